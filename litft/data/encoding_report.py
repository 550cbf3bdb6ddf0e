"""What the encoding of a file's records has found: counts and notes, for reports."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from litft.data.encoded import Encoded
from litft.data.review import Finding

# system prompts that a report has: whether there are several
MAX_SYSTEMS = 2
# records that a report names for each note, in addition to their count
MAX_NAMED = 10


@dataclass
class EncodingReport:
    """Counts and notes of the encoding of a file's records."""

    records: int = 0
    samples: int = 0
    tokens: int = 0  # input tokens
    supervised: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    # note -> [count, the first records]
    notes: dict[str, list] = field(default_factory=dict)
    bad: list = field(default_factory=lambda: [0, []])  # [count, the first messages]
    answers: int = 0  # that are learned
    answer_tokens: int = 0  # of them
    lost_tokens: int = 0  # of these, cut away by the length limit
    # of these, with an empty thought of the template that is not learned
    empty_thoughts: int = 0
    # field that nothing reads -> number of records
    unused: dict[str, int] = field(default_factory=dict)
    # the first system prompts that differ; empty: none
    systems: list[str] = field(default_factory=list)
    with_tools: int = 0  # records whose prompt lists functions to call
    ends: list[int] = field(default_factory=list)  # tokens that end answers
    special: list[int] = field(default_factory=list)  # special and new tokens that occur
    # the largest token id, and its record
    largest: list = field(default_factory=lambda: [-1, ""])
    content: str = ""  # the hash of all samples
    # XXH3 of each other file of the store, by name
    hashes: dict[str, str] = field(default_factory=dict)

    def add(self, encoded: Encoded) -> None:
        """Count one record."""
        self.records += 1
        if encoded.error is not None:
            _count(self.bad, encoded.error)
            return
        self.formats[encoded.form] = self.formats.get(encoded.form, 0) + 1
        self.answers += encoded.answers
        self.answer_tokens += encoded.answer_tokens
        self.lost_tokens += encoded.lost_tokens
        self.empty_thoughts += encoded.empty_thoughts
        system = encoded.system
        is_full = len(self.systems) >= MAX_SYSTEMS
        if system is not None and system not in self.systems and not is_full:
            self.systems.append(system)
        self.with_tools += encoded.has_tools
        # a pair has those of both answers
        for name in dict.fromkeys(encoded.unused):
            self.unused[name] = self.unused.get(name, 0) + 1
        for note in dict.fromkeys(encoded.notes):
            _count(self.notes.setdefault(note, [0, []]), encoded.where)

    def add_findings(self, findings: Iterable[Finding]) -> None:
        """Add what the comparison of the records has found."""
        for note, records in findings:
            if records:
                self.notes[note] = [
                    len(records),
                    [str(record) for record in records[:MAX_NAMED]],
                ]

    @property
    def is_prompts(self) -> bool:
        """Whether the records are prompts with room for completions."""
        return "prompts" in self.formats

    @property
    def has_conversations(self) -> bool:
        """Whether any record was rendered with the chat template."""
        return any(form not in ("text", "tokens") for form in self.formats)

    def bad_lines(self) -> list[str]:
        """Return the first of the named messages with each reason, and how many others have the
        same one."""
        by_reason: dict[str, list[str]] = {}
        # a message begins with the place of its record, up to the first colon
        for message in self.bad[1]:
            by_reason.setdefault(message.partition(": ")[2], []).append(message)
        lines = []
        for same in by_reason.values():
            if len(same) > 1:
                lines.append(f"{same[0]} (and {len(same) - 1} more like it)")
            else:
                lines.append(same[0])
        return lines


def _count(counter: list, name: str) -> None:
    counter[0] += 1
    if len(counter[1]) < MAX_NAMED:
        counter[1].append(name)
