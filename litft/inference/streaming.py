"""Generation from Python, one text at a time: `litft.generate` and `litft.stream`."""

import difflib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from litft.args.sampling import Sampling
from litft.data.answer_parser import ParsedAnswer
from litft.data.answer_reading import answer_parser
from litft.data.chat_template import Message
from litft.data.history import readable_history
from litft.data.messages import check_messages, read_tools
from litft.data.tokenizer import Tokenizer
from litft.inference.chat_answers import ChatAnswer
from litft.inference.decoder import Decoder, check_prompt
from litft.inference.generation import GenerationChunk, Request, generate_batch
from litft.inference.generation_config import GenerationConfig, read_generation_config
from litft.inference.speculative import Drafter
from litft.model.transformer import GPT


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | list[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    **settings: Any,
) -> str:
    """Return the answer to a text or to chat messages, without white space at its ends.

    A text is a user message if the model has a chat template, as with `generate/base.py --prompt`;
    otherwise it is continued, as by `stream`, and nothing is stripped. The answer to messages is a
    `ChatAnswer`: its content, a str, with `reasoning_content`, `tool_calls` and `message`. What
    cannot be parsed stays in the content, with its marks.

    Args:
        model: as `load` returns it.
        tokenizer: as `load` returns it.
        prompt: a text, or messages with role and content.
        tools: functions that the model may call, in OpenAI's form.
        settings: those of `stream`.
    """
    if isinstance(prompt, str) and not tokenizer.own_template:
        return "".join(stream(model, tokenizer, prompt, **settings))
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = check_messages(_require_messages(prompt), "the prompt")
    checked_tools = read_tools(tools, "tools")
    messages = readable_history(tokenizer, messages, checked_tools)
    text = tokenizer.apply_chat_template(
        messages, checked_tools, add_generation_prompt=True
    )
    parser = answer_parser(tokenizer, text, checked_tools)
    parsed = ParsedAnswer()
    is_cut = True
    for chunk in stream(model, tokenizer, messages, tools=tools, **settings):
        parsed.add(parser.push(chunk))
        is_cut = chunk.is_cut
    parsed.add(parser.finish(is_cut))
    return ChatAnswer(parsed)


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | list[Message],
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    tools: list[dict[str, Any]] | None = None,
    drafter: Drafter | None = None,
    **sampling: Any,
) -> Iterator[GenerationChunk]:
    """Stream the continuation of a text prompt, or the answer to chat messages (rendered by the
    chat template).

    The answer to messages has the marks around reasoning and tool calls; `generate` takes it apart.
    What is not given is as the folder's generation_config.json says, or else as with
    `generate/base.py`.

    Args:
        model: as `load` returns it.
        tokenizer: as `load` returns it.
        prompt: a text, or messages with role and content.
        max_new_tokens: the most tokens of the answer.
        stop: a text, or several, that end the answer, also special tokens.
        tools: functions that the model may call, in OpenAI's form.
        drafter: proposes tokens that the model only checks (speculative decoding).
        sampling: the fields of `Sampling` (temperature, top_k, top_p, min_p, repetition_penalty,
            presence_penalty, frequency_penalty, logit_bias, seed).

    Yields:
        Each a str with `tokens`, `logprobs`, `finish_reason` (in the last: stop, length or context)
            and `stats`.

    Raises:
        ValueError: if a setting is invalid, or the prompt is empty, longer than the context or
            outside the vocabulary.
        TypeError: for a setting that does not exist, and for a prompt that is neither text nor
            messages.
    """
    # arguments override generation_config.json, which overrides the defaults
    stored = read_generation_config(tokenizer.generation_folders)
    if stored.ignored:
        warnings.warn(stored.note(), stacklevel=2)
    settings = _sampling(stored, sampling, model.config.vocab_size)

    if max_new_tokens is None:
        max_new_tokens = stored.max_new_tokens
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: must be at least 1")

    if stop is None:
        stop = stored.stop
    stops = [stop] if isinstance(stop, str) else list(stop)
    if "" in stops:
        raise ValueError("stop: an empty text occurs everywhere; leave it out")

    ids = prompt_ids(tokenizer, prompt, read_tools(tools, "tools"))
    check_prompt(model, ids)
    # a decoder of its own: nothing is kept between calls
    decoder = Decoder(model, capacity=len(ids) + max_new_tokens)
    if isinstance(prompt, str):
        shown = frozenset()
    else:
        # tokens that structure an answer, such as the marks of a tool call, are part of the text
        shown = tokenizer.answer_ids
    request = Request(
        ids, max_new_tokens, settings, tokenizer.stop_ids, stops, shown_special_ids=shown
    )
    for _, chunk in generate_batch(decoder, tokenizer, [request], drafter):
        yield chunk


def _sampling(stored: GenerationConfig, given: dict[str, Any], vocab_size: int) -> Sampling:
    """Return the settings that are given, completed by those of generation_config.json.

    Raises TypeError for a name that is no setting, ValueError for a value that is not valid.
    """
    known = [field.name for field in fields(Sampling)]
    for name in given:
        if name not in known:
            names = ("max_new_tokens", "stop", *known)
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f", did you mean {nearest[0]!r}?" if nearest else ";"
            raise TypeError(f"{name!r} is not a setting{hint} known: {', '.join(names)}")

    bias = stored.logit_bias(vocab_size, given.get("logit_bias"))
    # later entries win: the file, then the arguments, then the bias, which has both
    settings = replace(Sampling(**stored.sampling | given), logit_bias=bias)
    problems = settings.problems()
    if problems:
        raise ValueError("; ".join(problem.removeprefix("--") for problem in problems))
    return settings


def _require_messages(prompt: Any) -> list[Message]:
    """Return a prompt that is a list of messages.

    Raises TypeError for anything else; several prompts are several calls.
    """
    if isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt):
        return prompt
    raise TypeError(
        "the prompt must be a text, or a list of messages such as {'role': 'user', 'content': "
        "'Hello'}; several prompts need a call each"
    )


def prompt_ids(
    tokenizer: Tokenizer, prompt: str | list[Message], tools: list | None = None
) -> list[int]:
    """Tokenize a prompt: text with the tokenizer's BOS, or messages rendered with the generation
    prompt."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    messages = check_messages(_require_messages(prompt), "the prompt")
    tokenizer.check_tools(tools)
    messages = readable_history(tokenizer, messages, tools)
    text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True)
    return tokenizer.encode(text, bos=False)
