"""Layers on several devices: each device gets as many as fit, and the logits stay the same."""

import pytest
import torch
import transformers
from conftest import script
from parity import ROWS

import litft
from litft.distributed.device_map import DeviceMap, fit_layers
from litft.pretrained.folder import resolve
from litft.pretrained.load import load_network


@pytest.mark.parametrize(
    "free, layers, ends, counts",
    [
        ([None], [5] * 4, 9, [4, 0]),  # a CPU has room for all
        ([100, 100], [20] * 4, 9, [4, 0, 0]),  # all fit on the first
        # 90 % of the memory is used; the first device also has the embedding
        ([100, 100], [20] * 6, 20, [3, 3, 0]),
        ([100, 100], [20] * 12, 20, [3, 4, 5]),  # the rest is on the host
        ([10, 100], [20] * 4, 20, [0, 4, 0]),
        ([100, 100], [50, 10, 80], 0, [2, 1, 0]),  # layers keep their order
    ],
)
def test_each_device_gets_the_layers_that_fit(free, layers, ends, counts):
    assert fit_layers(free, layers, ends) == counts


SPREAD = {
    "gemma2": "soft caps, windows",
    "gemma3n_text": "four streams, shared keys",
    "llama4_text": "chunks, NoPE, experts",
    "qwen3_5_text": "delta nets",
    "deepseek_v3": "groups, correction",
}


@pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this version of torch cannot simulate devices",
)
@pytest.mark.parametrize("family", SPREAD)
@pytest.mark.halved
def test_activations_move_between_devices(make_model, family):
    """Two simulated devices that refuse to be mixed, and the CPU, give the same logits as one
    CPU."""
    config_class, variations = ROWS[family]
    folder = make_model(getattr(transformers, config_class), **variations[SPREAD[family]])[
        1
    ]
    done = script("tests/simulated_devices.py", folder, cwd=folder)
    assert "as it should: " in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_on_a_gpu_and_the_host(checkpoints):
    source, tokens = resolve(checkpoints["demo"]), torch.arange(3, 40)[None]
    model = load_network(
        source,
        "fp32",
        "cuda",
        None,
        DeviceMap([torch.device("cuda"), torch.device("cpu")], [4, 2]),
    )
    expected = litft.load(checkpoints["demo"], "fp32")[0](tokens)
    torch.testing.assert_close(model(tokens.cuda()).cpu(), expected, rtol=1e-4, atol=1e-4)


def test_layers_per_device_flag(checkpoints, tmp_path):
    argv = [
        "generate/base.py",
        "--checkpoint_dir",
        checkpoints["stories"],
        "--prompt",
        "One day",
        "--temperature",
        "0",
    ]
    argv += ["--max_new_tokens", "12"]
    options = ("", "--layers_per_device auto", "--devices 2 --layers_per_device 2,3")
    results = [script(*argv, *flags.split(), cwd=tmp_path) for flags in options]
    assert (
        len({result.stdout for result in results}) == 1
        and "layers: 5 on cpu" in results[1].stderr
    )
    stderr = script(
        *argv, "--devices", "2", "--layers_per_device", "2,4", cwd=tmp_path, code=2
    ).stderr
    assert "the counts add up to 6, but the model has 5 layers" in stderr
    stderr = script(*argv, "--layers_per_device", "2,x", cwd=tmp_path, code=2).stderr
    assert "expected auto, or a number for each of --devices 1" in stderr
