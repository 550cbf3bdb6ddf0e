"""Tensor-parallel decoding: several processes give the answers of one device, and end together."""

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

PROMPTS = [
    "One day",
    "Lily and Tom went to the park. " * 4,
    "A",
    "Once upon a time there was a dog. He",
    "The",
]


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints["stories"]


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    )
    return ["--prompts", "in.jsonl", "--out", "out.jsonl", "--overwrite"]


def generate(folder, cwd, *arguments, code=0):
    flags = ["--temperature", "0", "--max_new_tokens", "20", "--precision", "fp32"]
    return script(
        "generate/base.py",
        "--checkpoint_dir",
        folder,
        *flags,
        *arguments,
        cwd=cwd,
        code=code,
    )


def answers(tmp_path):
    return [
        json.loads(line)["completion"]
        for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    "options",
    ["--batch_size 3", "--lookup", pytest.param("--draft_dir", marks=pytest.mark.slow)],
)
@pytest.mark.halved
def test_answers_equal_those_of_one_device(folder, prompts, tmp_path, options):
    """Prompts of different lengths in batches of three, and with draft tokens, some of which are
    rejected."""
    model, tokenizer = litft.load(folder, "fp32")
    flags = [options, folder] if options == "--draft_dir" else options.split()
    generate(folder, tmp_path, *prompts, *flags, "--devices", "2")
    settings = {"temperature": 0, "max_new_tokens": 20}
    assert answers(tmp_path) == [
        "".join(litft.stream(model, tokenizer, prompt, **settings)) for prompt in PROMPTS
    ]


@pytest.mark.slow
def test_a_chat_of_two_processes(folder, tmp_path):
    """A chat over several turns, with and without its adapter."""
    adapter, lines = (
        adapted(folder, tmp_path / "adapter", LoRA(LoRAArgs(r=4))),
        "One day\nLily\n/base\n/undo\nA dog\n",
    )
    flags = [
        "--checkpoint_dir",
        adapter,
        "--temperature",
        "0",
        "--max_new_tokens",
        "12",
        "--precision",
        "fp32",
    ]
    single, split = (
        script("generate/chat.py", *flags, "--devices", n, cwd=tmp_path, text=lines).stdout
        for n in ("1", "2")
    )
    plain = script(
        "generate/chat.py", *flags, cwd=tmp_path, text=lines.replace("/base", "/stats")
    ).stdout
    assert single == split and single != plain


@pytest.mark.slow
def test_quantized_shards_with_an_adapter(folder, prompts, tmp_path):
    """The adapter's prefixes, scales and norms work with quantized weights: answers are not empty
    and reproducible."""
    adapter, outputs = (
        adapted(
            folder,
            tmp_path / "adapter",
            AdapterV2(AdapterV2Args(prompt_length=4, start_layer=1)),
        ),
        [],
    )
    for _ in range(2):
        generate(adapter, tmp_path, *prompts, "--devices", "2", "--quantize", "nf4")
        outputs.append(answers(tmp_path))
    assert outputs[0] == outputs[1] and all(outputs[0])


@pytest.mark.slow
def test_only_one_process_reports_an_error(checkpoints, folder, tmp_path):
    smol = checkpoints["SmolLM2-135M-Instruct"]
    stderr = generate(smol, tmp_path, "--prompt", "a", "--devices", "2", code=2).stderr
    assert (
        "num_attention_heads 9, num_key_value_heads 3; this model supports 1, 3" in stderr
        and stderr.count("error:") == 1
    )
    stderr = generate(
        folder, tmp_path, "--prompt", "a " * 600, "--devices", "2", code=2
    ).stderr
    assert (
        "the model's context is 512; shorten it" in stderr and stderr.count("error:") == 1
    )


def test_a_stray_local_rank_is_reported(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(ENV, "LOCAL_RANK", "1")
    stderr = generate(folder, tmp_path, "--prompt", "a", "--devices", "2", code=2).stderr
    assert "LOCAL_RANK is '1', and no launcher has started this process; unset it" in stderr


def wait_until_gone(pid):
    """Wait until a process has ended; fail after a minute."""
    deadline = time.monotonic() + 60
    while subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid):
    """Return the ids of the child processes."""
    stdout = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [int(word) for word in stdout.split()]


def test_killing_the_leader_during_startup_leaves_no_process(folder, tmp_path):
    process = start(
        "generate/base.py",
        "--checkpoint_dir",
        folder,
        "--devices",
        2,
        "--prompt",
        "a",
        cwd=tmp_path,
    )
    while not (followers := children(process.pid)):
        time.sleep(0.01)
    time.sleep(1)  # the leader waits for the others to connect
    process.kill()
    process.wait()
    wait_until_gone(followers[0])


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("leader", marks=pytest.mark.weekly),
        pytest.param("follower", marks=pytest.mark.slow),
    ],
)
def test_killing_one_process_ends_the_others(folder, tmp_path, victim):
    flags = [
        "--checkpoint_dir",
        folder,
        "--devices",
        "2",
        "--max_new_tokens",
        "400",
        "--temperature",
        "0",
    ]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start("generate/chat.py", *flags, cwd=tmp_path, **pipes)
    process.stdin.write("One day\n" * 50)
    process.stdin.flush()
    process.stdout.readline()
    (follower,) = children(process.pid)
    os.kill(process.pid if victim == "leader" else follower, signal.SIGKILL)
    stderr = process.communicate(timeout=60)[1]
    assert "Traceback" not in stderr and (
        victim == "leader" or "another process" in stderr
    ), stderr
    wait_until_gone(follower)
