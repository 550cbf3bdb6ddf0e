"""Answers that follow a JSON schema: llguidance decides before each token which ones keep the
answer valid."""

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from litft.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

try:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
except ModuleNotFoundError as error:
    raise ValueError(
        f"a JSON schema needs the package {error.name}; pip install 'litft[json]'"
    ) from None

# models write JSON with spaces in these places; without the rule the grammar would admit any white
# space, without end
_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class _Vocabulary:
    """The bytes of every token, for tokenizers without a tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.end_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Encode a text as within an answer: without sentencepiece's rules for white space at the
        ends of a text."""
        around = "\x02"  # a byte token, which joins with nothing
        ids = self._tokenizer.encode(around + text + around, bos=False)
        length = len(self._tokenizer.encode(around, bos=False))
        return ids[length:-1]


class SchemaConstraint:
    """What may follow in one answer.

    trigger: what the answer ends with where the schema begins to hold, such as the end of the
    reasoning; None: it holds from the beginning.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: Tokenizer,
        vocab_size: int,
        trigger: re.Pattern[str] | None,
    ) -> None:
        self.matcher = matcher
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.trigger = trigger
        self.text = ""  # of the answer, until the trigger

    def allowed(self) -> Tensor | None:
        """Return which tokens may follow, (V,) bool on the CPU; None if all may."""
        if self.trigger is not None:
            return None
        # one bit a token, the lowest bit first
        packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[: self.vocab_size]
        # the mask may be shorter than the padded vocabulary of the model
        allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits.astype(bool))
        return allowed

    def problem(self) -> str | None:
        """Return why the answer cannot go on; None if it can."""
        if not self.matcher.is_error():
            return None
        # what follows is the state of the library
        reason = self.matcher.get_error().partition("<state>")[0]
        return f"response_format: the schema cannot be followed ({' '.join(reason.split())[:200]})"

    def advance(self, token: int) -> None:
        """Take note of the next token of the answer."""
        if self.trigger is None:
            self.matcher.consume_token(token)
            return
        # the trigger may be split into several tokens
        self.text += self.tokenizer.decode([token], skip_special=False)
        if self.trigger.search(self.text.rstrip()):
            self.trigger = None


class JsonGrammars:
    """Makes the constraints of a model's answers. The vocabulary is prepared once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        name, content = tokenizer.serialized()
        # llguidance reads this file itself; other tokenizers
        # are described by the bytes of their tokens
        if name == "tokenizer.json":
            source: Any = content.decode(errors="replace")
        else:
            source = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        self.backend = LLTokenizer(
            source, n_vocab=vocab_size, eos_token=list(tokenizer.stop_ids)
        )

    def constraint(
        self, schema: dict[str, Any], trigger: re.Pattern[str] | None = None
    ) -> SchemaConstraint:
        """Return the constraint of one answer; `trigger` as in SchemaConstraint.

        Raises ValueError for a schema that is invalid or not supported.
        """
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
        constraint = SchemaConstraint(
            LLMatcher(self.backend, grammar, log_level=0),
            self.tokenizer,
            self.vocab_size,
            trigger,
        )
        constraint.matcher.compute_bitmask()  # shows errors of the schema
        problem = constraint.problem()
        if problem:
            raise ValueError(problem.removeprefix("response_format: "))
        return constraint
