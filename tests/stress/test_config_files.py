"""config.json of every family with random mistakes: a network or one message within seconds, never
a traceback."""

import json
import random
from functools import cache

import parity
import pytest
import torch
import transformers
from mistakes import failure

from litft.families import family, read_config
from litft.model.config_fields import FIELD_TYPES
from litft.model.transformer import GPT

VALUES = [None, True, False, "", "x", "auto", 0, 1, 2, 3, 7, -1, 100_000, 10**9, 10**30]
VALUES += [1.5, -0.5, 0.0, 1e-30, 1e308, float("nan"), float("inf")]
VALUES += [
    [],
    [0],
    [-1],
    [[1]],
    [None],
    ["full_attention"],
    ["sliding_attention"] * 3,
    [1.5] * 3,
    [0.5, 2.0],
]
VALUES += [
    [10**9] * 3,
    [56] * 3,
    [2] * 3,
    {},
    {"a": 1},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": ["yarn"]},
]
VALUES += [{"full_attention": {"factor": []}}]


@cache
def contents():
    """Return a small config.json of each variation of each family."""
    found = []
    for class_name, variations in parity.ROWS.values():
        for values in variations.values():
            config = getattr(transformers, class_name)(**{**parity.TINY, **values})
            found.append(config.to_json_string(use_diff=False))
    return found


def mutated(text, generator):
    """Return a config.json with one to three mistakes in it, at any depth."""
    content = json.loads(text)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        place = content
        read = [
            name for name in content if name in FIELD_TYPES
        ]  # most mistakes in what litft reads
        name = generator.choice(
            sorted(read if read and generator.random() < 0.9 else content)
        )
        while isinstance(place[name], dict) and place[name] and generator.random() < 0.8:
            place = place[name]
            name = generator.choice(sorted(place))
        kind = generator.random()
        if kind < 0.1:
            del place[name]
        elif kind < 0.25:  # a value of another field
            place[name] = place[generator.choice(sorted(place))]
        elif kind < 0.35 and isinstance(place[name], int):
            place[name] = place[name] * generator.choice((2, 3, 1000))
        else:
            place[name] = generator.choice(VALUES)
        if not place:
            break
    return content


def network(content):
    """Read a config.json and compute the shapes of a forward pass of its network."""
    config = read_config(content)
    family(config.model_type).rules(config)
    with torch.device("meta"):
        model = GPT(config).to("meta")
        model(torch.zeros(1, 6, dtype=torch.long))


WERE_TRACEBACKS = [
    (
        "DeepseekV3Config",
        {"first_k_dense_replace": [[1]]},
        "first_k_dense_replace must be a whole number",
    ),
    (
        "DeepseekV3Config",
        {"moe_intermediate_size": None},
        "lacks the field 'moe_intermediate_size'",
    ),
    (
        "DeepseekV3Config",
        {"moe_intermediate_size": [56, 56, 56]},
        "moe_intermediate_size must be one number",
    ),
    (
        "Qwen3_5MoeTextConfig",
        {"num_experts": [2, 2, 2]},
        "must be one whole number for all layers",
    ),
    ("OlmoHybridConfig", {"linear_num_key_heads": 4000}, "cannot share 4000 key heads"),
    ("BambaConfig", {"mamba_n_groups": 3}, "do not divide into 3 groups"),
    ("GPTJConfig", {"n_head": 96}, "not divisible by num_attention_heads"),
    ("GptOssConfig", {"swiglu_limit": 10**30}, "swiglu_limit must be a number above 0"),
    ("HunYuanMoEV1Config", {"num_experts": None}, "lacks the field 'num_experts'"),
    (
        "GPTNeoConfig",
        {"attention_types": [[["global"], 10**9]]},
        "attention_types must be a list of pairs",
    ),
    (
        "LlamaConfig",
        {"head_dim": 10**9},
        "head_dim must be a whole number from 1 to 1,000,000",
    ),
    (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": ["yarn"]}},
        "rope_parameters.rope_type must be text",
    ),
]


@pytest.mark.parametrize(("class_name", "change", "message"), WERE_TRACEBACKS)
def test_mistakes_that_were_tracebacks(class_name, change, message):
    variations = [
        variations for name, variations in parity.ROWS.values() if name == class_name
    ]
    values = next(iter(variations[0].values())) if variations else {}
    config = getattr(transformers, class_name)(**{**parity.TINY, **values})
    with pytest.raises(ValueError, match=message):
        network(json.loads(config.to_json_string(use_diff=False)) | change)


def test_mistakes_in_config_files(cases):
    failures = []
    for number in range(cases(200)):
        generator = random.Random(number)
        content = mutated(generator.choice(contents()), generator)
        # the network takes fifty times as long as reading
        attempt = network if number % 4 == 0 else read_config
        problem = failure(lambda attempt=attempt, content=content: attempt(content))
        if problem:
            failures.append(f"{number}, {content.get('model_type')}: {problem}")
    assert not failures, "\n".join(failures)
