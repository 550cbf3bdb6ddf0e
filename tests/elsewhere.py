"""Devices that this machine does not have: tensors that say they lie there, compute on the CPU, and refuse to be mixed.

Started as `python elsewhere.py MODEL`: the model's three layers on two such devices and the CPU, and on the CPU alone.
"""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten


class There(torch.Tensor):
    """A tensor on such a device; `held` are its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, held, device):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=device
        )

    def __init__(self, held, device):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, inputs=(), named=None):
        return compute(function, inputs, named or {})


class Devices(TorchDispatchMode):
    """Inside, far:0 and far:1 are there."""

    def __torch_dispatch__(self, function, types, inputs=(), named=None):
        return compute(function, inputs, named or {})


def compute(function, inputs, named):
    """One operation, where its tensors lie; RuntimeError where they do not lie together."""
    named = dict(named)
    flat = [each for each in tree_flatten((inputs, named))[0] if isinstance(each, torch.Tensor)]
    places = {str(each.device) for each in flat if each.dim() or isinstance(each, There)}
    target = named.get("device")
    if function in (aten._to_copy.default, aten.copy_.default):
        target = str(target if target is not None else inputs[0].device)
    elif len(places) > 1:
        raise RuntimeError(f"{function}: tensors on {' and '.join(sorted(places))}")
    else:
        target = str(target) if target is not None else next(iter(places), "cpu")
    if "device" in named and named["device"].type == "far":
        named["device"] = torch.device("cpu")
    held = tree_map(lambda each: each.held if isinstance(each, There) else each, (inputs, named))
    found = function(*held[0], **held[1])
    if function._schema.name.endswith("_"):  # in place
        return inputs[0]
    place = torch.device(target)
    return tree_map(lambda e: There(e, place) if isinstance(e, torch.Tensor) and place.type == "far" else e, found)


def said(model, device):
    """What two texts of different lengths are followed by, read in pieces and then token by token."""
    from litft.inference.decoder import Decoder

    decoder = Decoder(model, 2, 64)
    found = [decoder.prefill(row, list(range(3, 3 + length))) for row, length in enumerate((9, 20))]
    found += list(decoder.extend(0, [5, 6]))
    for token in (7, 8):
        found += list(decoder.step(torch.tensor([token, token + 1]).to(device), [True, True]))
        for row in range(2):
            decoder.append(row, token + row)
    return torch.stack([each.held if isinstance(each, There) else each for each in found])


def main():
    """ValueError where the logits differ."""
    from torch.utils import backend_registration

    import litft
    from litft.distributed.device_map import DeviceMap
    from litft.pretrained import resolve

    backend_registration._setup_privateuseone_for_python_backend("far")
    source, places = resolve(sys.argv[1]), [torch.device(name) for name in ("far:0", "far:1", "cpu")]
    with Devices():
        model = source.model("fp32", places[0], None, DeviceMap(places, [1, 1, 1]))
        assert [block.attention.q_proj.weight.device for block in model.blocks] == places
        model.norm.weight.requires_grad_()  # inference mode would not let tensors of a class of their own be written
        found = said(model, places[0])
        for block in model.blocks:  # and without the hand-over it could not be
            block.input_device = None
        try:
            said(model, places[0])
        except RuntimeError as error:
            print(f"as it should: {error}")
        else:
            raise ValueError("tensors of several devices were mixed")
    expected = said(litft.load(sys.argv[1], "fp32")[0].requires_grad_(False), "cpu")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


if __name__ == "__main__":
    main()
