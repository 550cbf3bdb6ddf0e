"""The server under many clients: requests that end early leave no memory, and a long prompt does
not keep others waiting."""

import asyncio
import json
import random
import statistics
import threading
import time

import pytest
from server_process import NEVER, Server

import litft

MESSAGES = [{"role": "user", "content": "Lily went to the park."}]
CLIENTS = 16
SHORT_PROMPTS = ("In the 7 seas", "In the 8 seas", "In the 9 seas")
MIB = 2**20


def request_head(length, *more_lines):
    """Return the head of an HTTP request with a JSON body of this many bytes."""
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *more_lines,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def good(reader, writer):
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4}).encode()
    writer.write(request_head(len(body)) + body)
    assert b" 200 " in await reader.readline()


async def bad(reader, writer):
    """A long body without JSON."""
    body = b"x" * 3_900_000
    writer.write(request_head(len(body)) + body)
    assert b" 400 " in await reader.readline()


async def too_long(reader, writer):
    """A prompt of a million tokens."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "word " * 700_000}]}
    ).encode()
    writer.write(request_head(len(body)) + body)
    assert b" 400 " in await reader.readline()


async def aborted(reader, writer):
    """A client that leaves before it has sent the last bytes."""
    writer.write(request_head(3_950_000) + b"x" * 3_900_000)
    await writer.drain()


async def slow(reader, writer):
    """A client that sends its body in parts."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4}).encode()
    writer.write(request_head(len(body)))
    for start in range(0, len(body), 20):
        writer.write(body[start : start + 20])
        await asyncio.sleep(0.02)
    assert b" 200 " in await reader.readline()


async def unread(reader, writer):
    """A client that asks for a stream and leaves without reading it."""
    body = json.dumps(
        {"messages": MESSAGES, "max_tokens": 60, "stream": True, "logit_bias": {2: NEVER}}
    ).encode()
    writer.write(request_head(len(body)) + body)
    await writer.drain()
    await asyncio.sleep(0.2)


async def send(server, kind, count):
    """Send requests of one kind, CLIENTS at a time."""
    host, port = server.url.removeprefix("http://").split(":")
    limit = asyncio.Semaphore(CLIENTS)

    async def one():
        async with limit:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                await kind(reader, writer)
            finally:
                writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [good, bad, too_long, aborted, slow, unread], ids=lambda kind: kind.__name__
)
def test_requests_leave_no_memory(checkpoints, cases, kind):
    with Server(checkpoints["stories15M"], "--batch_size", "4") as server:
        asyncio.run(send(server, kind, cases(48)))
        before = server.settled_memory()
        asyncio.run(send(server, kind, cases(144)))
        after = server.settled_memory()
        print(f"{kind.__name__}: {before / MIB:.0f} MiB, then {after / MIB:.0f} MiB")
        assert after - before < 50 * MIB
        assert server.end() == 0 and "Traceback" not in server.log


async def answer(server, request):
    """Return the text of the server's answer to a request."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(request).encode()
    writer.write(request_head(len(body), "Connection: close") + body)
    head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 " in head.splitlines()[0], head
    return json.loads(content)["choices"][0]["message"]["content"]


def random_request(generator):
    """Return a request for a few tokens, greedy or with a seed."""
    words = [
        generator.choice(("Lily", "dog", "the", "park", "went", "7", "big"))
        for _ in range(generator.randint(1, 30))
    ]
    messages = [{"role": "user", "content": " ".join(words)}]
    settings = generator.choice(
        ({"temperature": 0}, {"temperature": 1.0, "seed": generator.randrange(100)})
    )
    return {"messages": messages, "max_tokens": generator.randint(1, 8), **settings}


@pytest.mark.slow
def test_many_clients_get_the_answers_of_one(checkpoints, cases):
    """64 clients at once; memory does not grow with the number of requests."""
    generator = random.Random(0)
    requests = [random_request(generator) for _ in range(40)]
    order = [generator.randrange(len(requests)) for _ in range(cases(400))]
    with Server(checkpoints["stories"], "--batch_size", "16") as server:

        async def one_by_one():
            return [await answer(server, request) for request in requests]

        async def client(indices):
            return [(index, await answer(server, requests[index])) for index in indices]

        async def together(indices):
            return await asyncio.gather(
                *(client(indices[number::64]) for number in range(64))
            )

        expected = asyncio.run(one_by_one())
        asyncio.run(together(order[:200]))
        server.wait_until_idle(30)
        before = server.memory
        start = time.monotonic()
        for answers in asyncio.run(together(order)):
            for index, text in answers:
                assert text == expected[index], requests[index]
        server.wait_until_idle(30)
        print(
            f"{len(order)} requests in {time.monotonic() - start:.0f} s, "
            f"{(server.memory - before) / MIB:.0f} MiB more"
        )
        assert server.memory - before < 50 * MIB
        assert server.end() == 0 and "Traceback" not in server.log


@pytest.mark.weekly
def test_a_short_request_beside_a_long_prompt(checkpoints):
    """It takes at most three times as long as alone, and both get the answers that they get
    alone."""
    folder = checkpoints["SmolLM2-135M-Instruct"]
    long_prompt = " ".join(f"{number} apples" for number in range(800))
    with Server(folder, "--batch_size", "4", "--max_seq_length", "4096") as server:
        client = server.client()

        def ask(prompt):
            messages = [{"role": "user", "content": prompt}]
            reply = client.chat.completions.create(
                model="SmolLM2-135M-Instruct", messages=messages, max_tokens=8
            )
            return reply.choices[0].message.content

        def timed(prompt):
            start = time.perf_counter()
            return ask(prompt), time.perf_counter() - start

        alone = [timed(f"My {number} dogs")[1] for number in range(3)]
        long_answers = []
        thread = threading.Thread(target=lambda: long_answers.append(ask(long_prompt)))
        thread.start()
        beside = []
        answers = []
        for prompt in SHORT_PROMPTS:
            time.sleep(1)
            answer, seconds = timed(prompt)
            answers.append(answer)
            beside.append(seconds)
        assert thread.is_alive()
        thread.join()
    print(
        f"alone {statistics.median(alone):.2f} s, beside a long prompt {max(beside):.2f} s"
    )
    assert max(beside) < 3 * statistics.median(alone)
    model, tokenizer = litft.load(folder, "fp32")
    expected = [
        litft.generate(model, tokenizer, prompt, max_new_tokens=8, temperature=0)
        for prompt in (*SHORT_PROMPTS, long_prompt)
    ]
    assert [*answers, *long_answers] == [str(text) for text in expected]
