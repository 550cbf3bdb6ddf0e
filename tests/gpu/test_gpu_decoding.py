"""Decoding on a GPU: CUDA graphs, greedy tokens beside the CPU's, and the server's thread."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parity import ROWS, TINY, draw, redraw

from gpu.comparisons import CUDA, PRETENDED, published_config, skip_host_counts
from litft.families import read_config
from litft.inference.decoder import Decoder
from litft.model.transformer import GPT

pytestmark = pytest.mark.quick
PROMPT, NEW = draw(40, seed=1).tolist(), 12


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def model(request):
    """A tiny network in fp32 on the CPU."""
    config_class, variations = ROWS[request.param]
    values = {**TINY, **next(iter(variations.values())), "max_position_embeddings": 1024}
    model = (
        GPT(read_config(published_config(config_class, **values)))
        .eval()
        .requires_grad_(False)
    )
    redraw(model)
    return model


def greedy(model, compiled, rows=1, prompt=PROMPT, new=NEW):
    """Return the tokens of each row, which all have the same prompt."""
    decoder = Decoder(model, rows, 1024, compiled)
    last = [decoder.prefill(row, prompt).argmax() for row in range(rows)]
    tokens = [torch.stack(last)]
    for _ in range(new - 1):
        tokens.append(decoder.step(tokens[-1], [True] * rows).argmax(-1))
        for row in range(rows):
            decoder.append(row, 3)
    return torch.stack(tokens, 1).cpu()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_greedy_tokens_equal_the_cpus(model, compiled, rows):
    skip_host_counts(any(layer.experts for layer in model.config.layers))
    tokens = greedy(copy.deepcopy(model).to(CUDA), compiled, rows)
    assert tokens.shape == (rows, NEW)
    assert PRETENDED or torch.equal(tokens, greedy(model, False, rows))


def test_a_compiled_token_is_one_cuda_graph(model):
    """Also after the keys have passed 256, and without a wait between steps."""
    on_gpu = copy.deepcopy(model).to(CUDA, torch.bfloat16)
    decoder = Decoder(on_gpu, 1, 1024, compiled=True)
    decoder.prefill(0, draw(250, seed=2).tolist())
    tokens = torch.tensor([3], device=CUDA)
    for _ in range(12):  # warm-up, capture, and again for 512 keys
        decoder.step(tokens, [True])
        decoder.append(0, 3)
    assert decoder._forward_token is not decoder.model
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        decoder.step(tokens, [True])
    launches = [event for event in profile.events() if event.name == "cudaGraphLaunch"]
    assert len(launches) == 1 or PRETENDED


def test_cuda_graphs_run_in_the_servers_thread(model):
    """A server decodes in a thread of its own; CUDA graphs are kept per thread."""
    skip_host_counts(any(layer.experts for layer in model.config.layers))
    on_gpu = copy.deepcopy(model).to(CUDA)
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(greedy, on_gpu, True).result()
    assert PRETENDED or torch.equal(tokens, greedy(model, False))
