"""Pieces of text: whole characters, stop texts over token boundaries, reasons, log-probabilities, speeds."""

import math

import pytest
import torch

import litft
from litft.args import Sampling
from litft.inference.decoder import Decoder
from litft.inference.generation import Answer, Batch, ChosenToken, Detokenizer, Request, generate_batch, prompt_ids


@pytest.fixture(scope="module")
def story(checkpoints):
    return litft.load(checkpoints["stories260K"])


def pieces_of(story, text, **settings):
    return list(litft.stream(*story, text, **{"temperature": 0, "max_new_tokens": 60} | settings))


def test_a_known_story(story):
    """A figure from elsewhere: what llama2.c's model says from BOS alone."""
    text = "".join(litft.stream(*story, "", max_new_tokens=60, temperature=0))
    expected = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    assert text.strip().startswith(expected)


def test_log_probabilities_are_the_networks(story):
    model, tokenizer = story
    pieces = pieces_of(story, "One day", temperature=1.3, top_k=5, seed=1, max_new_tokens=30)
    ids, tokens = tokenizer.encode("One day"), [token for piece in pieces for token in piece.tokens]
    logprobs = [value for piece in pieces for value in piece.logprobs]
    logits = model(torch.tensor([[*ids, *tokens]]))[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-4)
    assert len(tokens) == 30 == pieces[-1].stats.new_tokens and pieces[-1].finish_reason == "length"
    assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_a_stop_text_ends_the_answer_wherever_tokens_are_cut(story):
    whole = "".join(pieces_of(story, "One day"))
    for stop in (whole[20:31], whole[33:40], whole[60:64], "y", whole[7:9]):
        pieces = pieces_of(story, "One day", stop=["never said", stop])
        assert "".join(pieces) == whole[: whole.index(stop)] and pieces[-1].finish_reason == "stop", stop
    # what looked like the beginning of a stop text is said after all
    pieces = pieces_of(story, "One day", stop=[whole[20:31] + "Bob", whole[-3:] + "?"])
    assert "".join(pieces) == whole and pieces[-1].finish_reason == "length"


def test_a_stop_token_is_no_text(story):
    model, tokenizer = story
    ids = tokenizer.encode("One day")
    free = [token for piece in pieces_of(story, "One day") for token in piece.tokens]
    stop = free[12]
    request = Request(ids, 60, Sampling(0.0), [stop])
    pieces = [piece for _, piece in generate_batch(Decoder(model, 1, 100), tokenizer, [request])]
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens == free[: free.index(stop) + 1] and pieces[-1].finish_reason == "stop"
    assert "".join(pieces) == text_of(tokenizer, ids, tokens[:-1])


def text_of(tokenizer, ids, tokens):
    stream = Detokenizer(tokenizer, ids)
    return "".join(stream.push(token) for token in tokens) + stream.rest()


@pytest.mark.parametrize("text", ["naïve café ☕ 東京 🦊🦊 ok", "🦊", "é"])
def test_no_character_is_split(checkpoints, text):
    _, tokenizer = litft.load(checkpoints["SmolLM2-135M-Instruct"])
    tokens = tokenizer.encode(text, bos=False)
    answer = Answer(Request([1]), tokenizer, 1000, 0.0)
    pieces = [piece for token in tokens if (piece := answer.add_token(ChosenToken(token, 0.0, []))) is not None]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert sum(len(piece.tokens) for piece in pieces) == len(tokens) > len(pieces) or len(tokens) == len(pieces)


def test_half_a_character_at_the_end_is_said_as_such(checkpoints):
    _, tokenizer = litft.load(checkpoints["SmolLM2-135M-Instruct"])
    half = tokenizer.encode("ok 🦊", bos=False)[:-1]
    answer = Answer(Request([1], max_new_tokens=len(half)), tokenizer, 1000, 0.0)
    pieces = [piece for token in half if (piece := answer.add_token(ChosenToken(token, 0.0, []))) is not None]
    assert "".join(pieces).rstrip("\ufffd") == "ok " and pieces[-1].finish_reason == "length"


def test_seeds_repeat_and_do_not_depend_on_the_batch(story):
    model, tokenizer = story
    texts = ["".join(pieces_of(story, "One day", temperature=1.0, seed=seed, max_new_tokens=20)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    requests = [Request(tokenizer.encode("One day"), 20, Sampling(1.0, top_p=0.9, seed=seed)) for seed in (5, 2, 1)]
    found = {}
    for number, piece in generate_batch(Decoder(model, 2, 60), tokenizer, requests):
        found[number] = found.get(number, "") + piece
    assert found[1] == texts[2] and found[2] == texts[0]


def test_answers_come_and_go(story):
    """Each is what it is alone, whoever else begins, ends or is given up; a step computes no row that it need not."""
    model, tokenizer = story
    texts = ["One day", "Lily saw", "The dog", "Once upon a time", "A"]
    alone = ["".join(pieces_of(story, text, max_new_tokens=30, temperature=0)) for text in texts]
    decoder, found = Decoder(model, 4, 80), {}
    batch = Batch(decoder, tokenizer)

    def begin(number, text):
        batch.add(number, Request(tokenizer.encode(text), 30, Sampling(0.0)))
        batch.prefill()

    def steps(count):
        for _ in range(count):
            for number, piece in batch.step():
                found[number] = found.get(number, "") + piece

    for number in range(3):
        begin(number, texts[number])
    assert batch.free == [3]
    steps(5)
    batch.cancel(1)
    before = decoder.processed
    steps(3)
    assert decoder.processed == before + 6 and batch.free == [1, 3]
    begin(3, texts[3])
    assert batch.free == [3]  # between the others, where a step goes anyway
    steps(2)
    batch.cancel(2)
    begin(4, texts[4])
    while batch.running:
        steps(1)
    assert {number: found[number] for number in (0, 3, 4)} == {number: alone[number] for number in (0, 3, 4)}
    assert alone[1].startswith(found[1]) and alone[2].startswith(found[2])
    begin(5, texts[0])
    (row,) = batch.running
    assert decoder.span(batch._active()) == slice(row, row + 1)


def test_likely_tokens_are_told_to_those_who_ask(story):
    model, tokenizer = story
    ids = tokenizer.encode("One day")
    asked = [Request(ids, 4, Sampling(0.0), top_logprobs=count) for count in (0, 3, 600)]
    found = {}
    for number, piece in generate_batch(Decoder(model, 3, 60), tokenizer, asked):
        found.setdefault(number, []).extend(zip(piece.tokens, piece.logprobs, piece.top, strict=True))
    assert [[len(top) for _, _, top in own] for own in found.values()] == [[0] * 4, [3] * 4, [512] * 4]
    for (token, logprob, _), (_, _, some), (_, _, every) in zip(*found.values(), strict=True):
        assert [own for own, _ in some] == [own for own, _ in every[:3]] and every[0][0] == token
        assert logprob == pytest.approx(some[0][1], abs=1e-4) == pytest.approx(every[0][1], abs=1e-4)
        assert sum(math.exp(own) for _, own in every) == pytest.approx(1, abs=1e-5)


def test_settings_are_checked(story):
    with pytest.raises(ValueError, match=r"top_p 0.0: must lie in"):
        next(litft.stream(*story, "One day", top_p=0.0))
    with pytest.raises(ValueError, match="the prompt has 513 tokens and the model's context is 512"):
        next(litft.stream(*story, "day " * 512))
    assert prompt_ids(story[1], "One day") == story[1].encode("One day")
