"""The data of a run as text: what each file has and lacks, its lengths, the steps, and warnings.

Used by the command `prepare_data`, and by the dry run and the first lines of every run.
"""

from collections.abc import Iterator

import numpy as np

from litft.data.dataset import DataSplits, histogram, unknown_tokens
from litft.data.encoding_report import MAX_NAMED, EncodingReport
from litft.data.notes import COPY, CUT, CUT_AWAY
from litft.data.packing import num_slots
from litft.data.tokenizer import Tokenizer
from litft.training.schedule import Schedule
from litft.training.shown_samples import samples_lines

# the variable of most templates that have thoughts
SWITCH = "enable_thinking"
FEW_STEPS = 30
FEW_EXAMPLES = 10  # fewer are warned about
MANY_TOO_LONG = 0.05  # of the records
WHAT_TO_DO = "tutorials/prepare_data.md#what-is-probably-not-meant"
MANY_LOST = 0.1  # of the answers' tokens
FEW_EXAMPLES_EPOCHS = 20
FEW_EXAMPLES_BATCH = 4


def data_report(schedule: Schedule, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """Everything about the data before training: counts, problems, lengths, and the first `count`
    samples."""
    yield from data_lines(schedule, tokenizer, named=MAX_NAMED)
    yield from bad_records(schedule.data)
    yield "training examples by length:"
    yield from histogram_lines(schedule.data.train.lengths)
    yield from samples_lines(schedule, tokenizer, count)


def data_lines(schedule: Schedule, tokenizer: Tokenizer, named: int = 3) -> Iterator[str]:
    """The data: what each file has, the steps, and the packing, with warnings.

    named: how many records are named of those with the same note.
    """
    data = schedule.data
    for name, report in data.reports.items():
        yield f"{name}: {file_line(report)}"
        left_out = data.left_out.get(name, 0)
        yield from note_lines(name, report, named, has_dedup=left_out > 0)
        if left_out:
            yield f"  --data.dedup leaves out {left_out:,} of the {report.samples:,} examples"
    for name in data.unused:
        yield f"{name}: not used, since its weight is 0"
    yield f"the chat template is {data.template}"
    yield from _warnings_of_limit(data)

    # answers after an empty thought, or without a conversation: the template's prompt differs
    if (
        any(report.empty_thoughts for report in data.reports.values())
        and SWITCH in tokenizer.chat_template
    ):
        yield (
            "note: these answers follow an empty thought, which the prompt of the template does "
            f"not have; ask the result with {SWITCH}=false, or make that its default with "
            f"--data.template_args {SWITCH}=false"
        )
    if tokenizer.own_template and not any(
        report.has_conversations for report in data.reports.values()
    ):
        yield (
            "note: the result keeps the template of its base; generate/base.py --template none "
            "continues a text as trained"
        )

    # what the run does with the examples
    by_weight = _by_weight(data)
    yield (
        f"{len(data.train):,} training and {len(data.val):,} validation examples; "
        f"{count_of(schedule.steps, 'step')} of {_step_size(schedule)}, "
        f"{schedule.epochs:.3g} {'epoch' if schedule.epochs == 1 else 'epochs'} of "
        f"{schedule.order.epoch_size:,}{by_weight}, on "
        f"{count_of(schedule.layout.ranks, 'device')}"
    )
    yield packing_line(schedule)
    yield from _copies_line(data)

    # too few steps, or too few examples to validate on
    if schedule.steps < FEW_STEPS and schedule.is_by_epochs:
        yield (
            f"warning: {count_of(schedule.steps, 'step')} may be too few to learn much; for a "
            f"small set of examples, try {_flags_for_few_examples(schedule)}"
        )
    yield from _held_out_lines(schedule)
    yield from _tokenizer_notes(data, tokenizer)


def _held_out_lines(schedule: Schedule) -> Iterator[str]:
    """Yield what is wrong with the validation examples: few, none, or known from training."""
    data = schedule.data
    if 0 < len(data.val) < FEW_EXAMPLES:
        examples = count_of(len(data.val), "validation example")
        if schedule.val_path:
            remedy = "give more of them in --data.val_path"
        else:
            remedy = (
                "give --data.val_path or a larger --data.val_fraction, or learn them too: "
                "--data.val_fraction 0"
            )
        yield f"warning: {examples} cannot tell how good the model is; {remedy}"
    if not len(data.val):
        cause = "--data.val_fraction is 0, and there is no --data.val_path"
        if schedule.val_path:
            cause = "no example of --data.val_path can be used; see above why"
        elif schedule.val_fraction:
            cause = (
                f"none of the examples falls into --data.val_fraction {schedule.val_fraction:g}; "
                "raise it"
            )
            if len(set(data.train.digests.tolist())) == 1:
                cause = (
                    "the examples are all the same, and equal ones are held out together"
                )
        answers = ""
        if schedule.answers_prompts:
            answers = (
                "; the sample answers are to trained questions, unless "
                "--eval.prompts has others"
            )
        yield f"nothing is held out for validation: {cause}{answers}"

    # what a validation loss hides
    if len(data.duplicates):
        yield (
            f"warning: {len(data.duplicates):,} training examples are also in the validation set, "
            "token for token; the validation loss will look better than it is"
        )
    elif data.near_held_out:
        have = "has" if data.near_held_out == 1 else "have"
        remedy = "--data.val_path with others"
        if data.dedup != "near":
            remedy = f"--data.dedup near, or {remedy}"
        yield (
            f"warning: {data.near_held_out:,} of {count_of(len(data.val), 'validation example')} "
            f"{have} nearly the prompt of a training example; the validation loss will look better "
            f"than it is on new questions ({remedy})"
        )


def _warnings_of_limit(data: DataSplits) -> Iterator[str]:
    """Yield warnings of answers that the length limit cuts, or leaves out."""
    records = sum(report.records for report in data.reports.values())
    num_too_long = data.count(CUT_AWAY)
    if num_too_long and num_too_long >= MANY_TOO_LONG * records:
        yield (
            f"warning: {num_too_long:,} of {count_of(records, 'record')} are not learned: no "
            f"answer begins within --data.max_seq_length {data.limit:,}; raise it, or divide them"
        )
    answer_tokens = sum(report.answer_tokens for report in data.reports.values())
    lost = sum(report.lost_tokens for report in data.reports.values())
    if lost:
        share = f"{lost:,} of {answer_tokens:,} answer tokens ({lost / answer_tokens:.1%})"
        share += f", in {count_of(data.count(CUT, CUT_AWAY), 'record')}"
        if any(data.left_out.values()):
            share += ", those that --data.dedup leaves out among them"
        if lost >= MANY_LOST * answer_tokens:
            yield (
                f"warning: the length limit cuts away {share}; raise --data.max_seq_length "
                f"{data.limit:,}, divide these records, or leave them out"
            )
        else:
            yield f"the length limit cuts away {share}"


def _flags_for_few_examples(schedule: Schedule) -> str:
    """Return the flags of a run with more steps; none that the run has already."""
    flags = []
    epochs = FEW_EXAMPLES_EPOCHS
    if schedule.size <= FEW_EXAMPLES_BATCH:
        # the steps can only come from more epochs
        epochs = max(epochs, round(2 * schedule.num_samples / schedule.order.size))
    flags.append(f"--train.epochs {epochs}")
    if schedule.size > FEW_EXAMPLES_BATCH:
        flags.append(f"--train.global_batch_size {FEW_EXAMPLES_BATCH}")
    return " ".join(flags)


def _tokenizer_notes(data: DataSplits, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the problems of the tokenizer and the template with this data."""
    unknown = unknown_tokens(tokenizer)
    if unknown:
        texts = ",".join(unknown)
        remedy = f"--data.new_tokens '{texts}' makes them tokens"
        yield f"warning: the tokenizer has no token for the template's {texts}; {remedy}"
    unused = sorted(tokenizer.new_ids - data.special_ids)
    if unused:
        texts = ", ".join(repr(tokenizer.decode([i], skip_special=False)) for i in unused)
        yield (
            f"warning: no example has the new {texts}, so nothing trains it; commas separate "
            "tokens"
        )
    note = tokenizer.portability_note()
    if note:
        yield note


def _step_size(schedule: Schedule) -> str:
    """What a step has."""
    group = schedule.group_size
    if group == 1:
        return str(schedule.size)
    return f"{schedule.size // group} prompts with {group} completions each"


def _by_weight(data: DataSplits) -> str:
    if any(weight != 1 for weight in data.weights):
        return " by weight"
    return ""


def _copies_line(data: DataSplits) -> Iterator[str]:
    """A line on training examples that are copies of others, if no note is on them: those of
    several files, and those that the length limit has made equal."""
    copies, most = data.train.copies()
    if copies > data.count(COPY):
        yield (
            f"note: {copies:,} training examples are copies of others, token for token; the most "
            f"frequent one occurs {most:,} times, and is learned as often (--data.dedup exact "
            "keeps one of each)"
        )


def packing_line(schedule: Schedule) -> str:
    """How full the rows of the first 200 steps are."""
    fed = 0
    slots = 0
    rows = 0
    steps = range(min(schedule.steps, 200))
    for lengths in map(schedule.lengths, steps):
        fed += int(lengths.sum())
        for batch in schedule.layout.plan(lengths.tolist()):
            slots = slots + num_slots(lengths, batch)
            rows = rows + len(batch)
    if schedule.layout.row_tokens:
        room = f"packed into rows of at most {schedule.data.limit:,} tokens"
    else:
        room = "a row for each example"
    return f"{room}: {rows / len(steps):.1f} rows a step, {1 - fed / slots:.1%} padding"


def file_line(report: EncodingReport) -> str:
    """The counts of one data file."""
    # a single format needs no count
    if len(report.formats) > 1:
        formats = [f"{name} {count:,}" for name, count in report.formats.items()]
    else:
        formats = list(report.formats)
    parts = [
        f"{count_of(report.records, 'record')} ({', '.join(formats)}), {report.tokens:,} tokens, "
        f"{report.supervised:,} of them {'for completions' if report.is_prompts else 'learned'}"
    ]
    if report.empty_thoughts:
        parts.append(
            f"{report.empty_thoughts:,} of {report.answers:,} answers have an empty thought: not "
            "learned"
        )
    if report.unused:
        fields = []
        for name, count in report.unused.items():
            fields.append(f"{name} in {count_of(count, 'record')}")
        parts.append(f"fields that are not used: {', '.join(fields)}")
    if report.bad[0]:
        parts.append(f"{report.bad[0]:,} bad, which are left out")
    return "; ".join(parts)


def note_lines(
    name: str, report: EncodingReport, named: int, has_dedup: bool = False
) -> Iterator[str]:
    """How many records of a file have each note, and the first `named` of them. has_dedup: copies
    are left out already, and the notes need not say how."""
    for note, (count, places) in report.notes.items():
        records = ", ".join(place.replace(f"{name}, ", "") for place in places[:named])
        if count > named:
            records += " ..."
        if has_dedup:
            note = note.partition(" (--data.dedup")[0]
        yield f"  {count:,} {note}: {records}"
    if report.notes:
        is_shortened = any(count > named for count, _ in report.notes.values())
        all_of_them = "; all of them: prepare_data --findings FILE" if is_shortened else ""
        yield f"  what to do: {WHAT_TO_DO}{all_of_them}"


def bad_records(data: DataSplits) -> Iterator[str]:
    """What is wrong with the first bad records of each file."""
    for report in data.reports.values():
        for message in report.bad_lines():
            yield f"  bad: {message}"
        more = report.bad[0] - len(report.bad[1])
        if more > 0:
            yield f"  bad: {more:,} more"


def histogram_lines(lengths: np.ndarray) -> Iterator[str]:
    """A histogram of lengths as text."""
    bars = histogram(lengths)
    largest = max(count for _, _, count in bars)
    for low, high, count in bars:
        yield f"  {low:7,} to {high:7,} tokens {'█' * round(40 * count / largest):<40} {count:,}"


def count_of(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"
