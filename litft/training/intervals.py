"""When a run validates and saves a checkpoint, if the flags do not say."""

from litft.args import FinetuneArgs
from litft.data.dataset import DataSplits

VALIDATIONS = 10  # of a run
FEWEST_VALIDATIONS = 3
# of a training step, without the backward pass
FORWARD_COST = 1 / 3
LARGEST_SHARE = 0.5  # of the training time, for validations
# trained tokens that take as long as one decoded token: 19 on two CPU cores, more on a GPU
DECODED_TOKEN_COST = 16
# training examples that are answered if nothing is held out
NUM_TRAINED_PROMPTS = 3
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


def validation_cost(args: FinetuneArgs, data: DataSplits) -> float:
    """Return about how many training steps take as long as one validation: its losses, or its
    sample answers if nothing is held out."""
    batch_size = args.train.global_batch_size
    if len(data.val):
        return num_measured(args, data) / batch_size * FORWARD_COST
    num_prompts = len(args.eval.prompts) or NUM_TRAINED_PROMPTS
    answer_tokens = num_prompts * args.eval.max_new_tokens
    step_tokens = batch_size * float(data.train.lengths.mean())
    return answer_tokens * DECODED_TOKEN_COST / step_tokens


def validation_interval(
    args: FinetuneArgs, steps: int, cost: float, has_losses: bool
) -> int:
    """Return the steps between validations; 0 for none in between.

    The default gives about ten validations, fewer if they would take more than half as long as the
    training, but three losses at least.
    steps: of the run. cost: of one validation, in training steps. has_losses: whether validations
    measure losses; otherwise they only answer prompts.
    """
    if args.eval.interval is not None:
        return args.eval.interval
    # at most this many validations take no more than their share of the training time
    affordable = int(LARGEST_SHARE * steps / max(cost, FORWARD_COST))
    count = min(VALIDATIONS, affordable)
    if has_losses:
        count = max(FEWEST_VALIDATIONS, count)
    if count == 0:
        return 0
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
