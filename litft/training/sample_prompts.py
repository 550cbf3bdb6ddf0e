"""The prompts that a run answers at each validation, for people to read."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from litft.args import EvalArgs
from litft.data.chat_template import Message
from litft.data.dataset import DataSplits
from litft.data.tokenizer import Tokenizer
from litft.evaluation.scoring import question_text
from litft.inference.prompt_files import read_prompts, tokenize_prompt
from litft.inference.streaming import prompt_ids
from litft.training.intervals import NUM_TRAINED_PROMPTS

# prompts in records, as `generate --prompts` reads them; other files have one in each line
RECORD_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
# first samples, among which default prompts are searched
PROMPT_CANDIDATES = 16


def sample_prompts(
    args: EvalArgs, tokenizer: Tokenizer, data: DataSplits
) -> Iterator[tuple[str, list[int]]]:
    """Yield the prompts of --eval.prompts as text and as token ids; without the flag, questions of
    the examples.

    Raises ValueError if the model cannot read one.
    """
    if not args.prompts:
        samples, count = (
            (data.val, 1) if len(data.val) else (data.train, NUM_TRAINED_PROMPTS)
        )
        # several examples may share a question, also after different system prompts
        questions: dict[str, list[int]] = {}
        for sample in islice(samples, PROMPT_CANDIDATES):
            if sample.answer:
                ids = sample.answer[0].tolist()
                questions.setdefault(question_text(tokenizer, ids), ids)
        yield from islice(questions.items(), count)
    for item in args.prompts:
        if Path(item).suffix in RECORD_FILES and Path(item).is_file():
            yield from _prompts_of_records(Path(item), tokenizer, data)
            continue
        for text in filter(None, map(str.strip, _texts(item))):
            yield text, prompt_ids(tokenizer, _conversation(text, data))


def _prompts_of_records(
    path: Path, tokenizer: Tokenizer, data: DataSplits
) -> Iterator[tuple[str, list[int]]]:
    """Yield the prompts of a file that `generate --prompts` reads, too: a `prompt`, or `messages`
    and `tools`, as text and as token ids."""
    for where, record in read_prompts(path, out=None, key=""):
        # the system prompt of all examples, unless the record has one
        if (
            record.get("messages") is None
            and data.system_prompt
            and not record.get("system")
        ):
            record = {**record, "system": data.system_prompt}
        prompt = tokenize_prompt(
            tokenizer, where, record, in_template=not data.is_plain_text
        )
        yield question_text(tokenizer, prompt.ids), prompt.ids


def _conversation(text: str, data: DataSplits) -> str | list[Message]:
    """Return a prompt in the form of the training examples: a plain text, or a user message, with
    their system prompt before it if they share one."""
    if data.is_plain_text:
        return text
    question = {"role": "user", "content": text}
    if data.system_prompt:
        return [{"role": "system", "content": data.system_prompt}, question]
    return [question]


def _texts(item: str) -> list[str]:
    """Return the prompt itself, or the lines of a file.

    Raises ValueError if the file does not exist or is not text.
    """
    try:
        if Path(item).is_file():
            return Path(item).read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--eval.prompts {item} is not a UTF-8 text file ({error.reason} at byte {error.start})"
        ) from None
    except OSError:
        # the prompt is too long to be a file name
        return [item]
    if item.endswith((".txt", ".json", ".jsonl")) and " " not in item:
        raise ValueError(f"--eval.prompts {item}: no such file")
    return [item]
