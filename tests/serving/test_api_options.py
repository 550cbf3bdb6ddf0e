"""Options of the server: hosts, CORS, keys, a full queue, JSON schemas, template variables,
continued messages."""

import json
import math
import shutil
from dataclasses import replace
from queue import SimpleQueue

import httpx
import openai
import pytest
from server_process import Server

import litft
from litft.args import ModelArgs
from litft.data.answer_format import FINAL_HEADER
from litft.inference.generation import Request
from litft.inference.json_grammar import JsonGrammars
from litft.inference.session import open_session
from litft.serving.engine import Engine, Overloaded
from litft.serving.openai_requests import ChatRequest, CompletionRequest, parse_request

TEMPLATE = (
    "{{ bos_token }}{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Lily went to the park."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Lily", "Tom"]},
        "age": {"type": "integer", "maximum": 99, "minimum": 1},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("options") / "stories"
    shutil.copytree(checkpoints["stories"], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    flags = [
        "--allow_host",
        "my.tunnel.example",
        "--cors_origin",
        "https://app.example",
        "--api_key",
        "secret",
    ]
    with Server(folder, *flags, "--max_waiting", "0", "--batch_size", "1") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client("secret")


def ask(client, **settings):
    settings = {"messages": MESSAGES, "model": "stories", "max_tokens": 60} | settings
    return client.chat.completions.create(**settings).choices[0]


def test_other_hosts_are_refused_with_the_remedy(server):
    response = httpx.get(f"{server.url}/health", headers={"Host": "somewhere.else:80"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "invalid_host"
    assert "--allow_host somewhere.else" in error["message"]
    assert (
        httpx.get(f"{server.url}/health", headers={"Host": "my.tunnel.example"}).status_code
        == 200
    )


def test_pages_of_an_allowed_origin_may_call_the_api(server):
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    preflight = httpx.options(f"{server.url}/v1/chat/completions", headers=headers)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    other = httpx.options(
        f"{server.url}/v1/chat/completions",
        headers=headers | {"Origin": "https://evil.example"},
    )
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_the_key_has_no_case(server, scheme):
    for key, status in (("secret", 200), ("wrong", 401)):
        response = httpx.get(
            f"{server.url}/v1/models", headers={"Authorization": f"{scheme} {key}"}
        )
        assert response.status_code == status
    assert (
        httpx.get(
            f"{server.url}/v1/models", headers={"Authorization": "secret"}
        ).status_code
        == 401
    )


def test_an_answer_that_has_ended_takes_no_place(folder):
    """With --max_waiting 0, a client may send its next request as soon as it has the end of an
    answer."""
    session = open_session(ModelArgs(checkpoint_dir=str(folder), accelerator="cpu"))
    engine = Engine({"stories": session}, rows=1, capacity=50, max_waiting=0)
    outcomes = SimpleQueue()

    def ask_again(chunk):
        if not chunk.finish_reason:
            return
        try:
            engine.submit(
                "stories", [(Request([1], 1), lambda chunk: outcomes.put("answered"))]
            )
        except Overloaded:
            outcomes.put("refused")

    engine.start()
    engine.submit("stories", [(Request([1], 1), ask_again)])
    assert outcomes.get(timeout=60) == "answered"
    engine.stop()
    engine.join()


def test_answers_follow_a_json_schema(client):
    described = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for temperature in (0, 2):
        choice = ask(client, response_format=described, temperature=temperature, seed=1)
        person = json.loads(choice.message.content)
        assert (
            person.keys() == {"name", "age"}
            and person["name"] in ("Lily", "Tom")
            and 1 <= person["age"] <= 99
        )
        assert choice.finish_reason == "stop"
    first = ask(client, response_format={"type": "json_object"}, max_tokens=8)
    assert first.message.content.startswith("{")
    # as in llama.cpp's server
    beside = {"type": "json_object", "schema": SCHEMA}
    assert json.loads(ask(client, response_format=beside).message.content).keys() == {
        "name",
        "age",
    }
    # functions that must not be called do not matter
    uncalled = {"tools": [{"function": {"name": "f"}}], "tool_choice": "none"}
    answer = ask(client, response_format=beside, **uncalled).message
    assert json.loads(answer.content).keys() == {"name", "age"}
    # the next answer in the same row is free again
    assert not ask(client, max_tokens=8).message.content.startswith("{")


def test_a_schema_holds_from_the_final_message_of_channels(folder):
    """gpt-oss names the type of the content where JSON was asked for."""
    model, tokenizer = litft.load(folder, precision="fp32")
    grammars = JsonGrammars(tokenizer, model.config.vocab_size)
    headers = {
        "<|channel|>final<|message|>": True,
        "<|channel|>final <|constrain|>json<|message|>": True,
        "<|channel|>final json<|message|>": True,
        "<|channel|>analysis<|message|>": False,
    }
    for header, holds in headers.items():
        constraint = grammars.constraint(SCHEMA, FINAL_HEADER)
        for token in tokenizer.encode(header, bos=False):
            assert constraint.allowed() is None
            constraint.advance(token)
        assert (constraint.allowed() is not None) == holds


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/none"},
        {"$ref": "#"},
        {"enum": []},
        {"type": "string", "pattern": "(?=a)b"},
    ],
    ids=str,
)
def test_a_schema_that_no_answer_follows_is_refused(client, schema):
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(
        openai.BadRequestError, match="response_format: the schema cannot be followed"
    ):
        ask(client, response_format=described)


@pytest.mark.parametrize(
    "variables",
    [{"reasoning_effort": "high"}, {"extra_body": {"chat_template_kwargs": {"mood": 5}}}],
)
def test_variables_reach_the_template(client, folder, variables):
    _, tokenizer = litft.load(folder, precision="fp32")
    names = variables.get("extra_body", {}).get("chat_template_kwargs", variables)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, **names)
    assert ("[high]" in text) != ("(5)" in text)
    response = client.chat.completions.create(
        messages=MESSAGES, model="stories", max_tokens=9, **variables
    )
    assert response.usage.prompt_tokens == len(tokenizer.encode(text, bos=False))


def test_the_last_message_is_continued(client, folder):
    model, tokenizer = litft.load(folder, precision="fp32")
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon a"}]
    choice = ask(
        client,
        messages=messages,
        max_tokens=12,
        extra_body={"continue_final_message": True},
    )
    text = (
        tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True) + " Once upon a"
    )
    text = text.removeprefix("<s>")
    expected = "".join(
        litft.stream(model, tokenizer, text, max_new_tokens=12, temperature=0)
    )
    assert choice.message.content == expected and expected.startswith(" ")


def test_a_thought_is_continued_as_a_thought(client):
    """What follows a thought that the last message leaves open is reasoning, up to its end."""
    texts = []
    for content in ("<think>Once upon a", "<think>Hm.</think>Once upon a"):
        message = ask(
            client,
            messages=[*MESSAGES, {"role": "assistant", "content": content}],
            max_tokens=8,
            extra_body={"continue_final_message": True},
        ).message
        texts.append((bool(message.content), hasattr(message, "reasoning_content")))
    assert texts == [(False, True), (True, False)]


def test_the_sampled_token_is_among_the_alternatives(client):
    choice = ask(
        client, max_tokens=60, temperature=5, seed=3, logprobs=True, top_logprobs=2
    )
    counts = set()
    for entry in choice.logprobs.content:
        tokens = [alternative.token for alternative in entry.top_logprobs]
        assert entry.token in tokens
        counts.add(len(tokens))
    assert counts == {2, 3}


def test_an_empty_logit_bias_keeps_that_of_the_server(folder):
    session = open_session(ModelArgs(checkpoint_dir=str(folder)))
    banned = {5: -math.inf}
    session = session._replace(sampling=replace(session.sampling, logit_bias=banned))
    for bias, expected in ((None, {}), ({}, {}), ({"3": 1}, {3: 1.0})):
        body = json.dumps({"prompt": "a", "logit_bias": bias}).encode()
        request = parse_request(CompletionRequest, body)
        assert request._sampling(session).logit_bias == banned | expected


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "json_schema": None, "schema": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_what_clients_write_out_as_not_set_is_accepted(fields, folder):
    body = {"messages": MESSAGES, **fields}
    request = parse_request(ChatRequest, json.dumps(body).encode())
    assert not list(request.unsupported())
    session = open_session(ModelArgs(checkpoint_dir=str(folder)))
    request._prompt = ""
    request.constraint(session)
