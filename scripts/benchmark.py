"""Whole LoRA training steps of litft and of transformers + peft, in alternation; needs the `test` extra.

    python scripts/benchmark.py --peer peft --checkpoint_dir DIR --data.path FILE --out benchmark.json

Both train the same adapter on the same samples in the same order, with the same dtype, threads and fused AdamW; peft runs
transformers' sdpa attention without checkpointing, once with its padding collator and once each sample on its own without
padding. Each contender lives in a process of its own, so its peak memory is its own, and they take turns step by step, so
that what else the machine does strikes all alike. A step is collating, forward, backward, clipping and the optimizer. The
losses must agree to 1e-3, or the comparison is refused: then they did not do the same work.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from litft.args import DataArgs, LoRAArgs, impossible_numbers
from litft.cli import fail, parse, user_errors

CONTENDERS = ("litft", "peft, padded", "peft, unpadded")


@dataclass
class BenchmarkArgs:
    """Compare litft's training steps with those of a peer."""

    checkpoint_dir: str | None = None
    """The model's folder."""
    peer: Literal["peft"] = "peft"
    """What to compare with."""
    steps: int = 12
    """Measured steps of each contender."""
    warmup: int = 2
    """Steps of each contender before the measured ones."""
    global_batch_size: int = 16
    """Examples a step."""
    micro_batch_size: int = 4
    """Examples that go through the network at once."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The frozen weights' dtype: bf16 on a GPU, else fp32."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    threads: int = 2
    """CPU threads of each contender."""
    out: str | None = None
    """A file for the figures as JSON."""
    data: DataArgs = field(default_factory=DataArgs)
    lora: LoRAArgs = field(default_factory=LoRAArgs)

    def problems(self) -> list[str]:
        """What is missing."""
        needed = {"checkpoint_dir": self.checkpoint_dir, "data.path": self.data.path}
        found = [f"--{name} is missing" for name, value in needed.items() if not value]
        counts = ("steps", "global_batch_size", "micro_batch_size", "threads")
        found += [f"--{name} {getattr(self, name)}: must be at least 1" for name in counts if getattr(self, name) < 1]
        return found + impossible_numbers(self) + self.lora.problems()


class Contender:
    """One side: a model, and how it turns a step's samples into gradients."""

    def __init__(self, args: BenchmarkArgs, parameters: list) -> None:
        import torch

        self.args, self.parameters = args, parameters
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def accumulate(self, samples: list):
        """Gradients of the mean loss a token; returns that loss."""
        raise AssertionError("each side has its own")

    def step(self, samples: list) -> float:
        """One whole training step; returns its loss, and waits for the device by that."""
        import torch

        loss = self.accumulate(samples)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


class Litft(Contender):
    """The loop of `finetune/lora.py`."""

    def __init__(self, args: BenchmarkArgs, adapter: Path, device: str) -> None:
        from lightning_fabric import Fabric

        from litft.data.load import length_limit
        from litft.data.steps import Layout
        from litft.folder import resolve

        source = resolve(adapter)
        model = source.base_model(args.precision, device)
        method, values = source.read_adapter()
        method.load(model, values)
        super().__init__(args, list(method.parameters(model).values()))
        self.fabric = Fabric(accelerator=device, devices=1)
        self.model = self.fabric.setup_module(model).train()
        limit = length_limit(args.data.max_seq_length, source.config.context)
        self.layout = Layout(args.micro_batch_size, limit if args.data.packing else None)

    def accumulate(self, samples: list):
        """As every run of litft does it."""
        from litft.train import accumulate

        return accumulate(self.fabric, self.model, self.layout.batches(samples), sum(s.supervised for s in samples))


class Peft(Contender):
    """transformers and peft, with the loss normalised as their Trainer does it: by the count of the whole step."""

    def __init__(self, args: BenchmarkArgs, adapter: Path, device: str, padded: bool) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
        base = AutoModelForCausalLM.from_pretrained(args.checkpoint_dir, dtype=dtype, attn_implementation="sdpa")
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True).to(device).train()
        super().__init__(args, [p for p in self.model.parameters() if p.requires_grad])
        tokenizer = AutoTokenizer.from_pretrained(args.checkpoint_dir)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.collator = DataCollatorForSeq2Seq(tokenizer)
        self.rows, self.device = args.micro_batch_size if padded else 1, device

    def accumulate(self, samples: list):
        """Micro-batches in the order of the samples, each padded to its longest."""
        count, total = sum(sample.supervised for sample in samples), 0.0
        for start in range(0, len(samples), self.rows):
            batch = self.collator([_features(sample) for sample in samples[start : start + self.rows]]).to(self.device)
            loss = self.model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        return total


def _features(sample) -> dict[str, list[int]]:
    """A sample unshifted, as transformers' collator takes it: its model shifts the labels itself."""
    targets = sample.targets.tolist()
    ids = [*sample.tokens.tolist(), max(targets[-1], 0)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *targets]}


def open_samples(args: BenchmarkArgs) -> list:
    """The training samples, as every run of litft sees them."""
    from litft.data.load import load_data
    from litft.folder import resolve

    source = resolve(args.checkpoint_dir)
    source.check()
    if (tokenizer := source.tokenizer()) is None:
        raise ValueError(f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    return load_data(args.data, tokenizer, source.config.vocab_size, source.config.context).train


def contend(name: str, args: BenchmarkArgs, adapter: Path, device: str, pipe: Connection) -> None:
    """A contender's process: loads everything, then takes a step whenever it is sent the samples' indices."""
    import torch

    from litft.parallel import peak_memory

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    samples = open_samples(args)
    side = Litft(args, adapter, device) if name == "litft" else Peft(args, adapter, device, name == "peft, padded")
    pipe.send(len(samples))
    while indices := pipe.recv():
        step = [samples[i] for i in indices]
        start = time.perf_counter()
        loss = side.step(step)
        seconds = time.perf_counter() - start
        memory = peak_memory(torch.device(device))
        pipe.send({"seconds": seconds, "loss": loss, "tokens": sum(s.tokens.numel() for s in step), "memory_gib": memory})


def write_adapter(args: BenchmarkArgs, folder: Path) -> None:
    """The fresh adapter that all sides begin with."""
    import torch

    from litft.folder import base_record, resolve
    from litft.peft import LoRA

    source, method = resolve(args.checkpoint_dir), LoRA(args.lora)
    model = source.base_model()
    torch.manual_seed(0)
    method.choose(model, source.adapter_rules)
    method.attach(model)
    method.write(folder, source, method.values(model), base_record(source, folder))


def measure(args: BenchmarkArgs, device: str) -> dict[str, list[dict[str, float]]]:
    """Let the contenders take turns, the first to go changing every round; what each step showed, by contender."""
    from litft.data.steps import Order

    context = get_context("spawn")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(args, Path(folder))
        pipes, processes = {}, []
        for name in CONTENDERS:
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=contend, args=(name, args, Path(folder), device, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
        order = Order([{name: pipe.recv() for name, pipe in pipes.items()}["litft"]], seed=42)
        for step in range(args.warmup + args.steps):
            indices = order.indices(step * args.global_batch_size, (step + 1) * args.global_batch_size)
            for turn in range(len(CONTENDERS)):
                name = CONTENDERS[(step + turn) % len(CONTENDERS)]
                pipes[name].send(indices)
                found[name].append(pipes[name].recv())
            print(f"step {step + 1} of {args.warmup + args.steps}", file=sys.stderr)
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send([])
            process.join()
    return found


def summarise(args: BenchmarkArgs, found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the measured steps, and how many times litft's speed is that of each; exits where losses differ."""
    losses = {name: [row["loss"] for row in rows] for name, rows in found.items()}
    apart = max(abs(a - b) for rows in losses.values() for a, b in zip(rows, losses["litft"], strict=True))
    if apart > (1e-3 if args.precision == "fp32" else 5e-2):
        fail(f"the contenders' losses are {apart:.1e} apart: they do not train the same model on the same tokens")
    rows = {name: steps[args.warmup :] for name, steps in found.items()}
    ratios = {
        name: statistics.median(a["seconds"] / b["seconds"] for a, b in zip(steps, rows["litft"], strict=True))
        for name, steps in rows.items()
    }
    return {
        name: {
            "seconds_per_step": statistics.median(row["seconds"] for row in steps),
            "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in steps),
            "litft_is_faster_by": ratios[name],
            "peak_memory_gib": steps[-1]["memory_gib"],
            "last_loss": steps[-1]["loss"],
        }
        for name, steps in rows.items()
    }


def hardware(device: str) -> str:
    """What this ran on, in words."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main(args: BenchmarkArgs) -> None:
    """Measure, print a Markdown table, write the JSON."""
    # contenders wait for their turn: waiting threads must not spin on the cores of the one that works
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(args.threads)}
    import torch

    from litft.parallel import pick_accelerator, pick_precision

    device = pick_accelerator(args.accelerator)
    args.precision = pick_precision(args.precision, torch.device(device))
    open_samples(args)  # what is wrong with the files is said here, once, and not by every contender
    figures = summarise(args, measure(args, device))
    about = {
        "hardware": hardware(device),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "args": asdict(args),
    }
    print(f"{about['hardware']}, {args.threads} threads, {args.precision}, torch {torch.__version__}, {about['date']}\n")
    print("| | s a step | tokens/s | litft is faster by | peak memory, GiB |\n|---|---|---|---|---|")
    for name, row in figures.items():
        cells = [f"{row['seconds_per_step']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{row['litft_is_faster_by']:.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {row['peak_memory_gib']:.2f} |")
    if args.out:
        Path(args.out).write_text(json.dumps({**about, "figures": figures}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    with user_errors():
        main(parse(BenchmarkArgs, sys.argv[1:]))
