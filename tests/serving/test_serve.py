"""The endpoint, as OpenAI's own client and others meet it."""

import json
import math
import signal
import socket
import threading
import time

import httpx
import openai
import pytest
import torch
from conftest import adapted, refused, script
from server_process import NEVER, Server, lengthened

import litft
from litft.args import AdapterV2Args, LoRAArgs, Sampling
from litft.inference.decoder import Decoder
from litft.inference.generation import Request, generate_batch
from litft.methods import AdapterV2, LoRA

ROWS, ROOM = 3, 2000
ENDLESS = {"2": NEVER}  # a logit_bias without the end token
TALK = [{"role": "user", "content": "Lily went to the park."}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}] {% endfor %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    """stories260K with room for long answers and a template of its own."""
    folder = lengthened(checkpoints["stories260K"], tmp_path_factory.mktemp("served") / "stories", ROOM)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(folder):
    """Two adapters, of different methods."""
    lora = LoRA(LoRAArgs(r=4, targets=["q_proj", "down_proj"]))
    return {
        "first": adapted(folder, folder.parent / "first", lora),
        "second": adapted(folder, folder.parent / "second", AdapterV2(AdapterV2Args())),
    }


@pytest.fixture(scope="module")
def server(folder, adapters):
    named = ",".join(f"{name}={path}" for name, path in adapters.items())
    flags = ["--adapters", named, "--batch_size", ROWS, "--max_seq_length", ROOM, "--max_waiting", "4"]
    with Server(folder, *flags, "--max_body_mb", "0.05") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def plain(folder):
    return litft.load(folder, "fp32")


def alone(model, prompt, tokens, **settings):
    """What litft says by itself."""
    return "".join(litft.stream(*model, prompt, max_new_tokens=tokens, **({"temperature": 0} | settings)))


def ask(client, messages=TALK, model="stories", tokens=20, **more):
    return client.chat.completions.create(model=model, messages=messages, max_tokens=tokens, **more)


def raw(server, path="chat/completions", content=None, **body):
    """A request as it stands."""
    headers = {"Content-Type": "application/json"}
    usual = {"messages": TALK} if path.startswith("chat") else {}
    content = json.dumps(usual | {"max_tokens": 3} | body) if content is None else content
    return httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["stories", "first", "second"]
    assert client.models.retrieve("first").max_model_len == ROOM
    with pytest.raises(openai.NotFoundError, match="available: stories, first, second"):
        client.models.retrieve("third")


def test_an_answer_whole_and_streamed(client, plain):
    expected = alone(plain, TALK, 30).lstrip()
    whole = ask(client, tokens=30)
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "length"
    assert whole.object == "chat.completion" and whole.model == "stories" and whole.id.startswith("chatcmpl-")
    ids = plain[1].encode(plain[1].apply_chat_template(TALK, add_generation_prompt=True), bos=False)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 30)
    chunks = list(ask(client, tokens=30, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert not chunks[-1].choices and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(ids) - 1  # the same was read before
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_model_that_is_not_named_is_the_first(server, client):
    assert raw(server).json()["model"] == "stories"


def test_texts_are_continued(client, plain):
    prompts = ["Once upon a time", "The dog"]
    found = client.completions.create(model="stories", prompt=prompts, max_tokens=12, n=2)
    assert [choice.text for choice in found.choices] == [alone(plain, text, 12) for text in prompts for _ in range(2)]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    ids = [plain[1].encode(text) for text in prompts]
    assert found.usage.prompt_tokens == sum(map(len, ids)) and found.usage.completion_tokens == 48
    by_ids = client.completions.create(model="stories", prompt=ids, max_tokens=12)
    assert [choice.text for choice in by_ids.choices] == [found.choices[0].text, found.choices[2].text]
    assert client.completions.create(model="stories", prompt=ids[0]).usage.completion_tokens == 16
    parts = list(client.completions.create(model="stories", prompt=prompts, max_tokens=12, stream=True))
    for index, text in enumerate(prompts):
        own = "".join(part.choices[0].text for part in parts if part.choices[0].index == index)
        assert own == alone(plain, text, 12)


def test_stop_texts_end_an_answer(client, plain):
    text = alone(plain, "Once upon a time", 40)
    stop = text.split()[5]
    found = client.completions.create(model="stories", prompt="Once upon a time", max_tokens=40, stop=[stop, "zzz"])
    assert found.choices[0].text == text[: text.index(stop)] and found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens < 40


def test_a_seed_repeats_and_choices_differ(client):
    settings = dict(temperature=1.2, seed=7, n=3, top_p=0.95)
    first, second = ask(client, **settings), ask(client, **settings)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 3
    assert ask(client, temperature=1.2, seed=8, top_p=0.95).choices[0].message.content == texts[1]


def test_what_vllm_adds_counts_too(client):
    greedy = ask(client).choices[0].message.content
    assert ask(client, temperature=5, seed=1, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert ask(client, temperature=5, seed=1, extra_body={"min_p": 1.0}).choices[0].message.content == greedy
    assert (
        ask(client, tokens=60, frequency_penalty=2).choices[0].message.content
        != ask(client, tokens=60).choices[0].message.content
    )


@torch.no_grad()
def test_log_probabilities_are_the_models(client, plain):
    model, tokenizer = plain
    ids = tokenizer.encode("The dog")
    found = client.completions.create(model="stories", prompt="The dog", max_tokens=5, logprobs=3).choices[0].logprobs
    asked = ask(client, tokens=5, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    talk = tokenizer.encode(tokenizer.apply_chat_template(TALK, add_generation_prompt=True), bos=False)
    for prompt, said in ((ids, list(zip(found.token_logprobs, found.top_logprobs, strict=True))), (talk, asked)):
        text = list(prompt)
        for entry in said:
            logprob, top = (
                entry if isinstance(entry, tuple) else (entry.logprob, [own.logprob for own in entry.top_logprobs])
            )
            expected = model(torch.tensor([text]))[0, -1].log_softmax(-1)
            text.append(int(expected.argmax()))
            assert math.isclose(logprob, float(expected.max()), abs_tol=1e-4)
            values = sorted(top.values(), reverse=True) if isinstance(top, dict) else top
            assert torch.allclose(torch.tensor(values), expected.topk(3).values, atol=1e-4)
    assert "".join(found.tokens).strip() == alone(plain, "The dog", 5).strip()
    assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(5)]
    assert bytes(asked[0].bytes).decode() == asked[0].token


def test_an_end_token_is_not_told(client, plain):
    """Its log-probability would have no text."""
    end = plain[1].stop_ids[0]
    settings = dict(logit_bias={str(end): 100}, temperature=0, tokens=5)
    chosen = ask(client, logprobs=True, **settings).choices[0]
    assert (chosen.finish_reason, chosen.message.content, chosen.logprobs.content) == ("stop", "", [])


def test_tools_reach_the_template(client, plain):
    def said(text):
        model, tokenizer = plain
        request = Request(
            tokenizer.encode(f"<s>{text}", bos=False), 15, Sampling(0.0), tokenizer.stop_ids, strip_leading=True
        )
        return "".join(piece for _, piece in generate_batch(Decoder(model, capacity=200), tokenizer, [request]))

    asked = "user: Lily went to the park.\nassistant:"
    usual, with_tools = ask(client, tokens=15), ask(client, tokens=15, tools=[TOOL])
    assert with_tools.usage.prompt_tokens > usual.usage.prompt_tokens
    assert with_tools.choices[0].message.content == said(f"[weather] {asked}")
    assert ask(client, tokens=15, tools=[TOOL], tool_choice="none").choices[0].message.content == said(asked)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk += [{"role": "tool", "tool_call_id": "1", "content": "warm"}]
    found = ask(client, talk, tokens=15, tools=[TOOL]).choices[0].message.content
    text = f"[weather] {asked.removesuffix('assistant:')}assistant: (weather)\ntool: warm\nassistant:"
    assert found == said(text)


def test_adapters_over_one_base_answer_at_once(client, folder, adapters, plain):
    """Each as it does by itself."""
    expected = {"stories": alone(plain, TALK, 40).lstrip()}
    expected |= {name: alone(litft.load(path, "fp32"), TALK, 40).lstrip() for name, path in adapters.items()}
    found, threads = {}, []
    for name in [*expected] * 3:
        threads.append(
            threading.Thread(target=lambda name=name: found.setdefault(name, []).append(ask(client, model=name, tokens=40)))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(expected.values())) == 3
    for name, replies in found.items():
        assert [own.choices[0].message.content for own in replies] == [expected[name]] * 3


def test_requests_are_answered_together(server, client):
    """Of three rows each waits for its own tokens alone: three at once take far less than three one by one."""
    settings = dict(tokens=400, logit_bias=ENDLESS)

    def seconds(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def together():
        threads = [threading.Thread(target=ask, args=(client,), kwargs=settings) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    ask(client, **settings)
    one, three = seconds(lambda: ask(client, **settings)), seconds(together)
    assert three < 2.5 * one


WRONG = [
    (dict(model="nobody"), 404, "model", "available: stories"),
    (dict(messages=[]), 400, "messages", "at least one message"),
    (dict(temprature=1), 400, "temprature", "unknown field"),
    (dict(messages="hello"), 400, "messages", "array"),
    (dict(messages=None), 400, "messages", ""),
    (dict(messages=[{"role": "robot", "content": "a"}]), 400, "messages", "robot"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]), 400, "messages", "image_url"),
    (dict(messages=[{"role": "user", "content": "word " * 1999}]), 400, "messages", "shorten"),
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
    (dict(response_format={"type": "json_object"}), 400, "response_format", "text"),
    (dict(messages=[{"role": "user", "content": "\ud800"}]), 400, None, ""),
    (dict(temperature=math.nan), 400, "temperature", "nan"),
]


@pytest.mark.parametrize(("body", "status", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_bad_request_is_told_in_the_apis_shape(server, body, status, param, words):
    response = raw(server, **body)
    error = response.json()["error"]
    assert response.status_code == status and words in error["message"], error
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [[5], [600]], [1, "a"], "", None])
def test_prompts_that_are_none(server, prompt):
    response = raw(server, "completions", prompt=prompt)
    assert response.status_code == (200 if prompt == "" else 400), response.text  # an empty text has its BOS


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 9999, b'{"messages": 1e999}'])
def test_bodies_that_are_none(server, content):
    response = raw(server, content=content)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_addresses_and_ways(server):
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["message"].endswith("Not Found")
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    form = httpx.post(f"{server.url}/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415 and "application/json" in form.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health", headers={"Host": "somewhere.else"}).status_code == 400
    for name in ("localhost", "127.0.0.1:80", "[::1]:80"):
        assert httpx.get(f"{server.url}/health", headers={"Host": name}).status_code == 200, name


def test_a_long_body_is_read_no_further(server):
    response = raw(server, messages=[{"role": "user", "content": "a" * 60_000}])
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


def test_who_goes_away_frees_the_place(server):
    """While it waits, while it is streamed to, while it gets nothing yet."""
    body = {"messages": TALK, "max_tokens": 1900, "logit_bias": ENDLESS}
    for _ in range(3):
        for stream in (True, False):
            connections = [_begin(server, body | {"stream": stream}) for _ in range(ROWS + 2)]
            deadline = time.monotonic() + 5
            while server.health["running"] < ROWS or server.health["waiting"] < 2:
                assert time.monotonic() < deadline, server.health
            for connection in connections:
                connection.close()
            server.idle(2)


def _begin(server, body):
    """Send a request without waiting for what comes."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_a_long_prompt_lets_others_go_on(checkpoints, tmp_path):
    """It is read in pieces, between which they get their tokens."""
    folder = lengthened(checkpoints["stories15M"], tmp_path / "long", 8192)
    with Server(folder, "--max_seq_length", "8000") as server:
        client = server.client()
        stream = client.completions.create(
            model="long", prompt="One day", max_tokens=3000, stream=True, logit_bias={"2": NEVER}
        )
        next(stream)
        began, ended, times = time.perf_counter(), [], []

        def long():
            client.completions.create(model="long", prompt="word " * 6000, max_tokens=1)
            ended.append(time.perf_counter())

        thread = threading.Thread(target=long)
        thread.start()
        for _ in stream:
            times.append(time.perf_counter())
            if ended:
                break
        thread.join()
        stream.close()
        gaps = [after - before for before, after in zip([began, *times], times, strict=False)]
        assert len(times) > 6 and max(gaps) < 0.5 * (ended[0] - began)


def test_tools_without_a_place_are_refused(checkpoints):
    with Server(checkpoints["stories260K"]) as server:
        response = raw(server, tools=[TOOL])
        assert response.status_code == 400 and "does not support tools" in response.json()["error"]["message"]
        assert raw(server, tools=[TOOL], tool_choice="none").status_code == 200


def test_numbers_that_are_none_stay_where_they_are(checkpoints, tmp_path):
    """A token whose vector is NaN ends an answer with 500, and no other one, then or later."""
    from safetensors.torch import load_file, save_file

    folder = lengthened(checkpoints["stories260K"], tmp_path / "broken", 512)
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    tensors["model.embed_tokens.weight"][100] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with Server(folder, "--batch_size", "2") as server:
        ask = dict(path="completions", prompt="My cat", max_tokens=20)
        expected = raw(server, **ask).json()["choices"][0]["text"]
        broken = [dict(path="completions", prompt="Once", max_tokens=60, logit_bias={"100": 100}) for _ in range(4)]
        broken += [dict(path="completions", prompt=[5, 100, 7], max_tokens=5)]
        for body in broken:
            for stream in (False, True):
                response = raw(server, **body, stream=stream)
                told = response.text if response.status_code == 200 else response.json()["error"]["message"]
                assert "logits are NaN" in told and response.status_code in ((200, 500) if stream else (500,))
        longer = threading.Thread(
            target=raw, args=(server,), kwargs=dict(path="completions", prompt="Once upon a", max_tokens=200)
        )
        longer.start()
        for _ in range(3):
            assert raw(server, **ask).json()["choices"][0]["text"] == expected
        longer.join()
        server.idle()


def test_many_answers_to_one_request_let_others_pass(folder):
    with Server(folder, "--batch_size", "2", "--max_seq_length", str(ROOM)) as server:
        client, ends = server.client(), []
        settings = dict(n=20, temperature=1.0, logit_bias=ENDLESS, tokens=100)
        crowd = threading.Thread(target=lambda: (ask(client, **settings), ends.append("crowd")))
        crowd.start()
        while not server.health["waiting"]:
            time.sleep(0.01)
        ask(client, tokens=3)
        ends.append("one")
        crowd.join()
        assert ends == ["one", "crowd"]


def test_what_can_never_be_answered_is_refused_for_good(server):
    response = raw(server, n=3 * ROWS + 4 + 1)
    assert response.status_code == 400 and "ask for fewer" in response.json()["error"]["message"]
    began = time.perf_counter()
    response = raw(server, "completions", prompt=[[1]] * 5000, n=128)
    assert response.status_code == 400 and time.perf_counter() - began < 1


def test_negative_seeds_are_seeds(client):
    settings = dict(temperature=1.2, n=3)
    texts = {seed: [own.message.content for own in ask(client, seed=seed, **settings).choices] for seed in (-5, -1, 1, 5)}
    assert len({text for own in texts.values() for text in own[:2]}) == 8
    assert len(set(texts[-1])) == 3


def test_a_stop_does_not_wait_for_clients_who_do_nothing(folder):
    """One has not said all of what it wants, and one does not read what it is told."""
    with Server(folder, "--max_seq_length", str(ROOM)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        half = socket.create_connection((host, int(port)))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        half.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        body = {"messages": TALK, "max_tokens": 400, "n": 8, "stream": True, "logprobs": True, "top_logprobs": 20}
        deaf = _begin(server, body | {"logit_bias": ENDLESS})
        while not server.health["running"]:
            time.sleep(0.01)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 40 and "Traceback" not in server.log
        half.close()
        deaf.close()


def test_more_than_may_wait_are_refused(server):
    body = {"messages": TALK, "max_tokens": 1900, "logit_bias": ENDLESS}
    connections = [_begin(server, body) for _ in range(3 * ROWS + 4)]
    try:
        deadline = time.monotonic() + 5
        while sum(server.health[name] for name in ("running", "waiting")) < 3 * ROWS + 4:
            assert time.monotonic() < deadline, server.health
        response = raw(server)
        assert response.status_code == 503 and response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
    finally:
        for connection in connections:
            connection.close()
    server.idle()


def test_a_clean_stop(folder):
    """What is being said is said to its end, what waits is refused, and the exit code is 0."""
    with Server(folder, "--batch_size", "1", "--max_seq_length", str(ROOM)) as server:
        client = server.client()
        stream = ask(client, tokens=1000, logit_bias=ENDLESS, stream=True, stream_options={"include_usage": True})
        next(stream)
        refused = []
        waits = threading.Thread(target=lambda: refused.append(raw(server)))
        waits.start()
        while not server.health["waiting"]:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens == 1000
        waits.join()
        assert refused[0].status_code == 503 and refused[0].json()["error"]["code"] == "stopping"
        assert server.process.wait(timeout=20) == 0
        server.reader.join()
        assert "SIGTERM: finishing running answers" in server.log and "Traceback" not in server.log


def test_a_second_signal_ends_at_once(folder):
    with Server(folder, "--max_seq_length", str(ROOM)) as server:
        stream = ask(server.client(), tokens=1900, logit_bias=ENDLESS, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        while "finishing" not in server.log:
            time.sleep(0.01)
        assert server.end(signal.SIGINT) == 130


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_only_who_has_the_key_is_answered(folder, way):
    words, env = (["--api_key", "sesame"], {}) if way == "flag" else ([], {"LITFT_API_KEY": "sesame"})
    with Server(folder, *words, **env) as server:
        assert ask(server.client("sesame"), tokens=2).choices[0].message.content
        for key in ("sesam", "sesamé", "none"):
            response = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            ask(server.client("wrong"))
        assert httpx.get(f"{server.url}/v1/models").headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{server.url}/").status_code == httpx.get(f"{server.url}/health").status_code == 200
        assert server.end() == 0


def test_the_limits_of_an_answer(folder):
    with Server(folder, "--max_new_tokens", "7", "--max_seq_length", "60") as server:
        settings = dict(logit_bias=ENDLESS)
        client = server.client()
        assert ask(client, tokens=50, **settings).usage.completion_tokens == 7
        assert client.chat.completions.create(model="stories", messages=TALK, **settings).usage.completion_tokens == 7
    with Server(folder, "--max_seq_length", "60") as server:
        found = server.client().chat.completions.create(model="stories", messages=TALK, **settings)
        assert found.usage.total_tokens == 60 and found.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_a_network_that_is_cut_is_served(folder, plain):
    """By two processes, which end together."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Server(folder, "--devices", "2", "--max_seq_length", "300", "--port", port) as server:
        client = server.client()
        found = {}
        threads = [threading.Thread(target=lambda n=n: found.update({n: ask(client, tokens=n)})) for n in (5, 20, 40)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for count, reply in found.items():
            assert reply.choices[0].message.content == alone(plain, TALK, count).lstrip()
        assert server.end() == 0 and "Traceback" not in server.log


@pytest.mark.parametrize(
    ("words", "said"),
    [
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
def test_what_cannot_be_served(folder, words, said, capsys):
    words = [word.format(folder=folder) for word in words]
    assert said in refused("serve", "--checkpoint_dir", folder, "--port", "0", *words, capsys=capsys)


def test_a_port_that_is_taken(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = script("generate/serve.py", "--checkpoint_dir", folder, "--port", port, cwd=tmp_path, code=2)
    assert f"--port {port}" in done.stderr and "choose another" in done.stderr


def test_without_the_packages_one_message_says_what_to_install(folder, tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('no uvicorn', name='uvicorn')")
    env = {"PYTHONPATH": str(tmp_path)}
    done = script("generate/serve.py", "--checkpoint_dir", folder, cwd=tmp_path, env=env, code=2)
    assert done.stderr == "error: serving needs the package uvicorn; pip install 'litft[serve]'\n"
