"""Processes that decode together: the same answers as one device's, and an end together."""

import json
import os
import signal
import subprocess
import time

import pytest
from conftest import ENV, adapted, script, start

import litft
from litft.args import AdapterV2Args, LoRAArgs
from litft.methods import AdapterV2, LoRA

PROMPTS = ["One day", "Lily and Tom went to the park. " * 4, "A", "Once upon a time there was a dog. He", "The"]


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints["stories260K"]


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return ["--prompts", "in.jsonl", "--out", "out.jsonl", "--overwrite"]


def generate(folder, cwd, *words, code=0):
    flags = ["--temperature", "0", "--max_new_tokens", "20", "--precision", "fp32"]
    return script("generate/base.py", "--checkpoint_dir", folder, *flags, *words, cwd=cwd, code=code)


def answers(tmp_path):
    return [json.loads(line)["completion"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more", ["--batch_size 3", "--lookup", pytest.param("--draft_dir", marks=pytest.mark.slow)])
def test_the_answers_are_one_devices(folder, prompts, tmp_path, more):
    """Of prompts of different lengths, three at a time; and with guesses, of which some are taken back."""
    model, tokenizer = litft.load(folder, "fp32")
    words = [more, folder] if more == "--draft_dir" else more.split()
    generate(folder, tmp_path, *prompts, *words, "--devices", "2")
    settings = {"temperature": 0, "max_new_tokens": 20}
    assert answers(tmp_path) == ["".join(litft.stream(model, tokenizer, prompt, **settings)) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_chat_of_two_processes(folder, tmp_path):
    """Over turns, with an adapter and without."""
    adapter, lines = adapted(folder, tmp_path / "adapter", LoRA(LoRAArgs(r=4))), "One day\nLily\n/base\n/undo\nA dog\n"
    flags = ["--checkpoint_dir", adapter, "--temperature", "0", "--max_new_tokens", "12", "--precision", "fp32"]
    one, two = (script("generate/chat.py", *flags, "--devices", n, cwd=tmp_path, text=lines).stdout for n in ("1", "2"))
    plain = script("generate/chat.py", *flags, cwd=tmp_path, text=lines.replace("/base", "/stats")).stdout
    assert one == two and one != plain


@pytest.mark.slow
def test_quantized_parts_with_an_adapter(folder, prompts, tmp_path):
    """The adapter's prefixes, scales and norms beside packed bits: what two processes say is text, and repeatable."""
    adapter, found = adapted(folder, tmp_path / "adapter", AdapterV2(AdapterV2Args(prompt_length=4, start_layer=1))), []
    for _ in range(2):
        generate(adapter, tmp_path, *prompts, "--devices", "2", "--quantize", "nf4")
        found.append(answers(tmp_path))
    assert found[0] == found[1] and all(found[0])


@pytest.mark.slow
def test_what_cannot_be_cut_is_said_by_one_process(checkpoints, folder, tmp_path):
    smol = checkpoints["SmolLM2-135M-Instruct"]
    said = generate(smol, tmp_path, "--prompt", "a", "--devices", "2", code=2).stderr
    assert "num_attention_heads 9, num_key_value_heads 3; this model supports 1, 3" in said and said.count("error:") == 1
    said = generate(folder, tmp_path, "--prompt", "a " * 600, "--devices", "2", code=2).stderr
    assert "the model's context is 512; shorten it" in said and said.count("error:") == 1


def test_a_stray_rank_is_told(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(ENV, "LOCAL_RANK", "1")
    said = generate(folder, tmp_path, "--prompt", "a", "--devices", "2", code=2).stderr
    assert "LOCAL_RANK is '1', and no launcher has started this process; unset it" in said


def gone(pid):
    """A process ends within a minute."""
    ends = time.monotonic() + 60
    while subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0:
        assert time.monotonic() < ends
        time.sleep(0.1)


def children(pid):
    """The processes that a process has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def test_a_leader_that_is_killed_while_it_starts_leaves_no_one(folder, tmp_path):
    process = start("generate/base.py", "--checkpoint_dir", folder, "--devices", 2, "--prompt", "a", cwd=tmp_path)
    while not (found := children(process.pid)):
        time.sleep(0.01)
    time.sleep(1)  # it waits for the others to meet it
    process.kill()
    process.wait()
    gone(found[0])


@pytest.mark.parametrize("who", [pytest.param("leader", marks=pytest.mark.slow), "follower"])
def test_a_process_that_is_killed_takes_the_others_with_it(folder, tmp_path, who):
    flags = ["--checkpoint_dir", folder, "--devices", "2", "--max_new_tokens", "400", "--temperature", "0"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start("generate/chat.py", *flags, cwd=tmp_path, **pipes)
    process.stdin.write("One day\n" * 50)
    process.stdin.flush()
    process.stdout.readline()
    (other,) = children(process.pid)
    os.kill(process.pid if who == "leader" else other, signal.SIGKILL)
    said = process.communicate(timeout=60)[1]
    assert "Traceback" not in said and (who == "leader" or "another process" in said), said
    gone(other)
