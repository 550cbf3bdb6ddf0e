"""Every method from the command line: killed and resumed, continued from an adapter, new tokens,
frozen parameters."""

import csv
import json
import shutil

import pytest
import torch
from conftest import kill_after, script
from safetensors.torch import load_file
from transformers import LlamaConfig

import litft
from litft.args import DataArgs, FullFinetuneArgs, TrainArgs
from litft.data.dataset import load_data
from litft.data.packing import collate
from litft.data.tokenizer import Tokenizer
from litft.pretrained.folder import resolve

TIMED = ("tokens_per_second", "mfu", "memory_gib", "data_share", "seconds")
# flags of everything that resuming may get wrong: random numbers, warm-up, epochs, validation,
# checkpoints
FLAGS = (
    "--data.val_fraction 0.2 --train.epochs 2 --train.global_batch_size 3 --train.warmup_fraction "
    "0.9 --save.interval 3 --eval.interval 4 --eval.max_new_tokens 8 --train.neftune_alpha 5 "
    "--train.label_smoothing 0.1 "
    "--train.learning_rate 0.003"
).split()
METHODS = {
    "full, rounded by chance": "full --precision bf16-true --train.freeze embed,blocks.0.*",
    "pissa, dora, dropout": "lora --lora.r 8 --lora.init pissa --lora.dora "
    "--lora.dropout 0.2 --lora.lr_ratio 4",
    "lora, all it has, int8": "lora --quantize int8 --lora.targets q_proj,embed --lora.modules_to_save norm --lora.bias "
    "all",
    "adapter, new tokens": "adapter --data.new_tokens <once>,<upon>",
}


def rows_of(run):
    with (run / "metrics.csv").open() as file:
        return [
            {k: v for k, v in row.items() if k not in TIMED} for row in csv.DictReader(file)
        ]


def files_of(folder):
    """Return every file's content, without the record of the base model in adapter_config.json."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if config := files.get("adapter_config.json"):
        files["adapter_config.json"] = {
            k: v for k, v in json.loads(config).items() if k != "litft"
        }
    return files


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("full, rounded by chance", marks=pytest.mark.weekly),
        "pissa, dora, dropout",
        "lora, all it has, int8",
        "adapter, new tokens",
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tiny, examples, tmp_path, name):
    method, *more = METHODS[name].split()
    flags = [
        f"finetune/{method}.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        *FLAGS,
        *more,
        "--out_dir",
    ]
    script(*flags, "whole", cwd=tmp_path)
    run = tmp_path / "killed"
    kill_after(6, run, *flags, "killed", cwd=tmp_path)
    assert (
        "continuing after step"
        in script(flags[0], "--out_dir", "killed", "--resume", cwd=tmp_path).stdout
    )
    assert rows_of(run) == rows_of(tmp_path / "whole")
    assert files_of(run / "final") == files_of(tmp_path / "whole" / "final")
    losses = [float(row["val_loss"]) for row in rows_of(run) if row["val_loss"]]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "adapter", "adapter_v2"])
def test_training_continues_from_an_adapter(tiny, examples, tmp_path, method):
    """The same method begins where the adapter ended; another method asks for a merge."""
    flags = [
        "--data.path",
        examples,
        "--train.max_steps",
        4,
        "--train.learning_rate",
        0.01,
        "--data.new_tokens",
        "<upon>",
    ]
    script(
        f"finetune/{method}.py",
        "--checkpoint_dir",
        tiny,
        *flags,
        "--out_dir",
        "first",
        cwd=tmp_path,
    )
    done = script(
        f"finetune/{method}.py",
        "--checkpoint_dir",
        "first",
        *flags,
        "--out_dir",
        "second",
        cwd=tmp_path,
    )
    assert "training continues from this adapter" in done.stdout
    first, second = rows_of(tmp_path / "first"), rows_of(tmp_path / "second")
    assert float(second[0]["val_loss"]) == pytest.approx(
        float(first[-1]["val_loss"]), rel=1e-5
    )
    other = "adapter" if method == "lora" else "lora"
    stderr = script(
        f"finetune/{other}.py", "--checkpoint_dir", "first", *flags, cwd=tmp_path, code=2
    ).stderr
    remedy = (
        "merge it first: python scripts/merge_lora.py"
        if method == "lora"
        else "it cannot be merged, so begin with its base"
    )
    assert f"is an adapter of another method ({method})" in stderr and remedy in stderr
    flags[-1] = "<time>"
    stderr = script(
        f"finetune/{method}.py", "--checkpoint_dir", "first", *flags, cwd=tmp_path, code=2
    ).stderr
    assert (
        "--data.new_tokens '<time>': an adapter goes on with the tokens that it has"
        in stderr
    )


@pytest.mark.parametrize(
    "method",
    ["lora", *(pytest.param(m, marks=pytest.mark.slow) for m in ("full", "adapter"))],
)
def test_new_tokens(tiny, examples, tmp_path, method):
    """They are single tokens in training, in the folder and in transformers.

    PEFT methods train and save only their rows.
    """
    flags = [
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--train.max_steps",
        3,
        "--out_dir",
        "run",
    ]
    script(
        f"finetune/{method}.py", *flags, "--data.new_tokens", "once upon,<x>", cwd=tmp_path
    )
    model, tokenizer = litft.load(tmp_path / "run")
    ids = tokenizer.encode("say once upon a <x>time", bos=False)
    assert {512, 513} <= set(ids)
    # this sentencepiece model drops spaces at ends
    assert tokenizer.decode(ids).replace(" ", "") == "sayonceupona<x>time"
    assert model.config.vocab_size == 514 and model(torch.tensor([ids])).size(-1) == 514
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert hf_tokenizer.convert_tokens_to_ids(["once upon", "<x>"]) == [512, 513]
    final = tmp_path / "run" / "final"
    if method != "full":
        script(
            "scripts/convert_to_hf.py",
            "--checkpoint_dir",
            "run",
            "--merge",
            "false",
            "--out_dir",
            "copy",
            cwd=tmp_path,
        )
        assert (
            load_file(final / "adapter_model.safetensors").keys()
            == load_file(tmp_path / "copy" / "adapter_model.safetensors").keys()
        )
        rows = [
            tensor
            for key, tensor in load_file(final / "adapter_model.safetensors").items()
            if "token" in key
        ]
        assert [tuple(tensor.shape) for tensor in rows] == [(2, 32)] * 2
    if method == "lora":
        script(
            "scripts/merge_lora.py",
            "--checkpoint_dir",
            "run",
            "--out_dir",
            "merged",
            cwd=tmp_path,
        )
        final = tmp_path / "merged"
    if method != "adapter":
        with torch.no_grad():
            reference = AutoModelForCausalLM.from_pretrained(final, dtype="float32")(
                torch.tensor([ids])
            ).logits
            assert (
                reference - model(torch.tensor([ids]))
            ).abs().max() <= 1e-5 * reference.abs().max()


@pytest.mark.halved
def test_frozen_parameters_are_unchanged_and_saved(tiny, examples, tmp_path):
    flags = [
        "finetune/full.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        "--train.max_steps",
        3,
        "--out_dir",
    ]
    # in bf16, to which frozen parameters are rounded in memory, but not on disk
    freeze = ("--train.freeze", "embed,blocks.?.mlp.*,q_proj", "--precision", "bf16-true")
    done = script(*flags, "run", *freeze, cwd=tmp_path)
    before, after = (
        load_file(tiny / "model.safetensors"),
        load_file(tmp_path / "run" / "final" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name in before:
        frozen = "embed_tokens" in name or ".mlp." in name or "q_proj" in name
        assert torch.equal(before[name], after[name]) == frozen, name
    trained = sum(t.numel() for n, t in before.items() if not torch.equal(t, after[n]))
    assert f"full trains {trained:,}" in done.stdout
    stderr = script(*flags, "no", "--train.freeze", "nothing", cwd=tmp_path, code=2).stderr
    assert "--train.freeze nothing: nothing that is trained has that name" in stderr
    stderr = script(*flags, "no", "--train.freeze", "*", cwd=tmp_path, code=2).stderr
    assert "nothing is left to train" in stderr and not (tmp_path / "no").exists()


@pytest.mark.parametrize("pattern", ["blocks.1.*", "model.layers.1.*"])
def test_both_kinds_of_names_freeze_the_parameters_of_a_method(
    pattern, tiny, examples, tmp_path
):
    """Also the prompt and the gate, whose module has no weight of its own."""
    run = litft.finetune(
        method="adapter_v2",
        adapter_start_layer=0,
        model=str(tiny),
        data=str(examples),
        max_steps=2,
        learning_rate=1e-2,
        eval_max_new_tokens=0,
        freeze=[pattern],
        out_dir=str(tmp_path / "run"),
    )
    (file,) = (run.folder / "final").glob("*.safetensors")
    trained = load_file(file)
    gates = {}
    for name, tensor in trained.items():
        if name.endswith("gate"):
            gates[name.split(".")[1]] = float(tensor.abs().sum())
    assert gates.pop("1") == 0
    assert all(gates.values()) and gates


def test_a_full_run_equals_plain_training(tiny, examples, tmp_path):
    """Equal to five steps of torch's AdamW on transformers' model and the same samples."""
    from transformers import AutoModelForCausalLM

    flags = (
        "--data.val_fraction 0 --train.max_steps 5 --train.lr_schedule constant "
        "--train.warmup_fraction 0 "
    )
    flags += (
        "--train.global_batch_size 30 --train.micro_batch_size 7 --train.learning_rate 0.003 "
        "--out_dir run"
    )
    script(
        "finetune/full.py",
        "--checkpoint_dir",
        tiny,
        "--data.path",
        examples,
        *flags.split(),
        cwd=tmp_path,
    )
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    from litft.args import DataArgs

    samples = load_data(
        DataArgs(path=[str(examples)], val_fraction=0), resolve(tiny).tokenizer(), 512, 256
    ).train
    batch = collate([[sample] for sample in samples])
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for _ in range(5):
        logits = reference(batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] - losses[-1] >= 0.3
    assert [float(row["loss"]) for row in rows_of(tmp_path / "run")] == pytest.approx(
        losses, abs=1e-4
    )
    tuned = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "final", dtype="float32"
    )
    for parameter, expected in zip(tuned.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=2e-3)


def test_new_tokens_of_a_frozen_embedding_are_written(make_model, tiny, examples, tmp_path):
    """Even if the vocabulary has room for them and no shape changes."""
    folder = make_model(LlamaConfig, vocab_size=520, max_position_embeddings=256)[1]
    for path in tiny.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    data, train = (
        DataArgs(path=[str(examples)], new_tokens=["<x>"]),
        TrainArgs(max_steps=1, freeze=["embed.weight"]),
    )
    run = litft.finetune(
        FullFinetuneArgs(str(folder), data=data, train=train, out_dir=str(tmp_path / "run"))
    ).folder
    before, after = (litft.load(path, "fp32")[0].embed.weight for path in (folder, run))
    _, tokenizer = litft.load(run)
    pieces = Tokenizer(folder).encode("<x>", bos=False)
    torch.testing.assert_close(
        after[tokenizer.token_id("<x>")], before[pieces].mean(0), rtol=1e-2, atol=1e-3
    )
    assert torch.equal(after[:512], before[:512])
