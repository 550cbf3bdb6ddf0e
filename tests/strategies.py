"""Train the same runs on one process and on several: losses by strategy, method and base.

`losses` starts `python strategies.py MODEL DATA OUT STRATEGY CASE...` once per process. The
processes find each other as under torchrun and run all cases one after the other.
"""

import json
import os
import random
import socket
import sys
from contextlib import suppress
from pathlib import Path

import forkserver

PROCESSES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}
METHODS = ("full", "lora", "dora", "adapter", "adapter_v2")
BASES = ("none", "nf4", "int8")
STEPS = 6


def cases(strategy: str) -> list[str]:
    """Return the methods and bases that a strategy is tested with, such as `lora nf4`."""
    bases = BASES if strategy in ("single", "ddp") else BASES[:2]
    return [
        f"{method} {base}"
        for base in bases
        for method in METHODS
        if base == "none" or method != "full"
    ]


def free_port() -> int:
    """Return an unused port below the ephemeral range, from which a client could take it before it
    is used."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = random.SystemRandom().randrange(10_000, 32_000)
            probe.bind(("127.0.0.1", port))
            return port


def torchrun_env(rank: int, port: int, count: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for one of `count` processes."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
    }
    variables |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
    }
    return {name: str(value) for name, value in variables.items()}


def run_workers(file: str, words: list[str], count: int, out: Path) -> str:
    """Run a file with these words in `count` processes that find each other as under torchrun.

    Return what they print; fail with it if one of them fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    forkserver.prepare()
    port = free_port()
    workers = []
    logs = [out / f"{Path(file).stem}-{rank}.log" for rank in range(count)]
    for rank, path in enumerate(logs):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        if count > 1:
            env |= torchrun_env(rank, port, count)
        with path.open("w") as log:
            workers.append(
                forkserver.Process([file, *words], out, env, stdout=log, stderr=log)
            )
    codes = [worker.wait(timeout=900) for worker in workers]
    printed = "\n".join(path.read_text()[-3000:] for path in logs)
    assert not any(codes), f"{codes}\n{printed}"
    return printed


def run_cases(file: str, cases: list[dict], count: int, out: Path) -> list:
    """Run `python FILE CASES OUT` in `count` processes, and return what they save: the result of
    each case."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    (out / "cases.json").write_text(json.dumps(cases))
    run_workers(file, [str(out / "cases.json"), str(out / "results.pt")], count, out)
    return torch.load(out / "results.pt")


def losses(
    model: Path, data: Path, out: Path, strategy: str, case_names: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Return each case's loss, val_loss and grad_norm by step; fail with the logs if a process
    fails."""
    words = [str(model), str(data), str(out), strategy, *case_names]
    run_workers(__file__, words, PROCESSES[strategy], out)
    return json.loads((out / f"{strategy}.json").read_text())


def command_line(model: str, data: str, strategy: str, case: str) -> tuple[str, list[str]]:
    """Return a case's command and flags; words after the base in the case's name are further
    flags."""
    method, base, *extra = case.split()
    rate = {"full": "2e-3", "adapter": "0.3"}.get(method, "5e-3")
    flags = (
        f"--checkpoint_dir {model} --data.path {data} --out_dir {strategy}-{case.replace(' ', '')} "
        f"--quantize {base} "
    )
    flags += (
        "--precision fp32 --data.packing false --train.global_batch_size 9 "
        "--train.micro_batch_size 3 --timeout 60s "
    )
    flags += (
        f"--train.max_steps {STEPS} --train.learning_rate {rate} --train.weight_decay 0.1 "
        "--save.interval 0 "
    )
    flags += (
        "--eval.interval 0 --eval.max_new_tokens 4 --eval.exact_match --save.best "
        "--data.val_fraction 0.2 "
    )
    flags += {"single": "", "hsdp": "--strategy hsdp --shard_size 2 "}.get(
        strategy, f"--strategy {strategy} "
    )
    flags += {"dora": "--lora.dora ", "adapter": "--adapter.start_layer 0 "}.get(method, "")
    return "lora" if method == "dora" else method, [*flags.split(), *extra]


def main() -> None:
    """Run all cases in this process; rank 0 writes the results."""
    import torch

    import litft
    from litft.args.parser import parse
    from litft.cli import COMMANDS

    torch.set_num_threads(1)
    model, data, _, strategy, *case_names = sys.argv[1:]
    results = {}
    for case in case_names:
        rows = []
        command, flags = command_line(model, data, strategy, case)
        args = parse(COMMANDS[f"finetune {command}"].args, flags)
        # of the validation examples, which some cases have not
        metrics = {}
        if args.data.val_fraction:
            metrics["num_answers"] = lambda answers: len(set(answers))
        litft.finetune(args, rows.append, metrics=metrics)
        names = ("loss", "val_loss", "grad_norm", "num_answers")
        results[case] = {name: [row[name] for row in rows if name in row] for name in names}
    if os.environ.get("RANK", "0") == "0":
        Path(f"{strategy}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
