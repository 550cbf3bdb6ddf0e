"""The reference of rewards with sharded weights: its values are those before the first step."""

from frozen_copies import PROCESSES, run


def test_a_copy_of_shards_that_fsdp_moves(tmp_path):
    """FSDP2 pads an uneven shard in the first forward pass, which gives it other memory."""
    printed = run(tmp_path)
    assert printed.count("as before") == PROCESSES, printed
