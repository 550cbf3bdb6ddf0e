"""Streamed text: whole characters, stop strings across token boundaries, finish reasons,
log-probabilities."""

import math

import pytest
import torch

import litft
from litft.args import Sampling
from litft.data.tokenizer import Tokenizer
from litft.inference.decoder import Decoder
from litft.inference.detokenizer import Detokenizer
from litft.inference.generation import Answer, Batch, ChosenToken, Request, generate_batch
from litft.inference.streaming import prompt_ids


@pytest.fixture(scope="module")
def story(checkpoints):
    return litft.load(checkpoints["stories"])


def pieces_of(story, text, **settings):
    return list(
        litft.stream(*story, text, **{"temperature": 0, "max_new_tokens": 60} | settings)
    )


def test_a_story_equals_that_of_transformers(story, checkpoints):
    """From BOS only."""
    from transformers import AutoModelForCausalLM

    tokenizer = story[1]
    reference = AutoModelForCausalLM.from_pretrained(checkpoints["stories"])
    start = torch.tensor([[tokenizer.bos_id]])
    mask = torch.ones_like(start)
    expected = reference.generate(
        start, attention_mask=mask, max_new_tokens=60, do_sample=False
    )[0].tolist()
    text = "".join(litft.stream(*story, "", max_new_tokens=60, temperature=0))
    assert text.strip() == tokenizer.decode(expected).strip() and len(text.split()) > 10


def test_log_probabilities_equal_the_models(story):
    model, tokenizer = story
    pieces = pieces_of(
        story, "One day", temperature=1.3, top_k=5, seed=2, max_new_tokens=30
    )
    ids, tokens = (
        tokenizer.encode("One day"),
        [token for piece in pieces for token in piece.tokens],
    )
    logprobs = [value for piece in pieces for value in piece.logprobs]
    logits = model(torch.tensor([[*ids, *tokens]]))[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-4)
    assert (
        len(tokens) == 30 == pieces[-1].stats.new_tokens
        and pieces[-1].finish_reason == "length"
    )
    assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_a_stop_string_ends_the_answer_across_token_boundaries(story):
    full_text = "".join(pieces_of(story, "One day"))
    for stop in (full_text[20:31], full_text[33:40], full_text[60:64], "y", full_text[7:9]):
        pieces = pieces_of(story, "One day", stop=["never said", stop])
        assert (
            "".join(pieces) == full_text[: full_text.index(stop)]
            and pieces[-1].finish_reason == "stop"
        ), stop
    # text that looked like the beginning of a stop string is returned after all
    pieces = pieces_of(
        story, "One day", stop=[full_text[20:31] + "Bob", full_text[-3:] + "?"]
    )
    assert "".join(pieces) == full_text and pieces[-1].finish_reason == "length"


def test_a_stop_token_is_not_part_of_the_text(story):
    model, tokenizer = story
    ids = tokenizer.encode("One day")
    unstopped = [token for piece in pieces_of(story, "One day") for token in piece.tokens]
    stop = unstopped[12]
    request = Request(ids, 60, Sampling(0.0), [stop])
    pieces = [
        piece for _, piece in generate_batch(Decoder(model, 1, 100), tokenizer, [request])
    ]
    tokens = [token for piece in pieces for token in piece.tokens]
    assert (
        tokens == unstopped[: unstopped.index(stop) + 1]
        and pieces[-1].finish_reason == "stop"
    )
    assert "".join(pieces) == text_of(tokenizer, ids, tokens[:-1])


def test_a_stop_text_may_be_one_text(story):
    """As in OpenAI's API; its letters are no stop texts."""
    whole = "".join(pieces_of(story, "One day"))
    stop = whole[20:26]
    text = "".join(pieces_of(story, "One day", stop=stop))
    assert (
        text
        == "".join(pieces_of(story, "One day", stop=[stop]))
        == whole[: whole.index(stop)]
        != ""
    )
    with pytest.raises(ValueError, match="an empty text occurs everywhere"):
        pieces_of(story, "One day", stop="")


def text_of(tokenizer, ids, tokens):
    stream = Detokenizer(tokenizer, ids)
    return "".join(stream.push(token) for token in tokens) + stream.rest()


@pytest.mark.parametrize("text", ["naïve café ☕ 東京 🦊🦊 ok", "🦊", "é"])
def test_no_character_is_split(tokenizer_folder, text):
    tokenizer = Tokenizer(tokenizer_folder("bytes"))
    tokens = tokenizer.encode(text, bos=False)
    answer = Answer(Request([1]), tokenizer, 1000, 0.0)
    pieces = [
        piece
        for token in tokens
        if (piece := answer.add_token(ChosenToken(token, 0.0, []))) is not None
    ]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert sum(len(piece.tokens) for piece in pieces) == len(tokens) > len(pieces) or len(
        tokens
    ) == len(pieces)


def test_an_incomplete_last_character_becomes_a_replacement_character(tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder("bytes"))
    tokens = tokenizer.encode("ok 🦊", bos=False)[:-1]
    answer = Answer(Request([1], max_new_tokens=len(tokens)), tokenizer, 1000, 0.0)
    pieces = [
        piece
        for token in tokens
        if (piece := answer.add_token(ChosenToken(token, 0.0, []))) is not None
    ]
    assert (
        "".join(pieces).rstrip("\ufffd") == "ok " and pieces[-1].finish_reason == "length"
    )


def test_seeds_repeat_and_do_not_depend_on_the_batch(story):
    model, tokenizer = story
    texts = [
        "".join(pieces_of(story, "One day", temperature=1.0, seed=seed, max_new_tokens=20))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    requests = [
        Request(tokenizer.encode("One day"), 20, Sampling(1.0, top_p=0.9, seed=seed))
        for seed in (5, 2, 1)
    ]
    answers = {}
    for number, piece in generate_batch(Decoder(model, 2, 60), tokenizer, requests):
        answers[number] = answers.get(number, "") + piece
    assert answers[1] == texts[2] and answers[2] == texts[0]


def test_requests_join_and_leave_a_running_batch(story):
    """Answers do not depend on requests that start, end or are cancelled; a step computes only the
    rows it needs."""
    model, tokenizer = story
    texts = ["One day", "Lily saw", "The dog", "Once upon a time", "A"]
    expected = [
        "".join(pieces_of(story, text, max_new_tokens=30, temperature=0)) for text in texts
    ]
    decoder, answers = Decoder(model, 4, 80), {}
    batch = Batch(decoder, tokenizer)

    def begin(number, text):
        batch.add(number, Request(tokenizer.encode(text), 30, Sampling(0.0)))
        batch.prefill()

    def steps(count):
        for _ in range(count):
            for number, piece in batch.step():
                answers[number] = answers.get(number, "") + piece

    for number in range(3):
        begin(number, texts[number])
    assert batch.free == [3]
    steps(5)
    batch.cancel(1)
    processed = decoder.processed
    steps(3)
    assert decoder.processed == processed + 6 and batch.free == [1, 3]
    begin(3, texts[3])
    # row 1 is in use, between active rows that a step computes anyway
    assert batch.free == [3]
    steps(2)
    batch.cancel(2)
    begin(4, texts[4])
    while batch.running:
        steps(1)
    assert {number: answers[number] for number in (0, 3, 4)} == {
        number: expected[number] for number in (0, 3, 4)
    }
    assert expected[1].startswith(answers[1]) and expected[2].startswith(answers[2])
    begin(5, texts[0])
    (row,) = batch.running
    assert decoder.span(batch._active()) == slice(row, row + 1)


def test_top_logprobs_are_returned_per_request(story):
    model, tokenizer = story
    ids = tokenizer.encode("One day")
    requests = [Request(ids, 4, Sampling(0.0), top_logprobs=count) for count in (0, 3, 600)]
    answers = {}
    for number, piece in generate_batch(Decoder(model, 3, 60), tokenizer, requests):
        answers.setdefault(number, []).extend(
            zip(piece.tokens, piece.logprobs, piece.top, strict=True)
        )
    assert [[len(top) for _, _, top in answer] for answer in answers.values()] == [
        [0] * 4,
        [3] * 4,
        [512] * 4,
    ]
    for (token, logprob, _), (_, _, top3), (_, _, full) in zip(
        *answers.values(), strict=True
    ):
        assert [candidate for candidate, _ in top3] == [
            candidate for candidate, _ in full[:3]
        ] and full[0][0] == token
        assert (
            logprob
            == pytest.approx(top3[0][1], abs=1e-4)
            == pytest.approx(full[0][1], abs=1e-4)
        )
        assert sum(math.exp(value) for _, value in full) == pytest.approx(1, abs=1e-5)


def test_settings_are_checked(story):
    with pytest.raises(ValueError, match=r"top_p 0.0: must lie in"):
        next(litft.stream(*story, "One day", top_p=0.0))
    with pytest.raises(
        ValueError, match="the prompt has 513 tokens and the model's context is 512"
    ):
        next(litft.stream(*story, "day " * 512))
    assert prompt_ids(story[1], "One day") == story[1].encode("One day")
