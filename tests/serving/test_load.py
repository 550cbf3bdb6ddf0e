"""Load test: many concurrent clients that send, stream and cancel requests."""

import asyncio
import os
import random
import time
from itertools import product

import openai
import pytest
from conftest import adapted
from server_process import Server

import litft
from litft.args import LoRAArgs
from litft.methods import LoRA

CLIENTS = 64
SECONDS = float(os.environ.get("LITFT_LOAD_SECONDS", "20"))
PROMPTS = [
    f"{subject} {verb}"
    for subject in ("Once", "Lily", "The dog", "One day a boy", "Mom")
    for verb in ("was", "saw a", "ran")
]
TOKENS = (1, 8, 30, 120)


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    """A base model and an adapter of it, by name."""
    base = checkpoints["stories"]
    method = LoRA(LoRAArgs(r=4, targets=["q_proj", "down_proj"]))
    return {
        base.name: base,
        "tuned": adapted(base, tmp_path_factory.mktemp("load") / "tuned", method),
    }


@pytest.fixture(scope="module")
def expected(folders):
    """Every answer, generated one at a time without the server."""
    answers = {}
    for name, folder in folders.items():
        model, tokenizer = litft.load(folder, "fp32")
        for prompt, tokens in product(PROMPTS, TOKENS):
            pieces = litft.stream(
                model, tokenizer, prompt, max_new_tokens=tokens, temperature=0
            )
            answers[name, prompt, tokens] = "".join(pieces)
    return answers


async def send_requests(client, rng, folders, expected, deadline):
    """Send requests until the deadline and cancel some; return how many were answered and how many
    cancelled."""
    answered = cancelled = 0
    while time.monotonic() < deadline:
        name, prompt, tokens = (
            rng.choice([*folders]),
            rng.choice(PROMPTS),
            rng.choice(TOKENS),
        )
        settings = dict(
            model=name, prompt=prompt, max_tokens=tokens, stream=rng.random() < 0.5
        )
        cancels = rng.random() < 0.4
        try:
            request = client.completions.create(**settings)
            reply = await (
                asyncio.wait_for(request, rng.uniform(0, 3)) if cancels else request
            )
            text = ""
            if settings["stream"]:
                async with reply:
                    async for chunk in reply:
                        text += chunk.choices[0].text
                        if cancels and rng.random() < 0.1:
                            raise TimeoutError
            else:
                text = reply.choices[0].text
        except TimeoutError:
            cancelled += 1
            continue
        assert text == expected[name, prompt, tokens], (name, prompt, tokens, text)
        answered += 1
    return answered, cancelled


async def run_clients(server, folders, expected, seconds, seed):
    """Run all clients for `seconds`; return the totals of answered and cancelled requests."""
    deadline = time.monotonic() + seconds
    async with server.client(client_class=openai.AsyncOpenAI) as client:
        clients = (
            send_requests(client, random.Random(f"{seed} {n}"), folders, expected, deadline)
            for n in range(CLIENTS)
        )
        counts = await asyncio.gather(*clients)
    return [sum(column) for column in zip(*counts, strict=True)]


@pytest.mark.weekly
def test_many_clients_leave_no_requests_and_no_memory_behind(folders, expected):
    """The server is idle again, its memory has not grown, and every answer was correct."""
    (base, path), (name, adapter) = folders.items()
    with Server(
        path, "--adapters", f"{name}={adapter}", "--model_name", base, "--batch_size", "16"
    ) as server:
        # warm up: memory reaches its maximum
        asyncio.run(run_clients(server, folders, expected, min(20, SECONDS / 4), 0))
        server.wait_until_idle()
        memory_before = server.memory
        answered, cancelled = asyncio.run(
            run_clients(server, folders, expected, SECONDS, 1)
        )
        server.wait_until_idle()
        assert answered > SECONDS and cancelled > SECONDS / 2
        print(
            f"{answered} answered, {cancelled} left, {(server.memory - memory_before) / 2**20:.1f} "
            "MiB more"
        )
        assert server.memory - memory_before < 30 * 2**20
        assert server.end() == 0 and "Traceback" not in server.log
