"""Text streamed after prompts that are cut at every token: whole characters, special tokens, stop
texts."""

import pytest
from conftest import copy_unpacked
from own_tokenizers import WRITERS

from litft.args import Sampling
from litft.data.tokenizer import Tokenizer
from litft.inference.generation import Answer, ChosenToken, Request

# the unknown token of "words" is not shown, so that a stop text could be found across it
NAMES = [name for name in WRITERS if name != "words"]
NAMES += """
    falcon-40b gemma-2 gpt-neox-20b gpt2 llama-2-7b llama-3.1 mistral-7b-instruct-v0.3 phi-2
    qwen2.5 tinyllama-1.1b-chat
""".split()

WORDS = [
    "The cat sat.",
    "naïve café",
    "你好，世界！",
    "東京は大きい",
    "서울의 봄",
    "🦊🦊 ok",
    "👩‍👩‍👧‍👦 family",
    "שלום עולם",
    "नमस्ते दुनिया",
    "a  b   c\n\n  d",
    "x = {'k': [1, 2]}",
    "ሰላም ለዓለም",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]
TEXTS = [
    f"{first} {second}" for first, second in zip(WORDS, [*WORDS[1:], WORDS[0]], strict=True)
]
TEXTS += [
    first + second + first
    for first, second in zip(WORDS, [*WORDS[5:], *WORDS[:5]], strict=True)
]
TEXTS += [word[::-1] * 2 for word in WORDS] + ["龘龘龘 " * 3]
assert len(TEXTS) == 40


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(tokenizer_folder, request, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    return Tokenizer(copy_unpacked(tokenizer_folder(request.param), folder))


def streamed(tokenizer: Tokenizer, before: list[int], tokens: list[int], **settings) -> str:
    """Return the text of an answer, as it is streamed."""
    request = Request(before, len(tokens), Sampling(0.0), **settings)
    answer = Answer(request, tokenizer, 10_000, 0.0)
    text = ""
    for token in tokens:
        chunk = answer.add_token(ChosenToken(token, 0.0, []))
        text += chunk or ""
        if answer.finish_reason == "stop":
            break
    return text


@pytest.mark.halved
def test_text_after_every_cut_of_a_prompt(tokenizer):
    """What follows is the rest of the text; a character that the prompt begins belongs to the
    answer."""
    for text in TEXTS:
        ids = tokenizer.encode(text, bos=False)
        whole = tokenizer.decode(ids)
        for cut in range(1, len(ids)):
            complete = cut  # tokens of the prompt with whole characters
            while complete and "\ufffd" in tokenizer.decode(ids[:complete]):
                complete -= 1
            expected = whole[len(tokenizer.decode(ids[:complete])) :]
            found = streamed(tokenizer, ids[:cut], ids[cut:])
            assert found == expected, (text, cut)
            stop = expected[len(expected) // 2 :][:3]
            if stop:
                before_stop = expected[: expected.index(stop)]
                assert (
                    streamed(tokenizer, ids[:cut], ids[cut:], stop=[stop]) == before_stop
                ), (
                    text,
                    cut,
                )


def test_an_answer_that_ends_within_a_character(tokenizer):
    """The characters before it stay, and its bytes are one U+FFFD."""
    for text in TEXTS:
        ids = tokenizer.encode("ok " + text, bos=False)
        for end in range(1, len(ids)):
            if not tokenizer.decode(ids[:end]).endswith("\ufffd"):
                continue
            found = streamed(tokenizer, [ids[0]], ids[1:end])
            assert found.count("\ufffd") == 1 and found.endswith("\ufffd"), (text, end)
            whole = tokenizer.decode(ids)[len(tokenizer.decode(ids[:1])) :]
            assert whole.startswith(found[:-1]), (text, end)


def test_stop_texts_that_are_special_tokens(tokenizer):
    """They are found whether or not generation ends at the token, and special tokens are not
    shown."""
    special = next(i for i in sorted(tokenizer.special_ids) if tokenizer.special_text(i))
    mark = tokenizer.special_text(special)
    before = tokenizer.encode("One day", bos=False)
    first = tokenizer.encode("yes", bos=False)
    rest = tokenizer.encode("no", bos=False)
    answer = [*first, special, *rest]
    shown = tokenizer.decode([*before, *answer])[len(tokenizer.decode(before)) :]
    assert streamed(tokenizer, before, answer) == shown
    assert mark not in shown
    assert streamed(tokenizer, before, answer, stop=[mark]) == streamed(
        tokenizer, before, first
    )
    assert streamed(tokenizer, before, answer, stop=[mark[1:-1]]) == streamed(
        tokenizer, before, first
    )
    kept = streamed(tokenizer, before, answer, shown_special_ids=frozenset([special]))
    assert kept.count(mark) == 1 and kept.replace(mark, "") == shown


@pytest.mark.parametrize(
    "end", ["\ufffd", " \ufffd", "\ufffd\ufffd", "word \ufffd", " 😀\ufffd", "\ufffdé"]
)
def test_a_prompt_that_ends_in_the_replacement_character(tokenizer, end):
    """It is a character of the prompt, and no part of the answer."""
    before = tokenizer.encode(f"The{end}", bos=False)
    if not tokenizer.decode(before).endswith("\ufffd"):
        pytest.skip("this tokenizer has no such character")
    both = tokenizer.encode(f"The{end} cat sat.", bos=False)
    if both[: len(before)] != before:
        pytest.skip("the answer's first token is joined with the prompt")
    assert streamed(tokenizer, before, both[len(before) :]).strip() == "cat sat."
