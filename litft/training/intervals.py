"""When a run validates and saves a checkpoint, if the flags do not say."""

from litft.args import FinetuneArgs
from litft.data.dataset import DataSplits

VALIDATIONS = 10  # of a run
FEWEST_VALIDATIONS = 3
# of a training step, without the backward pass
FORWARD_COST = 1 / 3
LARGEST_SHARE = 0.5  # of the training time, for validations
# steps between validations of a run whose number of steps is not known
LONGEST_WITH_TIME_LIMIT = 100

CHECKPOINTS = 10  # of a run
SHORTEST = 60.0  # seconds between checkpoints
LONGEST = 600.0


def num_measured(args: FinetuneArgs, data: DataSplits) -> int:
    """Return how many examples a validation measures: of each set at most --eval.max_batches
    batches."""
    if data.val_sets:
        sizes = [len(indices) for indices in data.val_sets.values()]
    else:
        sizes = [len(data.val)]
    limit = (args.eval.max_batches or len(data.val)) * args.train.global_batch_size
    return sum(min(size, limit) for size in sizes)


def validation_interval(args: FinetuneArgs, steps: int, measured: int) -> int:
    """Return the steps between validations; 0 for none in between.

    The default gives about ten validations, fewer if they would take more than half as long as the
    training.
    steps: of the run. measured: the examples that a validation measures.
    """
    if args.eval.interval is not None:
        return args.eval.interval
    cost = max(1.0, measured / args.train.global_batch_size) * FORWARD_COST  # in training steps
    # at most this many validations take no more than their share of the training time
    affordable = int(LARGEST_SHARE * steps / cost)
    count = max(FEWEST_VALIDATIONS, min(VALIDATIONS, affordable))
    interval = max(1, round(steps / count))
    if args.train.max_time:
        return min(interval, LONGEST_WITH_TIME_LIMIT)
    return interval


def checkpoint_is_due(args: FinetuneArgs, step: int, steps: int, seconds: float) -> bool:
    """Return whether to save a checkpoint after `step` steps of `steps`.

    The default is every tenth of the run, but not within a minute of the last checkpoint, and every
    ten minutes.
    seconds: since the last checkpoint, the same on all processes.
    """
    interval = args.save.interval
    if interval is not None:
        # an interval of 0 asks for no checkpoints in between
        return bool(interval) and step % interval == 0
    is_tenth = step % max(1, round(steps / CHECKPOINTS)) == 0
    return seconds >= LONGEST or (is_tenth and seconds >= SHORTEST)
