"""200 greedy answers of five models in the chat, generate, the server and litft.generate: those of
transformers."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import script, write_records
from server_process import Server
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import litft
from litft.args import ChatArgs
from litft.data.tokenizer import Tokenizer
from litft.inference.chat import Conversation
from litft.inference.session import open_session

# of each model; the first takes most of the time: with LITFT_ALL_ANSWERS=1 it has 40, too
NUM_QUESTIONS = 40
NUM_OF_LARGEST = 40 if os.environ.get("LITFT_ALL_ANSWERS") else 10
NUM_TOKENS = 14
STOPS = [" the", "<|im_end|>"]
MODELS = ("SmolLM2-135M-Instruct", "stories15M", "stories", "demo", "tiny")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def questions(shared) -> list[str]:
    records = json.loads((shared / "data" / "alpaca_2k.json").read_text("utf-8"))
    return [record["instruction"][:120].strip() for record in records[:NUM_QUESTIONS]]


@torch.no_grad()
def reference_answer(model, tokenizer: Tokenizer, prompt: str) -> str:
    """Return transformers' greedy answer, cut at a stop text in the text with special tokens."""
    ids = tokenizer.encode(prompt, bos=False)
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=tokenizer.stop_ids,
        pad_token_id=tokenizer.stop_ids[0],
    )[0].tolist()
    new = output[len(ids) :]
    shown = ""
    for end in range(1, len(new) + 1):
        if new[end - 1] in tokenizer.stop_ids:
            return shown
        whole = tokenizer.decode(ids + new[:end], skip_special=False)[
            len(tokenizer.decode(ids, skip_special=False)) :
        ]
        found = [whole.find(stop) for stop in STOPS if stop in whole]
        if found:
            return whole[: min(found)]
        shown = tokenizer.decode(ids + new[:end])[len(tokenizer.decode(ids)) :]
    return shown


@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2-135M-Instruct",
        pytest.param("stories15M", marks=pytest.mark.weekly),
        pytest.param("stories", marks=pytest.mark.weekly),
        pytest.param("demo", marks=pytest.mark.weekly),
        "tiny",
    ],
)
def test_every_program_gives_the_answers_of_transformers(
    checkpoints, tiny, questions, tmp_path, name
):
    folder = tiny if name == "tiny" else checkpoints[name]
    if name == MODELS[0]:
        questions = questions[:NUM_OF_LARGEST]
    tokenizer = Tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.repetition_penalty = None
    expected = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        answer = reference_answer(model, tokenizer, prompt).strip()
        # the bytes of an incomplete character are one
        expected.append(re.sub("\ufffd+$", "\ufffd", answer))
    # the template is rendered as by transformers
    if tokenizer.own_template and (folder / "tokenizer.json").is_file():
        reference = PreTrainedTokenizerFast.from_pretrained(folder)
        messages = [{"role": "user", "content": questions[0]}]
        rendered = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert rendered == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True
        )

    flags = [
        "--temperature",
        "0",
        "--max_new_tokens",
        str(NUM_TOKENS),
        "--precision",
        "fp32",
    ]
    flags += ["--stop", json.dumps(STOPS), "--repetition_penalty", "1"]
    records = [
        {"messages": [{"role": "user", "content": question}]} for question in questions
    ]
    prompts = write_records(tmp_path / "prompts.jsonl", records)
    words = [
        "--checkpoint_dir",
        folder,
        "--prompts",
        prompts,
        "--out",
        tmp_path / "out.jsonl",
    ]
    script("generate/base.py", *words, *flags, cwd=tmp_path)
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["completion"].strip() for line in lines] == expected

    loaded = litft.load(folder, precision="fp32")
    settings = dict(temperature=0, max_new_tokens=NUM_TOKENS, stop=STOPS)
    assert [
        str(litft.generate(*loaded, record["messages"], **settings)) for record in records
    ] == expected

    arguments = dict(
        temperature=0.0,
        max_new_tokens=NUM_TOKENS,
        precision="fp32",
        stop=STOPS,
        repetition_penalty=1.0,
    )
    conversation = Conversation(
        open_session(ChatArgs(checkpoint_dir=str(folder), **arguments))
    )
    for question, answer in zip(questions, expected, strict=True):
        conversation.reset()
        steps = list(conversation.answer(question, print))
        assert "".join(part.text for step in steps for part in step.parts).strip() == answer
        assert conversation.messages[-1]["content"].strip() == answer

    with (
        Server(folder, *flags, "--model_name", "m") as server,
        ThreadPoolExecutor(8) as threads,
    ):
        client = server.client()

        def ask(question):
            message = [{"role": "user", "content": question}]
            choice = client.chat.completions.create(
                model="m", messages=message, max_tokens=NUM_TOKENS
            ).choices[0]
            return choice.message.content.strip()

        assert list(threads.map(ask, questions)) == expected
