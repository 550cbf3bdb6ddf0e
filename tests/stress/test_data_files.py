"""Random data files in every format, against tokens and learned tokens from transformers'
tokenizer."""

import csv
import gzip
import io
import json
import random

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from conftest import SHARED
from transformers import PreTrainedTokenizerFast

from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.tokenizer import Tokenizer
from litft.model.loss import IGNORED

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WORDS = [
    "a",
    "Hello",
    "na\u00efve",
    "\u6771\u4eac",
    "\U0001f98a",
    "\u0645\u0631\u062d",
    "e\u0301",
    "\ufb01",
    "a\u200bb",
]
WORDS += [
    "\n",
    "\n\n",
    "\t",
    "  ",
    "\r\n",
    "\u2028",
    "\x85",
    "\u00a0",
    "\\n",
    "\\",
    '"quoted"',
    "it's",
    "'''",
    "x,y",
    ";",
]
WORDS += [
    "{}",
    "[1]",
    "null",
    "NA",
    "true",
    "3.10",
    "007",
    "1e5",
    "-",
    "#",
    "%s",
    "`code`",
    "<b>",
    "### Human:",
    "im_end",
]
CONTAINERS = ("json", "jsonl", "csv", "parquet")


def text(generator: random.Random) -> str:
    """Return some words that begin with a visible one."""
    words = [generator.choice(WORDS) for _ in range(generator.randint(1, 12))]
    return "Say" + generator.choice(("", " ")).join(words)


def conversation(generator: random.Random, is_flat: bool) -> list[tuple[str, str]]:
    """Return roles and contents, ending with the assistant's. is_flat: one question and its
    answer."""
    if is_flat:
        return [("user", text(generator)), ("assistant", text(generator))]
    turns = [("system", text(generator))] if generator.random() < 0.4 else []
    for _ in range(generator.randint(1, 3)):
        turns += [("user", text(generator)), ("assistant", text(generator))]
    return turns


def record(turns: list[tuple[str, str]], form: str) -> dict:
    """Return the record of a conversation in one of the forms that users have."""
    if form == "messages":
        return {"messages": [{"role": role, "content": content} for role, content in turns]}
    if form == "sharegpt":
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        return {
            "conversations": [
                {"from": names[role], "value": content} for role, content in turns
            ]
        }
    contents = [content for _, content in turns]
    names = {"question": ("question", "answer"), "instruction": ("instruction", "output")}[
        form
    ]
    return dict(zip(names, contents, strict=True))


def file_content(records: list[dict], container: str, generator: random.Random) -> bytes:
    """Return a file of the records, with the variations that programs write."""
    is_ascii = generator.random() < 0.5
    if container == "json":
        content = json.dumps(
            records, ensure_ascii=is_ascii, indent=generator.choice((None, 1, "\t"))
        ).encode()
    elif container == "jsonl":
        end = generator.choice(("\n", "\r\n", "\n\n"))
        lines = end.join(json.dumps(entry, ensure_ascii=is_ascii) for entry in records)
        content = (lines + generator.choice(("", end))).encode()
    elif container == "csv":
        buffer = io.StringIO(newline="")
        quoting = generator.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
        writer = csv.DictWriter(
            buffer,
            list(records[0]),
            quoting=quoting,
            lineterminator=generator.choice(("\n", "\r\n")),
        )
        writer.writeheader()
        writer.writerows(records)
        content = buffer.getvalue().encode()
    else:
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), buffer)
        return buffer.getvalue()
    return generator.choice((b"", b"", b"\xef\xbb\xbf")) + content


def expected_tokens(
    turns: list[tuple[str, str]], reference: PreTrainedTokenizerFast
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them are learned: the answers and the ends
    of their turns."""
    rendered = ""
    answers = []
    for role, content in turns:
        rendered += f"<|im_start|>{role}\n"
        start = len(rendered)
        rendered += f"{content}<|im_end|>"
        if role == "assistant":
            answers.append((start, len(rendered)))
        rendered += "\n"
    encoded = reference(rendered, add_special_tokens=False, return_offsets_mapping=True)
    learned = []
    for start, end in encoded.offset_mapping:
        learned.append(any(first <= start and end <= last for first, last in answers))
    return encoded.input_ids, learned


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs a real tokenizer")
def test_learned_tokens_of_random_files(tmp_path, cases):
    folder = SHARED / "tokenizers" / "qwen2.5"
    tokenizer = Tokenizer(folder)
    tokenizer.use_template(TEMPLATE)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for number in range(cases(10)):
        generator = random.Random(number)
        container = generator.choice(CONTAINERS)
        forms = (
            ("question", "instruction")
            if container == "csv"
            else ("question", "instruction", "messages", "sharegpt")
        )
        form = generator.choice(forms)
        conversations = []
        for _ in range(generator.randint(1, 6)):
            conversations.append(
                conversation(generator, is_flat=form in ("question", "instruction"))
            )
        content = file_content(
            [record(turns, form) for turns in conversations], container, generator
        )
        name = f"{number}.{container}"
        compression = generator.choice(("", "", ".gz", ".zst"))
        if compression:
            name += compression
            content = (
                gzip.compress(content)
                if compression == ".gz"
                else zstandard.compress(content)
            )
        path = tmp_path / name
        path.write_bytes(content)
        args = DataArgs(path=[str(path)], val_fraction=0.0, max_seq_length=4096)
        samples = load_data(args, tokenizer, 151_936, 4096).train
        assert len(samples) == len(conversations), name
        for index, turns in enumerate(conversations):
            ids, learned = expected_tokens(turns, reference)
            sample = samples[index]
            # what follows the last learned token does not occur: its prediction has no target
            count = len(sample.tokens)
            assert sample.tokens.tolist() == ids[:count], (name, index, form, turns)
            targets = []
            for token, is_learned in zip(ids[1:], learned[1:], strict=True):
                targets.append(token if is_learned else IGNORED)
            assert sample.targets.tolist() == targets[:count], (name, index, form, turns)
            assert not any(learned[count + 1 :]), (name, index, form, turns)
        path.unlink()
