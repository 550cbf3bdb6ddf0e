"""Real checkpoints against transformers. test_families.py compares tiny models of every family."""

import pytest
import torch
import transformers
from parity import ROWS, relative

import litft
from litft.model.kv_cache import KVCache
from litft.model.placement import allocate
from litft.model.transformer import default_positions
from litft.pretrained.folder import resolve
from litft.training.memory.allocations import AllocationTracker


def test_positions_restart_with_each_document():
    """Rotary embeddings are relative, so only length-dependent scalings would show an error in the
    logits."""
    tokens, documents = (
        torch.zeros(2, 6),
        torch.tensor([[7, 7, 3, 3, 3, 7], [1, 1, 1, 1, 1, 1]]),
    )
    assert default_positions(tokens, documents, 0).tolist() == [
        [0, 1, 0, 1, 2, 0],
        [0, 1, 2, 3, 4, 5],
    ]
    assert default_positions(tokens, None, 4).tolist() == [[4, 5, 6, 7, 8, 9]]


def test_tied_embeddings_are_one_parameter(make_model):
    from transformers import LlamaConfig

    reference, folder = make_model(LlamaConfig, tie_word_embeddings=True)
    model, _ = litft.load(folder)
    assert model.lm_head.weight is model.embed.weight
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in reference.parameters()
    )


@torch.no_grad()
def test_tokens_without_a_per_layer_embedding_equal_transformers(make_model):
    """The table of Gemma 3n is shorter than the vocabulary."""
    config_class, variations = ROWS["gemma3n_text"]
    sizes = variations["three streams"] | {"vocab_size_per_layer_input": 80}
    reference, folder = make_model(getattr(transformers, config_class), **sizes)
    tokens = torch.tensor([[5, 90, 79, 80, 6]])
    assert relative(litft.load(folder)[0](tokens), reference(tokens).logits) <= 1e-5


def test_zero_embeddings_have_finite_gradients_in_streams(make_model):
    """A padding token has an embedding of zeros, to which the other streams of Gemma 3n are
    scaled."""
    config_class, variations = ROWS["gemma3n_text"]
    folder = make_model(getattr(transformers, config_class), **variations["three streams"])[
        1
    ]
    model, tokens = litft.load(folder)[0], torch.tensor([[5, 6, 0, 0]])
    with torch.no_grad():
        model.embed.weight[0] = 0
    loss, _ = model.requires_grad_()(tokens, targets=torch.tensor([[6, 7, -100, -100]]))
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_tied_weight_is_allocated_once(make_model):
    from transformers import LlamaConfig

    _, folder = make_model(LlamaConfig, tie_word_embeddings=True)
    model = resolve(folder).meta_model()
    with AllocationTracker() as tracker:
        allocate(model, "cpu")
    assert tracker.peak == sum(tensor.nbytes for tensor in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "stories",
        "stories15M",
        pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_logits_of_real_checkpoints_equal_transformers(checkpoints, shared, name):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        checkpoints[name], dtype="float32"
    ).eval()
    model, tokenizer = litft.load(checkpoints[name], precision="fp32")
    text = (shared / "data" / "wikitext2_valid.txt").read_text("utf-8")[:700]
    tokens = torch.tensor([tokenizer.encode(text)[:160]])
    expected = reference(tokens).logits
    assert relative(model(tokens), expected) <= 1e-5
    cache = KVCache(model.config, 1, tokens.size(1))
    pieces = [tokens[:, :100], *tokens[:, 100:120].split(1, dim=1)]
    cached = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
    assert relative(cached, expected[:, :120]) <= 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_perplexity_of_a_real_model(checkpoints, shared):
    """An independent reference: the mean loss of SmolLM2 on the first 1,024 tokens of WikiText is
    2.544."""
    model, tokenizer = litft.load(checkpoints["SmolLM2-135M-Instruct"], precision="fp32")
    ids = tokenizer.encode(
        (shared / "data" / "wikitext2_valid.txt").read_text("utf-8")[:8000], bos=False
    )[:1024]
    loss, count = model(torch.tensor([ids[:-1]]), targets=torch.tensor([ids[1:]]))
    assert float(loss / count) == pytest.approx(2.544, abs=5e-4)
