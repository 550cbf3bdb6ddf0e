"""Check that a change leaves all numbers unchanged: python tests/golden.py

Both trees, the commit BEFORE and the working tree, run the same commands on this machine: short
trainings, greedy generation, a merge, a GGUF export and a plan. Losses, tensors, generated texts
and planned numbers are compared bit for bit; messages are not compared.
"""

import argparse
import csv
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
BEFORE = "acaa700"  # the last commit before the files moved
EXCEPT: dict[str, str] = {}  # pattern: the reason why matching facts may differ
Facts = dict[str, str]

STORIES = ROOT / "tests" / "stories"
TIMED = {"tokens_per_second", "mfu", "memory_gib", "data_share", "seconds"}
FLAGS = (
    "--train.max_steps 4 --train.global_batch_size 4 --train.learning_rate 1e-3 "
    "--eval.max_new_tokens 8 --precision fp32"
)
TRAININGS = {  # name: (command, checkpoint, further flags)
    "lora": ("lora", "stories", "--data.packing false"),
    "lora nf4": ("lora", "stories", "--quantize nf4"),
    "dora, packed": (
        "lora",
        "SmolLM2-135M-Instruct",
        "--lora.dora true --data.max_seq_length 256",
    ),
    "adapter": ("adapter", "stories", ""),
    "adapter_v2": ("adapter_v2", "stories", "--data.val_fraction 0.3"),
    "full": ("full", "stories", "--train.micro_batch_size 2 --data.packing false"),
}
PLANS = (
    "--method lora",
    "--method full --precision bf16-true",
    "--method lora --quantize nf4 --budget 24GiB",
)


def facts_of(tree: Path, work: Path, checkpoints: dict[str, Path]) -> Facts:
    """Run the commands of one tree and return their results by name."""
    facts: Facts = {}
    data = work / "data.jsonl"
    lines = (SHARED / "data" / "gsm8k_500.jsonl").read_text("utf-8").split("\n")[:40]
    data.write_text("\n".join(lines) + "\n")
    for name, (command, model, extra_flags) in TRAININGS.items():
        out = work / name.replace(", ", "-").replace(" ", "-")
        arguments = [
            f"finetune/{command}.py",
            "--checkpoint_dir",
            checkpoints[model],
            "--data.path",
            data,
            "--out_dir",
            out,
        ]
        run(tree, work, *arguments, *FLAGS.split(), *extra_flags.split())
        facts |= {f"{name}: {key}": value for key, value in run_facts(out).items()}
        prompt = [
            "--prompt",
            "Lily has 3 apples.",
            "--max_new_tokens",
            "24",
            "--temperature",
            "0",
            "--precision",
            "fp32",
        ]
        facts[f"{name}: text"] = run(
            tree, work, "generate/base.py", "--checkpoint_dir", out / "final", *prompt
        )
    run(
        tree,
        work,
        "scripts/merge_lora.py",
        "--checkpoint_dir",
        work / "lora" / "final",
        "--out_dir",
        work / "merged",
    )
    facts |= {
        f"merged: {key}": value for key, value in tensor_hashes(work / "merged").items()
    }
    run(
        tree,
        work,
        "scripts/convert_to_gguf.py",
        "--checkpoint_dir",
        work / "merged",
        "--out_dir",
        work / "gguf",
    )
    (file,) = (work / "gguf").glob("*.gguf")
    facts["GGUF"] = hashlib.sha256(file.read_bytes()).hexdigest()
    for flags in PLANS:
        stdout = run(
            tree,
            work,
            "scripts/plan.py",
            "--checkpoint_dir",
            SHARED / "configs" / "llama-3-8b",
            *flags.split(),
        )
        facts[f"plan {flags}"] = " ".join(re.findall(r"\d[\d.,]*", stdout))
    return facts


def run(tree: Path, work: Path, script: str, *arguments: str | Path) -> str:
    """Run a tree's script and return its stdout; an error ends the comparison."""
    env = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(work / "cache"),
    }
    command = [sys.executable, str(tree / script), *map(str, arguments)]
    result = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
    if result.returncode:
        sys.exit(
            f"{' '.join(command)}\nexit code {result.returncode}\n{result.stderr[-3000:]}"
        )
    return result.stdout


def run_facts(out: Path) -> Facts:
    """Return a run's metrics and hashes of its tensors."""
    with (out / "metrics.csv").open() as file:
        rows = [
            {name: value for name, value in row.items() if name not in TIMED}
            for row in csv.DictReader(file)
        ]
    return {f"row {number}": str(row) for number, row in enumerate(rows)} | tensor_hashes(
        out / "final"
    )


def tensor_hashes(folder: Path) -> Facts:
    """Return a hash of every tensor in a folder."""
    hashes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                data = (
                    file.get_tensor(key)
                    .contiguous()
                    .flatten()
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
                hashes[f"{path.name} {key}"] = hashlib.sha256(data).hexdigest()
    return hashes


def extract(commit: str, folder: Path) -> Path:
    """Extract the tree of a commit to a new folder."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def main() -> int:
    """Compare both trees and print the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    commit = parser.parse_args().before
    built = ROOT / ".pytest_cache" / "d" / "checkpoints"  # built by the tests
    checkpoints = {
        "stories": STORIES,
        "SmolLM2-135M-Instruct": built / "SmolLM2-135M-Instruct",
    }
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        trees = {"before": extract(commit, work / "tree"), "after": ROOT}
        facts = {}
        for when, tree in trees.items():
            (work / when).mkdir()
            facts[when] = facts_of(tree, work / when, checkpoints)
    before, after = facts["before"], facts["after"]
    differing = [
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    ]
    for key in sorted(differing):
        reason = next((why for pattern, why in EXCEPT.items() if pattern in key), None)
        print(
            f"{key}: {reason or 'DIFFERS'}\n  before: {before.get(key)}\n  after:  {after.get(key)}"
        )
    unexplained = [
        key for key in differing if not any(pattern in key for pattern in EXCEPT)
    ]
    print(
        f"{len(before)} facts of {commit}; {len(differing)} differ, {len(unexplained)} of them "
        "without a reason"
    )
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
