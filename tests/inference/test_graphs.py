"""Compiled decoding is one graph per forward pass on a CPU, and one for each kind of block on a GPU:
every recompilation would be a wait within an answer."""

import pytest
import torch
import transformers
from graphs import counted_graphs
from parity import ROWS, TINY

from litft.families import read_config
from litft.inference.compiled_forward import with_compiled_blocks
from litft.inference.decoder import PREFILL_CHUNK, Decoder
from litft.model.transformer import GPT

FAMILIES = ["llama", "gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow), "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    """A tiny bf16 network with grouped heads; with windows and softcaps, sinks, or experts."""
    config_class, variations = ROWS[request.param]
    values = {**TINY, **next(iter(variations.values())), "max_position_embeddings": 1024}
    values["num_hidden_layers"] = 2
    config = read_config(getattr(transformers, config_class)(**values).to_dict())
    torch.manual_seed(0)
    model = GPT(config).bfloat16().eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.halved
def test_each_forward_pass_is_one_graph(model):
    """Prompts of any length share one graph, tokens another one, whatever the number of cached
    keys."""
    with counted_graphs() as counts:
        decoder = Decoder(model, rows=1, capacity=1024, compiled=True)
        tokens = [1 + i % 40 for i in range(PREFILL_CHUNK + 250)]
        decoder.prefill(0, tokens[:250])
        assert counts.reset() == (1, 1)
        for _ in range(10):  # the keys to attend to grow from 256 to 512
            decoder.step(torch.tensor([3]), [True])
            decoder.append(0, 3)
        assert counts.reset() == (1, 10)
        decoder.prefill(0, tokens[::-1])  # without a common prefix
        assert counts.reset() == (0, 2)
        decoder.step(torch.tensor([3]), [True])
        assert counts.reset() == (0, 1)
        assert not counts.breaks


@pytest.mark.halved
def test_each_block_is_one_graph(model):
    """Each kind of block has one graph for prompts of any length, and one for tokens with any
    number of cached keys."""
    kinds = len({layer.window for layer in model.config.layers})
    with counted_graphs() as counts:
        decoder = Decoder(model, rows=1, capacity=1024, compiled=True)
        # as on a GPU
        decoder._forward_chunk = decoder._forward_token = with_compiled_blocks(model)
        assert not any(block._compiled_call_impl for block in model.blocks)
        tokens = [1 + i % 40 for i in range(PREFILL_CHUNK + 250)]
        decoder.prefill(0, tokens[:250])
        assert counts.reset() == (kinds, 2)
        for _ in range(10):  # the keys to attend to grow from 256 to 512
            decoder.step(torch.tensor([3]), [True])
            decoder.append(0, 3)
        assert counts.reset() == (kinds, 20)
        decoder.prefill(0, tokens[::-1])  # without a common prefix
        assert counts.reset() == (0, 4)
        decoder.step(torch.tensor([3]), [True])
        assert counts.reset() == (0, 2)
        assert not counts.breaks
