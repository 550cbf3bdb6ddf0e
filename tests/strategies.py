"""The same run on one process and on several: its losses by strategy, method and base.

Started by `losses` as `python strategies.py MODEL DATA OUT STRATEGY CASE...`, once a process; the processes find each
other as under torchrun, and make all cases' runs one after the other.
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
    """The methods and bases that a strategy is shown with: `lora nf4`."""
    bases = BASES if strategy in ("single", "ddp") else BASES[:2]
    return [f"{method} {base}" for base in bases for method in METHODS if base == "none" or method != "full"]


def free_port() -> int:
    """One that nobody listens on, below those that the system gives to clients: they would take it before it is used."""
    while True:
        with socket.socket() as free, suppress(OSError):
            port = random.SystemRandom().randrange(10_000, 32_000)
            free.bind(("127.0.0.1", port))
            return port


def torchrun_env(rank: int, port: int, count: int) -> dict[str, str]:
    """What torchrun would tell one of `count` processes."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in found.items()}


def losses(model: Path, data: Path, out: Path, strategy: str, chosen: list[str]) -> dict[str, dict[str, list[float]]]:
    """Each case's loss, val_loss and grad_norm by step; AssertionError with what a process said where one fails."""
    out.mkdir(parents=True, exist_ok=True)
    forkserver.prepare()
    count = PROCESSES[strategy]
    port, started = free_port(), []
    for rank in range(count):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        env |= torchrun_env(rank, port, count) if count > 1 else {}
        command = [__file__, str(model), str(data), str(out), strategy, *chosen]
        with (out / f"{strategy}{rank}.log").open("w") as log:
            started.append(forkserver.Process(command, out, env, stdout=log, stderr=log))
    codes = [process.wait(timeout=900) for process in started]
    said = "\n".join((out / f"{strategy}{rank}.log").read_text()[-3000:] for rank in range(count))
    assert not any(codes), f"{codes}\n{said}"
    return json.loads((out / f"{strategy}.json").read_text())


def words(model: str, data: str, strategy: str, case: str) -> tuple[str, list[str]]:
    """A case's command and flags; what stands behind its base are more of them."""
    method, base, *more = case.split()
    rate = {"full": "2e-3", "adapter": "0.3"}.get(method, "5e-3")
    given = f"--checkpoint_dir {model} --data.path {data} --out_dir {strategy}-{case.replace(' ', '')} --quantize {base} "
    given += "--precision fp32 --data.packing false --train.global_batch_size 9 --train.micro_batch_size 3 --timeout 60s "
    given += f"--train.max_steps {STEPS} --train.learning_rate {rate} --train.weight_decay 0.1 --save.interval 0 "
    given += "--eval.interval 0 --eval.max_new_tokens 4 --eval.exact_match --save.best "
    given += {"single": "", "hsdp": "--strategy hsdp --shard_size 2 "}.get(strategy, f"--strategy {strategy} ")
    given += {"dora": "--lora.dora ", "adapter": "--adapter.start_layer 0 "}.get(method, "")
    return "lora" if method == "dora" else method, [*given.split(), *more]


def main() -> None:
    """One process's part."""
    import torch

    import litft
    from litft.args.parser import parse
    from litft.cli import COMMANDS

    torch.set_num_threads(1)
    model, data, _, strategy, *chosen = sys.argv[1:]
    found = {}
    for case in chosen:
        rows = []
        command, given = words(model, data, strategy, case)
        litft.finetune(parse(COMMANDS[f"finetune {command}"].args, given), rows.append)
        names = ("loss", "val_loss", "grad_norm")
        found[case] = {name: [row[name] for row in rows if name in row] for name in names}  # of the first process
    if os.environ.get("RANK", "0") == "0":
        Path(f"{strategy}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
