"""The network against transformers: every config read from disk, every tensor redrawn, nothing that can hide."""

import re

import pytest
import torch

import litft
from litft.cache import KVCache
from litft.model import default_positions

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LONG = dict(rope_type="longrope", short_factor=[1.1, 1.2, 1.4, 1.7], long_factor=[2.0, 3.0, 5.0, 9.0], factor=4.0)

LLAMA = {
    "grouped": {},
    "all heads": dict(num_key_value_heads=4),
    "one key head": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
    "attention bias": dict(attention_bias=True),
    "mlp bias": dict(mlp_bias=True),
    "wide heads": dict(head_dim=16),
    "gelu": dict(hidden_act="gelu_pytorch_tanh"),
    "rope base": dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)),
    "linear": dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=1e4)),
    "dynamic": dict(rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=1e4)),
    "llama3": dict(rope_parameters=dict(rope_theta=500.0, **LLAMA3)),
    "yarn": dict(rope_parameters=dict(rope_theta=1e4, **YARN)),
    "yarn mscale": dict(rope_parameters=dict(rope_theta=1e4, mscale=0.8, mscale_all_dim=0.5, truncate=False, **YARN)),
    "yarn betas": dict(rope_parameters=dict(rope_theta=1e4, beta_fast=16, beta_slow=2, attention_factor=1.3, **YARN)),
    "longrope": dict(rope_parameters=dict(rope_theta=1e4, original_max_position_embeddings=64, **LONG)),
}
MISTRAL = {
    "window": dict(sliding_window=5),
    "no window": dict(sliding_window=None),
    "window, wide heads": dict(sliding_window=9, head_dim=12, tie_word_embeddings=True),
}
CASES = {f"llama {name}": ("llama", values) for name, values in LLAMA.items()}
CASES |= {f"mistral {name}": ("mistral", values) for name, values in MISTRAL.items()}
LENGTHS = (20, 100)  # within the original context, and beyond it


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a part of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def pair(request, make_model):
    """transformers' model and the folder it was saved to."""
    from transformers import LlamaConfig, MistralConfig

    family, values = request.param
    return make_model({"llama": LlamaConfig, "mistral": MistralConfig}[family], **values)


@torch.no_grad()
def test_logits_are_transformers(pair):
    reference, folder = pair
    model, tokenizer = litft.load(folder)
    assert tokenizer is None
    for length in LENGTHS:
        tokens = torch.randint(96, (2, length), generator=torch.Generator().manual_seed(length))
        assert relative(model(tokens), reference(tokens).logits) <= 1e-5, length


@torch.no_grad()
def test_every_tensor_matters(pair):
    _, folder = pair
    model, _ = litft.load(folder)
    tokens = torch.randint(96, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    kinds = {re.sub(r"\d+", "N", name): parameter for name, parameter in model.named_parameters()}
    for kind, parameter in kinds.items():
        kept = parameter.clone()
        parameter.zero_()
        assert relative(model(tokens), expected) >= 1e-3, kind
        parameter.copy_(kept)


@torch.no_grad()
def test_cached_decoding_is_uncached(pair):
    _, folder = pair
    model, _ = litft.load(folder)
    for length in LENGTHS:
        tokens = torch.randint(96, (2, length), generator=torch.Generator().manual_seed(length))
        cache = KVCache(model.config, 2, length)
        pieces = [tokens[:, :7], tokens[:, 7:11], *tokens[:, 11:].split(1, dim=1)]
        cached = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
        assert relative(cached, model(tokens)) <= 1e-5, length


@torch.no_grad()
def test_packed_documents_are_alone(pair):
    _, folder = pair
    model, _ = litft.load(folder)
    first, second = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[0] * 12 + [1] * 20])
    packed = torch.cat((first[:12], second))[None]
    logits = model(packed, documents=documents)
    assert relative(logits[:, :12], model(first[None, :12])) <= 1e-5
    assert relative(logits[:, 12:], model(second[None])) <= 1e-5
    packed[0, 3] = (packed[0, 3] + 1) % 96
    assert torch.equal(model(packed, documents=documents)[:, 12:], logits[:, 12:])


def test_positions_restart_with_each_document():
    """Relative rotations hide it from the logits, scalings that look at the length do not."""
    tokens, documents = torch.zeros(2, 6), torch.tensor([[7, 7, 3, 3, 3, 7], [1, 1, 1, 1, 1, 1]])
    assert default_positions(tokens, documents, 0).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert default_positions(tokens, None, 4).tolist() == [[4, 5, 6, 7, 8, 9]]


def test_packed_loss_is_the_sum_of_single_losses(pair):
    _, folder = pair
    model, _ = litft.load(folder)
    first, second = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(4))
    documents = torch.tensor([[0] * 11 + [1] * 19])
    tokens = torch.cat((first[:11], second[:19]))[None]
    targets = torch.cat((first[1:12], second[1:20]))[None]
    loss, count = model(tokens, targets=targets, documents=documents)
    singles = [model(x[None, :-1], targets=x[None, 1:])[0] for x in (first[:12], second)]
    assert count == 30
    assert float(loss) == pytest.approx(float(sum(singles)), rel=1e-6)


def test_tied_is_one_parameter(make_model):
    from transformers import LlamaConfig

    reference, folder = make_model(LlamaConfig, tie_word_embeddings=True)
    model, _ = litft.load(folder)
    assert model.lm_head.weight is model.embed.weight
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("name", ["stories260K", "stories15M", "SmolLM2-135M-Instruct"])
@torch.no_grad()
def test_real_logits_are_transformers(checkpoints, shared, name):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype="float32").eval()
    model, tokenizer = litft.load(checkpoints[name], precision="fp32")
    text = (shared / "data" / "wikitext2_valid.txt").read_text("utf-8")[:700]
    tokens = torch.tensor([tokenizer.encode(text)[:160]])
    expected = reference(tokens).logits
    assert relative(model(tokens), expected) <= 1e-5
    cache = KVCache(model.config, 1, tokens.size(1))
    pieces = [tokens[:, :100], *tokens[:, 100:120].split(1, dim=1)]
    cached = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
    assert relative(cached, expected[:, :120]) <= 1e-5


@torch.no_grad()
def test_perplexity_of_a_real_model(checkpoints, shared):
    """A figure from elsewhere: SmolLM2's mean loss on wikitext's first 1,024 tokens is 2.544."""
    model, tokenizer = litft.load(checkpoints["SmolLM2-135M-Instruct"], precision="fp32")
    ids = tokenizer.encode((shared / "data" / "wikitext2_valid.txt").read_text("utf-8")[:8000], bos=False)[:1024]
    loss, count = model(torch.tensor([ids[:-1]]), targets=torch.tensor([ids[1:]]))
    assert float(loss / count) == pytest.approx(2.544, abs=5e-4)
