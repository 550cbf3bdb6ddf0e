"""Answers taken apart into reasoning, content and tool calls: what templates write is read back,
whole and streamed."""

import re
import time
from functools import partial

import pytest
from learned_spans import ANSWER, ANSWERS, QUESTION, REASONING, TOKENS, TOOLS
from own_tokenizers import HEADER
from quirks import QUIRKS

from litft.data.answer_format import answer_format, opens_thought
from litft.data.answer_parser import AnswerFormat, ParsedAnswer, make_parser
from litft.data.chat_template import STYLES, render
from litft.data.messages import check_messages
from litft.data.tokenizer import Tokenizer
from litft.data.tool_calls import CallMarks, ToolCall, read_calls
from litft.data.turn_ends import EndTokens
from litft.data.turns import assistant_turns
from litft.inference.chat_answers import call_entry

CALL = ToolCall("weather", {"town": 'Köln "x"', "days": 3})
SECOND = ToolCall("clock", {})
JSON = '{"town": "Köln \\"x\\"", "days": 3}'

# the text between a template's marks, for CALL alone or followed by SECOND
SYNTAXES = {
    "Hermes": (f'\n{{"name": "weather", "arguments": {JSON}}}\n', [CALL]),
    "Llama": (
        f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "clock", "parameters": {{}}}}',
        [CALL, SECOND],
    ),
    "Mistral": (
        f'[{{"name": "weather", "arguments": {JSON}, "id": "a1"}}, {{"name": "clock"}}]',
        [CALL, SECOND],
    ),
    "Mistral, named": (
        f"weather[CALL_ID]a1[ARGS]{JSON}[TOOL_CALLS]clock[ARGS]{{}}",
        [CALL, SECOND],
    ),
    "arguments as text": ('{"name": "clock", "arguments": ""}', [SECOND]),
    "Command": (
        f'[{{"tool_call_id": "0", "tool_name": "weather", "parameters": {JSON}}}]',
        [CALL],
    ),
    "Apertus": (f'[{{"weather": {JSON}}}, {{"clock": {{}}}}]', [CALL, SECOND]),
    "Qwen 3 Coder": (
        '\n<function=weather>\n<parameter=town>\nKöln "x"\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n',
        [CALL],
    ),
    "MiniMax": (
        '<invoke name="weather">\n<parameter name="town">Köln "x"</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="clock">\n</invoke>',
        [CALL, SECOND],
    ),
    "DeepSeek V3.2": (
        '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="town" string="true">Köln "x"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',
        [CALL],
    ),
    "DeepSeek V3": (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
        [CALL],
    ),
    "DeepSeek V3.1": (
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        [CALL],
    ),
    "Kimi K2": (
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
        [CALL],
    ),
    "GLM": (
        '\nweather\n<arg_key>town</arg_key>\n<arg_value>Köln "x"</arg_value>\n<arg_key>days</arg_key>\n'
        "<arg_value>3</arg_value>\n",
        [CALL],
    ),
    "Gemma 4": ('call:weather{town:<|"|>Köln "x"<|"|>,days:3}', [CALL]),
    "LFM2": ("[weather(town='Köln \"x\"', days=3), clock()]", [CALL, SECOND]),
    "Functionary": (f"<function=weather>{JSON}</function>", [CALL]),
}


@pytest.mark.parametrize("name", SYNTAXES)
def test_every_syntax_is_read(name):
    text, expected = SYNTAXES[name]
    assert read_calls(text, TOOLS) == expected


def test_values_without_quotes_have_their_declared_types():
    text = (
        "weather\n"
        "<arg_key>town</arg_key>\n"
        "<arg_value>1984</arg_value>\n"
        "<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>"
    )
    assert read_calls(text, TOOLS) == [ToolCall("weather", {"town": "1984", "days": 2})]
    types = {
        "town": {"type": ["string", "null"]},
        "days": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    nullable = [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": {"properties": types}},
        }
    ]
    assert read_calls(text, nullable) == [
        ToolCall("weather", {"town": "1984", "days": "2"})
    ]
    for null in ("null", "None"):
        assert read_calls(text.replace("1984", null), nullable) == [
            ToolCall("weather", {"town": None, "days": "2"})
        ]
    types["town"] = {"enum": ["1984", "2001"]}
    assert read_calls(text, nullable) == [
        ToolCall("weather", {"town": "1984", "days": "2"})
    ]
    nested = 'call:f{a:{b:[1,<|"|>x, y<|"|>,{c:true}],d:null}}'
    assert read_calls(nested) == [
        ToolCall("f", {"a": {"b": [1, "x, y", {"c": True}], "d": None}})
    ]


NO_CALLS = [
    "",
    "weather is fine",
    '{"name": "weather", "argu',
    '{"name": 3}',
    "[1, 2]",
    "[f(1)]",
    "[f(a=open('x'))]",
    "a" * 30_000,
    "a" * 30_000 + " b[ARGS]{",
]
NO_CALLS += [
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": {"x": "\\ud83d"}}',
    "[f(x=...)]",
    "[f(x=b'a')]",
]
# arguments under a name that no format has are not dropped
NO_CALLS += [
    '<tool_call>{"name": "weather", "args": {"town": "Oslo"}}</tool_call>',
    '{"name": "weather", "town": "Oslo"}',
]
NO_CALLS += ["[f(x={1, 2})]", "prose <function=f></function> more", "<function=" * 8000]
NO_CALLS += [
    "<function=f><parameter=a>\nx\n</parameter><parameter=b>\nlost</function>",
    "text f[ARGS]{} and more",
]
NO_CALLS += [
    "<function=weather><parameter=town>Os</function>",
    "call:weather{town:",
    "[" * 5000,
    '{"a":' * 5000,
]


@pytest.mark.parametrize("text", NO_CALLS, ids=lambda text: text[:20])
def test_other_text_is_no_call(text):
    """Also in a long answer without spaces, which is read in time that grows with its length."""
    start = time.process_time()
    with pytest.raises(ValueError, match="not a tool call"):
        read_calls(text, TOOLS)
    assert time.process_time() - start < 2


def test_text_that_is_no_call_stays_as_it_is():
    hermes = AnswerFormat(calls=CallMarks("<tool_call>", "</tool_call>"))
    for text in (
        'Look: <tool_call>{"name": "weather", "arguments": {"town"</tool_call> so.',
        "An open <tool_call>mark",
        "no </think> here",
        "  two  spaces \n",
        "<tool_cal",
    ):
        for size in (1, 5, 100):
            assert parsed_in_pieces(hermes, text, size) == ParsedAnswer(text), text
    llama = AnswerFormat(calls=CallMarks(""))
    answer = '{"name": "Ada", "age": 36}'
    assert make_parser(llama, tools=TOOLS).parse(answer) == ParsedAnswer(answer)
    call = '{"name": "clock", "parameters": {}}'
    # without tools, JSON is content
    assert make_parser(llama).parse(call) == ParsedAnswer(call)
    assert make_parser(llama, tools=TOOLS).parse("<|python_tag|>" + call).calls == [SECOND]


def parsed_in_pieces(answer_format, text, size, in_thought=False):
    parser = make_parser(answer_format, in_thought, TOOLS)
    parsed = ParsedAnswer()
    for start in range(0, len(text), size):
        parsed.add(parser.push(text[start : start + size]))
    parsed.add(parser.finish())
    return parsed


def test_reasoning_and_content_keep_their_text():
    thoughtful = AnswerFormat(calls=CallMarks("<tool_call>", "</tool_call>"))
    text = '<think>\nLet me\n\nsee.\n</think>\n\nIt  is \n\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    for size in (1, 3, 100):
        expected = ParsedAnswer("It  is", "Let me\n\nsee.", [SECOND])
        assert parsed_in_pieces(thoughtful, text, size) == expected
        assert (
            parsed_in_pieces(
                thoughtful, text.removeprefix("<think>"), size, in_thought=True
            )
            == expected
        )
        assert parsed_in_pieces(thoughtful, "</think>\n\nYes.", size) == ParsedAnswer(
            "Yes."
        )
        assert parsed_in_pieces(thoughtful, "<think>never closed", size) == ParsedAnswer(
            "", "never closed"
        )


def test_channels():
    channels = AnswerFormat(channels=True)
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Eve "
        "likes white."
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = f"{thought} to=functions.weather<|channel|>commentary json<|message|>{JSON}"
    for size in (1, 4, 1000):
        assert parsed_in_pieces(channels, text, size) == ParsedAnswer(
            "Eve likes white.", "Hm."
        )
        assert parsed_in_pieces(channels, call, size) == ParsedAnswer("", "Hm.", [CALL])
        assert parsed_in_pieces(channels, "no channels", size) == ParsedAnswer(
            "no channels"
        )


SHARED_TEMPLATES = """
    HuggingFaceTB-SmolLM3-3B NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B
    Qwen-Qwen2.5-7B-Instruct deepseek-ai-DeepSeek-R1-Distill-Llama-8B google-gemma-2-2b-it
    ibm-granite-granite-3.3-2B-Instruct meta-llama-Llama-3.1-8B-Instruct
    meta-llama-Llama-3.2-3B-Instruct microsoft-Phi-3.5-mini-instruct
    mistralai-Mistral-Nemo-Instruct-2407 openai-gpt-oss-120b
""".split()
STOPS = (
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<｜end▁of▁sentence｜>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
)


@pytest.mark.parametrize("name", SHARED_TEMPLATES)
def test_what_a_template_writes_is_read_back(shared, name):
    """The answers of learned_spans.py: the content, the calls, and the reasoning where the template
    writes it."""
    source = (shared / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    ends = EndTokens(STOPS, STOPS)
    found = answer_format(source, TOKENS, ends)
    write = partial(render, source, day="2026-01-01", **TOKENS)
    num_read = 0
    for kind, message in ANSWERS.items():
        if kind == "inline, not opened":
            continue
        try:
            turn = assistant_turns(write, [QUESTION, message], TOOLS, ends)[0].turns[0]
        except ValueError:  # the template does not write such an answer
            continue
        text = turn.text[turn.start : turn.end]
        for stop in STOPS:
            text = text.removesuffix(stop)
        calls = []
        for call in message.get("tool_calls", []):
            calls.append(ToolCall(call["function"]["name"], call["function"]["arguments"]))
        in_thought = opens_thought(turn.text[: turn.start])
        content = ANSWER if ANSWER in (message["content"] or "") else ""
        reasoning = REASONING if REASONING in text else ""
        # gpt-oss writes content beside a call as reasoning
        if "channel" in source and content and calls:
            content, reasoning = "", content
        expected = ParsedAnswer(content, reasoning, calls)
        for size in (1, 7, 10_000):
            parsed = parsed_in_pieces(found, text, size, in_thought)
            parsed.content = parsed.content.strip()
            assert parsed == expected, (kind, text)
        num_read += 1
    assert num_read >= 2


def test_the_marks_of_a_template_are_found_by_what_it_writes():
    body = "{{ '<|turn|>' + m.role + '\\n' + (m.content or '') }}"
    calls = (
        "{%- for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + "
        "c.function.arguments | tojson }}"
    )
    loop = (
        "{%- for m in messages %}"
        + body
        + calls
        + "{%- endfor %}{{ '<|end|>\\n' }}{%- endfor %}"
    )
    template = (
        loop
        + "{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}{# tools #}"
    )
    ends = EndTokens(("<|end|>",), ("<|end|>",))
    assert answer_format(template, {}, ends).calls == CallMarks("[TOOL_CALLS]")
    assert answer_format(template.replace("[TOOL_CALLS]", "<call>"), {}, ends).calls is None


def test_templates_that_take_arguments_as_text_get_text(tiny):
    tokenizer = Tokenizer(tiny)
    loop = "{%- for m in messages %}{{ m.role + ':' }}{%- for c in m.tool_calls or [] %}"
    template = (
        loop
        + "{{ c.function.name + ARGS }}{%- endfor %}{{ (m.content or '') + '</s>' }}{%- endfor "
        "%}{# tools #}"
    )
    messages = check_messages(
        [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call_entry(CALL)]},
        ],
        "the test",
    )
    for form in (
        "c.function.arguments",
        "c.function.arguments | string",
        "c.function.arguments | tojson",
    ):
        tokenizer.use_template(template.replace("ARGS", f"({form})"))
        assert JSON in tokenizer.apply_chat_template(messages, TOOLS), form


HERMES = AnswerFormat(calls=CallMarks("<tool_call>", "</tool_call>"))


@pytest.mark.parametrize(
    ("answer_format", "text", "expected"),
    [
        # a closing mark within an argument
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>b"}}</tool_call>',
            [{"x": "a</tool_call>b"}],
        ),
        # a mark that opens no call, before one that does
        (
            HERMES,
            'I use <tool_call> now. <tool_call>{"name": "f", "arguments": {}}</tool_call>',
            [{}],
        ),
        # a call within the text of an argument is none
        (
            AnswerFormat(calls=CallMarks("[TOOL_CALLS]")),
            '[TOOL_CALLS]f[ARGS]{"q": "g[ARGS]{}"}',
            [{"q": "g[ARGS]{}"}],
        ),
        # a mark within the text of an argument is a part of it
        (
            AnswerFormat(calls=CallMarks("[TOOL_CALLS]")),
            '[TOOL_CALLS]f[ARGS]{"q": "a[TOOL_CALLS]b\\"c"}[TOOL_CALLS]f[ARGS]{}',
            [{"q": 'a[TOOL_CALLS]b"c'}, {}],
        ),
        (
            AnswerFormat(calls=CallMarks("[TOOL_CALLS]")),
            '[TOOL_CALLS][{"name": "f", "arguments": {}}][TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
            [{}, {"a": 1}],
        ),
        (
            AnswerFormat(calls=CallMarks("<function=", "</function>")),
            '<function=f>{"a": 1}</function> done, thanks',
            [{"a": 1}],
        ),
        # GigaChat: the calls extend to the end
        (
            AnswerFormat(calls=CallMarks("function call<|role_sep|>")),
            'Wait.<|message_sep|>function call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
            [{"a": 1}],
        ),
        # the templates of Gemma 4's first versions write null as Python does
        (
            AnswerFormat(calls=CallMarks("<|tool_call>", "<tool_call|>")),
            '<|tool_call>call:f{a:None,b:[True,null],c:<|"|>None<|"|>}<tool_call|>',
            [{"a": None, "b": [True, None], "c": "None"}],
        ),
        (
            AnswerFormat(calls=CallMarks("<|tool_call_start|>", "<|tool_call_end|>")),
            "<|tool_call_start|>[f(a=[true, null], b={'c': -1})]<|tool_call_end|>",
            [{"a": [True, None], "b": {"c": -1}}],
        ),
    ],
)
def test_calls_with_marks_in_unusual_places(answer_format, text, expected):
    for size in (1, 7, 1000):
        parsed = parsed_in_pieces(answer_format, text, size)
        assert [call.arguments for call in parsed.calls] == expected
        assert "done, thanks" not in text or parsed.content.strip() == "done, thanks"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_between_marks_that_begin_like_elements(size):
    """OLMo 3's mark is no `<function=`."""
    olmo = AnswerFormat(calls=CallMarks("<function_calls>", "</function_calls>"))
    text = "<function_calls>weather(town='Köln \"x\"', days=3)</function_calls>"
    assert parsed_in_pieces(olmo, text, size).calls == [CALL]


FILE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "dry": {"type": "boolean"},
                    "mode": {"type": ["integer", "null"]},
                }
            },
        },
    }
]
HERMES = AnswerFormat(calls=CallMarks("<tool_call>", "</tool_call>"))
MISTRAL = AnswerFormat(calls=CallMarks("[TOOL_CALLS]"))
# a format, the text of an answer, and the number of calls in it if the answer was cut there
CUT = {
    "before an argument": (HERMES, "<tool_call>\n<function=write>\n", 0),
    "after an argument": (
        HERMES,
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n",
        0,
    ),
    "after the element": (HERMES, "<tool_call>\n<function=write>\n</function>\n", 1),
    "after a key": (
        HERMES,
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n",
        0,
    ),
    "within a name": (HERMES, "<tool_call>write", 0),
    "after a mark": (HERMES, "<tool_call>write</tool_call>", 1),
    "JSON": (HERMES, '<tool_call>{"name": "write", "arguments": {"path": "a"}}', 1),
    "before JSON": (MISTRAL, "[TOOL_CALLS]write", 0),
    "after JSON": (MISTRAL, '[TOOL_CALLS]write[ARGS]{"path": "a"}', 1),
    "a header": (
        AnswerFormat(channels=True),
        "<|channel|>commentary to=functions.write<|message|>",
        0,
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_a_call_that_is_cut_is_content(case):
    """It might lack arguments, or be another function's; a stop token stands for the mark."""
    answer_format, text, count = CUT[case]
    cut = make_parser(answer_format, tools=FILE_TOOLS).parse(text, is_cut=True)
    assert len(cut.calls) == count
    assert count or (cut.content.strip() in text.strip() and "write" in cut.content)
    whole = make_parser(answer_format, tools=FILE_TOOLS).parse(text)
    assert len(whole.calls) == 1 and not whole.content


# the arguments of a call, as templates write them
WRITTEN = {
    "Qwen 3 Coder": "<function=write><parameter={}>\n{}\n</parameter></function>",
    "Seed": "<function=write><parameter={}>{}</parameter></function>",
    "MiniMax": '<invoke name="write"><parameter name="{}">{}</parameter></invoke>',
    "GLM": "write<arg_key>{}</arg_key><arg_value>{}</arg_value>",
}


@pytest.mark.parametrize("syntax", WRITTEN)
@pytest.mark.parametrize(
    "key,text,value",
    [
        ("text", "    return x\n", "    return x\n"),
        ("text", "None", "None"),
        ("dry", "False", False),
        ("dry", "true", True),
        ("mode", "None", None),
        ("mode", "3", 3),
    ],
)
def test_values_are_read_as_templates_write_them(syntax, key, text, value):
    (call,) = read_calls(WRITTEN[syntax].format(key, text), FILE_TOOLS)
    assert call.arguments == {key: value}


@pytest.mark.parametrize(
    "answer_format,text",
    [
        (HERMES, '<tool_call>{"name": "write", "arguments": {}}</tool_call>'),
        (
            AnswerFormat(channels=True),
            "<|channel|>commentary to=functions.write<|message|>{}<|call|>",
        ),
    ],
)
def test_calls_that_are_not_looked_for_are_content(answer_format, text):
    assert make_parser(answer_format, tools=FILE_TOOLS).parse(text).calls
    parsed = make_parser(answer_format, tools=FILE_TOOLS, reads_calls=False).parse(text)
    assert not parsed.calls and "write" in parsed.content


def test_channels_that_are_cut_or_continued():
    channels = AnswerFormat(channels=True)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin"
    plain = "Hello there<|end|><|start|>assistant<|channel|>final<|message|>bye"
    both = (
        "<|channel|>commentary<|message|>Let me "
        "look.<|end|><|start|>assistant<|channel|>final<|message|>Done."
    )
    for size in (1, 5, 1000):
        assert parsed_in_pieces(channels, thought, size) == ParsedAnswer("", "Hm.")
        assert parsed_in_pieces(channels, plain, size) == ParsedAnswer(plain)
        assert parsed_in_pieces(channels, both, size) == ParsedAnswer(
            "Let me look.\n\nDone."
        )
    parser = make_parser(channels)
    parser.continue_message("<|start|>assistant<|channel|>final<|message|>Once upon")
    assert parser.parse(" a time").content == " a time"
    parser = make_parser(channels)
    parser.continue_message("<|start|>assistant<|channel|>analysis<|message|>First")
    answer = " this.<|end|><|start|>assistant<|channel|>final<|message|>That."
    assert parser.parse(answer) == ParsedAnswer("That.", "this.")


def test_a_continued_answer_ends_with_its_content(tiny):
    tokenizer = Tokenizer(tiny)
    for name, source in {
        "chatml": STYLES["chatml"],
        "header": HEADER,
        "plain": QUIRKS["plain"],
    }.items():
        tokenizer.use_template(source)
        for content in ("<", "|", "end", "turn", "Once upon a", "e"):
            text = tokenizer.continued_chat(
                [QUESTION, {"role": "assistant", "content": content}]
            )
            prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)
            assert text == prompt + content, (name, content)
        for last in (
            QUESTION,
            {"role": "assistant", "content": " "},
            ANSWERS["text and call"],
        ):
            with pytest.raises(ValueError, match="cannot be continued"):
                tokenizer.continued_chat([QUESTION, last])


REPEATED = {
    "a broken call": (
        "<tool_call>",
        "</tool_call>",
        '<tool_call>{"name": "weather"</tool_call>\n',
    ),
    "an empty call": ("<tool_call>", "</tool_call>", "<tool_call></tool_call>"),
    "an opening mark": ("<tool_call>", "</tool_call>", "<tool_call>"),
    "a mark without an end": ("[TOOL_CALLS]", "", "[TOOL_CALLS]x"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_marks_are_read_in_time(name):
    """The time grows with the length of the answer, whole and streamed; a call before them is
    found."""
    opening, closing, unit = REPEATED[name]
    text = (
        f'{opening}{{"name": "weather", "arguments": {{"town": "Oslo"}}}}{closing}'
        if closing
        else ""
    )
    text += unit * 3000
    answer_format = AnswerFormat(calls=CallMarks(opening, closing))
    start = time.process_time()
    whole = make_parser(answer_format, tools=TOOLS).parse(text)
    parser, streamed = make_parser(answer_format, tools=TOOLS), ParsedAnswer()
    for position in range(0, len(text), 7):
        streamed.add(parser.push(text[position : position + 7]))
    streamed.add(parser.finish())
    assert time.process_time() - start < 8
    assert streamed == whole and len(whole.calls) == (1 if closing else 0)
    assert whole.content.strip() == (unit * 3000).strip()


# as Command R7B: marks around the content; and as Muse Glimmer, a recipient before it
AROUND = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' %}OPENING"
    "{{ m.content }}CLOSING{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<|start|>", "<|stop|>"), ("", "<|stop|>"), (" to=user<|start|>", ""), ("Yes: ", "")],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_marks_around_the_content_are_no_part_of_it(opening, closing, size):
    template = AROUND.replace("OPENING", opening).replace("CLOSING", closing)
    ends = EndTokens(("<|turn|>", "<|end|>", "<|start|>", "<|stop|>"), ("<|end|>",))
    found = answer_format(template, {}, ends)
    text = f"{opening}It is warm.\n\nAnd dry. {closing}"
    parsed = parsed_in_pieces(found, text, size)
    # words may be a part of an answer, special tokens are not
    expected = "It is warm.\n\nAnd dry."
    if opening == "Yes: ":
        expected = f"Yes: {expected}"
    assert parsed.content.strip() == expected
    # an answer without the marks is content as it is
    assert parsed_in_pieces(found, "It is 5 <|s", size).content == "It is 5 <|s"


# as Muse Glimmer, whose reasoning is a message to itself; and as Kimi K3, which puts marks together
MESSAGES = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %} to=self<|message|>{{ m.reasoning_content }}<|eom|><|start|>"
    "assistant{% endif %} to=user{% endif %}<|message|>{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
COMPOSED = (
    "{% macro mark(kind, name) %}{{ '<|' + kind + '|>' + name + '<|sep|>' }}{% endmacro %}"
    "{% for m in messages %}{{ mark('open', m.role) }}{% if m.role == 'assistant' %}"
    "{{ mark('open', 'think') + m.reasoning_content + mark('close', 'think') if "
    "m.reasoning_content }}{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ mark('open', 'assistant') + mark('open', 'think') }}"
    "{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "text", "in_thought"),
    [
        (
            MESSAGES,
            " to=self<|message|>It matters.<|eom|><|start|>assistant to=user<|message|>Warm.",
            False,
        ),
        (COMPOSED, "It matters.<|close|>think<|sep|>Warm.", True),
    ],
    ids=["messages", "composed"],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_marks_around_reasoning_are_found_in_what_is_rendered(
    template, text, in_thought, size
):
    special = [*re.findall(r"<\|\w+\|>", template), "<|open|>", "<|close|>", "<|sep|>"]
    stops = ("<|eot|>", "<|end|>")
    found = answer_format(template, {}, EndTokens(tuple(dict.fromkeys(special)), stops))
    parsed = parsed_in_pieces(found, text, size, in_thought)
    assert parsed.reasoning.strip() == "It matters."
    assert parsed.content.strip() == "Warm."
