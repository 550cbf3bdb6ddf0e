"""Whole training steps of litft, alone or in alternation with a peer; needs the `test` extra.

    python scripts/benchmark.py --checkpoint_dir DIR --data.path FILE --peer peft --out benchmark.json
    python scripts/benchmark.py --checkpoint_dir DIR --data.path FILE --peer litgpt --peer_python ENV/bin/python
    python scripts/benchmark.py --checkpoint_dir DIR --data.path FILE --peer 532a5ef        # litft as that commit has it
    python scripts/benchmark.py --checkpoint_dir FOLDER_WITH_A_CONFIG_JSON --method full --data.max_seq_length 4096

With a peer both train the same LoRA adapter on the same samples in the same order, with the same dtype, threads and fused
AdamW. Each contender lives in a process (and with --peer_python an environment) of its own, so its peak memory is its own,
and they take turns step by step, so that what else the machine does strikes all alike. A step is collating, forward,
backward, clipping and the optimizer. The losses must agree, or the comparison is refused: then they did not do the same
work. Without weights in the folder they are random ones, and without --data.path so are the tokens. `scripts/peers/` holds
what each contender does.
"""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from litft.args import AdapterV2Args, DataArgs, LoRAArgs, TrainArgs, impossible_numbers
from litft.args.parser import parse
from litft.cli import fail, user_errors

ROOT = Path(__file__).parent.parent
PEERS = Path(__file__).parent / "peers"
APART = {"fp32": 1e-3, "bf16": 5e-2}  # how far losses may be, of contenders that begin with the same adapter
Rows = list[dict[str, float]]


@dataclass
class BenchmarkArgs:
    """Measure litft's training steps, and compare them with those of a peer."""

    checkpoint_dir: str | None = None
    """The model's folder, or one with its config.json alone: then the weights are random."""
    method: Literal["lora", "adapter", "adapter_v2", "full"] = "lora"
    """How it is trained; a peer does LoRA."""
    peer: list[str] = field(default_factory=list)
    """What to compare with: peft, litgpt, commits of litft's, or litft itself otherwise: padded, compiled, selective, full
    (of activation checkpointing), dora, nf4."""
    peer_python: str = sys.executable
    """The interpreter of the environment that holds the peer."""
    steps: int = 12
    """Measured steps of each contender."""
    warmup: int = 2
    """Steps of each contender before the measured ones."""
    precision: Literal["auto", "bf16", "bf16-true", "fp32"] = "auto"
    """What the network computes in: bf16 on a GPU, else fp32."""
    quantize: Literal["none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8"] = "none"
    """Keep the frozen Linears in 4 or 8 bits."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    threads: int = 2
    """CPU threads of each contender."""
    out: str | None = None
    """A file for the figures as JSON."""
    data: DataArgs = field(default_factory=DataArgs)
    train: TrainArgs = field(default_factory=lambda: TrainArgs(activation_checkpointing="none"))
    lora: LoRAArgs = field(default_factory=LoRAArgs)
    adapter: AdapterV2Args = field(default_factory=AdapterV2Args)

    def problems(self) -> list[str]:
        """What is missing, or not compared."""
        found = [] if self.checkpoint_dir else ["--checkpoint_dir is missing"]
        counts = ("steps", "threads")
        found += [f"--{name} {getattr(self, name)}: must be at least 1" for name in counts if getattr(self, name) < 1]
        found += [] if self.warmup >= 0 else [f"--warmup {self.warmup}: must be at least 0"]
        if self.method == "full" and self.quantize != "none":
            found.append(f"--quantize {self.quantize}: full fine-tuning changes every weight; leave it out")
        if self.method != "full" and self.precision == "bf16-true":
            found.append("--precision bf16-true: of full fine-tuning; use bf16")
        if self.train.optimizer_in_backward or self.train.cpu_offload == "parameters":
            found.append("--train.optimizer_in_backward and --train.cpu_offload parameters are not measured; leave them out")
        if self.peer and (self.method != "lora" or self.quantize != "none"):
            found.append(f"--peer {','.join(self.peer)}: compared is LoRA on unquantized weights")
        if self.peer and not self.data.path:
            found.append(f"--peer {','.join(self.peer)}: name the samples by --data.path")
        if "auto" in (self.train.micro_batch_size, self.train.activation_checkpointing):
            found.append("micro_batch_size and activation_checkpointing are what is measured: name them")
        return found + impossible_numbers(self) + self.lora.problems() + self.train.problems()


class Side:
    """A contender's process, from which each turn's figures come."""

    def __init__(self, script: Path, python: str, setup: Path, env: dict[str, str]) -> None:
        command = [python, str(script), str(setup)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.answer()  # it is ready

    def answer(self) -> dict[str, float]:
        """The next line; exits where the process has ended."""
        line = self.process.stdout.readline()
        if not line:
            fail(f"{' '.join(map(str, self.process.args))} has ended; its message is above")
        return json.loads(line)

    def turn(self, numbers: list[int]) -> dict[str, float]:
        """One step on these samples."""
        self.process.stdin.write(json.dumps(numbers) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait()


def write_setup(args: BenchmarkArgs, device: str, folder: Path) -> dict[str, Any]:
    """What all contenders are told, with the samples and the fresh adapter that they share."""
    from litft.data.dataset import length_limit
    from litft.pretrained import resolve

    source = resolve(args.checkpoint_dir)
    has_weights = any(Path(args.checkpoint_dir).glob("*.safetensors*"))
    limit = length_limit(args.data.max_seq_length, source.config.max_positions)
    if args.data.path:
        samples = real_samples(args, source)
    else:
        draw = random.Random(0)
        rows = [[draw.randrange(source.config.vocab_size) for _ in range(limit + 1)] for _ in range(32)]
        samples = [(row[:-1], row[1:]) for row in rows]
    (folder / "samples.json").write_text(json.dumps(samples))
    if args.peer:
        write_adapter(args, folder / "adapter")
    packs = args.data.packing and bool(args.data.path)
    return {
        "checkpoint_dir": args.checkpoint_dir,
        "random": not has_weights,
        "adapter": str(folder / "adapter") if args.peer else None,
        "samples": str(folder / "samples.json"),
        "longest": max(len(tokens) for tokens, _ in samples),
        "room": limit if packs else None,
        "rows": args.train.micro_batch_size or (1 if packs else 4),
        "recomputed": args.train.activation_checkpointing,
        "compile": device == "cuda" if args.train.compile is None else args.train.compile,
        "cpu_offload": args.train.cpu_offload,
        "optimizer": args.train.optimizer,
        "device": device,
        **{name: getattr(args, name) for name in ("method", "precision", "quantize", "threads")},
        "lora": asdict(args.lora),
        "adapter_flags": asdict(args.adapter),
    }


def real_samples(args: BenchmarkArgs, source: Any) -> list[tuple[list[int], list[int]]]:
    """The training samples, as every run of litft sees them."""
    from litft.data.dataset import load_data

    if (tokenizer := source.tokenizer()) is None:
        raise ValueError(f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    train = load_data(args.data, tokenizer, source.config.vocab_size, source.config.max_positions).train
    return [(sample.tokens.tolist(), sample.targets.tolist()) for sample in (train[n] for n in range(len(train)))]


def write_adapter(args: BenchmarkArgs, folder: Path) -> None:
    """The fresh adapter that all sides begin with."""
    import torch

    from litft.methods import LoRA
    from litft.pretrained import base_record, resolve

    source, method = resolve(args.checkpoint_dir), LoRA(args.lora)
    model = source.base_model()
    torch.manual_seed(0)
    method.choose(model, source.adapter_rules)
    method.attach(model)
    folder.mkdir()
    method.write(folder, source, method.values(model), base_record(source, folder))


def contenders(args: BenchmarkArgs, setup: dict[str, Any], folder: Path) -> dict[str, tuple[Path, str, dict, dict]]:
    """Who takes part: each one's script, interpreter, setup and environment."""
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(ROOT)}
    rows = args.train.micro_batch_size or 4
    found = {"litft": (PEERS / "run_litft.py", sys.executable, setup, env)}
    otherwise = {
        "padded": {"room": None, "rows": rows},
        "compiled": {"compile": True},
        "selective": {"recomputed": "selective"},
        "full": {"recomputed": "full"},
        "dora": {"adapter": None, "lora": setup["lora"] | {"dora": True}},
        "nf4": {"adapter": None, "quantize": "nf4"},
    }
    for peer in args.peer:
        if peer == "peft":
            script = PEERS / "run_peft.py"
            found["peft, padded"] = (script, args.peer_python, setup | {"rows": rows}, env)
            found["peft, unpadded"] = (script, args.peer_python, setup | {"rows": 1}, env)
        elif peer == "litgpt":
            found["litgpt"] = (PEERS / "run_litgpt.py", args.peer_python, setup | {"rows": rows}, env)
        elif peer in otherwise:
            found[f"litft, {peer}"] = (PEERS / "run_litft.py", sys.executable, setup | otherwise[peer], env)
        else:
            tree = unpacked(peer, folder)
            old = setup | {"compile": False, "recomputed": "none", "cpu_offload": "none"}
            found[f"litft {peer}"] = (PEERS / "run_litft.py", sys.executable, old, env | {"PYTHONPATH": str(tree)})
    return found


def unpacked(commit: str, folder: Path) -> Path:
    """The library as a commit has it."""
    done = subprocess.run(["git", "-C", ROOT, "archive", commit, "litft"], capture_output=True)
    if done.returncode:
        raise ValueError(f"--peer {commit}: neither a peer nor a commit of litft's; --help names them")
    tree = folder / commit
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", tree], input=done.stdout, check=True)
    return tree


def measure(args: BenchmarkArgs, device: str) -> dict[str, Rows]:
    """Let the contenders take turns, the first to go changing every round; what each step showed, by contender."""
    from litft.data.sampler import Sampler

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        setup = write_setup(args, device, folder)
        sides = {}
        for number, (name, (script, python, own, env)) in enumerate(contenders(args, setup, folder).items()):
            path = folder / f"setup-{number}.json"
            path.write_text(json.dumps(own))
            sides[name] = stack.enter_context(Side(script, python, path, env))
        found: dict[str, Rows] = {name: [] for name in sides}
        order = Sampler([len(json.loads((folder / "samples.json").read_text()))], seed=42)
        names, size = list(sides), args.train.global_batch_size
        for step in range(args.warmup + args.steps):
            for turn in range(len(names)):
                name = names[(step + turn) % len(names)]
                found[name].append(sides[name].turn(order.indices(step * size, (step + 1) * size)))
            print(f"step {step + 1} of {args.warmup + args.steps}", file=sys.stderr)
    return found


def summarise(args: BenchmarkArgs, found: dict[str, Rows], peak: float | None) -> dict[str, dict[str, float]]:
    """Medians over the measured steps, and how many times litft's speed is that of each; exits where losses differ."""
    for name, rows in found.items():
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(rows, found["litft"], strict=True))
        # litgpt begins with another adapter, so that only the first step is the same
        first = abs(rows[0]["loss"] - found["litft"][0]["loss"])
        if name == "litft, nf4":  # other weights
            continue
        if (first if name == "litgpt" else apart) > APART["fp32" if args.precision == "fp32" else "bf16"]:
            fail(f"{name}'s losses are {apart:.1e} from litft's: they do not train the same model on the same tokens")
    rows = {name: steps[args.warmup :] for name, steps in found.items()}

    def median(steps: Rows, other: Rows) -> float:
        return statistics.median(a["seconds"] / b["seconds"] for a, b in zip(steps, other, strict=True))

    table = {}
    for name, steps in rows.items():
        seconds = statistics.median(row["seconds"] for row in steps)
        flops = statistics.median(row["flops"] / row["seconds"] for row in steps) if steps[0]["flops"] else None
        table[name] = {
            "seconds_per_step": seconds,
            "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in steps),
            "litft_is_faster_by": median(steps, rows["litft"]),
            "mfu": flops / peak if flops and peak else None,
            "peak_memory_gib": steps[-1]["memory_gib"],
            "first_step_seconds": found[name][0]["seconds"],
            "graphs": steps[-1]["graphs"],
            "last_loss": steps[-1]["loss"],
        }
    return table


def hardware(device: str) -> str:
    """What this ran on, in words."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


COLUMNS = {
    "s a step": ("seconds_per_step", "{:.2f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "litft is faster by": ("litft_is_faster_by", "{:.2f}"),
    "MFU": ("mfu", "{:.0%}"),
    "peak memory, GiB": ("peak_memory_gib", "{:.2f}"),
    "first step, s": ("first_step_seconds", "{:.1f}"),
    "graphs": ("graphs", "{}"),
}


def main(args: BenchmarkArgs) -> None:
    """Measure, print a Markdown table, write the JSON."""
    import torch

    from litft.distributed.devices import pick_accelerator, pick_precision
    from litft.training.flops import peak_flops

    device = pick_accelerator(args.accelerator)
    args.precision = pick_precision(args.precision, torch.device(device))
    torch.set_num_threads(args.threads)
    found = measure(args, device)
    figures = summarise(args, found, peak_flops(torch.device(device), args.precision))
    about = {
        "hardware": hardware(device),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "args": asdict(args),
    }
    print(f"{about['hardware']}, {args.threads} threads, {args.precision}, torch {torch.__version__}, {about['date']}\n")
    print("| | " + " | ".join(COLUMNS) + " |\n|---" + "|---" * len(COLUMNS) + "|")
    for name, row in figures.items():
        cells = [form.format(row[key]) if row[key] is not None else "" for key, form in COLUMNS.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    if args.out:
        Path(args.out).write_text(json.dumps({**about, "figures": figures, "steps": found}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    with user_errors():
        main(parse(BenchmarkArgs, sys.argv[1:]))
