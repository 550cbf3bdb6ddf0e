"""The network of a run: built, changed by the method, sharded, filled, prepared for training."""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from litft.distributed.devices import DTYPES
from litft.distributed.fsdp import shard
from litft.model.placement import copy_into_local
from litft.model.transformer import GPT
from litft.pretrained.build import fill_model, unfilled_model
from litft.training.memory_saving.activation_checkpointing import recompute
from litft.training.memory_saving.compile import compile_blocks, compiles
from litft.training.memory_saving.cpu_offload import offload_activations, offload_parameters
from litft.training.run_setup import RunSetup


class TrainedNetwork(NamedTuple):
    """The network of a run, and the parameters that belong to its method."""

    model: GPT
    # those that are saved; some may be frozen
    parameters: dict[str, nn.Parameter]
    # over which this process holds a part of each; None: it holds all
    mesh: DeviceMesh | None

    @property
    def sharded(self) -> bool:
        """Whether this process holds a part of each parameter."""
        return self.mesh is not None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }


def build_trained_network(
    setup: RunSetup, precision: str, device: torch.device, mesh: DeviceMesh | None = None
) -> TrainedNetwork:
    """Build the network with the method attached.

    It is built on the meta device, changed by the method, sharded over `mesh`, filled from the
    files and initialised last, so that no process ever holds more than its shard.
    """
    # on the meta device: the network, the method, and what is frozen
    storage = setup.method.storage(precision)
    on_host = setup.args.train.cpu_offload == "parameters"
    model = unfilled_model(
        setup.source, storage, setup.quantize, setup.method.unquantized_modules()
    )
    setup.method.attach(model, keep=False)
    setup.method.set_compute_dtype(model, precision)
    for name in setup.method.frozen:
        model.get_parameter(name).requires_grad_(False)

    # shards, before there is memory behind them
    if mesh is not None:
        # full fine-tuning keeps fp32 weights, and gathers them in bf16
        if setup.method.saves_full_model and precision == "bf16":
            gather_in = DTYPES["bf16"]
        else:
            gather_in = None
        shard(model, mesh, gather_in, on_host)

    # values: the base's from its files, then the method's
    fill_model(setup.source, model, storage, "cpu" if on_host else device)
    # the initial values depend on the seed alone, whatever was drawn before
    torch.manual_seed(setup.args.seed)
    setup.method.reset_parameters(model)
    parameters = setup.method.parameters(model)
    for name, value in (setup.initial_values or {}).items():
        copy_into_local(parameters[name], value.__getitem__)
    model.compute_device = device if on_host else None
    model.label_smoothing = setup.args.train.label_smoothing
    model.neftune_alpha = setup.args.train.neftune_alpha
    if setup.args.objective == "grpo":
        model.loss_temperature = setup.args.grpo.temperature
    return TrainedNetwork(model, parameters, mesh)


def blocks_on_host(setup: RunSetup, sharded: bool) -> bool:
    """Whether the blocks' frozen weights wait in host memory; FSDP offloads those of a sharded
    network itself."""
    return setup.args.train.cpu_offload == "parameters" and not sharded


def prepare_blocks(
    setup: RunSetup, network: TrainedNetwork, recomputed: str, device: torch.device
) -> None:
    """Offload, recompute and compile the blocks as the flags and the plan say."""
    train = setup.args.train
    model = network.model
    on_host = blocks_on_host(setup, network.sharded)
    if on_host:
        offload_parameters(model, device)
    recompute(model, recomputed)
    if compiles(train.compile, device.type, on_host, recomputed):
        compile_blocks(model)
    if train.cpu_offload == "activations":
        offload_activations(model, device)
