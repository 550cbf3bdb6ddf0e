"""Measure complete training steps of litft, alone or compared with peft, litgpt or another commit
of litft.

    python scripts/benchmark.py --checkpoint_dir DIR --data.path FILE --peer peft --out
    benchmark.json python scripts/benchmark.py --checkpoint_dir DIR --data.path FILE --peer litgpt
    --peer_python ENV/bin/python python scripts/benchmark.py --checkpoint_dir DIR --data.path FILE
    --peer 532a5ef        # litft at that commit python scripts/benchmark.py --checkpoint_dir DIR
    --data.path PAIRS --objective dpo --peer trl python scripts/benchmark.py --checkpoint_dir
    FOLDER_WITH_A_CONFIG_JSON --method full --data.max_seq_length 4096

Needs `pip install -e '.[test]'`. With a peer, all contenders train the same LoRA adapter on the
same samples in the same order, with the same dtype, threads and fused AdamW. Each contender has its
own process (and environment, with --peer_python), so peak memory is measured per contender. On a
CPU they take turns step by step, so other load on the machine affects all equally. On a GPU, whose
memory cannot hold all of them, they run one after the other. A step is collation,
forward, backward, gradient clipping and the optimizer step. If the losses differ, the contenders
did not do the same work and the comparison is refused. Without weights in the folder the weights
are random; without --data.path the tokens are. `scripts/peers/` has the code of each contender.
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
from litft.methods.lora import DEFAULT_SCALE
from litft.pretrained.build import base_model

ROOT = Path(__file__).parent.parent
PEERS = Path(__file__).parent / "peers"
# for contenders that start from the same adapter
LOSS_TOLERANCE = {
    "fp32": 1e-3,
    "bf16": 5e-2,
}
Rows = list[dict[str, float]]


@dataclass
class BenchmarkArgs:
    """Measure complete training steps of litft, alone or compared with peers."""

    checkpoint_dir: str | None = None
    """The folder of the model. If it has only a config.json, the weights are random."""
    method: Literal["lora", "adapter", "adapter_v2", "full"] = "lora"
    """The training method. Comparing with peers needs lora."""
    objective: Literal["sft", "dpo"] = "sft"
    """What the steps learn: answers, or with dpo from pairs of answers."""
    peer: list[str] = field(default_factory=list)
    """What to compare with: peft, litgpt, trl (for dpo), commits of litft, or litft with one
    change: padded, compiled, eager, dora, nf4, or selective or full activation checkpointing.
    Several: a,b."""
    peer_python: str = sys.executable
    """The Python interpreter of the environment in which the peer is installed."""
    steps: int = 12
    """Number of measured steps per contender."""
    warmup: int = 2
    """Number of steps per contender before the measured ones."""
    precision: Literal["auto", "bf16", "bf16-true", "fp32"] = "auto"
    """The dtype of the computation. bf16-true (full fine-tuning only): the weights are bf16 too.
    auto: bf16 on a GPU, fp32 on a CPU."""
    quantize: Literal["none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8"] = "none"
    """Quantize the frozen Linears to 4 or 8 bits."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The device type to run on. auto: cuda if available."""
    threads: int = 2
    """CPU threads per contender."""
    out: str | None = None
    """A JSON file to write the results to. Default: no file."""
    data: DataArgs = field(default_factory=DataArgs)
    train: TrainArgs = field(
        default_factory=lambda: TrainArgs(activation_checkpointing="none")
    )
    lora: LoRAArgs = field(default_factory=LoRAArgs)
    adapter: AdapterV2Args = field(default_factory=AdapterV2Args)

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        if self.checkpoint_dir:
            problems = []
        else:
            problems = ["--checkpoint_dir is missing: name the folder of the model"]
        counts = ("steps", "threads")
        problems += [
            f"--{name} {getattr(self, name)}: must be at least 1"
            for name in counts
            if getattr(self, name) < 1
        ]
        problems += (
            [] if self.warmup >= 0 else [f"--warmup {self.warmup}: must be at least 0"]
        )
        if self.method == "full" and self.quantize != "none":
            problems.append(
                f"--quantize {self.quantize}: full fine-tuning trains every weight; leave "
                "--quantize out"
            )
        if self.method != "full" and self.precision == "bf16-true":
            problems.append(
                "--precision bf16-true applies only to full fine-tuning; use bf16"
            )
        if self.train.optimizer_in_backward or self.train.cpu_offload == "parameters":
            problems.append(
                "--train.optimizer_in_backward and --train.cpu_offload parameters are not "
                "supported here; leave them out"
            )
        if self.peer and (self.method != "lora" or self.quantize != "none"):
            problems.append(
                f"--peer {','.join(self.peer)}: comparison needs unquantized LoRA; use --method "
                "lora --quantize none"
            )
        if ("trl" in self.peer) != (self.objective == "dpo" and bool(self.peer)):
            problems.append(
                "--peer trl is the one to compare --objective dpo with, and no other objective"
            )
        if self.objective == "dpo" and not self.data.path:
            problems.append("--objective dpo: add --data.path, a file of pairs")
        if "auto" in (self.train.micro_batch_size, self.train.activation_checkpointing):
            problems.append(
                "--train.micro_batch_size and --train.activation_checkpointing must not be auto "
                "here; give their values"
            )
        return (
            problems
            + impossible_numbers(self)
            + self.lora.problems()
            + self.train.problems()
        )


class ContenderProcess:
    """The process of a contender. It runs one step per turn and answers with the measurements."""

    def __init__(self, script: Path, python: str, setup: Path, env: dict[str, str]) -> None:
        command = [python, str(script), str(setup)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.answer()  # wait until it is ready

    def answer(self) -> dict[str, float]:
        """Read the next answer. Exit if the process has ended."""
        line = self.process.stdout.readline()
        if not line:
            fail(
                f"{' '.join(map(str, self.process.args))} ended unexpectedly; its error is above"
            )
        return json.loads(line)

    def turn(self, sample_ids: list[int]) -> dict[str, float]:
        """Run one step on the samples with these indices, and return its measurements."""
        self.process.stdin.write(json.dumps(sample_ids) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def __enter__(self) -> "ContenderProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait()


def write_setup(args: BenchmarkArgs, device: str, folder: Path) -> dict[str, Any]:
    """Write the shared samples and the new adapter to `folder`, and return the setup of the
    contenders."""
    from litft.data.dataset import length_limit
    from litft.pretrained.folder import resolve

    source = resolve(args.checkpoint_dir)
    has_weights = any(Path(args.checkpoint_dir).glob("*.safetensors*"))
    limit = length_limit(args.data.max_seq_length, source.config.max_positions)
    if args.data.path:
        samples = real_samples(args, source)
    else:
        rng = random.Random(0)
        rows = []
        for _ in range(32):
            rows.append([rng.randrange(source.config.vocab_size) for _ in range(limit + 1)])
        samples = [(row[:-1], row[1:]) for row in rows]
    (folder / "samples.json").write_text(json.dumps(samples))
    shares_adapter = bool(args.peer) and has_weights
    if shares_adapter:
        write_adapter(args, folder / "adapter")
    packs = args.data.packing
    lora = asdict(args.lora)
    # the other programs have other defaults
    if lora["alpha"] is None:
        lora["alpha"] = DEFAULT_SCALE * lora["r"]
    return {
        "checkpoint_dir": args.checkpoint_dir,
        "random": not has_weights,
        "adapter": str(folder / "adapter") if shares_adapter else None,
        "samples": str(folder / "samples.json"),
        "longest": max(len(tokens) for tokens, *_ in samples),
        "room": limit if packs else None,
        "objective": args.objective,
        "rows": args.train.micro_batch_size or (1 if packs else 4),
        "recomputed": args.train.activation_checkpointing,
        "compile": device == "cuda" if args.train.compile is None else args.train.compile,
        "cpu_offload": args.train.cpu_offload,
        "optimizer": args.train.optimizer,
        "device": device,
        **{
            name: getattr(args, name)
            for name in ("method", "precision", "quantize", "threads")
        },
        "lora": lora,
        "adapter_flags": asdict(args.adapter),
    }


def real_samples(args: BenchmarkArgs, source: Any) -> list[tuple]:
    """Return (tokens, targets, lengths of a pair's answers) of the training samples, prepared as in
    a fine-tuning run."""
    from litft.data.dataset import load_data

    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it"
        )
    kind = "supervised" if args.objective == "sft" else "pairs"
    train = load_data(
        args.data,
        tokenizer,
        source.config.vocab_size,
        source.config.max_positions,
        kind=kind,
    ).train
    samples = (train[n] for n in range(len(train)))
    return [
        (sample.tokens.tolist(), sample.targets.tolist(), sample.documents)
        for sample in samples
    ]


def write_adapter(args: BenchmarkArgs, folder: Path) -> None:
    """Write the new LoRA adapter that all contenders start from."""
    import torch

    from litft.methods import LoRA
    from litft.pretrained.folder import base_record, resolve

    source = resolve(args.checkpoint_dir)
    method = LoRA(args.lora)
    model = base_model(source)
    torch.manual_seed(0)
    method.select_targets(model, source.adapter_rules)
    method.attach(model)
    folder.mkdir()
    method.write(folder, source, method.values(model), base_record(source, folder))


def python_path(tree: Path) -> str:
    """Return the PYTHONPATH of a contender: litft's folder, then the other folders of this process.
    A machine without package indexes has packages there."""
    carried = os.environ.get("PYTHONPATH", "")
    folders = [str(tree)]
    for folder in carried.split(os.pathsep):
        if folder and Path(folder).resolve() != ROOT.resolve():
            folders.append(folder)
    return os.pathsep.join(folders)


def contenders(
    args: BenchmarkArgs, setup: dict[str, Any], folder: Path
) -> dict[str, tuple[Path, str, dict, dict]]:
    """Return the script, interpreter, setup and environment variables of each contender by name."""
    env = os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(args.threads),
        "PYTHONPATH": python_path(ROOT),
    }
    rows = args.train.micro_batch_size or 4
    selected = {"litft": (PEERS / "run_litft.py", sys.executable, setup, env)}
    variants = {
        "padded": {"room": None, "rows": rows},
        "compiled": {"compile": True},
        "eager": {"compile": False},
        "elementwise": {"recomputed": "elementwise"},
        "selective": {"recomputed": "selective"},
        "full": {"recomputed": "full"},
        "dora": {"adapter": None, "lora": setup["lora"] | {"dora": True}},
        "nf4": {"adapter": None, "quantize": "nf4"},
    }
    for peer in args.peer:
        if peer == "peft":
            script = PEERS / "run_peft.py"
            if args.data.path:
                names = {"peft, padded": rows, "peft, unpadded": 1}
            else:
                names = {"peft": setup["rows"]}
            selected |= {
                name: (script, args.peer_python, setup | {"rows": count}, env)
                for name, count in names.items()
            }
        elif peer == "trl":  # by default, TRL runs the reference model in each step
            setups = {
                "trl": setup | {"precomputed": False},
                "trl, precomputed": setup | {"precomputed": True},
            }
            script = PEERS / "run_trl.py"
            selected |= {
                name: (script, args.peer_python, own | {"rows": rows}, env)
                for name, own in setups.items()
            }
        elif peer == "litgpt":
            selected["litgpt"] = (
                PEERS / "run_litgpt.py",
                args.peer_python,
                setup | {"rows": rows},
                env,
            )
        elif peer in variants:
            selected[f"litft, {peer}"] = (
                PEERS / "run_litft.py",
                sys.executable,
                setup | variants[peer],
                env,
            )
        else:
            tree = extract_commit(peer, folder)
            commit_setup = setup | {
                "compile": False,
                "recomputed": "none",
                "cpu_offload": "none",
            }
            selected[f"litft {peer}"] = (
                PEERS / "run_litft.py",
                sys.executable,
                commit_setup,
                env | {"PYTHONPATH": python_path(tree)},
            )
    return selected


def extract_commit(commit: str, folder: Path) -> Path:
    """Write the library at a commit to `folder` and return its folder.

    Raise ValueError if the commit does not exist.
    """
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit, "litft"], capture_output=True
    )
    if archive.returncode:
        raise ValueError(
            f"--peer {commit}: neither a peer nor a commit of litft; see --help for the peers"
        )
    tree = folder / commit
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
    return tree


def measure(args: BenchmarkArgs, device: str) -> dict[str, Rows]:
    """Run the contenders, and return the measured steps of each by name.

    On a CPU they take turns, and each round starts with another one. On a GPU they run one after
    the other.
    """
    from litft.data.sampler import SampleOrder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = write_setup(args, device, folder)
        order = SampleOrder(
            [len(json.loads((folder / "samples.json").read_text()))], seed=42
        )
        batches = []
        for step in range(args.warmup + args.steps):
            start = step * args.train.global_batch_size
            batches.append(order.indices(start, start + args.train.global_batch_size))

        # the command of each contender
        commands = {}
        selected = contenders(args, setup, folder)
        for number, (name, (script, python, contender_setup, env)) in enumerate(
            selected.items()
        ):
            path = folder / f"setup-{number}.json"
            path.write_text(json.dumps(contender_setup))
            commands[name] = (script, python, path, env)
        if device == "cuda":
            return measure_apart(commands, batches)
        return measure_in_turns(commands, batches)


def measure_apart(commands: dict[str, tuple], batches: list[list[int]]) -> dict[str, Rows]:
    """Run all steps of a contender before the next one starts."""
    rows = {}
    for name, command in commands.items():
        with ContenderProcess(*command) as process:
            rows[name] = [process.turn(batch) for batch in batches]
        print(f"{name}: {len(batches)} steps", file=sys.stderr)
    return rows


def measure_in_turns(
    commands: dict[str, tuple], batches: list[list[int]]
) -> dict[str, Rows]:
    """Run each step of every contender before the next step."""
    names = list(commands)
    rows: dict[str, Rows] = {name: [] for name in names}
    with ExitStack() as stack:
        processes = {}
        for name, command in commands.items():
            processes[name] = stack.enter_context(ContenderProcess(*command))
        for step, batch in enumerate(batches):
            for turn in range(len(names)):
                name = names[(step + turn) % len(names)]
                rows[name].append(processes[name].turn(batch))
            print(f"step {step + 1} of {len(batches)}", file=sys.stderr)
    return rows


def summarise(
    args: BenchmarkArgs, all_rows: dict[str, Rows], peak: float | None
) -> dict[str, dict[str, float]]:
    """Return the medians over the measured steps by contender, and how much faster litft is.

    Exit if the losses differ.

    peak: the peak FLOPs per second of the device, or None if unknown.
    """
    for name, rows in all_rows.items():
        difference = max(
            abs(a["loss"] - b["loss"]) for a, b in zip(rows, all_rows["litft"], strict=True)
        )
        # litgpt starts from another adapter (also with B = 0), so only its first loss must agree
        first_difference = abs(rows[0]["loss"] - all_rows["litft"][0]["loss"])
        # quantized, or random: other weights
        if name == "litft, nf4" or (name == "peft" and not args.data.path):
            continue
        if (first_difference if name == "litgpt" else difference) > LOSS_TOLERANCE[
            "fp32" if args.precision == "fp32" else "bf16"
        ]:
            fail(
                f"{name}: losses differ from litft's by up to {difference:.1e}; both must train "
                "the same model and tokens"
            )
    rows = {name: steps[args.warmup :] for name, steps in all_rows.items()}

    def median_ratio(steps: Rows, reference: Rows) -> float:
        return statistics.median(
            a["seconds"] / b["seconds"] for a, b in zip(steps, reference, strict=True)
        )

    table = {}
    for name, steps in rows.items():
        seconds = statistics.median(row["seconds"] for row in steps)
        if steps[0]["flops"]:
            flops = statistics.median(row["flops"] / row["seconds"] for row in steps)
        else:
            flops = None
        table[name] = {
            "seconds_per_step": seconds,
            "tokens_per_second": statistics.median(
                row["tokens"] / row["seconds"] for row in steps
            ),
            "litft_is_faster_by": median_ratio(steps, rows["litft"]),
            "mfu": flops / peak if flops and peak else None,
            "peak_memory_gib": steps[-1]["memory_gib"],
            "first_step_seconds": all_rows[name][0]["seconds"],
            "graphs": steps[-1]["graphs"],
            "last_loss": steps[-1]["loss"],
        }
    return table


def hardware(device: str) -> str:
    """Return a description of the device."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = []
    for line in lines:
        if line.startswith("model name"):
            names.append(line.split(":")[1].strip())
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


COLUMNS = {  # by title: (key of the figures, format)
    "s a step": ("seconds_per_step", "{:.2f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "litft is faster by": ("litft_is_faster_by", "{:.2f}"),
    "MFU": ("mfu", "{:.0%}"),
    "peak memory, GiB": ("peak_memory_gib", "{:.2f}"),
    "first step, s": ("first_step_seconds", "{:.1f}"),
    "graphs": ("graphs", "{}"),
}


def main(args: BenchmarkArgs) -> None:
    """Measure, print a Markdown table and write the JSON file."""
    import torch

    from litft.distributed.devices import pick_accelerator, pick_precision
    from litft.training.memory.flops import peak_flops

    device = pick_accelerator(args.accelerator)
    args.precision = pick_precision(args.precision, torch.device(device))
    torch.set_num_threads(args.threads)
    rows = measure(args, device)
    figures = summarise(args, rows, peak_flops(torch.device(device), args.precision))
    about = {
        "hardware": hardware(device),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "args": asdict(args),
    }
    print(
        f"{about['hardware']}, {args.threads} threads, {args.precision}, torch "
        f"{torch.__version__}, {about['date']}\n"
    )
    print("| | " + " | ".join(COLUMNS) + " |\n|---" + "|---" * len(COLUMNS) + "|")
    for name, row in figures.items():
        cells = [
            template.format(row[key]) if row[key] is not None else ""
            for key, template in COLUMNS.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    if args.out:
        Path(args.out).write_text(
            json.dumps({**about, "figures": figures, "steps": rows}, indent=2) + "\n",
            "utf-8",
        )


if __name__ == "__main__":
    with user_errors():
        main(parse(BenchmarkArgs, sys.argv[1:]))
