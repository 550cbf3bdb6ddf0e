"""Many clients at once, who come, wait, read and go away as they like."""

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
    f"{who} {what}" for who in ("Once", "Lily", "The dog", "One day a boy", "Mom") for what in ("was", "saw a", "ran")
]
TOKENS = (1, 8, 30, 120)


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    """A model, and an adapter over it, by their names."""
    base = checkpoints["stories260K"]
    method = LoRA(LoRAArgs(r=4, targets=["q_proj", "down_proj"]))
    return {base.name: base, "tuned": adapted(base, tmp_path_factory.mktemp("load") / "tuned", method)}


@pytest.fixture(scope="module")
def expected(folders):
    """Every answer, asked for one by one."""
    found = {}
    for name, folder in folders.items():
        model, tokenizer = litft.load(folder, "fp32")
        for prompt, tokens in product(PROMPTS, TOKENS):
            pieces = litft.stream(model, tokenizer, prompt, max_new_tokens=tokens, temperature=0)
            found[name, prompt, tokens] = "".join(pieces)
    return found


async def visits(client, rng, folders, expected, deadline):
    """One client's requests until the deadline, some of which it gives up; how many it has had answered and given up."""
    answered = left = 0
    while time.monotonic() < deadline:
        name, prompt, tokens = rng.choice([*folders]), rng.choice(PROMPTS), rng.choice(TOKENS)
        settings = dict(model=name, prompt=prompt, max_tokens=tokens, stream=rng.random() < 0.5)
        goes = rng.random() < 0.4
        try:
            asking = client.completions.create(**settings)
            reply = await (asyncio.wait_for(asking, rng.uniform(0, 3)) if goes else asking)
            text = ""
            if settings["stream"]:
                async with reply:
                    async for chunk in reply:
                        text += chunk.choices[0].text
                        if goes and rng.random() < 0.1:
                            raise TimeoutError
            else:
                text = reply.choices[0].text
        except TimeoutError:
            left += 1
            continue
        assert text == expected[name, prompt, tokens], (name, prompt, tokens, text)
        answered += 1
    return answered, left


async def crowd(server, folders, expected, seconds, seed):
    """All clients for so long."""
    deadline = time.monotonic() + seconds
    async with server.client(kind=openai.AsyncOpenAI) as client:
        each = (visits(client, random.Random(f"{seed} {n}"), folders, expected, deadline) for n in range(CLIENTS))
        found = await asyncio.gather(*each)
    return [sum(counts) for counts in zip(*found, strict=True)]


@pytest.mark.slow
def test_a_crowd_leaves_nothing_behind(folders, expected):
    """No place is taken, no memory kept, and no answer was wrong."""
    (base, path), (name, adapter) = folders.items()
    with Server(path, "--adapters", f"{name}={adapter}", "--model_name", base, "--batch_size", "16") as server:
        asyncio.run(crowd(server, folders, expected, min(20, SECONDS / 4), 0))  # memory is as large as it gets
        server.idle()
        before = server.memory
        answered, left = asyncio.run(crowd(server, folders, expected, SECONDS, 1))
        server.idle()
        assert answered > SECONDS and left > SECONDS / 2
        print(f"{answered} answered, {left} left, {(server.memory - before) / 2**20:.1f} MiB more")
        assert server.memory - before < 30 * 2**20
        assert server.end() == 0 and "Traceback" not in server.log
