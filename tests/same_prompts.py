"""The prompts of training and of inference are the same: `python tests/same_prompts.py 500` compares
them over random conversations and published chat templates, or those whose files follow.

An answer is learned after the tokens from which it is generated. `differences` encodes a record for
training, and each of its conversations up to an answer as a prompt; the tokens before every learned
part have to be one of the prompts, unless a note says that they are not.
"""

import copy
import importlib.util
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from learned_spans import SPECIAL, TOOLS
from own_tokenizers import WRITERS
from quirks import QUIRKS

from litft.data.encoder import Encoder
from litft.data.notes import OTHER_PROMPT, THOUGHT_IS_OFF, WITHIN_TOKEN
from litft.data.reasoning import EMPTY_THOUGHT
from litft.data.sample import ID_MASK, SUPERVISED
from litft.data.tokenizer import Tokenizer
from litft.data.turn_rendering import common_length
from litft.inference.prompt_files import tokenize_prompt

SHARED = Path(__file__).parents[2] / "shared" / "chat_templates"
# the token that ends an answer: the first that a template has
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    "<|eot|>",
    "<|calls|>",
    "<seed:eos>",
    "<｜hy_eos:opensource｜>",
    "<|message_sep|>",
    "<|user|>",
    "</s>",
)
OFF = {"enable_thinking": False}
# notes that say that a prompt differs
SAID = {OTHER_PROMPT, THOUGHT_IS_OFF, WITHIN_TOKEN}
WORDS = ("Hello", "world", "12", "yes.", "é", "日本語", "Paris", "I", "think", "1+1=2")
PIECES = (
    *WORDS,
    " world",
    "x = 3\n",
    "  lead",
    "trail  ",
    "\n\npara",
    "<b>",
    '{"a": 1}',
    "\n",
)
ARGUMENTS = (
    {"town": "Paris"},
    {"town": 'São "P"', "days": 3},
    {},
    {"town": None},
    {"x": {"y": [1, "z", True]}},
)


def templates() -> Iterator[tuple[str, str]]:
    """Yield the chat templates of TRL, of ../shared if it is there, and our own."""
    package = importlib.util.find_spec("trl")
    assert package is not None and package.origin is not None
    published = Path(package.origin).parent / "chat_templates"
    for folder in (published, SHARED):
        for path in sorted(folder.glob("*.jinja")):
            # TRL's changed templates for training mark what is learned
            if not path.stem.endswith("_training"):
                yield path.stem, path.read_text("utf-8")
    yield from QUIRKS.items()


@cache
def _files() -> dict[str, str]:
    """Return the files of a byte-level tokenizer that divides words as Llama 3's and Qwen's do."""
    with tempfile.TemporaryDirectory() as folder:
        WRITERS["header"](Path(folder))
        return {path.name: path.read_text("utf-8") for path in Path(folder).iterdir()}


def tokenizer_with(source: str, folder: Path) -> Tokenizer:
    """Return a tokenizer with a chat template and its special tokens."""
    files = _files()
    config = json.loads(files["tokenizer_config.json"])
    content = json.loads(files["tokenizer.json"])
    known = {token["content"] for token in content["added_tokens"]}
    number = max(content["model"]["vocab"].values()) + len(known) + 1
    end = next((token for token in ENDS if token in source), "</s>")
    thoughts = ("<think>", "</think>")
    for token in dict.fromkeys([*SPECIAL.findall(source), *thoughts, "<s>", end]):
        if token in known:
            continue
        content["added_tokens"].append(
            {
                "id": number,
                "content": token,
                "special": token not in thoughts,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        )
        number += 1
    # templates write BOS themselves, or want none
    content["post_processor"] = None
    config["bos_token"] = "<s>"
    config["eos_token"] = end
    config["chat_template"] = source
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return Tokenizer(folder)


class Conversations:
    """Random conversations: with and without tools, reasoning in every spelling, and texts with
    white space at their ends."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def text(self) -> str:
        """Return a short text, seldom a blank one."""
        if self.draw.random() < 0.02:
            return self.draw.choice(["", " ", "\n"])
        if self.draw.random() < 0.6:
            return " ".join(self.draw.choices(WORDS, k=self.draw.randint(1, 4)))
        return "".join(self.draw.choices(PIECES, k=self.draw.randint(1, 4)))

    def answer(self, spelling: str | None, is_calling: bool) -> dict[str, Any]:
        """Return an answer; spelling: of its reasoning, None without any."""
        content: Any = self.text()
        if is_calling and self.draw.random() < 0.6:
            content = self.draw.choice(["", None])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if spelling is None or self.draw.random() < 0.2:
            return message
        thought = self.text()
        if spelling == "inline":
            form = self.draw.choice(
                [
                    "<think>\n{}\n</think>\n\n{}",
                    "<think>{}</think>{}",
                    "{}\n</think>\n\n{}",
                    "<think>\n\n</think>\n\n{1}",
                ]
            )
            message["content"] = form.format(thought, content or "")
        elif spelling == "parts":
            parts = [{"type": "thinking", "thinking": thought}]
            parts.append({"type": "text", "text": content or ""})
            message["content"] = parts
        else:
            message[spelling] = thought
        return message

    def calls(self) -> list[dict[str, Any]]:
        """Return one or two calls."""
        calls = []
        for _ in range(self.draw.choice([1, 1, 2])):
            arguments: Any = self.draw.choice(ARGUMENTS)
            if self.draw.random() < 0.5:
                arguments = json.dumps(arguments)
            name = self.draw.choice(TOOLS)["function"]["name"]
            calls.append(
                {
                    "type": "function",
                    # Mistral's templates want nine letters and digits
                    "id": "".join(self.draw.choices("abcdefgh123", k=9)),
                    "function": {"name": name, "arguments": arguments},
                }
            )
        return calls

    def tool_turns(self, spelling: str | None) -> Iterator[dict[str, Any]]:
        """Yield an answer with calls, and their results."""
        calls = self.calls()
        yield {**self.answer(spelling, is_calling=True), "tool_calls": calls}
        for call in calls:
            yield {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": self.draw.choice(["15", '{"temp": 15}', self.text()]),
            }

    def record(self) -> dict[str, Any]:
        """Return a record."""
        draw = self.draw
        has_tools = draw.random() < 0.4
        spelling = None
        if draw.random() < 0.5:
            spellings = ["reasoning_content", "reasoning", "thinking", "inline", "inline"]
            spelling = draw.choice([*spellings, "parts"])
        messages = []
        if draw.random() < 0.4:
            messages.append({"role": "system", "content": self.text()})
        for _ in range(draw.choice([1, 1, 1, 2, 2, 3])):
            messages.append({"role": "user", "content": self.text()})
            if has_tools and draw.random() < 0.6:
                for _ in range(draw.choice([1, 1, 2])):
                    messages += self.tool_turns(spelling)
            messages.append(self.answer(spelling, is_calling=False))
            # some files have the end token in the text
            if draw.random() < 0.05 and isinstance(messages[-1]["content"], str):
                messages[-1]["content"] += draw.choice(["</s>", "<|im_end|>"])
        record: dict[str, Any] = {"messages": messages}
        if has_tools:
            record["tools"] = TOOLS
        if draw.random() < 0.2:
            record["chat_template_kwargs"] = {"enable_thinking": draw.random() < 0.5}
        return record


@dataclass(frozen=True)
class Difference:
    """Tokens before a learned part that are no prompt of inference, as text."""

    learned_after: str
    prompts: list[str]


def differences(tokenizer: Tokenizer, record: dict[str, Any]) -> list[Difference] | None:
    """Return what training learns after other tokens than those of any prompt; None if the record
    or a prompt is refused, or a note says so."""
    encoded = Encoder(tokenizer, limit=100_000)("a record", copy.deepcopy(record))
    if encoded.error or not encoded.samples or SAID & set(encoded.notes):
        return None
    try:
        prompts = list(_prompts(tokenizer, record))
    except ValueError:
        return None
    found = []
    for sample in encoded.samples:
        ids = sample & ID_MASK
        learned = (sample & SUPERVISED) != 0
        for start in np.flatnonzero(learned[1:] & ~learned[:-1]) + 1:
            before = ids[:start].tolist()
            if before in prompts:
                continue
            text = tokenizer.decode(before, skip_special=False)
            texts = [tokenizer.decode(prompt, skip_special=False) for prompt in prompts]
            # a report says how many answers follow an empty thought
            if encoded.empty_thoughts and any(
                _adds_thought(text, known) for known in texts
            ):
                continue
            if encoded.empty_thoughts and before in _prompts(tokenizer, record, **OFF):
                continue
            found.append(Difference(text, texts))
    return found


def _adds_thought(text: str, prompt: str) -> bool:
    """Return whether a text is a prompt and an empty thought."""
    return text.startswith(prompt) and bool(EMPTY_THOUGHT.fullmatch(text[len(prompt) :]))


def _prompts(
    tokenizer: Tokenizer, record: dict[str, Any], **variables: bool
) -> Iterator[list[int]]:
    """Yield the prompts of all answers; variables: of the template."""
    arguments = {**record.get("chat_template_kwargs", {}), **variables}
    for number, message in enumerate(record["messages"]):
        if message["role"] == "assistant":
            part = copy.deepcopy(record)
            part["messages"] = part["messages"][:number]
            part["chat_template_kwargs"] = arguments
            yield tokenize_prompt(tokenizer, "a record", part, in_template=True).ids


def shown(difference: Difference) -> str:
    """Return where a learned part leaves the nearest prompt."""
    text = difference.learned_after
    lengths = []
    for prompt in difference.prompts:
        lengths.append((common_length(text, prompt), prompt))
    length, prompt = max(lengths, default=(0, ""))
    start = max(0, length - 60)
    end = length + 80
    return f"learned after {text[start:end]!r}\n  prompt {prompt[start:end]!r}"


def main(num_records: int, names: list[str]) -> None:
    """Print what is found, and counts; names: of templates, or their files. None: all."""
    chosen = dict(templates())
    if names:
        known = chosen
        chosen = {}
        for name in names:
            chosen[name] = known.get(name) or Path(name).read_text("utf-8")
    for number, (name, source) in enumerate(chosen.items()):
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = tokenizer_with(source, Path(folder))
            conversations = Conversations(number)
            for _ in range(num_records):
                record = conversations.record()
                found = differences(tokenizer, record)
                if found is None:
                    counts["refused or said"] += 1
                elif not found:
                    counts["equal"] += 1
                else:
                    counts["DIFFERENT"] += 1
                    if counts["DIFFERENT"] <= 2:
                        print(name, shown(found[0]))
                        print(" ", json.dumps(record, ensure_ascii=False)[:1500])
        print(f"{name}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
