"""The HTTP API, called with OpenAI's client and with plain HTTP requests."""

import json
import math
import re
import signal
import socket
import subprocess
import threading
import time

import httpx
import openai
import pytest
import torch
from conftest import adapted, refused, script, start
from server_process import NEVER, Server, copy_with_context

import litft
from litft.args import AdapterV2Args, LoRAArgs, Sampling
from litft.inference.decoder import Decoder
from litft.inference.generation import Request, generate_batch
from litft.methods import AdapterV2, LoRA
from litft.pretrained.folder import DEMO

ROWS, CONTEXT = 3, 2000
ENDLESS = {"2": NEVER}  # a logit_bias that suppresses the end token
MESSAGES = [{"role": "user", "content": "Lily went to the park."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object"},
    },
}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}] {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "({{ call.function.name }} {{ call.function.arguments.town }})"
    "{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    """stories with a longer context and its own chat template."""
    folder = copy_with_context(
        checkpoints["stories"], tmp_path_factory.mktemp("served") / "stories", CONTEXT
    )
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(folder):
    """Two adapters of different methods."""
    lora = LoRA(LoRAArgs(r=4, targets=["q_proj", "down_proj"]))
    return {
        "first": adapted(folder, folder.parent / "first", lora),
        "second": adapted(folder, folder.parent / "second", AdapterV2(AdapterV2Args())),
    }


@pytest.fixture(scope="module")
def server(folder, adapters):
    adapter_flag = ",".join(f"{name}={path}" for name, path in adapters.items())
    flags = [
        "--adapters",
        adapter_flag,
        "--batch_size",
        ROWS,
        "--max_seq_length",
        CONTEXT,
        "--max_waiting",
        "4",
    ]
    with Server(folder, *flags, "--max_body_mb", "0.05") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def reference(folder):
    return litft.load(folder, "fp32")


def reference_text(model, prompt, tokens, **settings):
    """Return the text that litft.stream generates."""
    return "".join(
        litft.stream(
            *model, prompt, max_new_tokens=tokens, **({"temperature": 0} | settings)
        )
    )


def ask(client, messages=MESSAGES, model="stories", tokens=20, **more):
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=tokens, **more
    )


def post(server, path="chat/completions", content=None, **body):
    """Send a request without a client library."""
    headers = {"Content-Type": "application/json"}
    usual = {"messages": MESSAGES} if path.startswith("chat") else {}
    content = json.dumps(usual | {"max_tokens": 3} | body) if content is None else content
    return httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["stories", "first", "second"]
    assert client.models.retrieve("first").max_model_len == CONTEXT
    with pytest.raises(openai.NotFoundError, match="available: stories, first, second"):
        client.models.retrieve("third")


def test_complete_and_streamed_answers(client, reference):
    expected = reference_text(reference, MESSAGES, 30).lstrip()
    response = ask(client, tokens=30)
    assert (
        response.choices[0].message.content == expected
        and response.choices[0].finish_reason == "length"
    )
    assert (
        response.object == "chat.completion"
        and response.model == "stories"
        and response.id.startswith("chatcmpl-")
    )
    ids = reference[1].encode(
        reference[1].apply_chat_template(MESSAGES, add_generation_prompt=True), bos=False
    )
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (
        len(ids),
        30,
    )
    chunks = list(
        ask(client, tokens=30, stream=True, stream_options={"include_usage": True})
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    )
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 2
    ) + ["length"]
    assert (
        not chunks[-1].choices
        and chunks[-1].usage.total_tokens == response.usage.total_tokens
    )
    # the first request has cached the prompt
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_first_model_is_the_default(server, client):
    assert post(server).json()["model"] == "stories"


def test_completions_continue_the_prompts(client, reference):
    prompts = ["Once upon a time", "The dog"]
    response = client.completions.create(
        model="stories", prompt=prompts, max_tokens=12, n=2
    )
    assert [choice.text for choice in response.choices] == [
        reference_text(reference, text, 12) for text in prompts for _ in range(2)
    ]
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    ids = [reference[1].encode(text) for text in prompts]
    assert (
        response.usage.prompt_tokens == sum(map(len, ids))
        and response.usage.completion_tokens == 48
    )
    by_ids = client.completions.create(model="stories", prompt=ids, max_tokens=12)
    assert [choice.text for choice in by_ids.choices] == [
        response.choices[0].text,
        response.choices[2].text,
    ]
    assert (
        client.completions.create(model="stories", prompt=ids[0]).usage.completion_tokens
        == 16
    )
    parts = list(
        client.completions.create(
            model="stories", prompt=prompts, max_tokens=12, stream=True
        )
    )
    for index, text in enumerate(prompts):
        streamed = "".join(
            part.choices[0].text for part in parts if part.choices[0].index == index
        )
        assert streamed == reference_text(reference, text, 12)


def test_stop_texts_end_an_answer(client, reference):
    text = reference_text(reference, "Once upon a time", 40)
    stop = text.split()[5]
    response = client.completions.create(
        model="stories", prompt="Once upon a time", max_tokens=40, stop=[stop, "zzz"]
    )
    assert (
        response.choices[0].text == text[: text.index(stop)]
        and response.choices[0].finish_reason == "stop"
    )
    assert response.usage.completion_tokens < 40


def test_a_seed_reproduces_answers_and_choices_differ(client):
    settings = dict(temperature=1.2, seed=7, n=3, top_p=0.95)
    first, second = ask(client, **settings), ask(client, **settings)
    texts = [choice.message.content for choice in first.choices]
    assert (
        texts == [choice.message.content for choice in second.choices]
        and len(set(texts)) == 3
    )
    assert (
        ask(client, temperature=1.2, seed=8, top_p=0.95).choices[0].message.content
        == texts[1]
    )


def test_vllm_parameters_are_supported(client):
    greedy = ask(client).choices[0].message.content
    assert (
        ask(client, temperature=5, seed=1, extra_body={"top_k": 1})
        .choices[0]
        .message.content
        == greedy
    )
    assert (
        ask(client, temperature=5, seed=1, extra_body={"min_p": 1.0})
        .choices[0]
        .message.content
        == greedy
    )
    assert (
        ask(client, tokens=60, frequency_penalty=2).choices[0].message.content
        != ask(client, tokens=60).choices[0].message.content
    )


@torch.no_grad()
def test_log_probabilities_equal_the_models(client, reference):
    model, tokenizer = reference
    ids = tokenizer.encode("The dog")
    completion_logprobs = (
        client.completions.create(
            model="stories", prompt="The dog", max_tokens=5, logprobs=3
        )
        .choices[0]
        .logprobs
    )
    chat_logprobs = (
        ask(client, tokens=5, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    )
    chat_ids = tokenizer.encode(
        tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True), bos=False
    )
    for prompt, entries in (
        (
            ids,
            list(
                zip(
                    completion_logprobs.token_logprobs,
                    completion_logprobs.top_logprobs,
                    strict=True,
                )
            ),
        ),
        (chat_ids, chat_logprobs),
    ):
        sequence = list(prompt)
        for entry in entries:
            logprob, top = (
                entry
                if isinstance(entry, tuple)
                else (
                    entry.logprob,
                    [candidate.logprob for candidate in entry.top_logprobs],
                )
            )
            expected = model(torch.tensor([sequence]))[0, -1].log_softmax(-1)
            sequence.append(int(expected.argmax()))
            assert math.isclose(logprob, float(expected.max()), abs_tol=1e-4)
            values = sorted(top.values(), reverse=True) if isinstance(top, dict) else top
            assert torch.allclose(torch.tensor(values), expected.topk(3).values, atol=1e-4)
    assert (
        "".join(completion_logprobs.tokens).strip()
        == reference_text(reference, "The dog", 5).strip()
    )
    assert completion_logprobs.text_offset == [
        len("".join(completion_logprobs.tokens[:n])) for n in range(5)
    ]
    assert bytes(chat_logprobs[0].bytes).decode() == chat_logprobs[0].token


def test_the_end_token_has_no_log_probability(client, reference):
    """It has no text to report a log-probability for."""
    end = reference[1].stop_ids[0]
    settings = dict(logit_bias={str(end): 100}, temperature=0, tokens=5)
    choice = ask(client, logprobs=True, **settings).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.logprobs.content) == (
        "stop",
        "",
        [],
    )


def test_tools_reach_the_template(client, reference):
    def continuation(text):
        model, tokenizer = reference
        request = Request(
            tokenizer.encode(f"<s>{text}", bos=False),
            15,
            Sampling(0.0),
            tokenizer.stop_ids,
            strip_leading=True,
        )
        return "".join(
            piece
            for _, piece in generate_batch(
                Decoder(model, capacity=200), tokenizer, [request]
            )
        )

    prompt = "user: Lily went to the park.\nassistant:"
    without_tools, with_tools = ask(client, tokens=15), ask(client, tokens=15, tools=[TOOL])
    assert with_tools.usage.prompt_tokens > without_tools.usage.prompt_tokens
    assert with_tools.choices[0].message.content == continuation(f"[weather] {prompt}")
    assert ask(client, tokens=15, tools=[TOOL], tool_choice="none").choices[
        0
    ].message.content == continuation(prompt)
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"town": "Oslo"}'},
    }
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "warm"}]
    answer = ask(client, messages, tokens=15, tools=[TOOL]).choices[0].message.content
    history = "assistant: (weather Oslo)\ntool: warm\n"
    text = f"[weather] {prompt.removesuffix('assistant:')}{history}assistant:"
    assert answer == continuation(text)


def test_adapters_of_one_base_answer_concurrently(client, folder, adapters, reference):
    """Each answer equals that of its adapter without the server."""
    expected = {"stories": reference_text(reference, MESSAGES, 40).lstrip()}
    expected |= {
        name: reference_text(litft.load(path, "fp32"), MESSAGES, 40).lstrip()
        for name, path in adapters.items()
    }
    responses, threads = {}, []
    for name in [*expected] * 3:
        threads.append(
            threading.Thread(
                target=lambda name=name: responses.setdefault(name, []).append(
                    ask(client, model=name, tokens=40)
                )
            )
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(expected.values())) == 3
    for name, replies in responses.items():
        assert [reply.choices[0].message.content for reply in replies] == [
            expected[name]
        ] * 3


def test_concurrent_requests_are_batched(server, client):
    """Three concurrent requests take far less time than three sequential ones."""
    settings = dict(tokens=400, logit_bias=ENDLESS)

    def seconds(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def three_at_once():
        threads = [
            threading.Thread(target=ask, args=(client,), kwargs=settings) for _ in range(3)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    ask(client, **settings)
    ratios = [
        seconds(three_at_once) / seconds(lambda: ask(client, **settings)) for _ in range(3)
    ]
    assert min(ratios) < 2.5  # other tests run beside this one


INVALID_REQUESTS = [
    (dict(model="nobody"), 404, "model", "available: stories"),
    (dict(messages=[]), 400, "messages", "at least one message"),
    (dict(temprature=1), 400, "temprature", "unknown field"),
    (dict(messages="hello"), 400, "messages", "array"),
    (dict(messages=None), 400, "messages", ""),
    (dict(messages=[{"role": "robot", "content": "a"}]), 400, "messages", "robot"),
    (
        dict(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
            ]
        ),
        400,
        "messages",
        "image_url",
    ),
    (
        dict(messages=[{"role": "user", "content": "word " * 1999}]),
        400,
        "messages",
        "shorten",
    ),
    # tokenized in parts: the rest does not matter
    (
        dict(messages=[{"role": "user", "content": "word " * 9000}]),
        400,
        "messages",
        "more than 2000 tokens",
    ),
    (dict(temperature="hot"), 400, "temperature", "number"),
    (dict(temperature=-1), 400, "temperature", "-1"),
    (dict(top_p=0), 400, "top_p", "(0, 1]"),
    (dict(n=0), 400, "n", "1"),
    (dict(n=1000), 400, "n", "128"),
    (dict(max_tokens=0), 400, "max_tokens", "1"),
    (dict(max_tokens=2.5), 400, "max_tokens", "integer"),
    (dict(stop=[""]), 400, "stop", "empty"),
    (dict(stop=["a"] * 33), 400, "stop", "32"),
    (dict(stop="a" * 1001), 400, "stop", "1000"),
    (dict(stop=5), 400, "stop", "string"),
    (dict(logit_bias={"600": 1}), 400, "logit_bias", "512"),
    (dict(logit_bias={"a": 1}), 400, "logit_bias", "integer"),
    (dict(logit_bias={"1": 1000}), 400, "logit_bias", "100"),
    (dict(top_logprobs=3), 400, "top_logprobs", "logprobs"),
    (dict(logprobs=True, top_logprobs=50), 400, "top_logprobs", "20"),
    (dict(tools=[TOOL], tool_choice="required"), 400, "tool_choice", "auto"),
    (dict(tools=[5]), 400, "tools", "object"),
    (
        dict(tools=[TOOL], response_format={"type": "json_object"}),
        400,
        "response_format",
        "pass tool_choice none",
    ),
    (dict(response_format={"type": "xml"}), 400, "response_format", "json_schema"),
    (dict(response_format={"type": "json_schema"}), 400, "response_format", "schema"),
    (
        dict(
            response_format={
                "type": "json_schema",
                "json_schema": {"schema": {"type": "x"}},
            }
        ),
        400,
        "response_format",
        "x",
    ),
    (
        dict(response_format={"type": "json_object", "json_schema": {"schema": {}}}),
        400,
        "response_format",
        "unknown field json_schema",
    ),
    (
        dict(response_format={"type": "json_schema", "json_schema": {"shema": {}}}),
        400,
        "response_format",
        "unknown field shema",
    ),
    (dict(stream=True, stream_options={"usage": True}), 400, "stream_options", "unknown"),
    (dict(chat_template_kwargs={"messages": []}), 400, "messages", "remove it"),
    (dict(chat_template_kwargs={"self": 1}), 400, "messages", "remove it"),
    (dict(tools=[{"function": None}]), 400, "tools", "a name"),
    (dict(tools=[{"function": {"name": ["a"]}}]), 400, "tools", "a name"),
    (dict(continue_final_message=True), 400, "messages", "cannot be continued"),
    (
        dict(continue_final_message=True, response_format={"type": "json_object"}),
        400,
        "response_format",
        "leave it out with continue_final_message",
    ),
    (dict(messages=[{"role": "user", "content": "\ud800"}]), 400, None, ""),
    (dict(temperature=math.nan), 400, "temperature", "nan"),
]


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    INVALID_REQUESTS,
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_returns_an_openai_error(server, body, status, param, words):
    response = post(server, **body)
    error = response.json()["error"]
    assert response.status_code == status and words in error["message"], error
    assert (
        error.keys() == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
    )
    assert error["param"] == param


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [[5], [600]], [1, "a"], "", None])
def test_invalid_prompts_are_rejected(server, prompt):
    response = post(server, "completions", prompt=prompt)
    # an empty prompt still has the BOS token
    assert response.status_code == (200 if prompt == "" else 400), response.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 9999, b'{"messages": 1e999}']
)
def test_invalid_bodies_are_rejected(server, content):
    response = post(server, content=content)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_paths_methods_and_hosts(server):
    message = httpx.post(f"{server.url}/v1/responses").json()["error"]["message"]
    assert "/v1/responses: Not Found; this server has /v1/chat/completions" in message
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    form = httpx.post(f"{server.url}/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415 and "application/json" in form.json()["error"]["message"]
    assert (
        httpx.get(f"{server.url}/health", headers={"Host": "somewhere.else"}).status_code
        == 400
    )
    for name in ("localhost", "127.0.0.1:80", "[::1]:80"):
        assert (
            httpx.get(f"{server.url}/health", headers={"Host": name}).status_code == 200
        ), name


def test_a_body_that_is_too_large_is_rejected(server):
    response = post(server, messages=[{"role": "user", "content": "a" * 60_000}])
    assert (
        response.status_code == 413
        and response.json()["error"]["code"] == "request_too_large"
    )


def test_a_disconnected_client_frees_its_row(server):
    """Whether the request is waiting, streaming or not streaming."""
    body = {"messages": MESSAGES, "max_tokens": 1900, "logit_bias": ENDLESS}
    for _ in range(3):
        for stream in (True, False):
            connections = [
                open_request(server, body | {"stream": stream}) for _ in range(ROWS + 2)
            ]
            deadline = time.monotonic() + 5
            while server.health["running"] < ROWS or server.health["waiting"] < 2:
                assert time.monotonic() < deadline, server.health
            for connection in connections:
                connection.close()
            server.wait_until_idle(2)


def open_request(server, body):
    """Send a request without reading the response; return the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_a_long_prompt_does_not_block_other_requests(checkpoints, tmp_path):
    """The prompt is prefilled in chunks; other requests are decoded in between."""
    folder = copy_with_context(checkpoints["stories15M"], tmp_path / "long", 8192)
    with Server(folder, "--max_seq_length", "8000") as server:
        client = server.client()
        stream = client.completions.create(
            model="long",
            prompt="One day",
            max_tokens=3000,
            stream=True,
            logit_bias={"2": NEVER},
        )
        next(stream)
        start, end_times, token_times = time.perf_counter(), [], []

        def request_long_prompt():
            client.completions.create(model="long", prompt="word " * 6000, max_tokens=1)
            end_times.append(time.perf_counter())

        thread = threading.Thread(target=request_long_prompt)
        thread.start()
        for _ in stream:
            token_times.append(time.perf_counter())
            if end_times:
                break
        thread.join()
        stream.close()
        gaps = [
            after - before
            for before, after in zip([start, *token_times], token_times, strict=False)
        ]
        assert len(token_times) > 6 and max(gaps) < 0.5 * (end_times[0] - start)


def test_tools_are_rejected_if_the_template_ignores_them(checkpoints):
    with Server(checkpoints["stories"]) as server:
        response = post(server, tools=[TOOL])
        assert (
            response.status_code == 400
            and "does not support tools" in response.json()["error"]["message"]
        )
        assert post(server, tools=[TOOL], tool_choice="none").status_code == 200


def test_nan_logits_fail_only_their_own_request(checkpoints, tmp_path):
    """A token with a NaN embedding fails its own request with status 500 and affects no other
    request."""
    from safetensors.torch import load_file, save_file

    folder = copy_with_context(checkpoints["stories"], tmp_path / "broken", 512)
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    tensors["model.embed_tokens.weight"][100] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "tie_word_embeddings": False
    }
    (folder / "config.json").write_text(json.dumps(config))
    with Server(folder, "--batch_size", "2") as server:
        healthy_request = dict(path="completions", prompt="My cat", max_tokens=20)
        expected = post(server, **healthy_request).json()["choices"][0]["text"]
        broken_requests = [
            dict(path="completions", prompt="Once", max_tokens=60, logit_bias={"100": 100})
            for _ in range(4)
        ]
        broken_requests += [dict(path="completions", prompt=[5, 100, 7], max_tokens=5)]
        for body in broken_requests:
            for stream in (False, True):
                response = post(server, **body, stream=stream)
                message = (
                    response.text
                    if response.status_code == 200
                    else response.json()["error"]["message"]
                )
                assert "logits are NaN" in message and response.status_code in (
                    (200, 500) if stream else (500,)
                )
        concurrent_request = threading.Thread(
            target=post,
            args=(server,),
            kwargs=dict(path="completions", prompt="Once upon a", max_tokens=200),
        )
        concurrent_request.start()
        for _ in range(3):
            assert post(server, **healthy_request).json()["choices"][0]["text"] == expected
        concurrent_request.join()
        server.wait_until_idle()


@pytest.mark.slow
def test_a_request_for_many_choices_does_not_block_others(folder):
    with Server(folder, "--batch_size", "2", "--max_seq_length", str(CONTEXT)) as server:
        client, finished = server.client(), []
        settings = dict(n=20, temperature=1.0, logit_bias=ENDLESS, tokens=100)
        many_choices = threading.Thread(
            target=lambda: (ask(client, **settings), finished.append("crowd"))
        )
        many_choices.start()
        while not server.health["waiting"]:
            time.sleep(0.01)
        ask(client, tokens=3)
        finished.append("one")
        many_choices.join()
        assert finished == ["one", "crowd"]


def test_requests_that_can_never_be_served_are_rejected(server):
    response = post(server, n=3 * ROWS + 4 + 1)
    assert (
        response.status_code == 400
        and "ask for fewer" in response.json()["error"]["message"]
    )
    start = time.perf_counter()
    response = post(server, "completions", prompt=[[1]] * 5000, n=128)
    assert response.status_code == 400 and time.perf_counter() - start < 1


def test_negative_seeds_are_supported(client):
    settings = dict(temperature=1.2, n=3)
    texts = {
        seed: [
            choice.message.content for choice in ask(client, seed=seed, **settings).choices
        ]
        for seed in (-5, -1, 1, 5)
    }
    assert len({text for choices in texts.values() for text in choices[:2]}) == 8
    assert len(set(texts[-1])) == 3


@pytest.mark.slow
def test_shutdown_does_not_wait_for_stalled_clients(folder):
    """One client has sent half a request; the other does not read its response."""
    with Server(folder, "--max_seq_length", str(CONTEXT)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        incomplete = socket.create_connection((host, int(port)))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\n"
            "Host: localhost\r\n"
            "Content-Type: application/json\r\n"
        )
        incomplete.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        body = {
            "messages": MESSAGES,
            "max_tokens": 400,
            "n": 8,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
        unread = open_request(server, body | {"logit_bias": ENDLESS})
        while not server.health["running"]:
            time.sleep(0.01)
        start = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - start < 40 and "Traceback" not in server.log
        incomplete.close()
        unread.close()


def test_requests_beyond_max_waiting_are_refused(server):
    body = {"messages": MESSAGES, "max_tokens": 1900, "logit_bias": ENDLESS}
    connections = [open_request(server, body) for _ in range(3 * ROWS + 4)]
    try:
        deadline = time.monotonic() + 5
        while sum(server.health[name] for name in ("running", "waiting")) < 3 * ROWS + 4:
            assert time.monotonic() < deadline, server.health
        response = post(server)
        assert (
            response.status_code == 503 and response.json()["error"]["code"] == "overloaded"
        )
        assert response.headers["retry-after"] == "1"
    finally:
        for connection in connections:
            connection.close()
    server.wait_until_idle()


def test_graceful_shutdown(folder):
    """The running answer is completed, the waiting request is refused, and the exit code is 0."""
    with Server(folder, "--batch_size", "1", "--max_seq_length", str(CONTEXT)) as server:
        client = server.client()
        stream = ask(
            client,
            tokens=1000,
            logit_bias=ENDLESS,
            stream=True,
            stream_options={"include_usage": True},
        )
        next(stream)
        responses = []
        waiting = threading.Thread(target=lambda: responses.append(post(server)))
        waiting.start()
        while not server.health["waiting"]:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens == 1000
        waiting.join()
        assert (
            responses[0].status_code == 503
            and responses[0].json()["error"]["code"] == "stopping"
        )
        assert server.process.wait(timeout=20) == 0
        server.reader.join()
        assert (
            "SIGTERM: finishing running answers" in server.log
            and "Traceback" not in server.log
        )


def test_a_second_signal_exits_immediately(folder):
    with Server(folder, "--max_seq_length", str(CONTEXT)) as server:
        stream = ask(server.client(), tokens=1900, logit_bias=ENDLESS, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        while "finishing" not in server.log:
            time.sleep(0.01)
        assert server.end(signal.SIGINT) == 130


@pytest.mark.parametrize("source", ["flag", "environment"])
def test_requests_need_the_api_key(folder, source):
    flags, env = (
        (["--api_key", "sesame"], {})
        if source == "flag"
        else ([], {"LITFT_API_KEY": "sesame"})
    )
    with Server(folder, *flags, **env) as server:
        assert ask(server.client("sesame"), tokens=2).choices[0].message.content
        for key in ("sesam", "sesamé", "none"):
            response = httpx.get(
                f"{server.url}/v1/models",
                headers={"Authorization": f"Bearer {key}".encode()},
            )
            assert (
                response.status_code == 401
                and response.json()["error"]["code"] == "invalid_api_key"
            )
        with pytest.raises(openai.AuthenticationError):
            ask(server.client("wrong"))
        assert httpx.get(f"{server.url}/v1/models").headers["www-authenticate"] == "Bearer"
        assert (
            httpx.get(f"{server.url}/").status_code
            == httpx.get(f"{server.url}/health").status_code
            == 200
        )
        assert server.end() == 0


def test_answer_length_limits(folder):
    with Server(folder, "--max_new_tokens", "7", "--max_seq_length", "60") as server:
        settings = dict(logit_bias=ENDLESS)
        client = server.client()
        assert ask(client, tokens=50, **settings).usage.completion_tokens == 7
        assert (
            client.chat.completions.create(
                model="stories", messages=MESSAGES, **settings
            ).usage.completion_tokens
            == 7
        )
    with Server(folder, "--max_seq_length", "60") as server:
        response = server.client().chat.completions.create(
            model="stories", messages=MESSAGES, **settings
        )
        assert (
            response.usage.total_tokens == 60
            and response.choices[0].finish_reason == "length"
        )


@pytest.mark.slow
def test_a_tensor_parallel_model_is_served(folder, reference):
    """Two processes serve it and exit together."""
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    with Server(
        folder, "--devices", "2", "--max_seq_length", "300", "--port", port
    ) as server:
        client = server.client()
        replies = {}
        threads = [
            threading.Thread(target=lambda n=n: replies.update({n: ask(client, tokens=n)}))
            for n in (5, 20, 40)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for count, reply in replies.items():
            assert (
                reply.choices[0].message.content
                == reference_text(reference, MESSAGES, count).lstrip()
            )
        assert server.end() == 0 and "Traceback" not in server.log


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.halved
@pytest.mark.weekly
def test_the_base_is_served_too(method, tmp_path):
    """An adapter's base shares its weights; that of a full fine-tuning run is the model that it
    began with."""
    run = tmp_path / "tuned"
    script(
        f"finetune/{method}.py",
        "--out_dir",
        run,
        "--train.max_steps",
        12,
        "--train.learning_rate",
        0.01,
        "--eval.max_new_tokens",
        0,
        cwd=tmp_path,
    )
    with Server(run, "--with_base") as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["tuned", "base"]
        answers = {}
        for name, folder in {"tuned": run, "base": DEMO / "base"}.items():
            reply = client.chat.completions.create(
                model=name, messages=MESSAGES, max_tokens=10
            )
            answers[name] = reply.choices[0].message.content
            assert (
                answers[name]
                == reference_text(litft.load(folder, "fp32"), MESSAGES, 10).lstrip()
            )
        assert answers["tuned"] != answers["base"]
        assert (
            client.chat.completions.create(
                model=None, messages=MESSAGES, max_tokens=10
            ).model
            == "tuned"
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--with_base"], "neither an adapter nor the result of a run"),
        (["--with_base", "--devices", "2"], "serves one model only"),
        (["--adapters", "a"], "NAME=DIR"),
        (["--adapters", "a=x,a=y"], "twice"),
        (["--adapters", "stories={folder}"], "--model_name"),
        (["--adapters", "other={folder}"], "no adapter"),
        (["--max_seq_length", "100000"], "context"),
        (["--api_key", ""], "--api_key"),
        (["--port", "70000"], "65535"),
        (["--host", "300.1.1.1"], "cannot listen"),
        (["--batch_size", "0"], "at least 1"),
        (["--batch_size", "1000000000"], "at most 4096"),
        (["--max_seq_length", "1"], "at least 2"),
    ],
    ids=str,
)
def test_invalid_flags_are_rejected(folder, flags, message, capsys):
    flags = [flag.format(folder=folder) for flag in flags]
    assert message in refused(
        "serve", "--checkpoint_dir", folder, "--port", "0", *flags, capsys=capsys
    )


def test_a_port_in_use_is_reported(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = script(
            "generate/serve.py",
            "--checkpoint_dir",
            folder,
            "--port",
            port,
            cwd=tmp_path,
            code=2,
        )
    assert f"--port {port}" in done.stderr and "choose another" in done.stderr


def test_a_missing_package_is_reported_with_the_install_command(folder, tmp_path):
    (tmp_path / "uvicorn.py").write_text(
        "raise ModuleNotFoundError('no uvicorn', name='uvicorn')"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    done = script(
        "generate/serve.py", "--checkpoint_dir", folder, cwd=tmp_path, env=env, code=2
    )
    assert (
        done.stderr
        == "error: serving needs the package uvicorn; pip install 'litft[serve]'\n"
    )


def test_sigterm_ends_a_server_whose_stderr_is_not_read(checkpoints, tmp_path):
    """Its message cannot be written then."""
    flags = ["--checkpoint_dir", checkpoints["stories"], "--port", "0"]
    process = start("generate/serve.py", *flags, cwd=tmp_path, stderr=subprocess.PIPE)
    url = next(
        match[1]
        for line in process.stderr
        if (match := re.search(r"at (http://\S+)", line))
    )
    # the server has printed all that it prints at the start
    assert httpx.get(url).status_code == 200
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
