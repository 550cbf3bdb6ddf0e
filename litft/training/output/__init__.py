"""What a run writes: its folder, checkpoints, metrics, screen and report."""
