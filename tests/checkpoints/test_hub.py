"""Downloads and uploads against a local hub: huggingface_hub's real requests, and how litft handles
the responses."""

import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ENV, ROOT, STORIES, rows_of, script
from hub import Hub
from make_stories import story

import litft
from litft.args import (
    DataArgs,
    EvalArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    SaveArgs,
    TrainArgs,
    UploadArgs,
)
from litft.checkpoints import hub as hub_module
from litft.checkpoints.hub import HubId, downloaded_from, files_to_transfer, hub_id
from litft.cli import run as command
from litft.export.model_card import model_card
from litft.export.upload_files import _hub_base_of_adapter, card_info
from litft.pretrained.folder import resolve

CLEAN = {name: value for name, value in ENV.items() if not name.startswith("HF_")}


def run(
    arguments: list, cwd: Path, env: dict[str, str], code: int = 0
) -> subprocess.CompletedProcess:
    """Run a script with the environment of a hub."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ENV.keys() - CLEAN.keys():
            patch.delitem(ENV, name)
        return script(*arguments, cwd=cwd, env=env, code=code)


@pytest.fixture(scope="module")
def online(tiny, tmp_path_factory):
    """Return (hub with a tiny model and unneeded files, working folder, environment)."""
    root = tmp_path_factory.mktemp("online")
    shutil.copytree(tiny, root / "source")
    for name in (
        "pytorch_model.bin",
        "model.onnx",
        "tf_model.h5",
        "consolidated.00.pth",
        "training_args.bin",
    ):
        (root / "source" / name).write_bytes(b"much")
    (root / "source" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    with Hub(tiny=root / "source") as hub:
        yield hub, root, hub.env(root / "home")


def test_valid_and_invalid_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for text in ("owner/name", "Qwen/Qwen2.5-0.5B", "a/b.c_d"):
        assert hub_id(text) == HubId(text)
    assert (
        hub_id("owner/name@v1.0") == HubId("owner/name", "v1.0")
        and hub_id("o/n@refs/pr/1").revision == "refs/pr/1"
    )
    assert HubId("o/n", "a" * 40).is_pinned and not HubId("o/n", "main").is_pinned
    for text in (
        "name",
        "./owner/name",
        "/owner/name",
        "a/b/c",
        "../a",
        "here/there",
        "~/a",
        "a/b@",
        "a b/c",
        "",
        "a/b@../c",
        "a/b@x/../../c",
    ):
        assert hub_id(text) is None, text


def test_only_needed_files_are_transferred():
    safetensors = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    unneeded = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "model.onnx",
        "onnx/model.onnx",
        "original/params.json",
        "a.gguf",
    ]
    small = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE.txt",
        "README.md",
    ]
    assert files_to_transfer([*small, *safetensors, *unneeded]) == [*small, *safetensors]
    assert files_to_transfer([*small, *unneeded]) == [*small, "pytorch_model.bin"]
    adapter = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "optimizer.pt",
    ]
    assert files_to_transfer(adapter) == adapter[:2]


@pytest.mark.slow
def test_a_model_is_loaded_by_its_hub_id(online, tiny):
    hub, root, env = online
    arguments = [
        "generate/base.py",
        "--prompt",
        "Once",
        "--max_new_tokens",
        "6",
        "--seed",
        "1",
        "--checkpoint_dir",
    ]
    expected = run([*arguments, tiny], root, {}).stdout
    hub.requests.clear()
    assert run([*arguments, "me/tiny"], root, env).stdout == expected
    fetched = {
        line.rpartition("/")[2] for line in hub.requests if line.startswith("GET /me/")
    }
    expected_files = {
        path.name for path in tiny.iterdir() if path.name != "training_args.bin"
    }
    assert fetched == {*expected_files, "README.md"}
    # a cached commit is not requested again; without a network, the cached state of a branch is
    # used
    pinned, requests = f"me/tiny@{hub.commit('me/tiny')}", list(hub.requests)
    assert (
        run([*arguments, pinned], root, env).stdout == expected and hub.requests == requests
    )
    offline = {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = run([*arguments, "me/tiny"], root, offline)
    assert (
        result.stdout == expected
        and "the hub cannot be reached; using me/tiny from" in result.stderr
    )


@pytest.mark.slow
def test_a_run_records_the_commit_of_its_base_model(online, examples):
    hub, root, env = online
    flags = [
        "--data.path",
        examples,
        "--train.max_steps",
        "2",
        "--save.interval",
        "1",
        "--out_dir",
        "run",
    ]
    run(["finetune/lora.py", "--checkpoint_dir", "me/tiny", *flags], root, env)
    commit = hub.commit("me/tiny")
    assert (
        yaml.safe_load((root / "run" / "config.yaml").read_text())["checkpoint_dir"]
        == f"me/tiny@{commit}"
    )
    config = json.loads((root / "run" / "final" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/tiny", commit)
    requests = list(hub.requests)
    run(
        ["finetune/lora.py", "--resume", "--out_dir", "run", "--train.max_steps", "3"],
        root,
        env,
    )
    arguments = [
        "generate/base.py",
        "--prompt",
        "Once",
        "--max_new_tokens",
        "4",
        "--seed",
        "1",
        "--checkpoint_dir",
    ]
    expected = run([*arguments, "run"], root, env).stdout
    assert hub.requests == requests
    # an adapter moved to another folder downloads its base by the id in adapter_config.json
    shutil.copytree(root / "run" / "final", root / "moved" / "adapter")
    assert (
        run(
            [*arguments, "moved/adapter"], root, {**env, "HF_HOME": str(root / "other")}
        ).stdout
        == expected
    )
    step = root / "run" / "checkpoints" / "step-000003"
    run(
        ["scripts/convert_to_hf.py", "--checkpoint_dir", step, "--out_dir", "early"],
        root,
        env,
    )


@pytest.mark.slow
def test_an_interrupted_download_resumes(online):
    hub, root, env = online
    env = {**env, "HF_HOME": str(root / "empty")}  # files in the cache would be copied
    arguments, weights = (
        ["scripts/download.py", "--repo_id", "me/tiny", "--out_dir"],
        "model.safetensors",
    )
    # within one download, huggingface_hub retries by itself
    hub.cut[weights] = 60_000
    run([*arguments, "models/cut"], root, env)
    assert (root / "models" / "cut" / weights).read_bytes() == hub.models["me/tiny"][
        weights
    ]
    # a second download fetches only the incomplete files
    hub.cut[weights], hub.down_after = 60_000, weights
    result = run([*arguments, "models/tiny"], root, env, code=2)
    assert (
        f"{hub.url} cannot be reached" in result.stderr
        and "downloaded files are kept" in result.stderr
    )
    hub.down_after, hub.is_down = None, False
    hub.requests.clear()
    result = run([*arguments, "models/tiny"], root, env)
    assert [
        line.rpartition("/")[2] for line in hub.requests if line.startswith("GET /me/")
    ] == [weights]
    assert (
        result.stdout.strip() == "models/tiny"
        and f"downloaded me/tiny@{hub.commit('me/tiny')}" in result.stderr
    )
    assert (root / "models" / "tiny" / weights).read_bytes() == hub.models["me/tiny"][
        weights
    ]
    assert downloaded_from(root / "models" / "tiny") == HubId(
        "me/tiny", hub.commit("me/tiny")
    )
    files = {path.name for path in (root / "models" / "tiny").iterdir()}
    assert "pytorch_model.bin" not in files and "config.json" in files


REFUSED = {
    "gated": (
        ["--repo_id", "me/gated"],
        r"me/gated is gated: accept its terms at http.*/me/gated and set HF_TOKEN",
    ),
    "missing": (
        ["--repo_id", "me/nothing"],
        "me/nothing is neither a local folder nor a public repository on the hub",
    ),
    "revision": (["--repo_id", "me/tiny@v9"], "me/tiny has no revision 'v9'; see http"),
    "full": (
        ["--repo_id", "me/huge"],
        r"me/huge@\w+ needs 93132257\.\d GiB more in .*; free space, or choose another disk",
    ),
    "none": (
        ["--repo_id", "me/empty"],
        "the repository has no config.json and no adapter_config.json; name a model",
    ),
    "shape": (["--repo_id", "tiny"], "--repo_id tiny: expected owner/name"),
    "taken": (
        ["--repo_id", "me/tiny", "--out_dir", "taken"],
        "--out_dir taken is not empty and contains no download",
    ),
    "other": (
        ["--repo_id", "me/gated", "--out_dir", "held"],
        r"--out_dir held contains me/tiny@\w+; choose another folder",
    ),
}


DOWNLOAD_EACH = """
import json, sys
from litft import cli
for name, words in json.loads(sys.argv[1]).items():
    try:
        cli.run("download", words)
    except SystemExit as ended:
        print(f"{name} ended with {ended.code}", file=sys.stderr)
"""


def test_refused_downloads_are_reported(online):
    hub, root, env = online
    huge = {"config.json": b"{}", "model.safetensors": b"few", "LICENSE.huge": b"much"}
    hub.models |= {
        "me/gated": hub.models["me/tiny"],
        "me/huge": huge,
        "me/empty": {"a.txt": b""},
    }
    hub.gated.add("me/gated")
    hub.sizes["LICENSE.huge"] = 10**17
    run(["scripts/download.py", "--repo_id", "me/tiny", "--out_dir", "held"], root, env)
    (root / "taken").mkdir()
    (root / "taken" / "mine.txt").write_text("mine")
    commands = json.dumps({name: arguments for name, (arguments, _) in REFUSED.items()})
    result = subprocess.run(
        [sys.executable, "-c", DOWNLOAD_EACH, commands],
        env={**CLEAN, **env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=root,
    )
    messages = re.split(r"(\w+) ended with 2\n", result.stderr)
    assert (
        dict(zip(messages[1::2], messages[::2], strict=False)).keys() == REFUSED.keys()
    ), result.stderr
    for text, name in zip(messages[::2], messages[1::2], strict=False):
        assert re.search(REFUSED[name][1], text), text


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"sha": "short", "siblings": []},
        {"sha": "a" * 40, "siblings": None},
        "<html>",
    ],
)
def test_invalid_responses_are_reported(answer, tmp_path, monkeypatch):
    import huggingface_hub

    from litft.checkpoints.hub import fetch

    with Hub() as hub:
        hub.response = answer
        api = huggingface_hub.HfApi(endpoint=hub.url)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: api)
        with pytest.raises(ValueError, match=r"me/tiny: .* sent no valid response"):
            fetch(HubId("me/tiny"), folder=tmp_path / "out")


def test_a_missing_network_is_reported(tmp_path):
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    for extra_env in ({}, {"HF_HUB_OFFLINE": "1"}):
        result = run(
            ["generate/base.py", "--checkpoint_dir", "me/other", "--prompt", "a"],
            tmp_path,
            {**offline, **extra_env},
            code=2,
        )
        message = (
            " is not in the cache, and HF_HUB_OFFLINE is set"
            if extra_env
            else ": http://127.0.0.1:9 cannot be reached"
        )
        assert f"me/other{message}" in result.stderr


def test_data_is_pinned_if_the_hub_is_reachable(online):
    _, _, env = online
    code = (
        "from litft.checkpoints.hub import *; print(*map(pin_dataset, [HubId('me/data'), "
        "HubId('me/data', 'e' * 40)]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**CLEAN, **env},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.stdout.split() == [f"me/data@{'d' * 40}", f"me/data@{'e' * 40}"], (
        result.stderr
    )
    offline = {**CLEAN, **env, "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=offline, capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout.split()[0] == "me/data"


@pytest.fixture(scope="module")
def tuned(online, examples) -> tuple[Hub, Path, dict[str, str]]:
    """Train the hub's model with LoRA and with full finetuning; return `online`."""
    _, root, env = online
    flags = [
        "--checkpoint_dir",
        "me/tiny",
        "--data.path",
        examples,
        "--train.max_steps",
        "2",
    ]
    run(
        [
            "finetune/lora.py",
            *flags,
            "--lora.r",
            "4",
            "--lora.rank_pattern",
            "q_proj=6",
            "--out_dir",
            "lora",
        ],
        root,
        env,
    )
    run(["finetune/full.py", *flags, "--out_dir", "full"], root, env)
    return online


@pytest.mark.slow
def test_the_model_card_describes_the_run(tuned, examples):
    hub, root, env = tuned
    arguments = [
        "scripts/upload.py",
        "--checkpoint_dir",
        "lora",
        "--repo_id",
        "me/mine",
        "--dry_run",
    ]
    hub.requests.clear()
    result = run(arguments, root, env)
    assert not hub.requests
    metadata = yaml.safe_load(result.stdout.split("---")[1])
    assert metadata == {
        "base_model": "me/tiny",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["litft", "lora"],
    }
    rows = (root / "lora" / "metrics.csv").read_text().splitlines()
    values = [
        dict(zip(rows[0].split(","), row.split(","), strict=True)) for row in rows[1:]
    ]
    last, first = values[-1], values[0]
    for text in (
        f"commit `{hub.commit('me/tiny')[:12]}`",
        "trained by LoRA with litft 0.1.0",
        "Licence: apache-2.0.",
        f"Data: `{examples.name}` (a file).",
        f"| steps, samples, tokens | 2, {int(last['samples'])}, {int(last['tokens']):,} |",
        f"| validation loss, before training | {float(first['val_loss']):.4f} |",
        f"| validation loss, at the end | {float(last['val_loss']):.4f} |",
        "| `--lora.r` | 4 |",
        "| `--lora.rank_pattern` | q_proj=6 |",
        "| `--train.learning_rate` |",
        f"vllm serve me/tiny --revision {hub.commit('me/tiny')} --enable-lora",
        "--max-lora-rank 8 --lora-modules mine=me/mine",
        "litft convert_to_gguf --checkpoint_dir me/mine --out_dir gguf",
    ):
        assert text in result.stdout, text
    assert str(root) not in result.stdout and str(examples.parent) not in result.stdout
    uploads = [
        line.split()[1]
        for line in result.stderr.splitlines()
        if re.match(r" +[\d,]+  \w", line)
    ]
    assert (
        uploads[0] == "README.md"
        and "adapter_config.json" in uploads
        and "adapter_model.safetensors" in uploads
    )
    assert (
        "tokenizer.model" in uploads
        and "chat_template.jinja" in uploads
        and "config.yaml" not in uploads
    )


@pytest.mark.slow
def test_the_card_of_a_merged_model_describes_its_run(tuned, examples):
    _, root, env = tuned
    run(
        ["scripts/merge_lora.py", "--checkpoint_dir", "lora", "--out_dir", "merged"],
        root,
        env,
    )
    arguments = [
        "scripts/upload.py",
        "--checkpoint_dir",
        "merged",
        "--repo_id",
        "me/merged",
        "--dry_run",
    ]
    plain_card, run_card = (
        run(arguments, root, env).stdout,
        run([*arguments, "--run", "lora"], root, env).stdout,
    )
    assert (
        "trained by" not in plain_card
        and "Licence" not in plain_card
        and "vllm serve me/merged" in plain_card
    )
    assert yaml.safe_load(run_card.split("---")[1])["base_model_relation"] == "finetune"
    for text in (
        "A model derived from [me/tiny]",
        "trained by LoRA",
        "Licence: apache-2.0",
        "validation loss, at the end",
    ):
        assert text in run_card
    # a run that continued the adapter has the same base
    flags = ["--checkpoint_dir", "lora", "--data.path", examples, "--train.max_steps", "1"]
    run(["finetune/lora.py", *flags, "--out_dir", "more"], root, env)
    run(
        ["scripts/merge_lora.py", "--checkpoint_dir", "more", "--out_dir", "both"],
        root,
        env,
    )
    arguments[2] = "both"
    card = run([*arguments, "--run", "more"], root, env).stdout
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "me/tiny"
    assert (
        "The training continued from an adapter" in card and "Licence: apache-2.0" in card
    )
    assert (
        "--run merged is not a run of litft"
        in run([*arguments, "--run", "merged"], root, env, code=2).stderr
    )


def snippets(card: str) -> dict[str, str]:
    """Return a card's Python snippets by title."""
    return dict(re.findall(r"(\w+):\n\n```python\n(.*?)```", card, re.DOTALL))


@pytest.mark.weekly
def test_uploaded_models_load_with_the_code_on_their_card(tuned):
    hub, root, env = tuned
    config_file = root / "full" / "final" / "config.json"
    config_file.write_text(
        json.dumps(
            {**json.loads(config_file.read_text()), "_name_or_path": str(root / "secret")}
        )
    )
    for name, title in (("lora", "PEFT"), ("full", "transformers")):
        result = run(
            [
                "scripts/upload.py",
                "--checkpoint_dir",
                name,
                "--repo_id",
                f"me/{name}",
                "--private",
            ],
            root,
            env,
        )
        assert result.stdout.strip().endswith(f"/me/{name}") and hub.private[f"me/{name}"]
        files = hub.models[f"me/{name}"]
        assert not any(
            str(root).encode() in data or b"base_path" in data for data in files.values()
        )
        code = snippets(files["README.md"].decode())[title]
        code += "\nimport torch\nprint(model(torch.arange(3, 40)[None]).logits.sum(-1).tolist()[0][-1])"
        fresh_env = {**env, "HF_HOME": str(root / f"other-{name}")}
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**CLEAN, **fresh_env},
            capture_output=True,
            text=True,
            cwd=root,
        )
        assert result.returncode == 0, result.stderr[-2000:]
        check = (
            f"import litft, torch; model = litft.load('{name}', precision='fp32')[0]; tokens = "
            "torch.arange(3, 40)[None]"
        )
        check += "; print(model(tokens).sum(-1).tolist()[0][-1])"
        local = subprocess.run(
            [sys.executable, "-c", check],
            env={**CLEAN, **env},
            capture_output=True,
            text=True,
            cwd=root,
        )
        assert float(result.stdout.split()[-1]) == pytest.approx(
            float(local.stdout), abs=1e-3
        )
        arguments = [
            "generate/base.py",
            "--prompt",
            "Once",
            "--max_new_tokens",
            "4",
            "--seed",
            "1",
            "--checkpoint_dir",
        ]
        assert (
            run([*arguments, f"me/{name}"], root, fresh_env).stdout
            == run([*arguments, name], root, env).stdout
        )


@pytest.mark.slow
def test_an_adapter_on_a_local_base_needs_the_hub_id_of_its_base(online, tiny, examples):
    hub, root, env = online
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--train.max_steps",
        "1",
        "--out_dir",
        "local",
    ]
    run(["finetune/lora.py", *flags], root, env)
    arguments = [
        "scripts/upload.py",
        "--checkpoint_dir",
        "local",
        "--repo_id",
        "me/local",
        "--dry_run",
    ]
    result = run(arguments, root, env, code=2)
    assert "which is not on the hub; pass its hub id as --base_model" in result.stderr
    result = run([*arguments, "--base_model", "me/tiny", "--licence", "mit"], root, env)
    assert (
        "base_model: me/tiny" in result.stdout
        and "license: mit" in result.stdout
        and str(tiny) not in result.stdout
    )
    # a template with a name of its own
    named = root / "local" / "final" / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("{{ messages[0].content }}")
    run([*arguments[:-1], "--base_model", "me/tiny"], root, env)
    assert "additional_chat_templates/tool_use.jinja" in hub.models["me/local"]
    config = json.loads(hub.models["me/local"]["adapter_config.json"])
    record = json.loads(hub.models["me/local"]["litft.json"])
    assert (
        config["base_model_name_or_path"] == "me/tiny"
        and "base_path" not in record
        and "litft" not in config
    )
    assert not any(str(tiny).encode() in data for data in hub.models["me/local"].values())
    result = run([*arguments, "--base_model", "tiny"], root, env, code=2)
    assert "--base_model tiny: expected owner/name" in result.stderr


def test_files_of_two_commits_are_not_mixed(tmp_path):
    """Those that the new commit lacks would stay, and one file of weights is read before parts."""
    old = HubId("me/tiny", "a" * 40)
    origin = tmp_path / hub_module._ORIGIN_FILE
    origin.parent.mkdir(parents=True)
    origin.write_text(json.dumps(old._asdict()))
    assert downloaded_from(tmp_path) == old
    hub_module._check_same_commit(tmp_path, old)
    hub_module._check_same_commit(None, old)
    with pytest.raises(ValueError, match="has other files; choose another folder"):
        hub_module._check_same_commit(tmp_path, HubId("me/tiny", "b" * 40))


def test_the_base_of_an_uploaded_adapter_keeps_its_revision(tiny):
    """Where the base was opened from a folder that does not know where it comes from."""
    config = {"base_model_name_or_path": "me/tiny", "revision": "abc123"}
    assert _hub_base_of_adapter(resolve(tiny), config) == HubId("me/tiny", "abc123")


@pytest.mark.slow
def test_an_upload_without_a_network_is_reported(tuned):
    _, root, env = tuned
    offline = {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}
    arguments = ["scripts/upload.py", "--checkpoint_dir", "lora", "--repo_id", "me/mine"]
    assert "cannot be reached" in run(arguments, root, offline, code=2).stderr


@pytest.mark.weekly
def test_the_card_of_the_best_step_describes_that_step(tmp_path):
    """The card of a run that continues from an adapter lists no LoRA flags."""
    # the base knows these stories, and the learning rate rises: each step makes it worse
    generator = random.Random(5)
    records = [json.dumps({"text": story(generator)}) for _ in range(24)]
    (tmp_path / "stories.jsonl").write_text("\n".join(records))
    data = DataArgs(path=[str(tmp_path / "stories.jsonl")], val_fraction=0.2)
    train = TrainArgs(max_steps=8, learning_rate=0.1, warmup_fraction=1.0)
    args = LoRAFinetuneArgs(
        str(STORIES),
        data=data,
        train=train,
        lora=LoRAArgs(r=2),
        out_dir=str(tmp_path / "first"),
    )
    args = replace(
        args, eval=EvalArgs(interval=1, max_new_tokens=0), save=SaveArgs(best=True)
    )
    rows = rows_of(litft.finetune(args).folder)
    best = min((row for row in rows if row["step"]), key=lambda row: row["val_loss"])
    assert 0 < best["step"] < 8
    upload = UploadArgs(
        checkpoint_dir=str(tmp_path / "first" / "best"),
        repo_id="me/mine",
        base_model="me/base",
    )
    card = model_card(card_info(resolve(upload.checkpoint_dir), upload))
    assert (
        f"| steps, samples, tokens | {best['step']:.0f}," in card
        and "`--lora.r` | 2" in card
    )
    after = f"validation loss, after step {best['step']:.0f} | {best['val_loss']:.4f} |"
    assert f"| {after}" in card and "Compared with" not in card
    # a checkpoint after the last validation that it knows of
    metrics = tmp_path / "first" / "metrics.csv"
    text = metrics.read_text()
    header, *lines = text.splitlines()
    column = header.split(",").index("val_loss")
    of_best = next(line for line in lines if line.startswith(f"{best['step']:.0f},"))
    blank = ",".join(
        "" if number == column else value for number, value in enumerate(of_best.split(","))
    )
    metrics.write_text(text.replace(of_best, blank))
    card = model_card(card_info(resolve(upload.checkpoint_dir), upload))
    assert (
        f"validation loss, after step {best['step'] - 1:.0f} |" in card or best["step"] == 1
    )
    assert f"validation loss, after step {best['step']:.0f} |" not in card
    metrics.write_text(text)
    # also once it is exported
    for merge in ("true", "false"):
        exported = tmp_path / f"exported-{merge}"
        flags = ["--checkpoint_dir", upload.checkpoint_dir, "--out_dir", exported]
        command("convert_to_hf", [*map(str, flags), "--merge", merge])
        other = replace(upload, checkpoint_dir=str(exported), run=str(tmp_path / "first"))
        assert after in model_card(card_info(resolve(exported), other))
    second = replace(
        args,
        checkpoint_dir=str(tmp_path / "first"),
        lora=LoRAArgs(),
        out_dir=str(tmp_path / "second"),
    )
    litft.finetune(second)
    upload = UploadArgs(
        checkpoint_dir=str(tmp_path / "second" / "final"),
        repo_id="me/mine",
        base_model="me/base",
    )
    assert "`--lora" not in model_card(card_info(resolve(upload.checkpoint_dir), upload))
