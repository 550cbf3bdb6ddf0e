"""Devices, dtypes, process groups, FSDP, tensor parallelism and the placement of blocks on several
devices."""
