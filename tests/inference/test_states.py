"""Decoding with recurrent mixers: their states go only forward, so cut texts continue from
snapshots."""

import pytest
import torch
import transformers
from parity import ROWS, draw, relative

import litft
from litft.args import Sampling
from litft.inference.decoder import Decoder
from litft.inference.sampling import TokenSampler
from litft.inference.speculative import PromptLookup, speculative_rounds

FAMILIES = {
    "qwen3_5_text": "delta nets",
    "kimi_linear": "KDA, latent",
    "falcon_h1": "side by side",
    "lfm2": "short convolutions",
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, make_model):
    """A network with recurrent mixers."""
    config_class, variations = ROWS[request.param]
    _, folder = make_model(
        getattr(transformers, config_class), **variations[FAMILIES[request.param]]
    )
    return litft.load(folder)[0]


def logits_of(model, ids):
    """Return the logits after a text, computed at once."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0, -1]


def text(length, seed):
    """Return random token ids."""
    return draw(1, length, seed=seed)[0].tolist()


def test_rows_step_on_their_own(model):
    """Rows of different lengths; the state of a row that does not take part in a step stays."""
    decoder, texts = Decoder(model, rows=3, capacity=60), [text(n, n) for n in (17, 30, 9)]
    for row, ids in enumerate(texts):
        assert relative(decoder.prefill(row, ids), logits_of(model, ids)) <= 3e-5
    for active in (
        [True, True, True],
        [True, False, True],
        [False, True, False],
        [True, True, True],
    ):
        tokens = torch.tensor([5, 6, 7])
        logits = decoder.step(tokens, active)
        for row in range(3):
            if active[row]:
                decoder.append(row, int(tokens[row]))
                texts[row] = [*texts[row], int(tokens[row])]
                assert relative(logits[row], logits_of(model, texts[row])) <= 3e-5


def test_cut_texts_continue_from_a_snapshot(model):
    """The next turn of a chat begins like the last prompt; an edited one before it; another row
    shares the prefix."""
    decoder, prompt = Decoder(model, rows=2, capacity=100), text(40, 1)
    decoder.prefill(0, prompt)
    for token in (4, 5, 6):
        decoder.step(torch.tensor([token, 0]), [True, False])
        decoder.append(0, token)
    before = decoder.processed
    edited = [*prompt, 4, 9, 9]
    assert relative(decoder.prefill(0, edited), logits_of(model, edited)) <= 3e-5
    assert decoder.processed - before == 3  # the prompt's snapshot
    before = decoder.processed
    assert (
        relative(decoder.prefill(1, [*prompt, 8]), logits_of(model, [*prompt, 8])) <= 3e-5
    )
    # the other row's prompt, unless its newer snapshots replaced it
    assert decoder.processed - before in (1, 41)
    again = decoder.prefill(1, [*prompt, 8])
    # known logits, without a pass
    assert torch.equal(again, decoder.prefill(0, [*prompt, 8]))
    decoder.truncate(0, 20)
    logits = decoder.extend(0, [7])
    assert relative(logits[-1], logits_of(model, [*prompt[:20], 7])) <= 3e-5


class Interrupted(Exception):
    """In place of Ctrl-C."""


def interrupt_last_block(model, monkeypatch):
    """Let the next forward pass end after all but the last block."""
    block = model.blocks[-1]
    forward = block.forward

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(block, "forward", forward)
        raise Interrupted

    monkeypatch.setattr(block, "forward", interrupted)


def test_an_interrupted_pass_leaves_no_trace(model, monkeypatch):
    """The states of the blocks that ran contain what the text lacks."""
    decoder, prompt = Decoder(model, rows=1, capacity=100), text(33, 1)
    decoder.prefill(0, prompt)
    interrupt_last_block(model, monkeypatch)
    with pytest.raises(Interrupted):
        decoder.step(torch.tensor([4]), [True])
    longer = [*prompt, 7, 8, 9]
    assert relative(decoder.prefill(0, longer), logits_of(model, longer)) <= 3e-5
    interrupt_last_block(model, monkeypatch)
    with pytest.raises(Interrupted):
        decoder.prefill(0, [*longer, 5, 6])
    other = [*longer, 2, 1, 3]
    assert relative(decoder.prefill(0, other), logits_of(model, other)) <= 3e-5


def test_a_compiler_that_fails_in_a_later_block_leaves_no_trace(model, monkeypatch):
    """The pass is repeated without it, from the states before."""
    decoder, prompt = Decoder(model, rows=1, capacity=100), text(33, 1)
    decoder.prefill(0, prompt[:20])
    decoder.compiled = True
    interrupt_last_block(model, monkeypatch)
    with pytest.warns(UserWarning, match="decoding runs uncompiled"):
        logits = decoder.prefill(0, prompt)
    assert relative(logits, logits_of(model, prompt)) <= 3e-5


def test_a_larger_cache_keeps_the_states(model):
    decoder, prompt = Decoder(model, rows=1, capacity=20), text(18, 2)
    decoder.prefill(0, prompt)
    decoder.reserve(40)
    assert relative(decoder.extend(0, [7])[-1], logits_of(model, [*prompt, 7])) <= 3e-5


def test_rejected_drafts_leave_no_trace(model):
    """Greedy speculative decoding gives the tokens of plain decoding."""
    prompt, settings = text(12, 3) * 2, Sampling(temperature=0.0)
    plain, decoder = [], Decoder(model, rows=1, capacity=60)
    logits = decoder.prefill(0, prompt)
    while len(plain) < 24:
        plain.append(int(logits.argmax()))
        logits = decoder.step(torch.tensor(plain[-1:]), [True])[0]
        decoder.append(0, plain[-1])
    decoder, answer = Decoder(model, rows=1, capacity=60), []
    logits = decoder.prefill(0, prompt)
    sampler = TokenSampler(1, model.config.vocab_size, decoder.device)
    sampler.begin(0, prompt, settings)
    for verified in speculative_rounds(decoder, sampler, PromptLookup(), logits):
        answer += verified.tokens
        if len(answer) >= 24:
            break
    assert answer[:24] == plain
