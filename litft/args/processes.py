"""Processes started by torchrun or SLURM's srun. (Those that Fabric starts follow from the
flags.)"""

import os


def started_by() -> tuple[str, int, int] | None:
    """Return (launcher, processes per node, nodes), or None if no launcher started this process.

    Raise ValueError if nodes have different numbers of processes, or the launcher is neither
    torchrun nor srun.
    """
    env = os.environ
    # torchrun may run in a job of SLURM, so its variables come first
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun", *_per_node(
            "torchrun", _read_count("WORLD_SIZE"), _read_count("LOCAL_WORLD_SIZE")
        )
    if _started_by_srun():
        num_processes = _read_count("SLURM_NTASKS")
        nodes = 1
        if "SLURM_NNODES" in env:
            nodes = _read_count("SLURM_NNODES")
        return "srun", *_per_node("srun", num_processes, num_processes // nodes)
    if "RANK" in env and env.get("WORLD_SIZE", "1") != "1":
        reason = (
            f"RANK {env['RANK']} and WORLD_SIZE {env['WORLD_SIZE']} are set, but not by torchrun "
            "or srun"
        )
        raise ValueError(f"{reason}; start the processes with torchrun, or unset both")
    return None


def _started_by_srun() -> bool:
    """Return whether srun, and not torchrun, started this process as one of several."""
    env = os.environ
    # a shell in an allocation has the variables of SLURM as well, but is a single process
    several = env.get("SLURM_NTASKS", "1") != "1" and env.get("SLURM_JOB_NAME") not in (
        "bash",
        "interactive",
    )
    return several and "TORCHELASTIC_RUN_ID" not in env


def local_rank() -> str:
    """Return this process's rank on its node; "0" if it is the only process.

    Local rank 0 prints messages.
    """
    return _rank("LOCAL_RANK", of_srun="SLURM_LOCALID")


def is_first_on_node() -> bool:
    """Return whether this process prints messages: of several on a node, the first does."""
    return local_rank() == "0"


def global_rank() -> str:
    """Return this process's rank among all processes; "0" if it is the only one."""
    return _rank("RANK", of_srun="SLURM_PROCID")


def _rank(of_torchrun: str, of_srun: str) -> str:
    """Return a rank from the variable that torchrun sets (Fabric, too, but only LOCAL_RANK), or
    from that of srun; "0" if neither does."""
    env = os.environ
    if env.get(of_torchrun):
        return env[of_torchrun]
    if _started_by_srun():
        return env.get(of_srun, "0")
    return "0"


def is_first_process() -> bool:
    """Return whether this is the first of all processes, also of those that Fabric starts: they
    have no RANK yet."""
    # on several nodes without a launcher, the user gives each of them its NODE_RANK
    first_node = os.environ.get("NODE_RANK", "0") == "0"
    return (
        global_rank() == "0"
        and is_first_on_node()
        and (first_node or started_by() is not None)
    )


def process_counts(devices: int, nodes: int) -> tuple[int, int]:
    """Return (processes per node, nodes) of the launcher or the flags.

    Raise ValueError if they contradict each other.
    """
    launch = started_by()
    if launch is None:
        return devices, nodes
    launcher, *started = launch
    # (1, 1) are the defaults: the flags were left out
    if (devices, nodes) not in ((1, 1), tuple(started)):
        requested = f"--devices {devices} --num_nodes {nodes}"
        actual = f"{started[0]} processes on {started[1]} nodes"
        raise ValueError(
            f"{requested}: {launcher} started {actual}; leave the flags out, or start as many"
        )
    return started[0], started[1]


def cores() -> int:
    """Return the number of CPU cores that this process may use (on macOS: all cores)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _per_node(launcher: str, num_processes: int, per_node: int) -> tuple[int, int]:
    """Return (processes per node, nodes).

    Raise ValueError if the processes do not divide evenly.
    """
    if not per_node or num_processes % per_node:
        raise ValueError(
            f"{launcher}: {num_processes} processes are not evenly divided over the nodes; start "
            "equally many on each"
        )
    return per_node, num_processes // per_node


def _read_count(name: str) -> int:
    """Return the number in a launcher's environment variable.

    Raise ValueError if it is not a positive integer.
    """
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"the environment variable {name} is {text!r}, not a positive number; start the "
            "launcher again, or unset it"
        )
    return int(text)


def may_be_restarted() -> bool:
    """Return whether this process may be a restarted one: of several, or of a job that SLURM has
    put back into its queue."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return tasks > 1 or restarts > 0


def launch_id() -> str | None:
    """Return an id shared by all processes of a launch and their restarts, or None if unknown."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID")
    # torchrun's default, the same for every launch
    if launch == "none":
        return None
    return launch
