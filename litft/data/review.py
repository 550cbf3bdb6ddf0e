"""The records of a file compared with each other: copies, the same prompt with other answers,
sentences that many answers have, and records that are unlike most."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from litft.data.notes import (
    COPY,
    NEAR_COPY,
    OTHER_ANSWER,
    OTHER_SYSTEM,
    UNFINISHED,
    VARYING_SYSTEM,
)
from litft.data.record_facts import RecordFacts
from litft.data.similarity import copied_texts

# a sentence that so many answers begin or end with, and so large a share of them, is boilerplate
FEWEST_SAME_SENTENCES = 5
SAME_SENTENCE_SHARE = 0.05
MOST_SENTENCES = 3  # that are named
# records whose facts are held in memory: about 1 GB
MOST_COMPARED = 1_000_000
# below this share, what is unlike the others is an exception; above, it is how the file is
MOST = 0.8
# a language or a system prompt that at least this share of the records has is the usual one
USUAL = 0.5


class FoundRecord(NamedTuple):
    """A record with a finding."""

    place: str
    earlier: str = ""  # the place of the record that it repeats

    def __str__(self) -> str:
        if self.earlier:
            return f"{self.place} (as {self.earlier})"
        return self.place


class Finding(NamedTuple):
    """A note, and the records that have it."""

    note: str
    records: list[FoundRecord]


class Review:
    """Collects the facts of a file's records, and compares them."""

    def __init__(self) -> None:
        self.places: list[str] = []  # of the records, for messages
        self.facts: list[RecordFacts] = []

    def add(self, where: str, facts: RecordFacts) -> None:
        """Add the facts of the record at this place. After MOST_COMPARED records, do nothing."""
        if len(self.facts) < MOST_COMPARED:
            self.places.append(where)
            self.facts.append(facts)

    def findings(self, signatures: np.ndarray) -> Iterator[Finding]:
        """Yield what the comparison finds. signatures: of at least these records, (N, 128)."""
        signatures = signatures[: len(self.facts)]
        copies = self._copies()
        yield self._repeating(COPY, copies)
        near: dict[int, int] = {}
        for index, first in enumerate(copied_texts(signatures).tolist()):
            if first != index and index not in copies:
                near[index] = first
        yield self._repeating(NEAR_COPY, near)
        other = {}
        for index, first in self._other_answers().items():
            if index not in near:
                other[index] = first
        yield self._repeating(OTHER_ANSWER, other)
        yield self._unfinished()
        yield from self._same_sentences(copies)
        yield from self._other_languages()
        yield from self._other_systems()

    def _finding(self, note: str, indices: set[int]) -> Finding:
        """Return the finding on the records with facts at these indices."""
        return Finding(note, [FoundRecord(self.places[index]) for index in sorted(indices)])

    def _repeating(self, note: str, earlier: Mapping[int, int]) -> Finding:
        """Return the finding on records that repeat earlier ones, which are named, too; earlier:
        their indices, by those of the records that repeat them."""
        records = []
        for index, first in sorted(earlier.items()):
            records.append(FoundRecord(self.places[index], self.places[first]))
        return Finding(note, records)

    def _copies(self) -> dict[int, int]:
        """Return the indices of records that an earlier one equals, with the index of that."""
        first: dict[int, int] = {}
        copies = {}
        for index, facts in enumerate(self.facts):
            if facts.content in first:
                copies[index] = first[facts.content]
            else:
                first[facts.content] = index
        return copies

    def _other_answers(self) -> dict[int, int]:
        """Return the indices of records that have the prompt of an earlier one, but another answer,
        with the index of that."""
        # of each prompt: the answers so far, and the first record
        answers: dict[int, set[int]] = {}
        first: dict[int, int] = {}
        found = {}
        for index, facts in enumerate(self.facts):
            if facts.prompt is None:
                continue
            earlier = answers.setdefault(facts.prompt, set())
            if earlier and facts.answer not in earlier:
                found[index] = first[facts.prompt]
            earlier.add(facts.answer)
            first.setdefault(facts.prompt, index)
        return found

    def _unfinished(self) -> Finding:
        """Return the records whose answer stops within a sentence, if most of them do not."""
        prose = sum(facts.is_prose for facts in self.facts)
        found = {index for index, facts in enumerate(self.facts) if facts.is_unfinished}
        if len(found) > (1 - MOST) * prose:
            found = set()
        return self._finding(UNFINISHED, found)

    def _same_sentences(self, copies: Collection[int]) -> Iterator[Finding]:
        """Yield the records whose answers begin or end with a sentence that many others have."""
        having: dict[str, set[int]] = {}
        for index, facts in enumerate(self.facts):
            if index in copies:
                continue
            for sentence in facts.sentences:
                having.setdefault(sentence, set()).add(index)
        distinct = len(self.facts) - len(copies)
        least = max(FEWEST_SAME_SENTENCES, SAME_SENTENCE_SHARE * distinct)
        frequent = []
        for sentence, found in having.items():
            if len(found) >= least:
                frequent.append(sentence)
        frequent.sort(key=lambda sentence: -len(having[sentence]))
        for sentence in frequent[:MOST_SENTENCES]:
            note = (
                f'with an answer that begins or ends with "{sentence}", as many do (remove it, '
                "unless every answer is to have it)"
            )
            yield self._finding(note, having[sentence])

    def _other_languages(self) -> Iterator[Finding]:
        """Yield the records whose answers are in another language than most."""
        counts = Counter(facts.language for facts in self.facts if facts.language)
        if not counts:
            return
        usual, count = counts.most_common(1)[0]
        if count < USUAL * counts.total():
            return
        found = set()
        others: Counter[str] = Counter()
        for index, facts in enumerate(self.facts):
            if facts.language not in ("", usual):
                found.add(index)
                others[facts.language] += 1
        named = ", ".join(sorted(others))
        note = (
            f"with an answer in {named}, where most are in {usual} (leave them out, unless that is "
            "meant)"
        )
        yield self._finding(note, found)

    def _other_systems(self) -> Iterator[Finding]:
        """Yield the records with another system prompt than most, or all of those with one, if no
        system prompt is the usual one."""
        counts = Counter(facts.system for facts in self.facts if facts.system is not None)
        if len(counts) < 2:
            return
        usual, count = counts.most_common(1)[0]
        if count < USUAL * counts.total():
            note = VARYING_SYSTEM
            found = {
                index for index, facts in enumerate(self.facts) if facts.system is not None
            }
        else:
            note = OTHER_SYSTEM
            found = set()
            for index, facts in enumerate(self.facts):
                if facts.system not in (None, usual):
                    found.add(index)
        yield self._finding(note, found)
