"""The parser for an answer to a prompt."""

from litft.data.answer_format import is_in_thought, opens_thought
from litft.data.answer_parser import AnswerParser, ChannelParser, make_parser
from litft.data.tokenizer import Tokenizer


def answer_parser(
    tokenizer: Tokenizer,
    prompt: str,
    tools: list | None = None,
    reads_calls: bool = True,
    continued: str = "",
) -> AnswerParser:
    """Return the parser for the answer to a rendered prompt.

    reads_calls: whether calls are looked for. continued: the beginning of the answer, where the
    prompt ends with it.
    """
    in_thought = opens_thought(prompt) or is_in_thought(continued)
    parser = make_parser(tokenizer.answer_format, in_thought, tools, reads_calls)
    if isinstance(parser, ChannelParser):
        parser.continue_message(prompt)
    return parser
