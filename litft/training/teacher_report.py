"""What a run's teacher takes, as text."""

from collections.abc import Iterator

from litft.training.memory.choose import pass_bytes
from litft.training.memory.flops import Flops
from litft.training.memory.plan import format_bytes
from litft.training.planned_run import PlannedRun

# of a target: for each token of the teacher an int32 and an fp16, and one fp16 for all others
BYTES_OF_TOKEN = 6
# training examples that are looked at for questions
LOOKED_AT = 64


def teacher_flops(run: PlannedRun) -> float:
    """Return the FLOPs of the teacher's pass over the training examples, once each."""
    setup = run.setup
    if setup.teacher is None:
        return 0.0
    schedule = run.schedule
    train = schedule.data.train
    numbers = schedule.distinct_indices()
    flops = Flops(setup.teacher.meta_model())
    return flops.forward(train.document_lengths(numbers), train.supervised[numbers])


def teacher_lines(run: PlannedRun) -> Iterator[str]:
    """Yield what the teacher is, and what its pass over the data takes."""
    setup = run.setup
    if setup.teacher is None:
        return
    schedule = run.schedule
    numbers = schedule.distinct_indices()
    targets = int(schedule.data.train.supervised[numbers].sum())
    size = targets * setup.args.distill.top_k * BYTES_OF_TOKEN
    needed = pass_bytes(setup, run.settings.precision, run.settings.shards)
    parameters = sum(parameter.numel() for parameter in setup.teacher.outline.parameters())
    if setup.args.distill.on_policy:
        when = "it stays in memory beside the student"
    else:
        when = "it is not in memory while the student learns"
    yield (
        f"teacher: {setup.teacher.folder}, {parameters:,} parameters; it reads {len(numbers):,} "
        f"training examples first, with {format_bytes(needed)} of memory and "
        f"{format_bytes(size)} on disk ({setup.args.distill.top_k} tokens for each of {targets:,} "
        f"targets); {when}"
    )
    if setup.teacher.adapter:
        warning = setup.teacher.quantization_warning(setup.args.distill.quantize)
        if warning:
            yield warning.replace("--quantize", "--distill.quantize")
    if setup.args.distill.on_policy:
        train = schedule.data.train
        looked_at = numbers[:LOOKED_AT]
        answered = sum(train[number].answer is not None for number in looked_at)
        if answered < len(looked_at):
            count = len(looked_at) - answered
            yield (
                f"note: {count} of the first {len(looked_at)} training examples have no whole "
                "answer (a text, or one that is cut at --data.max_seq_length): the "
                "student answers none of these itself"
            )


def check_teacher(run: PlannedRun) -> None:
    """Raise ValueError for a teacher that cannot read the examples, or has none to judge."""
    setup = run.setup
    if setup.teacher is None:
        return
    data = run.schedule.data
    longest = int(data.train.lengths.max())
    if len(data.val):
        longest = max(longest, int(data.val.lengths.max()))
    if setup.args.distill.on_policy:
        longest = min(data.limit, longest + setup.args.distill.max_new_tokens)
    positions = setup.teacher.config.max_positions
    if longest > positions:
        raise ValueError(
            f"--teacher {setup.args.teacher} reads at most {positions:,} tokens, and examples have "
            f"up to {longest:,}; lower --data.max_seq_length to {positions}"
        )
    looked_at = range(min(LOOKED_AT, len(data.train)))
    if setup.args.distill.on_policy and all(
        data.train[at].answer is None for at in looked_at
    ):
        raise ValueError(
            f"--distill.on_policy {setup.args.distill.on_policy:g}: the examples have no questions "
            "that the student could answer; leave it out, or give prompts with answers"
        )
