"""litft's side of scripts/benchmark.py: the loop of the fine-tuning scripts."""

from typing import Any

import torch
from turns import Contender, Sample, contend

import litft.data.encoder as data
from litft.data.packing import Layout
from litft.pretrained import resolve
from litft.training.trainer import accumulate


class Litft(Contender):
    """An adapter folder that all sides share, or with --peer none any method on any base, or on random weights."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from lightning_fabric import Fabric

        self.setup, device = setup, setup["device"]
        if setup["adapter"]:
            model, method, parameters = self.with_adapter(setup, device)
        else:
            model, method, parameters = self.with_method(setup, device)
        self.parameters = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self.arrange(model, setup)
        self.fabric = Fabric(accelerator=device, devices=1)
        self.model = self.fabric.setup_module(model).train()
        self.layout = Layout(setup["rows"], setup["room"])
        if not setup["adapter"]:
            from litft.args import TrainArgs
            from litft.training.optimizers import make_optimizer

            named = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            self.optimizer = make_optimizer(TrainArgs(optimizer=setup["optimizer"], learning_rate=1e-5), method, named)
        from litft.training.flops import Flops

        self.flops = Flops(model)

    def with_adapter(self, setup: dict[str, Any], device: str) -> tuple:
        """The base, with the adapter on it."""
        source = resolve(setup["adapter"])
        model = source.base_model(setup["precision"], device)
        method, values = source.read_adapter()
        method.load(model, values)
        return model, method, method.parameters(model)

    def with_method(self, setup: dict[str, Any], device: str) -> tuple:
        """The method as the flags say."""
        from litft import args
        from litft.methods import method_of

        lora, adapter = args.LoRAArgs(**setup["lora"]), args.AdapterV2Args(**setup["adapter_flags"])
        finetuning = {
            "lora": args.LoRAFinetuneArgs(lora=lora),
            "adapter": args.AdapterFinetuneArgs(adapter=adapter),
            "adapter_v2": args.AdapterV2FinetuneArgs(adapter=adapter),
            "full": args.FullFinetuneArgs(),
        }
        method = method_of(finetuning[setup["method"]])
        source = resolve(setup["checkpoint_dir"])
        method.choose(source.meta_model(), source.adapter_rules)
        storage = method.storage(setup["precision"])
        quantize = setup["quantize"]
        if setup["random"]:
            model = random_model(source, storage, device, quantize, method.unquantized_modules())
        else:
            model = source.base_model(storage, device, quantize, method.unquantized_modules())
        method.attach(model, keep=False)  # as in training
        method.compute_in(model, setup["precision"])
        return model, method, method.parameters(model)

    def arrange(self, model: torch.nn.Module, setup: dict[str, Any]) -> None:
        """Compiled, recomputed, offloaded, where asked for."""
        if setup["compile"] or setup["recomputed"] != "none" or setup["cpu_offload"] != "none":
            from litft.training.activation_checkpointing import recompute
            from litft.training.compile import compile_blocks
            from litft.training.cpu_offload import offload_activations

            recompute(model, setup["recomputed"])
            if setup["compile"]:
                compile_blocks(model)
            if setup["cpu_offload"] == "activations":
                offload_activations(model, torch.device(setup["device"]))

    def samples(self, samples: list[Sample]) -> list[data.Sample]:
        """As the loop takes them."""
        return [data.Sample(torch.tensor(tokens), torch.tensor(targets)) for tokens, targets in samples]

    def accumulate(self, samples: list[data.Sample], count: int) -> torch.Tensor:
        """As every run does it."""
        return accumulate(self.fabric, self.model, self.layout.batches(samples), count)


def random_model(source: Any, precision: str, device: str, quantize: str, plain: set[str]) -> torch.nn.Module:
    """A network of normal weights with a deviation of 0.02, vectors one."""
    from litft.distributed.devices import DTYPES
    from litft.model.placement import allocate
    from litft.model.quantization import QuantizedModule, QuantizedTensor, is_quantizable, quantize_modules

    model = source.meta_model(DTYPES[precision])
    owners = [name.rpartition(".")[0] for name, _ in model.named_parameters() if is_quantizable(name, model)]
    if quantize != "none":
        quantize_modules(model, [name for name in owners if name not in plain], quantize)
    allocate(model.requires_grad_(False), device)
    shapes = source.meta_model(DTYPES[precision])
    for name, parameter in model.named_parameters():
        like = shapes.get_parameter(name)
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, QuantizedModule) and name.endswith(".weight"):
            drawn = torch.empty(like.shape, dtype=like.dtype, device=device).normal_(std=0.02)
            owner.fill(QuantizedTensor.quantize(drawn.flatten(0, -2), owner.kind))
        elif like.dim() > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)
    model.rotaries.to_empty(device=device)
    return model


if __name__ == "__main__":
    contend(Litft)
