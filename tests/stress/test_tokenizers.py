"""Tokenizer files with random mistakes: they work, or end in one message."""

import json
import random
import shutil

import pytest
from mistakes import failure, mutated

from litft.data.tokenizer import Tokenizer
from litft.pretrained.folder import DEMO
from litft.pretrained.save import copy_tokenizer

TEXTS = ("Hello world", "", "日本 🎉\n\n  x", "<s></s>[UNK]")
NAMES = (
    "tokenizer.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
TEMPLATES = [
    {"name": "default", "template": "{{ messages[0].content }}"},
    {"name": "tool_use", "template": "tools"},
]


@pytest.fixture
def folder(tmp_path):
    """The demo's tokenizer, with named templates."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in dict.fromkeys(NAMES):
        shutil.copy(DEMO / "base" / name, folder)
    change(
        folder,
        "tokenizer_config.json",
        lambda config: config | {"chat_template": TEMPLATES},
    )
    return folder


def change(folder, name, update):
    path = folder / name
    path.write_text(json.dumps(update(json.loads(path.read_text("utf-8")))), "utf-8")


def use(folder, out):
    """Do with a tokenizer what a run does."""
    tokenizer = Tokenizer(folder)
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text, bos=False))
    tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    tokenizer.digest()
    copy_tokenizer(tokenizer, out)


def test_mistakes_in_tokenizer_files(folder, tmp_path, cases):
    contents = {name: (folder / name).read_text("utf-8") for name in NAMES}
    failures = []
    for number in range(cases(40)):
        generator = random.Random(number)
        name = generator.choice(NAMES)
        for other, content in contents.items():
            (folder / other).write_text(content, "utf-8")
        change(
            folder, name, lambda content, generator=generator: mutated(content, generator)
        )
        out = tmp_path / f"out{number}"
        out.mkdir()
        problem = failure(lambda out=out: use(folder, out))
        if problem:
            failures.append(f"{number}, {name}: {problem}")
        assert {path.name for path in tmp_path.iterdir()} <= {
            "tokenizer",
            *(f"out{n}" for n in range(number + 1)),
        }
    assert not failures, "\n".join(failures)


def largest_id(content):
    vocabulary = content["model"]["vocab"]
    vocabulary[next(iter(vocabulary))] = 2**31
    return content


def test_an_id_that_no_model_has(folder, tmp_path):
    """The library would write two billion lines."""
    change(folder, "tokenizer.json", largest_id)
    with pytest.raises(ValueError, match="the token id 2,147,483,648, which no model has"):
        use(folder, tmp_path)


def test_a_template_does_not_leave_its_folder(folder, tmp_path):
    outside = [{"name": "../../evil", "template": "x"}, *TEMPLATES]
    change(
        folder, "tokenizer_config.json", lambda config: config | {"chat_template": outside}
    )
    out = tmp_path / "a" / "b"
    out.mkdir(parents=True)
    use(folder, out)
    assert not list(tmp_path.glob("evil*")) and not list((tmp_path / "a").glob("evil*"))
