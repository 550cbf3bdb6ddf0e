"""Greedy text against transformers' generate, sampling against its filters, and the two commands."""

import json

import pytest
import torch
from conftest import script

import litft
from litft.generate import prompt_ids, sample, stream_ids

PROMPTS = {
    "stories260K": "Once upon a time",
    "stories15M": "Once upon a time, a small",
    "SmolLM2-135M-Instruct": [{"role": "user", "content": "What is the capital of France, and what is it known for?"}],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_is_transformers(checkpoints, name):
    from transformers import AutoModelForCausalLM

    model, tokenizer = litft.load(checkpoints[name], precision="fp32")
    reference = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype="float32")
    ids = prompt_ids(tokenizer, PROMPTS[name])
    settings = dict(max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)
    prompt = torch.tensor([ids])
    # without a mask, generate takes the end tokens of earlier turns for padding
    out = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    expected = out[0, len(ids) :].tolist()
    assert len(expected) == 64
    assert list(stream_ids(model, ids, max_new_tokens=64)) == expected


def test_a_known_story(checkpoints):
    """A figure from elsewhere: what llama2.c's model says from BOS alone."""
    model, tokenizer = litft.load(checkpoints["stories260K"])
    text = "".join(litft.stream(model, tokenizer, "", max_new_tokens=60, temperature=0))
    expected = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    assert text.strip().startswith(expected)


def test_top_k_and_top_p_are_transformers():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2
    for temperature, k, p in [(1.0, None, 1.0), (0.7, 5, 1.0), (1.3, None, 0.6), (0.9, 20, 0.8), (1.0, 1, 0.1)]:
        scores = TemperatureLogitsWarper(temperature)(None, logits[None]) if temperature != 1 else logits[None]
        scores = TopKLogitsWarper(k)(None, scores) if k else scores
        scores = TopPLogitsWarper(p)(None, scores) if p < 1 else scores
        expected = scores.softmax(-1)[0]
        draws = [int(sample(logits, temperature, k, p, torch.Generator().manual_seed(n))) for n in range(3000)]
        found = torch.bincount(torch.tensor(draws), minlength=50) / 3000
        assert not found[expected == 0].any()
        assert (found - expected).abs().max() < 0.04, (temperature, k, p)


def test_zero_temperature_is_greedy_and_seeds_repeat(checkpoints):
    model, tokenizer = litft.load(checkpoints["stories260K"])
    settings = dict(max_new_tokens=20, temperature=1.0)
    texts = ["".join(litft.stream(model, tokenizer, "One day", seed=seed, **settings)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_it_stops_at_a_stop_token_and_at_the_context(checkpoints):
    model, tokenizer = litft.load(checkpoints["stories260K"])
    ids = tokenizer.encode("Once upon a time")
    free = list(stream_ids(model, ids, max_new_tokens=30))
    stopped = list(stream_ids(model, ids, max_new_tokens=30, stop_ids=[free[7]]))
    assert stopped == free[: free.index(free[7])]
    context = model.config.context
    assert len(list(stream_ids(model, (ids * context)[: context - 2], max_new_tokens=30))) == 2
    with pytest.raises(ValueError, match=f"the prompt has {context + 1} tokens and the model's context is {context}"):
        next(stream_ids(model, (ids * context)[: context + 1], max_new_tokens=1))
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(stream_ids(model, [], max_new_tokens=1))


def test_the_completion_alone_is_on_stdout(checkpoints, tmp_path):
    model, tokenizer = litft.load(checkpoints["stories260K"])
    command = ["generate/base.py", "--checkpoint_dir", checkpoints["stories260K"], "--temperature", "0"]
    done = script(*command, "--max_new_tokens", "20", "--prompt", "One day", cwd=tmp_path)
    expected = "".join(litft.stream(model, tokenizer, "One day", max_new_tokens=20, temperature=0))
    assert done.stdout == expected + "\n" and "tokens/s" in done.stderr
    (tmp_path / "in.jsonl").write_text('{"prompt": "One day", "id": 7}\n{"prompt": "Lily"}\n')
    script(*command, "--max_new_tokens", "20", "--prompts", "in.jsonl", "--out", "out.jsonl", cwd=tmp_path)
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first == {"prompt": "One day", "id": 7, "completion": expected} and second["completion"]


def test_a_chat_remembers_its_turns(checkpoints, tmp_path):
    folder = checkpoints["SmolLM2-135M-Instruct"]
    model, tokenizer = litft.load(folder, precision="fp32")
    system, answers, talk = "You are terse.", [], [{"role": "system", "content": "You are terse."}]
    lines = ["What is the capital of France?", "Which country did I ask about?"]
    for line in lines:
        talk.append({"role": "user", "content": line})
        answers.append("".join(litft.stream(model, tokenizer, talk, max_new_tokens=24, temperature=0)))
        talk.append({"role": "assistant", "content": answers[-1]})
    flags = ["--system", system, "--max_new_tokens", "24", "--temperature", "0", "--debug"]
    done = script("generate/chat.py", "--checkpoint_dir", folder, *flags, cwd=tmp_path, text="\n".join(lines) + "\n")
    assert done.stdout == "".join(answer + "\n" for answer in answers)
    assert "Paris" in answers[0]
    assert tokenizer.apply_chat_template(talk[:-1], add_generation_prompt=True) in done.stderr


def test_a_message_that_is_too_long_is_dropped(checkpoints, tmp_path):
    flags = ["--max_new_tokens", "8", "--temperature", "0"]
    command = ["generate/chat.py", "--checkpoint_dir", checkpoints["stories260K"], *flags]
    plain = script(*command, cwd=tmp_path, text="Hello\n").stdout
    done = script(*command, cwd=tmp_path, text="once upon a time " * 600 + "\nHello\n")
    assert "shorten it; this message is dropped" in done.stderr and done.stdout == plain


def test_all_prompts_are_checked_before_the_first_answer(checkpoints, tmp_path):
    command = ["generate/base.py", "--checkpoint_dir", checkpoints["stories260K"], "--prompts", "in.jsonl"]
    for bad in ({"text": "a"}, {"messages": [{"role": "robot", "content": "a"}]}, {"prompt": "once upon a time " * 600}):
        (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "One day"}) + "\n" + json.dumps(bad) + "\n")
        script(*command, "--out", "out.jsonl", cwd=tmp_path, code=2)
        assert not (tmp_path / "out.jsonl").exists()
    assert "is the file of the prompts" in script(*command, "--out", "in.jsonl", cwd=tmp_path, code=2).stderr


def test_reset_forgets(checkpoints, tmp_path):
    flags = ["--max_new_tokens", "8", "--temperature", "0", "--debug"]
    command = ["generate/chat.py", "--checkpoint_dir", checkpoints["stories260K"], *flags]
    done = script(*command, cwd=tmp_path, text="Hello\n\n/reset\nHello\n/exit\nnever\n")
    first, second = done.stderr.split("--- the model reads\n")[1:]
    assert first == second and "never" not in done.stderr
