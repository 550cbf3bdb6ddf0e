"""Simulated devices: their tensors compute on the CPU, but refuse to be mixed with those of another
device.

`python simulated_devices.py MODEL` compares a model whose layers are on two such devices and the CPU with
one on the CPU only.
"""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten


class FarTensor(torch.Tensor):
    """A tensor on a simulated device; `on_cpu` is the CPU tensor with its values."""

    @staticmethod
    def __new__(cls, on_cpu, device):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=device,
        )

    def __init__(self, on_cpu, device):
        self.on_cpu = on_cpu

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, inputs=(), kwargs=None):
        return compute(function, inputs, kwargs or {})


class FarDevices(TorchDispatchMode):
    """Within the context, the devices far:0 and far:1 exist."""

    def __torch_dispatch__(self, function, types, inputs=(), kwargs=None):
        return compute(function, inputs, kwargs or {})


def compute(function, inputs, kwargs):
    """Run an operation on the device of its tensors; raise RuntimeError if they are on several
    devices."""
    kwargs = dict(kwargs)
    tensors = [
        value
        for value in tree_flatten((inputs, kwargs))[0]
        if isinstance(value, torch.Tensor)
    ]
    devices = {
        str(value.device)
        for value in tensors
        if value.dim() or isinstance(value, FarTensor)
    }
    target = kwargs.get("device")
    if function in (aten._to_copy.default, aten.copy_.default):
        target = str(target if target is not None else inputs[0].device)
    elif len(devices) > 1:
        raise RuntimeError(f"{function}: tensors on {' and '.join(sorted(devices))}")
    else:
        target = str(target) if target is not None else next(iter(devices), "cpu")
    if "device" in kwargs and kwargs["device"].type == "far":
        kwargs["device"] = torch.device("cpu")
    cpu_inputs = tree_map(
        lambda value: value.on_cpu if isinstance(value, FarTensor) else value,
        (inputs, kwargs),
    )
    result = function(*cpu_inputs[0], **cpu_inputs[1])
    if function._schema.name.endswith("_"):  # in place
        return inputs[0]
    device = torch.device(target)
    return tree_map(
        lambda output: (
            FarTensor(output, device)
            if isinstance(output, torch.Tensor) and device.type == "far"
            else output
        ),
        result,
    )


def next_token_logits(model, device):
    """Return the next-token logits of two texts of different lengths, prefilled in chunks, then
    decoded token by token."""
    from litft.inference.decoder import Decoder

    decoder = Decoder(model, 2, 64)
    logits = [
        decoder.prefill(row, list(range(3, 3 + length)))
        for row, length in enumerate((9, 20))
    ]
    logits += list(decoder.extend(0, [5, 6]))
    for token in (7, 8):
        logits += list(
            decoder.step(torch.tensor([token, token + 1]).to(device), [True, True])
        )
        for row in range(2):
            decoder.append(row, token + row)
    return torch.stack(
        [value.on_cpu if isinstance(value, FarTensor) else value for value in logits]
    )


def main():
    """Raise an error if the logits differ."""
    from torch.utils import backend_registration

    import litft
    from litft.distributed.device_map import DeviceMap
    from litft.pretrained.folder import resolve
    from litft.pretrained.load import load_network

    backend_registration._setup_privateuseone_for_python_backend("far")
    source, devices = (
        resolve(sys.argv[1]),
        [torch.device(name) for name in ("far:0", "far:1", "cpu")],
    )
    with FarDevices():
        count = len(source.config.layers) // 3
        model = load_network(
            source, "fp32", devices[0], None, DeviceMap(devices, [count] * 3)
        )
        assert model.block_devices == [device for device in devices for _ in range(count)]
        # inference mode forbids writing to tensors of a custom class
        model.norm.weight.requires_grad_()
        logits = next_token_logits(model, devices[0])
        # without moving the activations between devices it must fail
        for block in model.blocks:
            block.input_device = None
        try:
            next_token_logits(model, devices[0])
        except RuntimeError as error:
            print(f"as it should: {error}")
        else:
            raise ValueError("tensors of several devices were mixed")
    expected = next_token_logits(
        litft.load(sys.argv[1], "fp32")[0].requires_grad_(False), "cpu"
    )
    # a custom class of tensors takes other paths through torch, which round differently
    torch.testing.assert_close(
        logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


if __name__ == "__main__":
    main()
