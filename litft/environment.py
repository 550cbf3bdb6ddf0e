"""What litft needs of the operating system; and environment variables that torch reads when it is
imported: defaults that the user's own values override."""

import os
import sys

# OpenMP threads that spin while waiting halve the speed of training
# next to other programs, and gain only 3 % without; the small matrix
# products of decoding take twice as long if threads sleep between them
TRAINING_SPINS = "1000"
DECODING_SPINS = "100000"


def set_defaults(spin_count: str) -> None:
    """Set the variables. spin_count: how long an OpenMP thread spins before it sleeps."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", spin_count)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its former name
        # batches of varying size then fragment GPU memory less
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def system_problem() -> str | None:
    """Return why litft does not run on this operating system; None if it may."""
    if sys.platform != "win32":
        return None
    return (
        "litft does not run on Windows itself: it needs the file locks and signals of Linux; "
        "install WSL (wsl --install), which has your GPU too, and install litft there"
    )
