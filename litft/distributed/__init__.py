"""Devices, dtypes, process groups, tensor parallelism and the placement of blocks on several GPUs."""
