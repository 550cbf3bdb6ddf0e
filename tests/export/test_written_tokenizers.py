"""The tokenizer and the chat templates of written folders: in transformers as in training, one
template in each folder."""

import json
import shutil

import pytest
from conftest import copy_unpacked, script
from quirks import QUIRKS
from transformers import AutoTokenizer

from litft.data.encoder import Encoder
from litft.data.sample import SUPERVISED
from litft.data.tokenizer import Tokenizer
from litft.pretrained.save import _write_templates, copy_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
}
CHAT = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Warm."}]
RUN = [
    "--train.max_steps",
    "1",
    "--train.global_batch_size",
    "1",
    "--data.val_fraction",
    "0",
    "--out_dir",
    "run",
]


def with_config(tiny, folder, **settings):
    """Copy a model folder, with settings in its tokenizer_config.json."""
    shutil.copytree(tiny, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def written(tokenizer, folder):
    """Write a tokenizer as into the folder of a result."""
    folder.mkdir()
    copy_tokenizer(tokenizer, folder)
    return folder


TEXTS = [
    "[INST] hi [/INST]",
    "Hello  world",
    "  two  leading",
    "a\n\nb </s> c",
    "[",
    "日本語 🦙",
    "x = [1, 2]\n\n\n  y",
    " ",
]


NAMES = "bytes header fallback words".split()
NAMES += (
    "gemma-2 gpt2 llama-2-7b llama-3.1 mistral-7b-instruct-v0.3 "
    "phi-2 qwen2.5 tinyllama-1.1b-chat".split()
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.halved
def test_ids_in_transformers_equal_those_of_training(tokenizer_folder, tmp_path, name):
    tokenizer = Tokenizer(copy_unpacked(tokenizer_folder(name), tmp_path / name))
    reference = AutoTokenizer.from_pretrained(written(tokenizer, tmp_path / "written"))
    for text in TEXTS:
        assert reference(text).input_ids == tokenizer.encode(text), text
        assert reference(text, add_special_tokens=False).input_ids == tokenizer.encode(
            text, bos=False
        ), text


@pytest.mark.parametrize("name", NAMES)
def test_the_end_token_of_an_adapter_is_known_in_transformers(
    tokenizer_folder, tmp_path, name
):
    """GPT-2's folder does not name it, and an adapter's folder has no config.json."""
    folder = copy_unpacked(tokenizer_folder(name), tmp_path / name)
    tokenizer = Tokenizer(folder)
    reference = AutoTokenizer.from_pretrained(written(tokenizer, tmp_path / "written"))
    assert reference.eos_token == tokenizer.special["eos_token"]
    assert reference.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id


def test_a_tokenizer_whose_ids_may_differ_elsewhere_is_announced(tiny, tokenizer_folder):
    assert "tokenizer.model" in Tokenizer(tiny).portability_note()
    assert Tokenizer(tokenizer_folder("bytes")).portability_note() is None


def test_settings_that_transformers_prefers_are_noted(tokenizer_folder, tmp_path):
    """The written folder says what texts were tokenized with."""
    folder = shutil.copytree(tokenizer_folder("bytes"), tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    for change, is_noted in (
        ({"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False}, False),
        ({"tokenizer_class": "TokenizersBackend", "add_prefix_space": True}, False),
        ({"split_special_tokens": True}, True),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}, True),
    ):
        path.write_text(json.dumps(config | change), "utf-8")
        note = Tokenizer(folder).portability_note()
        assert (note is not None) == is_noted, change
    assert "add_prefix_space true" in note
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(path, out)
    _write_templates(Tokenizer(folder), out)
    written = json.loads((out / "tokenizer_config.json").read_text("utf-8"))
    assert written["add_prefix_space"] is False


NAMED = {
    "default": "{%- for m in messages %}{{ m.role + m.content }}{% endfor %}",
    "tool_use": QUIRKS["plain"],
}


@pytest.mark.parametrize("as_files", [False, True])
def test_the_template_for_tools_is_used_and_kept(tiny, tmp_path, as_files):
    """As in Hermes and Command-R: a template for conversations with tools beside the default
    one."""
    entries = [{"name": name, "template": source} for name, source in NAMED.items()]
    folder = with_config(
        tiny, tmp_path / "base", chat_template=None if as_files else entries
    )
    if as_files:
        (folder / "chat_template.jinja").write_text(NAMED["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
            NAMED["tool_use"]
        )
    tokenizer = Tokenizer(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    for tools in (None, [TOOL]):
        expected = reference.apply_chat_template(CHAT, tools=tools, tokenize=False)
        rendered = tokenizer.apply_chat_template(CHAT, tools)
        assert rendered.removeprefix("<s>") == expected.removeprefix("<s>")
        assert ("weather" in rendered) == bool(tools)
    (sample,) = Encoder(tokenizer, 500)("here", {"messages": CHAT, "tools": [TOOL]}).samples
    ids = [int(x & ~SUPERVISED & 0x0FFFFFFF) for x in sample]
    assert "weather" in tokenizer.decode(ids)
    again = AutoTokenizer.from_pretrained(written(tokenizer, tmp_path / "written"))
    assert again.chat_template.keys() == NAMED.keys()
    flags = ["--checkpoint_dir", folder, "--out_dir", tmp_path / "converted"]
    script("scripts/convert_hf_checkpoint.py", *flags, cwd=tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "converted").chat_template == NAMED
    for tools in (None, [TOOL]):
        assert again.apply_chat_template(
            CHAT, tools=tools, tokenize=False
        ) == tokenizer.apply_chat_template(CHAT, tools)


def test_a_folder_has_one_template(tiny, tmp_path):
    """After --data.template, programs that look in tokenizer_config.json find no other one."""
    folder = with_config(tiny, tmp_path / "base", chat_template=QUIRKS["plain"])
    records = tmp_path / "data.jsonl"
    records.write_text(json.dumps({"messages": CHAT}) + "\n")
    flags = [
        "--checkpoint_dir",
        folder,
        "--data.path",
        records,
        "--data.template",
        "chatml",
    ]
    script("finetune/lora.py", *flags, *RUN, cwd=tmp_path)
    final = tmp_path / "run" / "final"
    assert "chat_template" not in json.loads((final / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in (final / "chat_template.jinja").read_text()
    reference = AutoTokenizer.from_pretrained(final)
    assert reference.apply_chat_template(CHAT, tokenize=False) == Tokenizer(
        final
    ).apply_chat_template(CHAT)


def test_no_template_is_invented(tiny, tmp_path):
    """After a run on text, the result continues a text as the base does."""
    (tmp_path / "data.txt").write_text("Once upon a time there was a little girl. " * 40)
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        "data.txt",
        "--data.template",
        "chatml",
    ]
    done = script("finetune/lora.py", *flags, *RUN, "--dry_run", cwd=tmp_path)
    assert "the chat template is not used: the data is text" in done.stdout + done.stderr
    script("finetune/lora.py", *flags, *RUN, cwd=tmp_path)
    final = tmp_path / "run" / "final"
    assert (
        not (final / "chat_template.jinja").exists()
        and Tokenizer(final).own_template is None
    )
    script(
        "scripts/convert_to_gguf.py",
        "--checkpoint_dir",
        tiny,
        "--out_dir",
        "gguf",
        cwd=tmp_path,
    )
    assert "TEMPLATE" not in (tmp_path / "gguf" / "Modelfile").read_text()
    from gguf import GGUFReader

    (file,) = (tmp_path / "gguf").glob("*.gguf")
    assert "tokenizer.chat_template" not in GGUFReader(file).fields


def test_a_run_on_text_keeps_the_template_of_its_base(tiny, tmp_path):
    folder = with_config(tiny, tmp_path / "base", chat_template=QUIRKS["plain"])
    (tmp_path / "data.txt").write_text("Once upon a time there was a little girl. " * 40)
    flags = [
        "--checkpoint_dir",
        folder,
        "--data.path",
        "data.txt",
        "--data.template",
        "chatml",
    ]
    script("finetune/lora.py", *flags, *RUN, cwd=tmp_path)
    assert (
        Tokenizer(tmp_path / "run" / "final").chat_template
        == Tokenizer(folder).chat_template
    )
