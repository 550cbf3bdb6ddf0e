"""config.json of every family with changed fields: litft computes what transformers does, or refuses
the file."""

import json
import random

import parity
import torch
import transformers
from test_config_files import contents

import litft

# fields that do not describe the network
UNRELATED = {"architectures", "dtype", "model_type", "transformers_version", "vocab_size"}
UNRELATED |= {"bos_token_id", "eos_token_id", "pad_token_id", "is_encoder_decoder"}
# MPT: transformers cuts its biases at max_seq_len, and takes 8 for alibi_bias_max, whatever it is
UNRELATED |= {"max_seq_len", "alibi_bias_max"}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NUMBERS = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128]
NUMBERS += [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 10.0, 1e-5, 1e-3, 1e4, 5e5]
TEXTS = ["silu", "gelu", "relu", "gelu_pytorch_tanh", "relu2", "sigmoid"]
TEXTS += ["default", "linear", "yarn", "llama3", "longrope", "dynamic"]
ROPES = [
    {},
    parity.LINEAR,
    parity.PART,
    parity.LLAMA3,
    YARN,
    YARN | {"rope_theta": 1e4},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "default", "rope_theta": 3e4},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
]
LISTS = [[], [0], [2], [1, 2], [0, 1, 0], [1, 1, 0], [0, 0, 1], parity.MIXED]
LISTS += [["full_attention"] * 3, ["sliding_attention"] * 3]
VALUES = [None, True, False, *NUMBERS, *TEXTS, *ROPES, *LISTS]
MOST_PARAMETERS = 3_000_000


def changed(text, generator):
    """Return the content of a config.json with one or two changed fields, and the changes."""
    content = json.loads(text)
    changes = {}
    for _ in range(generator.choice((1, 1, 2))):
        place = content
        names = sorted(set(content) - UNRELATED)
        path = [generator.choice(names)]
        while isinstance(place[path[-1]], dict) and place[path[-1]]:
            # sometimes the whole object is replaced
            if generator.random() < 0.2:
                break
            place = place[path[-1]]
            path.append(generator.choice(sorted(place)))
        changes[".".join(path)] = _change(place, path[-1], generator)
        if not place:
            break
    return content, changes


def _change(place, name, generator):
    """Change one field of an object, and return its new value."""
    value = place[name]
    kind = generator.random()
    if kind < 0.15:
        del place[name]
        return "deleted"
    if kind < 0.3:
        place[name] = place[generator.choice(sorted(place))]
    elif kind < 0.5 and isinstance(value, bool):
        place[name] = not value
    elif kind < 0.4 and isinstance(value, int):
        place[name] = value * generator.choice((2, 3))
    else:
        place[name] = generator.choice(VALUES)
    return place[name]


@torch.no_grad()
def reference_of(content):
    """Return transformers' network of a config.json, and its logits; None if it refuses the file,
    or cannot compute them."""
    try:
        config_class = transformers.CONFIG_MAPPING[content["model_type"]]
        config = config_class.from_dict(json.loads(json.dumps(content)))
        with torch.device("meta"):
            outline = transformers.AutoModelForCausalLM.from_config(config)
        if sum(p.numel() for p in outline.parameters()) > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        )
        model.eval().float()
        parity.redraw(model)
        logits = [model(tokens).logits for tokens in batches()]
    except Exception:  # of any kind: transformers checks few fields
        return None
    if not all(part.isfinite().all() for part in logits):
        return None
    return model, logits


def batches():
    """Return tokens within and beyond the original context."""
    return [parity.draw(2, length, seed=length) for length in parity.LENGTHS]


@torch.no_grad()
def test_changed_fields_of_config_files(cases, tmp_path):
    failures = []
    num_equal = 0
    for number in range(cases(80)):
        generator = random.Random(number)
        content, changes = changed(generator.choice(contents()), generator)
        found = reference_of(content)
        if found is None:
            continue
        reference, expected = found
        folder = tmp_path / str(number)
        try:
            reference.save_pretrained(folder)
        except Exception:  # transformers writes no such config.json
            continue
        (folder / "config.json").write_text(json.dumps(content))
        try:
            model, _ = litft.load(folder, precision="fp32")
        except ValueError:
            continue
        difference = 0.0
        for tokens, logits in zip(batches(), expected, strict=True):
            difference = max(difference, parity.relative(model(tokens), logits))
        num_equal += 1
        # where little is left of the logits, rounding has a larger share of them
        if difference > 1e-4 and difference > 100 * parity.rounding_noise(reference):
            failures.append(
                f"{number}, {content['model_type']}, {changes}: {difference:.2g}"
            )
    assert not failures, "\n".join(failures)
    assert num_equal > 8
