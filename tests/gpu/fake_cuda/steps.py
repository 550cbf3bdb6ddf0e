"""Training steps on fake CUDA tensors: variations of every family by ways to train, each by litft's
own Trainer.

    python tests/gpu/fake_cuda/steps.py                       # all, in about 10 minutes
    python tests/gpu/fake_cuda/steps.py --covering            # one variation of each family, in
    turn with each way; 1 minute python tests/gpu/fake_cuda/steps.py --only "llama: grouped"
    --capability 7.5

A step fails if a tensor is on the wrong device, if an operator refuses its inputs, if the host
waits for the GPU, or if a parameter has no gradient. Nothing is computed. README.md of `tests/gpu`
says what this cannot show.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import fake_cuda  # before torch
import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from parity import ROWS, TINY, draw  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402

from litft.args import (  # noqa: E402
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    EvalArgs,
    FinetuneArgs,
    FullFinetuneArgs,
    GrpoArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    TrainArgs,
)
from litft.data.dataset import DataSplits  # noqa: E402
from litft.data.packing import BatchLayout, MicroBatch  # noqa: E402
from litft.data.sample import Sample  # noqa: E402
from litft.data.tokenizer import Tokenizer  # noqa: E402
from litft.distributed.devices import lacks_bf16, make_fabric, pick_accelerator  # noqa: E402
from litft.distributed.process_group import Processes, launch  # noqa: E402
from litft.families import families, fits_fp16, read_config  # noqa: E402
from litft.model.loss import IGNORED  # noqa: E402
from litft.model.mixers import kernels  # noqa: E402
from litft.model.placement import SINGLE_DEVICE  # noqa: E402
from litft.pretrained.folder import DEMO, PretrainedFolder  # noqa: E402
from litft.training import network  # noqa: E402
from litft.training.optimizers.make import make_optimizer  # noqa: E402
from litft.training.planned_run import DeviceSettings, PlannedRun  # noqa: E402
from litft.training.rollouts import Rollouts  # noqa: E402
from litft.training.run_setup import resolve_setup  # noqa: E402
from litft.training.schedule import Schedule  # noqa: E402
from litft.training.trainer import Trainer  # noqa: E402
from litft.training.updates import Updates  # noqa: E402

# those of flash-linear-attention read the lengths of documents
kernels.are_installed = lambda: False


def _lora(
    precision: str = "bf16", packing: bool = True, lora: dict | None = None, **train: Any
) -> FinetuneArgs:
    args = LoRAFinetuneArgs(
        precision=precision, lora=LoRAArgs(**(lora or {})), train=TrainArgs(**train)
    )
    return replace(args, data=replace(args.data, packing=packing))


WAYS: dict[str, FinetuneArgs] = {
    "LoRA, padded rows": _lora(packing=False),
    "LoRA, packed": _lora(),
    "LoRA, fp32": _lora("fp32"),
    "DoRA, NEFTune": _lora(lora=dict(dora=True), neftune_alpha=5.0),
    "full": FullFinetuneArgs(precision="bf16"),
    "full, bf16-true": FullFinetuneArgs(precision="bf16-true"),
    "adapter v2": AdapterV2FinetuneArgs(precision="bf16"),
    "LoRA, recomputed": _lora(activation_checkpointing="full"),
    "LoRA, embedding and head": _lora(
        lora=dict(targets=["all-linear", "embed", "lm_head"])
    ),
}
# only with the first variation of a few families
MORE_WAYS: dict[str, FinetuneArgs] = {
    "adapter": AdapterFinetuneArgs(precision="bf16"),
    "LoRA, dropout, recomputed MLPs": _lora(
        lora=dict(dropout=0.1), activation_checkpointing="selective"
    ),
    "full, Adafactor": FullFinetuneArgs(
        precision="bf16", train=TrainArgs(optimizer="adafactor")
    ),
    "full, Muon, clipped": FullFinetuneArgs(
        precision="bf16", train=TrainArgs(optimizer="muon", max_grad_norm=0.1)
    ),
    "full, bf16-true, stepped in the backward pass": FullFinetuneArgs(
        precision="bf16-true",
        train=TrainArgs(optimizer_in_backward=True, max_grad_norm=0.0, global_batch_size=4),
    ),
    "LoRA, a teacher": replace(_lora(), objective="distill"),
    "LoRA, label smoothing, auto precision": _lora("auto", label_smoothing=0.1),
    "LoRA, rewards": replace(_lora(), objective="grpo", reward=["brief:20"]),
    "full, rewards with a reference, two updates": FullFinetuneArgs(
        precision="bf16",
        objective="grpo",
        reward=["brief:20"],
        grpo=GrpoArgs(loss="gspo", beta=0.04, updates=2),
    ),
}
MORE_FAMILIES = ("llama", "gemma2", "gpt_oss", "qwen3_moe")
# with --covering: parts of the names of the steps that are taken on a GPU without bf16, too
OLD_GPU, ON_OLD_GPU = (7, 5), ("auto precision", "llama: grouped: LoRA, packed")


@cache
def some_tokenizer() -> Tokenizer:
    """Return the demo's tokenizer, read once."""
    return Tokenizer(DEMO / "base")


class UnreadFolder(PretrainedFolder):
    """A folder with only a config: its weights are allocated, not read."""

    weight_files: ClassVar[list[Path]] = []

    def check(self) -> None:
        """Do nothing: there are no weight files."""

    def tokenizer(self) -> Tokenizer:
        """Return some tokenizer; only its existence matters."""
        return some_tokenizer()


def unfilled(source: Any, model: Any, precision: Any, device: Any) -> None:
    """Allocate the network."""
    SINGLE_DEVICE.allocate(model, device)
    model.rotaries.to_empty(device=device)


class FourSamples(Sequence):
    """Four samples of different lengths, on the host."""

    def __init__(self) -> None:
        self.samples = [
            Sample(tokens[:-1], tokens[1:])
            for tokens in (draw(n, seed=n) for n in (20, 9, 14, 5))
        ]
        self.lengths = np.array([sample.tokens.numel() for sample in self.samples])
        # counted before the tensors are fake
        self.supervised = np.array([sample.supervised for sample in self.samples])
        self.sizes = [len(self.samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]

    def document_lengths(self, indices: Sequence[int]) -> np.ndarray:
        """Return the number of tokens of each document of these samples, which have one."""
        return self.lengths[indices]


def some_completions() -> list[Sample]:
    """Return two completions of each of two prompts, which they share; on the host."""
    completions = []
    for prompt, advantage, length in ((0, 1.0, 6), (0, -1.0, 9), (1, 0.5, 4), (1, -0.5, 7)):
        tokens = torch.cat([draw(8, seed=prompt), draw(length, seed=10 * length)])
        targets = tokens[1:].clone()
        targets[:7] = IGNORED
        sample = Sample(
            tokens[:-1],
            targets,
            advantage=advantage,
            decoded=torch.zeros(length),
            old=torch.zeros(length),
            reference_tokens=torch.zeros(length),
            shared_tokens=7,
        )
        # counted before the tensors are fake
        assert sample.supervised == length
        completions.append(sample)
    return completions


@contextmanager
def real_on_the_host(mode: FakeTensorMode) -> Iterator[None]:
    """Within the context, the order of samples and their micro-batches are real; these then become
    fake, on the host."""
    collate_rows, step_indices = BatchLayout.collate_rows, Schedule.step_indices
    plan_samples = BatchLayout.plan_samples

    def collate(self: BatchLayout, rows: list[list[Sample]]) -> MicroBatch:
        with unset_fake_temporarily():
            batch = collate_rows(self, rows)
        if self.shares_prompts:
            assert batch.documents is not None and batch.documents.shared is not None
        return MicroBatch(
            *(fake_cuda.faked(mode, getattr(batch, item.name)) for item in fields(batch))
        )

    def indices(self: Schedule, step: int) -> list[int]:
        with unset_fake_temporarily():
            return step_indices(self, step)

    def plan(self: BatchLayout, samples: list[Sample]) -> list[list[list[int]]]:
        with unset_fake_temporarily():
            return plan_samples(self, samples)

    with (
        mock.patch.object(BatchLayout, "collate_rows", collate),
        mock.patch.object(Schedule, "step_indices", indices),
        mock.patch.object(BatchLayout, "plan_samples", plan),
    ):
        yield


@contextmanager
def without_overflows(precision: str) -> Iterator[None]:
    """Within the context, a step in fp16 does not read whether gradients overflow: fake tensors
    have no values."""
    if precision != "fp16":
        yield
        return
    with (
        mock.patch.object(Updates, "_is_taken", lambda *_: True),
        mock.patch.object(Updates, "metrics", lambda _: {}),
    ):
        yield


def train(
    hf: dict[str, Any], args: FinetuneArgs, capability: tuple[int, int], steps: int
) -> None:
    """Take `steps` optimizer steps of two micro-batches with the Trainer; raise whatever is
    wrong."""
    source = UnreadFolder(Path(), Path(), None, hf, read_config(hf))
    data = DataSplits(
        FourSamples(), FourSamples(), [1.0], {}, 32, "none", source.tokenizer(), 64
    )
    batch_size = args.train.global_batch_size if args.train.optimizer_in_backward else 4
    rows = 4 if args.train.optimizer_in_backward else 1 if args.data.packing else 2
    flags = replace(
        args.train,
        max_steps=steps,
        global_batch_size=batch_size,
        micro_batch_size=rows,
        compile=False,
    )
    if flags.activation_checkpointing == "auto":
        flags = replace(flags, activation_checkpointing="none")
    args = replace(args, train=flags, eval=EvalArgs(max_new_tokens=0))
    setup = resolve_setup(args, source)
    schedule = Schedule(
        args,
        data,
        1,
        group_size=setup.objective.group_size,
        shares_prompts=setup.shares_prompts,
    )
    # a fake network draws no tokens
    completions = some_completions()
    with (
        mock.patch.object(Rollouts, "collect", lambda *_: (completions, {})),
        fake_cuda.fake_cuda(capability, waits="allow") as mode,
        mock.patch.object(network, "fill_model", unfilled),
        tempfile.TemporaryDirectory() as folder,
    ):
        device = torch.device(pick_accelerator("cuda"), 0)
        recomputed = args.train.activation_checkpointing
        settings = DeviceSettings(
            device,
            "single",
            "",
            1,
            setup.precision(device),
            recomputed,
            None,
            1.0,
            80 * 2**30,
        )
        if args.precision == "auto":
            in_range = fits_fp16(source.config)
            note = lacks_bf16(device, settings.precision)
            print(note or "bf16")
            on_old_gpu = "fp16" if in_range else "fp32"
            assert settings.precision == (on_old_gpu if note else "bf16")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        fabric = make_fabric(args, "single")
        run = PlannedRun(setup, schedule, settings)
        trainer = Trainer(
            Processes(fabric, launch(fabric, args.timeout)), run, Path(folder)
        )
        optimizer = make_optimizer(setup.args.train, setup.method, trainer.trained)
        # all of it is there already
        model, optimizer = fabric.setup(trainer.model, optimizer, move_to_device=False)
        gradients = {
            name: p.register_hook(
                lambda grad, name=name: gradients.__setitem__(name, grad) or grad
            )
            for name, p in trainer.trained.items()
        }
        hooks = set(map(type, gradients.values()))
        # building may wait, steps may not
        with (
            fake_cuda.NoWaits(),
            real_on_the_host(mode),
            without_overflows(settings.precision),
        ):
            for _ in range(steps):
                trainer._train_step(model, optimizer)
    missing = [name for name, grad in gradients.items() if type(grad) in hooks]
    assert not missing, f"no gradient: {missing[:3]}"
    assert all(
        grad.is_cuda and grad.shape == trainer.trained[name].shape
        for name, grad in gradients.items()
    )


def where(error: BaseException) -> str:
    """Return the line of litft that an error came from, and its message."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(str(ROOT / "litft"))
    ]
    line = (
        f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}"
        if frames
        else "not in litft"
    )
    return f"{type(error).__name__} at {line}: {str(error).strip().partition(chr(10))[0][:150]}"


def cases(covering: bool) -> Iterator[tuple[str, str, dict[str, Any], FinetuneArgs]]:
    """Yield the name, class and values of the config, and the arguments of every step."""
    modules = set()
    for number, (family, (config_class, variations)) in enumerate(ROWS.items()):
        if covering and families()[family] in modules and family not in MORE_FAMILIES:
            continue  # a relative, which differs in values of its config
        modules.add(families()[family])
        more = [*MORE_WAYS] if family in MORE_FAMILIES else []
        more = (
            more[MORE_FAMILIES.index(family) :: len(MORE_FAMILIES)]
            if covering and more
            else more
        )
        names = [(variation, way) for variation in variations for way in WAYS] + [
            (next(iter(variations)), way) for way in more
        ]
        if covering:
            names = [([*variations][number % len(variations)], [*WAYS][number % len(WAYS)])]
            names += [(next(iter(variations)), way) for way in more]
        for variation, way in names:
            values = {**TINY, **variations[variation]}
            name = f"{family}: {variation}: {way}"
            yield name, config_class, values, WAYS.get(way) or MORE_WAYS[way]


def main() -> None:
    """Take all chosen steps and report those that fail."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--covering",
        action="store_true",
        help="one variation of each family file, and each way",
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of the names of the steps to take"
    )
    parser.add_argument("--capability", default="9.0", help="compute capability of the GPU")
    options = parser.parse_args()
    capability = tuple(map(int, options.capability.split(".")))
    chosen = [
        (capability, *case)
        for case in cases(options.covering)
        if not options.only or any(part in case[0] for part in options.only)
    ]
    if options.covering:
        chosen += [
            (OLD_GPU, f"{name} on an old GPU", *case)
            for name, *case in cases(False)
            if any(part in name for part in ON_OLD_GPU)
        ]
    start, passed, failed = time.time(), 0, {}
    for capability, name, config_class, values, args in chosen:
        begun = time.time()
        try:
            hf = getattr(transformers, config_class)(**values).to_dict()
            train(hf, args, capability, 1 if options.covering else 2)
            passed += 1
            print(f"passed in {time.time() - begun:.1f} s: {name}", flush=True)
        except Exception as error:  # all kinds are counted
            failed.setdefault(where(error), []).append(name)
    count = sum(map(len, failed.values()))
    print(
        f"{passed + count} steps: {passed} passed, {count} failed, in {time.time() - start:.0f} s"
    )
    for reason, names in sorted(failed.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(names)} x {reason}", *names, sep="\n    ")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
