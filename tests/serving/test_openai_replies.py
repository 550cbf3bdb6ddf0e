"""Answers in the form of OpenAI's API."""

import pytest

from litft.data.tokenizer import Tokenizer
from litft.inference.generation import ChosenToken, GenerationChunk, GenerationStats
from litft.serving.openai_replies import CompletionReply


def test_the_likeliest_of_tokens_with_one_text_is_shown(tiny):
    """Parts of characters are tokens whose text is the same replacement character."""
    tokenizer = Tokenizer(tiny)
    parts = []
    for token in range(512):
        if tokenizer.decode([token], skip_special=False) == "\ufffd":
            parts.append(token)
    chosen = ChosenToken(parts[0], -0.1, [(parts[0], -0.1), (parts[1], -5.0)])
    chunk = GenerationChunk("", [chosen], "length", GenerationStats(1))
    reply = CompletionReply("tiny", tokenizer, 1, True)
    logprobs = reply.choice(0, [chunk])["logprobs"]
    assert logprobs["token_logprobs"] == [pytest.approx(-0.1)]
    assert logprobs["top_logprobs"] == [{"\ufffd": pytest.approx(-0.1)}]
