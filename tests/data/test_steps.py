"""Packing: rows are full and balanced, and the samples in a row are isolated."""

import random

import pytest
import torch
from parity import ROWS

import litft
from litft.args import DataArgs
from litft.data.dataset import load_data
from litft.data.packing import BatchLayout, collate, pack
from litft.data.sample import Sample
from litft.data.sampler import SampleOrder
from litft.data.tokenizer import Tokenizer
from litft.model.attention import attend
from litft.model.attention_eager import eager_attention
from litft.model.attention_mask import attention_mask
from litft.model.packed_sequences import PackedSequences
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve


def random_samples(
    count: int, vocab_size: int = 96, max_length: int = 40, seed: int = 0
) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(1, max_length, (1,), generator=generator))
        ids = torch.randint(vocab_size, (length + 1,), generator=generator)
        samples.append(Sample(ids[:-1], ids[1:]))
    return samples


def test_rows_contain_every_sample_once_within_their_capacity():
    rng = random.Random(0)
    for _ in range(300):
        capacity, ranks = rng.randint(8, 200), rng.randint(1, 4)
        lengths = [rng.randint(1, capacity) for _ in range(rng.randint(1, 60))]
        rows = pack(lengths, capacity, ranks)
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
        row_lengths = [sum(lengths[i] for i in row) for row in rows]
        assert all(row_lengths) and max(row_lengths) <= capacity
        min_rows = -(-sum(lengths) // capacity)
        assert len(rows) <= 11 / 9 * min_rows + 1 + ranks
        assert len(rows) >= min(ranks, len(lengths)) or len(rows) == len(lengths)


@pytest.mark.parametrize("count", [128, 16])
def test_packed_alpaca_rows_are_95_percent_full(shared, checkpoints, count):
    """Rows of 2,048 tokens are at least 95 % full in every step of an epoch."""
    tokenizer = Tokenizer(checkpoints["SmolLM2-135M-Instruct"])
    args = DataArgs(path=[str(shared / "data" / "alpaca_2k.json")], val_fraction=0.0)
    train = load_data(args, tokenizer, 49152, 8192).train
    sampler, lengths = SampleOrder(train.sizes, 42), train.lengths
    for ranks in (1, 2):
        for step in range(len(train) // count):
            step_lengths = [
                int(lengths[i]) for i in sampler.indices(step * count, (step + 1) * count)
            ]
            batches = BatchLayout(1, 2048, ranks).plan(step_lengths)
            slots = sum(
                len(rows) * max(sum(step_lengths[i] for i in row) for row in rows)
                for rows in batches
                if rows
            )
            assert sum(step_lengths) / slots >= 0.95
            row_lengths = [
                sum(step_lengths[i] for i in row) for rows in batches for row in rows
            ]
            assert len(row_lengths) % ranks == 0
            assert ranks == 2 or len(row_lengths) <= -(-sum(step_lengths) // 2048) + 1


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "gemma2", "gpt_oss", "phi3", "gpt2", "qwen3_moe", "cohere2"],
)
def test_a_packed_loss_is_the_sum_of_single_losses(make_model, family):
    """Also with sliding windows, softcaps, sinks, learned positions and experts."""
    config, variations = ROWS[family]
    source = resolve(make_model(config, **next(iter(variations.values())))[1])
    model = base_model(source)
    samples = random_samples(7, model.config.vocab_size)
    single_losses = [
        model(sample.tokens[None], targets=sample.targets[None])[0] for sample in samples
    ]
    for layout in (BatchLayout(1, 512), BatchLayout(2, 100), BatchLayout(4, 60)):
        packed = [
            model(batch.tokens, **batch.inputs()) for batch in layout.batches(samples)
        ]
        assert float(sum(loss for loss, _ in packed)) == pytest.approx(
            float(sum(single_losses)), rel=1e-6
        )
        assert sum(int(count) for _, count in packed) == sum(
            sample.supervised for sample in samples
        )


@torch.no_grad()
def test_packed_samples_are_isolated(tiny):
    """Changing one sample leaves the logits of the others bit-identical; positions restart; targets
    stay within a sample."""
    model, _ = litft.load(tiny)
    samples = random_samples(3, 512)
    batch = collate([samples])
    changed_sample = Sample((samples[0].tokens + 1) % 512, samples[0].targets)
    changed_batch = collate([[changed_sample, *samples[1:]]])
    logits = model(batch.tokens, positions=batch.positions, documents=batch.documents)
    changed = model(
        changed_batch.tokens,
        positions=changed_batch.positions,
        documents=changed_batch.documents,
    )
    border = samples[0].tokens.numel()
    assert torch.equal(logits[:, border:], changed[:, border:]) and not torch.equal(
        logits[:, :border], changed[:, :border]
    )
    expected = torch.cat([torch.arange(sample.tokens.numel()) for sample in samples])
    assert torch.equal(batch.positions[0], expected)
    assert torch.equal(batch.targets[0], torch.cat([sample.targets for sample in samples]))


def test_padding_belongs_to_no_sample(tiny):
    short, long = random_samples(1, 512, 4)[0], random_samples(9, 512)[-1]
    batch = collate([[long, long], [short]])
    length = short.tokens.numel()
    assert (batch.documents.ids[1, length:] == -1).all() and (
        batch.positions[1, length:] == 0
    ).all()
    assert (batch.targets[1, length:] == -100).all()


@pytest.mark.parametrize(
    "window, softcap, sinks",
    [(None, None, False), (5, None, False), (7, 3.0, False), (None, None, True)],
)
def test_attention_per_document_equals_masked_attention(window, softcap, sinks):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 30, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    documents = PackedSequences.of(
        torch.tensor([[0] * 4 + [1] * 20 + [2] * 6, [0] * 29 + [-1]])
    )
    sinks = torch.randn(6) if sinks else None
    output = attend(q, k, v, documents, window, softcap, sinks)
    expected = eager_attention(
        q, k, v, attention_mask(q, k, documents, window), softcap, sinks
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
