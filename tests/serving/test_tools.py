"""An agent client (the package openai with `tools`) uses models that litft has trained to call a
function."""

import json

import pytest
from agents import ANSWER, ARGUMENTS, FORMATS, QUESTION, TOOL, follow_up, trained  # noqa: F401
from conftest import script
from server_process import Server

import litft


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "Gemma 4" else pytest.mark.slow) for n in FORMATS],
)
@pytest.mark.halved
def test_an_agent_calls_the_function_and_reads_its_result(trained, name, tmp_path):  # noqa: F811
    folder = trained(name)
    with Server(folder, "--model_name", "agent") as server:
        client = server.client()
        messages = [QUESTION]
        settings = dict(model="agent", tools=[TOOL], max_tokens=100)
        choice = client.chat.completions.create(messages=messages, **settings).choices[0]
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather",
            ARGUMENTS,
        )
        assert not choice.message.content

        events = client.chat.completions.create(messages=messages, stream=True, **settings)
        deltas = [event.choices[0] for event in events]
        (streamed,) = [
            entry for choice in deltas for entry in choice.delta.tool_calls or []
        ]
        assert (streamed.index, streamed.function.arguments) == (0, call.function.arguments)
        assert deltas[-1].finish_reason == "tool_calls"
        assert not any(choice.delta.content for choice in deltas)

        assert len(call.id) == 9
        messages = [QUESTION, *follow_up(choice.message.model_dump(exclude_none=True))]
        choice = client.chat.completions.create(messages=messages, **settings).choices[0]
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")

        # without tools nothing is a call: the text keeps its marks
        plain = client.chat.completions.create(
            messages=[QUESTION], model="agent", max_tokens=100
        ).choices[0]
        assert plain.message.tool_calls is None and plain.finish_reason in (
            "stop",
            "length",
        )

    model = litft.load(folder, precision="fp32")
    answer = litft.generate(
        *model, [QUESTION], tools=[TOOL], temperature=0, max_new_tokens=100
    )
    assert answer == "" and answer.tool_calls[0]["function"] == {
        "name": "weather",
        "arguments": ARGUMENTS,
    }

    # in the terminal, the message after a call is its result
    if name == "Mistral":
        return  # its template writes the id of a call, and a chat's ids are random
    flags = ["--checkpoint_dir", folder, "--temperature", "0", "--max_new_tokens", "100"]
    tools = ["--tools", folder.parent.parent / "data.jsonl"]
    lines = f"{QUESTION['content']}\n20 degrees\n/save talk.json\n/reset\n/load talk.json\n/stats\n"
    chat = script("generate/chat.py", *flags, *tools, cwd=tmp_path, text=lines)
    assert chat.stdout.rstrip().endswith(ANSWER) and "weather" in chat.stdout
    assert "4 messages" in chat.stderr
    (saved,) = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert saved["tools"] == [TOOL] and saved["messages"][2]["content"] == "20 degrees"
