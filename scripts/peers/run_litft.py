"""The litft contender of scripts/benchmark.py: the training step of the fine-tuning scripts."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from turns import Contender, Sample, run_contender

# `Sample` has had several homes, and other commits of litft are peers, too: packing has it in all
import litft.data.packing as data
from litft.args import PreferenceArgs
from litft.distributed.devices import pick_accelerator
from litft.training.accumulation import accumulate
from litft.training.objectives import OBJECTIVES

# where modules were before: other commits of litft are peers, too
FORMER_MODULES = {
    "litft.pretrained.folder": "litft.pretrained",
    "litft.training.reference_values": "litft.training.batches",
    "litft.training.batches": "litft.training.references",
    "litft.training.optimizers.make": "litft.training.optimizers",
    "litft.training.memory.flops": "litft.training.flops",
    "litft.training.memory_saving.activation_checkpointing": (
        "litft.training.activation_checkpointing"
    ),
    "litft.training.memory_saving.compile": "litft.training.compile",
    "litft.training.memory_saving.cpu_offload": "litft.training.cpu_offload",
}


# what names were before
FORMER_NAMES = {"BatchLayout": "Layout", "select_targets": "choose"}


def member(module: str, name: str) -> Any:
    """Return what a module of litft defines, also of a commit that had it in another module or
    under another name."""
    while True:
        try:
            return attribute(import_module(module), name)
        except ModuleNotFoundError:
            module = FORMER_MODULES[module]


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute that earlier commits may have under another name."""
    if hasattr(owner, name):
        return getattr(owner, name)
    return getattr(owner, FORMER_NAMES[name])


resolve = member("litft.pretrained.folder", "resolve")
log_probs = member("litft.training.reference_values", "log_probs")
batch_layout = member("litft.data.packing", "BatchLayout")


def base_model(source: Any, *settings: Any) -> torch.nn.Module:
    """Load the base model of a folder, which was a method of the folder in earlier commits."""
    try:
        build = import_module("litft.pretrained.build")
    except ModuleNotFoundError:
        return source.base_model(*settings)
    return build.base_model(source, *settings)


class Litft(Contender):
    """Train the shared adapter, or without one, any method on the weights of the folder or on
    random weights."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from lightning_fabric import Fabric

        self.setup = setup
        device = setup["device"]
        if setup["adapter"]:
            model, method, parameters = self.with_adapter(setup, device)
        else:
            model, method, parameters = self.with_method(setup, device)
        self.parameters = [
            parameter for parameter in parameters.values() if parameter.requires_grad
        ]
        self.transform_blocks(model, setup)
        self.fabric = Fabric(accelerator=pick_accelerator(device), devices=1)
        self.model = self.fabric.setup_module(model).train()
        self.layout = batch_layout(setup["rows"], setup["room"])
        self.objective = OBJECTIVES[setup["objective"]](PreferenceArgs())
        if not setup["adapter"]:
            from litft.args import TrainArgs

            make_optimizer = member("litft.training.optimizers.make", "make_optimizer")

            trained = {}
            for name, parameter in parameters.items():
                if parameter.requires_grad:
                    trained[name] = parameter
            self.optimizer = make_optimizer(
                TrainArgs(optimizer=setup["optimizer"], learning_rate=1e-5), method, trained
            )
        Flops = member("litft.training.memory.flops", "Flops")

        self.flops = Flops(model)

    def with_adapter(self, setup: dict[str, Any], device: str) -> tuple:
        """Return the base model with the shared adapter, the method, and the method's parameters by
        name."""
        source = resolve(setup["adapter"])
        model = base_model(source, setup["precision"], device)
        method, values = source.read_adapter()
        method.load(model, values)
        return model, method, method.parameters(model)

    def with_method(self, setup: dict[str, Any], device: str) -> tuple:
        """Return the model with a new adapter of the method in the flags, the method, and its
        parameters by name."""
        from litft import args
        from litft.methods import method_of

        lora = args.LoRAArgs(**setup["lora"])
        adapter = args.AdapterV2Args(**setup["adapter_flags"])
        finetune_args = {
            "lora": args.LoRAFinetuneArgs(lora=lora),
            "adapter": args.AdapterFinetuneArgs(adapter=adapter),
            "adapter_v2": args.AdapterV2FinetuneArgs(adapter=adapter),
            "full": args.FullFinetuneArgs(),
        }
        method = method_of(finetune_args[setup["method"]])
        source = resolve(setup["checkpoint_dir"])
        attribute(method, "select_targets")(source.meta_model(), source.adapter_rules)
        storage = method.storage(setup["precision"])
        quantize = setup["quantize"]
        if setup["random"]:
            model = random_model(
                source, storage, device, quantize, method.unquantized_modules()
            )
        else:
            model = base_model(
                source, storage, device, quantize, method.unquantized_modules()
            )
        method.attach(model, keep=False)  # as in training
        method.set_compute_dtype(model, setup["precision"])
        return model, method, method.parameters(model)

    def transform_blocks(self, model: torch.nn.Module, setup: dict[str, Any]) -> None:
        """Apply activation checkpointing, compilation and CPU offload as the setup says."""
        if (
            setup["compile"]
            or setup["recomputed"] != "none"
            or setup["cpu_offload"] != "none"
        ):
            saving = "litft.training.memory_saving"
            recompute = member(f"{saving}.activation_checkpointing", "recompute")
            compile_blocks = member(f"{saving}.compile", "compile_blocks")
            offload_activations = member(f"{saving}.cpu_offload", "offload_activations")
            recompute(model, setup["recomputed"])
            if setup["compile"]:
                compile_blocks(model)
            if setup["cpu_offload"] == "activations":
                offload_activations(model, torch.device(setup["device"]))

    def samples(self, samples: list[Sample]) -> list[data.Sample]:
        """Return the samples as litft's data classes."""
        made = [
            data.Sample(
                torch.tensor(tokens), torch.tensor(targets), documents=tuple(documents)
            )
            for tokens, targets, documents in ((*sample, ())[:3] for sample in samples)
        ]
        if not self.objective.needs_reference:
            return made
        references = log_probs(self.fabric, self.model, self.layout, made).tolist()
        return [
            replace(sample, reference=tuple(values))
            for sample, values in zip(made, references, strict=True)
        ]

    def accumulate(self, samples: list[data.Sample], count: int) -> torch.Tensor:
        """Accumulate gradients with the function that fine-tuning uses."""
        totals = self.objective.totals(samples)
        return accumulate(
            self.fabric, self.objective, self.model, self.layout.batches(samples), totals
        )[0]


def random_model(
    source: Any, precision: str, device: str, quantize: str, unquantized: set[str]
) -> torch.nn.Module:
    """Return a model with random normal matrices (standard deviation 0.02) and vectors of ones.

    unquantized: the names of modules that are not quantized.
    """
    from litft.distributed.devices import DTYPES
    from litft.model.placement import allocate
    from litft.model.quantization import (
        QuantizedModule,
        QuantizedTensor,
        is_quantizable,
        quantize_modules,
    )

    model = source.meta_model(DTYPES[precision])
    module_names = [
        name.rpartition(".")[0]
        for name, _ in model.named_parameters()
        if is_quantizable(name, model)
    ]
    if quantize != "none":
        quantize_modules(
            model, [name for name in module_names if name not in unquantized], quantize
        )
    allocate(model.requires_grad_(False), device)
    references = source.meta_model(DTYPES[precision])
    for name, parameter in model.named_parameters():
        reference = references.get_parameter(name)
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, QuantizedModule) and name.endswith(".weight"):
            weights = torch.empty(
                reference.shape, dtype=reference.dtype, device=device
            ).normal_(std=0.02)
            module.fill(QuantizedTensor.quantize(weights.flatten(0, -2), module.kind))
        elif reference.dim() > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)
    model.rotaries.to_empty(device=device)
    return model


if __name__ == "__main__":
    run_contender(Litft)
