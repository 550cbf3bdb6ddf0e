"""Records to samples: rendered, tokenized, masked and cut to length, with notes on everything that
was changed or lost."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain, pairwise

import numpy as np

from litft.data.chat_template import Message
from litft.data.digests import hash64
from litft.data.encoded import Encoded, learned_texts, unit_hash, without_learned
from litft.data.formats import (
    COMMON_FIELDS,
    FORMATS,
    Example,
    Record,
    detect_format,
    has_other_system,
    rename_columns,
    strip_end_token,
    to_example,
    unused_fields,
)
from litft.data.history import opens_thoughts, readable_history
from litft.data.masked_parts import masked_ranges
from litft.data.notes import (
    BLANK,
    CUT,
    CUT_AWAY,
    EARLIER_TURNS,
    EMPTY,
    EMPTY_PROMPT,
    EMPTY_TURN,
    END_TEXT,
    EQUAL,
    MARK_IGNORED,
    MASKED,
    MESSAGES_AS_TEXT,
    OTHER_QUESTION,
    PROMPT_CUT,
    UNANSWERED,
    WITHOUT,
)
from litft.data.preferences import cut_together, read_fields, to_preferences
from litft.data.prompts import PromptEncoder
from litft.data.reasoning import drop_reasoning, with_opening_mark
from litft.data.sample import ID_MASK, IN_ANSWER, SUPERVISED
from litft.data.stored_messages import has_messages_as_text, read_stored_messages
from litft.data.suspicions import suspicions
from litft.data.tokenizer import Tokenizer
from litft.data.tokenizer_backends import common_prefix_length
from litft.data.turn_notes import turn_notes
from litft.data.turns import Turn, assistant_turns

# messages; from here on, those beyond the length limit are not rendered
LONG_CONVERSATION = 40

# characters of a divided text that go into the same split
SPAN = 2048


@dataclass(frozen=True)
class TurnTokens:
    """An assistant turn as positions in the token ids of a text: see `turns.Turn`."""

    message: int
    start: int
    answer: int
    end: int
    empty_thought: bool
    masked: tuple[tuple[int, int], ...] = ()  # ranges that are not learned
    notes: tuple[str, ...] = ()  # if it is learned


@dataclass(frozen=True)
class Encoder:
    """Converts records to samples, as a pure function of the record and these fields.

    Learned tokens are marked `SUPERVISED`: those of the assistant's turns, with the token that ends
    each, and of texts all. The others are context. A sample is cut at `limit` tokens.
    """

    tokenizer: Tokenizer
    limit: int  # the most input tokens of a sample
    form: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    mask_prompt: bool = True
    last_only: bool = False
    # or "learn_empty", "mask", "drop": see --data.reasoning
    reasoning: str = "learn"
    # or "pairs", "labels": see preferences.py; "prompts": see prompts.py
    kind: str = "supervised"
    # of prompts: the most tokens of a completion
    completion_tokens: int = 0

    @cached_property
    def digest(self) -> str:
        """The hash of everything that decides how records become samples."""
        policy = {}
        for item in fields(self):
            if item.name != "tokenizer":
                policy[item.name] = getattr(self, item.name)
        return hashlib.sha256(
            (self.tokenizer.digest() + json.dumps(policy, sort_keys=True)).encode()
        ).hexdigest()

    def __call__(self, where: str, record: Record | ValueError) -> Encoded:
        """Encode a record; errors in the record are returned in the result, not raised."""
        encoded = Encoded(where)
        try:
            if isinstance(record, ValueError):
                raise record
            missing = []
            mapped = []
            for name, file_name in self.columns.items():
                if file_name in record:
                    mapped.append(name)
                else:
                    missing.append(file_name)
            encoded.notes += [f"{WITHOUT} {name}" for name in missing]
            record = read_stored_messages(rename_columns(record, self.columns), where)
            if has_messages_as_text(record, where):
                encoded.notes.append(MESSAGES_AS_TEXT)
            if self.kind == "prompts":
                prompts = PromptEncoder(
                    self.tokenizer, self.limit, self.completion_tokens, self.form
                )
                prompts.encode(record, where, encoded, mapped)
                return encoded
            if self.kind != "supervised":
                self._encode_preferences(record, where, encoded)
                return encoded
            form = self.form or detect_format(record, where, missing, mapped)
            example = to_example(record, where, self.tokenizer.chat_template, form)
            read = {*FORMATS[form].fields, *FORMATS[form].optional, *COMMON_FIELDS}
            encoded.unused = unused_fields(record, read)
            if has_other_system(record, example):
                encoded.unused.append("system")
            if form == "text" and example.text is None:
                encoded.form = "guanaco"
            else:
                encoded.form = form
            self._encode(example, encoded)
            # without a template, which decides how an instruction and its input are joined
            if not encoded.text:
                encoded.units = [unit_hash(to_example(record, where, "", form))] * len(
                    encoded.samples
                )
        except ValueError as error:
            message = str(error)
            if message.startswith(where):
                encoded.error = message
            else:
                encoded.error = f"{where}: {message}"
            encoded.samples = []
            encoded.units = []
            encoded.turns = []
            encoded.first_sizes = []
            encoded.labels = []
        return encoded

    def _encode_preferences(self, record: Record, where: str, encoded: Encoded) -> None:
        encoded.form = self.kind
        # without a template, as for other records; examples with one prompt go into the same split
        plain = to_preferences(record, where, "", self.kind)
        unit = unit_hash(_prompt_of(plain[0].answers[0]))
        read = {*read_fields(record, where), *COMMON_FIELDS}
        encoded.unused = unused_fields(record, read)
        if has_other_system(record, plain[0].answers[0]):
            encoded.unused.append("system")
        preferences = to_preferences(record, where, self.tokenizer.chat_template, self.kind)
        # a pair that became two labelled answers: equal
        # answers would be both desirable and undesirable
        if len(preferences) == 2 and preferences[0].answers == preferences[1].answers:
            encoded.notes.append(EQUAL)
            return
        encoded.compare_preferences(preferences)
        for preference in preferences:
            if preference.has_different_prompts:
                encoded.notes.append(OTHER_QUESTION)
            sides = []
            for answer in preference.answers:
                side = self._encode_answer(answer, encoded)
                if side is not None:
                    sides.append(side)
            if len(sides) < len(preference.answers):
                continue
            cut, lost = cut_together(sides, self.limit, SUPERVISED, ID_MASK)
            if len(sides) == 2 and np.array_equal(cut[0], cut[1]):
                encoded.notes.append(EQUAL)
                continue
            if lost:
                encoded.notes.append(PROMPT_CUT)
            stored = []
            was_cut = False
            for before, after in zip(sides, cut, strict=True):
                # an answer that was cut is not complete, and is not generated to compare
                if len(after) < len(before) - lost:
                    was_cut = True
                    after = after & ~IN_ANSWER
                stored.append(after)
            if was_cut:
                encoded.notes.append(CUT)
            if not all((side[1:] & SUPERVISED).any() for side in stored):
                encoded.notes.append(CUT_AWAY)
                continue
            encoded.samples.append(np.concatenate(stored))
            encoded.units.append(unit)
            encoded.turns.append(2 * len(encoded.turns))
            if preference.desirable is None:
                encoded.first_sizes.append(len(stored[0]))
            else:
                encoded.labels.append(preference.desirable)

    def _encode_answer(self, example: Example, encoded: Encoded) -> np.ndarray | None:
        """Return the stored tokens of a conversation of any length, with its last answers as
        targets; None without one."""
        messages, supervised = self._select_turns(example, encoded)
        encoded.note_controls(learned_texts(messages, example.tools), self.tokenizer)
        if not supervised:
            if EMPTY not in encoded.notes:
                encoded.notes.append(MASKED)
            return None
        encoded.note_unused(messages, example, self.tokenizer)
        # where the template needs several texts, the last one ends with the answer to compare
        *_, (ids, turns) = self._tokenize(messages, example)
        stored = np.array(ids, np.uint32)
        for turn in turns:
            if turn.message in supervised:
                self._mark_targets(stored, turn, encoded)
        if not supervised <= {turn.message for turn in turns}:
            encoded.notes.append(EARLIER_TURNS)
        last = turns[-1]
        stored[self._answer_start(last) : last.end] |= IN_ANSWER
        encoded.ends.add(ids[last.end - 1])
        return stored

    def _answer_start(self, turn: TurnTokens) -> int:
        """Return where an answer begins that is generated to compare: a thought that is not learned
        is in its prompt."""
        if turn.empty_thought and self.reasoning != "learn_empty":
            return turn.answer
        return turn.start

    def _first_target(self, turn: TurnTokens) -> int:
        """Return the position of a turn's first target token."""
        if self.reasoning == "mask":
            return turn.answer
        return self._answer_start(turn)

    def _mark_targets(self, sample: np.ndarray, turn: TurnTokens, encoded: Encoded) -> None:
        """Mark the tokens of an answer that are learned, and count the answer."""
        sample[self._first_target(turn) : turn.end] |= SUPERVISED
        for start, end in turn.masked:
            sample[start:end] &= ~SUPERVISED
        encoded.answers += 1
        encoded.notes += [note for note in turn.notes if note not in encoded.notes]
        encoded.empty_thoughts += turn.empty_thought and self.reasoning != "learn_empty"

    def _encode(self, example: Example, encoded: Encoded) -> None:
        if example.token_ids is not None:
            self._encode_token_ids(example.token_ids, example.supervised, encoded)
            return
        if example.text is not None:
            encoded.note_controls([example.text], self.tokenizer)
            encoded.text = True
            if not example.divided:
                encoded.compare_text(example.text)
            for span, ids in self._spans(example, example.text):
                encoded.units.append(hash64(span))
                encoded.turns.append(0)
                encoded.samples.append(np.array(ids, np.uint32) | SUPERVISED)
            if not encoded.samples:
                encoded.notes.append(BLANK)
            return
        messages, supervised = self._select_turns(example, encoded)
        encoded.notes += suspicions(messages, supervised)
        encoded.compare_example(example, messages, supervised)
        messages = self._up_to_limit(messages, example, supervised, encoded)
        encoded.note_controls(learned_texts(messages, example.tools), self.tokenizer)
        encoded.note_unused(messages, example, self.tokenizer)
        was_cut = False
        previous_ids = []
        for ids, turns in self._tokenize(messages, example):
            sample = np.array(ids, np.uint32)
            last_complete = -1
            is_partial = False
            for turn in turns:
                if turn.message in supervised:
                    self._mark_targets(sample, turn, encoded)
                    first = self._first_target(turn)
                    lost = turn.end - max(first, self.limit + 1)
                    encoded.count_tokens(answer=turn.end - first, lost=max(0, lost))
                # a sample has one token more than inputs: its last token is only a target
                if turn.end <= self.limit + 1:
                    last_complete = turn.message
                    # exact match asks for the last answer that is learned
                    if turn.message in supervised:
                        sample[self._answer_start(turn) : turn.end] |= IN_ANSWER
                elif turn.start <= self.limit:
                    is_partial = turn.message in supervised
            # each of several texts continues the previous one, which is supervised already
            if not self.mask_prompt:
                sample[common_prefix_length(ids, previous_ids) :] |= SUPERVISED
            previous_ids = ids
            if len(ids) > self.limit + 1:
                was_cut = True
                sample = sample[: self.limit + 1]
            # a call may end with another token than the last answer
            for turn in turns:
                if turn.message in supervised and turn.end <= self.limit + 1:
                    encoded.ends.add(ids[turn.end - 1])
            if (sample[1:] & SUPERVISED).any():
                encoded.samples.append(sample)
                encoded.turns.append(2 * last_complete + is_partial)
        if was_cut and encoded.samples:
            encoded.notes.append(CUT)
        elif not encoded.samples and EMPTY not in encoded.notes:
            encoded.notes.append(CUT_AWAY if supervised else MASKED)

    def _encode_token_ids(
        self, ids: list[int], supervised: list[bool], encoded: Encoded
    ) -> None:
        """Add a sample of tokens as they are, cut to the length limit."""
        if max(ids, default=0) > ID_MASK:
            raise ValueError(f"the token id {max(ids)} is larger than any vocabulary")
        encoded.compare_token_ids(ids, supervised)
        sample = np.array(ids, np.uint32)
        targets = supervised if self.mask_prompt else True
        sample |= np.where(targets, SUPERVISED, np.uint32(0))
        cut = sample[: self.limit + 1]
        if (cut[1:] & SUPERVISED).any():
            encoded.samples.append(cut)
            encoded.turns.append(0)
            if len(cut) < len(sample):
                encoded.notes.append(CUT)
            # a sample that is learned whole is a block of text, whose end is no end of an answer
            if supervised[-1] and not all(supervised):
                encoded.last_token = ids[-1]
        else:
            encoded.notes.append(CUT_AWAY if (sample[1:] & SUPERVISED).any() else MASKED)

    def _spans(self, example: Example, text: str) -> Iterator[tuple[str, list[int]]]:
        """Yield (text, tokens) of each span of SPAN characters, or of the whole text; independent
        of the length limit."""
        if not text.strip():
            return
        # tokenized as a whole, so that no token depends on the cuts
        cuts = [*range(SPAN, len(text), SPAN)] if example.divided else []
        ids, boundaries = self.tokenizer.encode_with_boundaries(text, cuts)
        # BOS goes in front and an end token after it, unless the text has them already
        opening = self.tokenizer.encode("") if example.begins else []
        num_added = 0 if ids[: len(opening)] == opening else len(opening)
        if example.ends and ids[-1:] and ids[-1] not in self.tokenizer.stop_ids:
            end = self.tokenizer.eos_id
            if end is None:
                end = self.tokenizer.stop_ids[-1]
            ids.append(end)
        ids = opening[:num_added] + ids
        # a sample needs an input and a target
        if len(ids) < 2:
            return
        bounds = [0, *(num_added + boundary for boundary in boundaries), len(ids)]
        for number, (start, end) in enumerate(pairwise(bounds)):
            span = text
            if cuts:
                span = text[number * SPAN : (number + 1) * SPAN]
            if end > start:
                yield span, ids[start:end]

    def _select_turns(
        self, example: Example, encoded: Encoded
    ) -> tuple[list[Message], set[int]]:
        """Return the messages up to the last answer, and the indices of the supervised ones.

        Raise ValueError if no message is an answer.
        """
        turns = [
            n
            for n, message in enumerate(example.messages)
            if message["role"] == "assistant"
        ]
        if not turns:
            last = example.messages[-1]["role"]
            raise ValueError(
                f"no message is from the assistant (the last is from the {last}); add the answer "
                "to train on"
            )
        if turns[-1] + 1 < len(example.messages):
            encoded.notes.append(UNANSWERED)
        for message in example.messages:
            if message["role"] == "user" and not message["content"].strip():
                encoded.notes.append(EMPTY_PROMPT)
                break
        messages = self._clean(example, turns[-1] + 1, encoded)
        # for the reports: its system prompt, which the model needs afterwards, too, and its tools
        encoded.describe(messages, example.tools)
        if self.reasoning == "drop":
            messages = drop_reasoning(messages)
        empty = set()
        for n in turns:
            if not messages[n]["content"].strip() and not messages[n].get("tool_calls"):
                empty.add(n)
        supervised = set()
        learned_turns = turns[-1:] if self.last_only else turns
        for n in learned_turns:
            turn = example.messages[n]
            is_learned = turn.get("train", True)
            if is_learned:
                supervised.add(n)
            # of joined turns, one part may be marked
            has_marked_part = any(not part["train"] for part in turn.get("parts", []))
            is_marked = has_marked_part or not is_learned
            # where prompts are learned, too, everything is
            if is_marked and not self.mask_prompt and MARK_IGNORED not in encoded.notes:
                encoded.notes.append(MARK_IGNORED)
        if self.mask_prompt and supervised & empty:
            encoded.notes.append(EMPTY_TURN if supervised - empty else EMPTY)
        return messages, supervised - empty

    def _clean(self, example: Example, count: int, encoded: Encoded) -> list[Message]:
        """Return the first messages without the marks of what is learned, and answers without end
        tokens, and with the mark that opens their thought."""
        template = self.tokenizer.template_for(example.tools)
        has_marks = opens_thoughts(self.tokenizer, template, bool(example.tools))
        own_ends = self.tokenizer.end_tokens.special_stops
        messages = []
        for message in example.messages[:count]:
            clean = without_learned(message)
            if message["role"] == "assistant":
                clean["content"] = strip_end_token(message["content"], own_ends)
            if clean["content"] != message["content"] and END_TEXT not in encoded.notes:
                encoded.notes.append(END_TEXT)
            if message["role"] == "assistant" and has_marks:
                clean = with_opening_mark(clean)
            messages.append(clean)
        return messages

    def _up_to_limit(
        self,
        messages: list[Message],
        example: Example,
        supervised: set[int],
        encoded: Encoded,
    ) -> list[Message]:
        """Return a conversation without the turns after the first one whose prompt exceeds the
        length limit; their answers count as lost.

        They would be cut away, after rendering each of them several times with all that comes
        before it. Prompts are compared that end with the user: a template may leave out earlier
        reasoning only from there on. Where prompts are learned, too, all turns are rendered: a
        template may write each of them differently.
        """
        if len(messages) < LONG_CONVERSATION or not self.mask_prompt:
            return messages
        # a template may leave out reasoning that is spelled otherwise; without it, no prompt is
        # longer than what is rendered
        shortest = drop_reasoning(messages)
        answers = []  # to the user
        for number in range(1, len(messages)):
            if (
                messages[number]["role"] == "assistant"
                and messages[number - 1]["role"] == "user"
            ):
                answers.append(number)

        def exceeds(number: int) -> bool:
            prompt = self.tokenizer.apply_chat_template(
                shortest[:number],
                example.tools,
                add_generation_prompt=True,
                **example.template_args,
            )
            return len(self.tokenizer.encode(prompt, bos=False)) > self.limit + 1

        # the longer prompts come later, so bisection renders only a few of them
        try:
            at = bisect_left(answers, True, key=exceeds)
        except ValueError:
            # what renders each turn says what is wrong
            return messages
        if at == len(answers):
            return messages
        for number in range(answers[at] + 1, len(messages)):
            if number in supervised:
                lost = len(self.tokenizer.encode(messages[number]["content"], bos=False))
                encoded.count_tokens(answer=lost, lost=lost)
        return messages[: answers[at] + 1]

    def _tokenize(
        self, messages: list[Message], example: Example
    ) -> Iterator[tuple[list[int], list[TurnTokens]]]:
        """Yield the token ids of each text of a conversation, with the assistant's turns in
        them."""
        render = partial(self.tokenizer.apply_chat_template, **example.template_args)
        for rendered in assistant_turns(
            render=render,
            messages=messages,
            tools=example.tools,
            ends=self.tokenizer.end_tokens,
            history=self._history(messages, example),
        ):
            # all positions of a text are looked up at once, in one pass of the tokenizer
            offsets = []
            masked = {}
            for turn in rendered.turns:
                offsets += [turn.start, turn.answer, turn.end]
                # `messages` are cleaned copies, at the same indices: only the originals have parts
                masked[turn.message] = masked_ranges(
                    turn,
                    example.messages[turn.message].get("parts", []),
                    own_ends=self.tokenizer.end_tokens.special_stops,
                )
            for ranges in masked.values():
                offsets += chain(*ranges)
            ids, boundaries = self.tokenizer.encode_with_boundaries(rendered.text, offsets)
            if not ids:
                raise ValueError(
                    "the chat template renders no text; pass another --data.template"
                )
            positions = dict(zip(offsets, boundaries, strict=True))
            turns = []
            for turn in rendered.turns:
                turns.append(
                    TurnTokens(
                        message=turn.message,
                        start=positions[turn.start],
                        answer=positions[turn.answer],
                        end=positions[turn.end],
                        empty_thought=turn.empty_thought,
                        masked=tuple(
                            (positions[start], positions[end])
                            for start, end in masked[turn.message]
                        ),
                        notes=self._notes(turn, ids, positions, example),
                    )
                )
            last = turns[-1]
            # the template adds no end token: add one, in place of what comes after the turn. The
            # text is encoded again, since its last token may have reached beyond the turn.
            if ids[last.end - 1] not in self.tokenizer.special_ids:
                text = rendered.turns[-1].text[: rendered.turns[-1].end]
                ids = [*self.tokenizer.encode(text, bos=False), self.tokenizer.end_id]
                turns[-1] = replace(last, end=len(ids))
            yield ids, turns

    def _notes(
        self, turn: Turn, ids: list[int], positions: dict[int, int], example: Example
    ) -> tuple[str, ...]:
        """Return what is to be said of a turn; ids: of its text, with the `positions` of its
        characters."""
        # an empty thought that is not learned belongs to the prompt without thinking; one that the
        # prompt has cannot be learned
        start = turn.start
        is_other = turn.other_prompt
        if turn.empty_thought and self.reasoning != "learn_empty":
            start = turn.answer
        elif turn.empty_thought and turn.start == turn.answer:
            is_other = True
        notes = turn_notes(
            tokenizer=self.tokenizer,
            turn=replace(turn, start=start, other_prompt=is_other),
            prompt_ids=ids[: positions[start]],
            answer_ids=ids[positions[start] : positions[turn.end]],
            message=example.messages[turn.message],
            tools=example.tools,
        )
        return tuple(notes)

    def _history(self, messages: list[Message], example: Example) -> list[Message]:
        """Return the messages as the prompts of later answers have them at inference."""
        try:
            return readable_history(
                self.tokenizer,
                messages,
                example.tools,
                checks_system=False,
                variables=example.template_args,
            )
        except ValueError:
            # what renders each turn says what the template leaves out
            return messages


def _prompt_of(example: Example) -> Example:
    """Return the part of an answer's conversation before the answer."""
    before = []
    for message in example.messages:
        if message.get("train", True):
            break
        before.append(message)
    return replace(example, messages=before)
