"""Notes on what happened to examples; reports print them after a count."""

CUT = "cut to the length limit"
CUT_AWAY = "skipped: no part of an answer is within the length limit"
MASKED = "skipped: every turn is masked"
EMPTY = "skipped: the answer is empty (give one; there is nothing to learn)"
BLANK = "skipped: no text"
EMPTY_TURN = "with an empty answer, which is excluded from the loss"
EMPTY_PROMPT = "with an empty prompt"
UNANSWERED = "ending in a turn without an answer, which is dropped"
CONTROL = (
    "containing the text of a control token, which is encoded as that token (remove it, or divide "
    "the text into messages)"
)
OTHER_PROMPT = (
    "with an answer whose prompt is another one when it is generated: the template opens a thought "
    "there, or writes another history (give reasoning, or another --data.template)"
)
THOUGHT_IS_OFF = (
    "with reasoning, which the template switches off when an answer is generated (make it the "
    "default: --data.template_args enable_thinking=true, or the template's own name for it)"
)
WITHIN_TOKEN = (
    "with a prompt that ends within a token, so that it has other tokens when it is generated from "
    "(move spaces from the end of the prompt to the beginning of the answer)"
)
CALL_UNREAD = (
    "with a tool call that cannot be read from the text of the template as it was written (give "
    "its arguments the types that the tool declares, or another --data.template)"
)
EARLIER_TURNS = (
    "with an answer of several turns, of which only the last is compared: the template renders the "
    "others differently once it follows (another --data.template may not)"
)
MARK_IGNORED = (
    "with a turn that is marked not to be learned, which --data.mask_prompt false learns all the "
    "same (leave the flag out)"
)
MESSAGES_AS_TEXT = (
    "with a list of messages that is learned as text (prompt and answer must both be lists; "
    "--data.columns messages=... reads a list of all turns)"
)
TOOLS_LOST = "with tools, which the chat template leaves out"
SYSTEM_LOST = "with a system prompt, which the chat template leaves out"
RESULTS_LOST = "with results of tools, which the chat template leaves out"
WITHOUT = "without the field"
REFUSAL = "with an answer that refuses (leave them out, unless that is meant)"
AS_AN_AI = 'with an answer that speaks "as an AI" (remove the sentence, or leave them out)'
FOREIGN_MARKS = (
    "with the mark of a chat format in a message, such as `### Response:` "
    "(divide it into messages)"
)
END_TEXT = "with an end token written after an answer, which is removed"

# of prompts
NO_ROOM = (
    "skipped: prompt and completion exceed the length limit (raise --data.max_seq_length, or lower "
    "max_new_tokens)"
)

# of preferences
OTHER_QUESTION = "whose chosen and rejected answers follow different prompts"
EQUAL = "skipped: both answers are equal"
PROMPT_CUT = "with the beginning of the prompt cut to the length limit"

# of records compared with the others of their file
COPY = "equal to an earlier record (--data.dedup exact leaves them out)"
NEAR_COPY = "nearly equal to an earlier record (--data.dedup near leaves them out)"
OTHER_ANSWER = (
    "with the prompt of an earlier record, but another answer (read both: either may be the wrong "
    "one)"
)
UNFINISHED = (
    "with an answer that stops in the middle of a sentence (leave them out, or generate them "
    "again with a higher limit)"
)
OTHER_SYSTEM = (
    "with another system prompt than most records, or none (give all the same, unless that is "
    "meant)"
)
VARYING_SYSTEM = "with system prompts of which none is the usual one"

# of the order of a conversation
ANSWER_FIRST = (
    "with messages out of order: an answer comes first (remove it, or add its question)"
)
USER_TWICE = (
    "with messages out of order: two of the user in a row (join them, or "
    "add the answer between)"
)
SYSTEM_LATE = (
    "with messages out of order: a system prompt after the beginning "
    "(move it to the beginning)"
)
