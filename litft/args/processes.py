"""The processes that torchrun, or SLURM's srun, has started; of Fabric's own the flags know."""

import os


def started_by() -> tuple[str, int, int] | None:
    """Who has started this process among others, the processes on a node, and the nodes; None: no one has.

    ValueError for nodes with unequal numbers of processes, and for a launcher that is neither torchrun nor srun.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun", *_per_node("torchrun", _number("WORLD_SIZE"), _number("LOCAL_WORLD_SIZE"))
    if _by_srun():
        everywhere = _number("SLURM_NTASKS")
        nodes = _number("SLURM_NNODES") if "SLURM_NNODES" in env else 1
        return "srun", *_per_node("srun", everywhere, everywhere // nodes)
    if "RANK" in env and env.get("WORLD_SIZE", "1") != "1":
        reason = f"RANK {env['RANK']} and WORLD_SIZE {env['WORLD_SIZE']} are set, and not by torchrun or srun"
        raise ValueError(f"{reason}; start the processes with torchrun, or unset both")
    return None


def _by_srun() -> bool:
    """Whether srun has started this process among others, as torchrun has not."""
    env = os.environ
    others = env.get("SLURM_NTASKS", "1") != "1" and env.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    return others and "TORCHELASTIC_RUN_ID" not in env


def local_rank() -> str:
    """This process's rank on its node; 0 if it is the only process. Rank 0 prints for the others."""
    return os.environ.get("LOCAL_RANK") or (os.environ.get("SLURM_LOCALID", "0") if _by_srun() else "0")


def global_rank() -> str:
    """This process's rank among all processes; 0 if it is the only one."""
    return os.environ.get("RANK") or (os.environ.get("SLURM_PROCID", "0") if _by_srun() else "0")


def counted(devices: int, nodes: int) -> tuple[int, int]:
    """The processes on a node, and the nodes, as asked for or as started; ValueError where these are at odds."""
    if (found := started_by()) is None:
        return devices, nodes
    who, *there = found
    if (devices, nodes) not in ((1, 1), tuple(there)):
        asked, started = f"--devices {devices} --num_nodes {nodes}", f"{there[0]} processes on {there[1]} nodes"
        raise ValueError(f"{asked}: {who} has started {started}; leave the flags out, or start as many")
    return there[0], there[1]


def cores() -> int:
    """The CPU's cores that this process may use; macOS does not say, and means all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _per_node(who: str, everywhere: int, local: int) -> tuple[int, int]:
    """Processes on a node, and nodes."""
    if not local or everywhere % local:
        raise ValueError(f"{who}: {everywhere} processes are not equally many on each node; give each node as many")
    return local, everywhere // local


def _number(name: str) -> int:
    """A launcher's variable; ValueError where it is no number above 0."""
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"the environment's {name} is {text!r}, where its launcher sets a number; start it anew, or unset it"
        )
    return int(text)


def launch_id() -> str | None:
    """What all processes of a launch, and all that are started again for them, have in common; None: nothing is known."""
    name = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID")
    return None if name == "none" else name  # torchrun's default, which any two launches have in common
