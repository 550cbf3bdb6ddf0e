"""The same numbers before and after a change that is meant to change none: python tests/golden.py

Both trees, the commit BEFORE and the working tree, run the same commands on this machine: short trainings, greedy
generation, a merge, a GGUF export and a plan. What they write is compared bit for bit: losses, tensors, texts, planned
numbers. Prose is not compared.
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
EXCEPT: dict[str, str] = {}  # what may differ, and why
Facts = dict[str, str]

STORIES = SHARED / "checkpoints" / "stories260K"
TIMED = {"tokens_per_second", "mfu", "memory_gib", "data_share", "seconds"}
FLAGS = "--train.max_steps 4 --train.global_batch_size 4 --train.learning_rate 1e-3 --eval.max_new_tokens 8 --precision fp32"
TRAININGS = {  # name: (command, checkpoint, further flags)
    "lora": ("lora", "stories260K", "--data.packing false"),
    "lora nf4": ("lora", "stories260K", "--quantize nf4"),
    "dora, packed": ("lora", "SmolLM2-135M-Instruct", "--lora.dora true --data.max_seq_length 256"),
    "adapter": ("adapter", "stories260K", ""),
    "adapter_v2": ("adapter_v2", "stories260K", "--data.val_fraction 0.3"),
    "full": ("full", "stories260K", "--train.micro_batch_size 2 --data.packing false"),
}
PLANS = ("--method lora", "--method full --precision bf16-true", "--method lora --quantize nf4 --budget 24GiB")


def facts_of(tree: Path, work: Path, checkpoints: dict[str, Path]) -> Facts:
    """All that the commands of one tree leave behind, by name."""
    facts: Facts = {}
    data = work / "data.jsonl"
    lines = (SHARED / "data" / "gsm8k_500.jsonl").read_text("utf-8").split("\n")[:40]
    data.write_text("\n".join(lines) + "\n")
    for name, (command, model, more) in TRAININGS.items():
        out = work / name.replace(", ", "-").replace(" ", "-")
        words = [f"finetune/{command}.py", "--checkpoint_dir", checkpoints[model], "--data.path", data, "--out_dir", out]
        run(tree, work, *words, *FLAGS.split(), *more.split())
        facts |= {f"{name}: {key}": value for key, value in trained(out).items()}
        asked = ["--prompt", "Lily has 3 apples.", "--max_new_tokens", "24", "--temperature", "0", "--precision", "fp32"]
        facts[f"{name}: text"] = run(tree, work, "generate/base.py", "--checkpoint_dir", out / "final", *asked)
    run(tree, work, "scripts/merge_lora.py", "--checkpoint_dir", work / "lora" / "final", "--out_dir", work / "merged")
    facts |= {f"merged: {key}": value for key, value in tensors(work / "merged").items()}
    run(tree, work, "scripts/convert_to_gguf.py", "--checkpoint_dir", work / "merged", "--out_dir", work / "gguf")
    (file,) = (work / "gguf").glob("*.gguf")
    facts["GGUF"] = hashlib.sha256(file.read_bytes()).hexdigest()
    for flags in PLANS:
        said = run(tree, work, "scripts/plan.py", "--checkpoint_dir", SHARED / "configs" / "llama-3-8b", *flags.split())
        facts[f"plan {flags}"] = " ".join(re.findall(r"\d[\d.,]*", said))
    return facts


def run(tree: Path, work: Path, script: str, *words: str | Path) -> str:
    """What a tree's script prints; an error ends the comparison."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(work / "cache")}
    command = [sys.executable, str(tree / script), *map(str, words)]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def trained(out: Path) -> Facts:
    """A run's numbers and tensors."""
    with (out / "metrics.csv").open() as file:
        rows = [{name: value for name, value in row.items() if name not in TIMED} for row in csv.DictReader(file)]
    return {f"row {number}": str(row) for number, row in enumerate(rows)} | tensors(out / "final")


def tensors(folder: Path) -> Facts:
    """A hash of every tensor of a folder's files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                data = file.get_tensor(key).contiguous().flatten().view(torch.uint8).numpy().tobytes()
                found[f"{path.name} {key}"] = hashlib.sha256(data).hexdigest()
    return found


def extracted(commit: str, folder: Path) -> Path:
    """The tree of a commit."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def main() -> int:
    """Compare, and list what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    commit = parser.parse_args().before
    built = ROOT / ".pytest_cache" / "d" / "checkpoints"  # where the tests build them
    checkpoints = {"stories260K": STORIES, "SmolLM2-135M-Instruct": built / "SmolLM2-135M-Instruct"}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        trees = {"before": extracted(commit, work / "tree"), "after": ROOT}
        facts = {}
        for when, tree in trees.items():
            (work / when).mkdir()
            facts[when] = facts_of(tree, work / when, checkpoints)
    before, after = facts["before"], facts["after"]
    odd = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    for key in sorted(odd):
        reason = next((why for pattern, why in EXCEPT.items() if pattern in key), None)
        print(f"{key}: {reason or 'DIFFERS'}\n  before: {before.get(key)}\n  after:  {after.get(key)}")
    wrong = [key for key in odd if not any(pattern in key for pattern in EXCEPT)]
    print(f"{len(before)} facts of {commit}; {len(odd)} differ, {len(wrong)} of them without a reason")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
