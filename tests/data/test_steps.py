"""Packing: rows that are full and even, samples in them that know nothing of each other."""

import random

import pytest
import torch
from parity import ROWS

import litft
from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.encoder import Sample
from litft.data.packing import Layout, collate, pack
from litft.data.sampler import Sampler
from litft.data.tokenizer import Tokenizer
from litft.model.attention import attend
from litft.model.attention_eager import attention_mask, eager_attention
from litft.model.packed_sequences import PackedSequences
from litft.pretrained import resolve


def draws(count: int, vocabulary: int = 96, longest: int = 40, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(1, longest, (1,), generator=generator))
        ids = torch.randint(vocabulary, (length + 1,), generator=generator)
        samples.append(Sample(ids[:-1], ids[1:]))
    return samples


def test_rows_hold_every_sample_once_and_no_more_than_their_room():
    draw = random.Random(0)
    for _ in range(300):
        room, ranks = draw.randint(8, 200), draw.randint(1, 4)
        lengths = [draw.randint(1, room) for _ in range(draw.randint(1, 60))]
        rows = pack(lengths, room, ranks)
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
        used = [sum(lengths[i] for i in row) for row in rows]
        assert all(used) and max(used) <= room
        fewest = -(-sum(lengths) // room)
        assert len(rows) <= 11 / 9 * fewest + 1 + ranks
        assert len(rows) >= min(ranks, len(lengths)) or len(rows) == len(lengths)


@pytest.mark.parametrize("count", [128, 16])
def test_alpaca_packs_tight(shared, checkpoints, count):
    """At a global batch of 128 rows of 2,048 are 95 % full or more, in every step of an epoch."""
    tokenizer = Tokenizer(checkpoints["SmolLM2-135M-Instruct"])
    args = DataArgs(path=[str(shared / "data" / "alpaca_2k.json")], val_fraction=0.0)
    train = load_data(args, tokenizer, 49152, 8192).train
    order, lengths = Sampler(train.sizes, 42), train.lengths
    for ranks in (1, 2):
        for step in range(len(train) // count):
            chosen = [int(lengths[i]) for i in order.indices(step * count, (step + 1) * count)]
            batches = Layout(1, 2048, ranks).plan(chosen)
            slots = sum(len(rows) * max(sum(chosen[i] for i in row) for row in rows) for rows in batches if rows)
            assert sum(chosen) / slots >= 0.95
            used = [sum(chosen[i] for i in row) for rows in batches for row in rows]
            assert len(used) % ranks == 0
            assert ranks == 2 or len(used) <= -(-sum(chosen) // 2048) + 1


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "phi3", "gpt2", "qwen3_moe", "cohere2"])
def test_a_packed_loss_is_the_sum_of_single_losses(make_model, family):
    """Where windows, caps, sinks, learned positions and experts are too."""
    config, variations = ROWS[family]
    source = resolve(make_model(config, **next(iter(variations.values())))[1])
    model = source.base_model()
    samples = draws(7, model.config.vocab_size)
    alone = [model(sample.tokens[None], targets=sample.targets[None])[0] for sample in samples]
    for layout in (Layout(1, 512), Layout(2, 100), Layout(4, 60)):
        packed = [model(batch.tokens, **batch.inputs()) for batch in layout.batches(samples)]
        assert float(sum(loss for loss, _ in packed)) == pytest.approx(float(sum(alone)), rel=1e-6)
        assert sum(int(count) for _, count in packed) == sum(sample.supervised for sample in samples)


@torch.no_grad()
def test_a_sample_does_not_see_its_neighbours(tiny):
    """Perturbing one leaves the others' logits bit-equal; positions restart; no target lies across a border."""
    model, _ = litft.load(tiny)
    samples = draws(3, 512)
    batch = collate([samples])
    other = Sample((samples[0].tokens + 1) % 512, samples[0].targets)
    changed = collate([[other, *samples[1:]]])
    one = model(batch.tokens, positions=batch.positions, documents=batch.documents)
    two = model(changed.tokens, positions=changed.positions, documents=changed.documents)
    border = samples[0].tokens.numel()
    assert torch.equal(one[:, border:], two[:, border:]) and not torch.equal(one[:, :border], two[:, :border])
    expected = torch.cat([torch.arange(sample.tokens.numel()) for sample in samples])
    assert torch.equal(batch.positions[0], expected)
    assert torch.equal(batch.targets[0], torch.cat([sample.targets for sample in samples]))


def test_padding_is_no_sample(tiny):
    short, long = draws(1, 512, 4)[0], draws(9, 512)[-1]
    batch = collate([[long, long], [short]])
    n = short.tokens.numel()
    assert (batch.documents.ids[1, n:] == -1).all() and (batch.positions[1, n:] == 0).all()
    assert (batch.targets[1, n:] == -100).all()


@pytest.mark.parametrize(
    "window, softcap, sinks", [(None, None, False), (5, None, False), (7, 3.0, False), (None, None, True)]
)
def test_document_after_document_is_the_mask(window, softcap, sinks):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 30, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    documents = PackedSequences.of(torch.tensor([[0] * 4 + [1] * 20 + [2] * 6, [0] * 29 + [-1]]))
    sinks = torch.randn(6) if sinks else None
    found = attend(q, k, v, documents, window, softcap, sinks)
    expected = eager_attention(q, k, v, attention_mask(q, k, documents, window), softcap, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
