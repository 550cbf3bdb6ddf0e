"""The command line: --help, flags, config files, and the message of every mistake."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT, refused, script

import litft
from litft import args as flags
from litft import run_dir
from litft.args import parser
from litft.args.aliases import ALIASES, BETAS, hint_for_flag
from litft.args.build_parser import PRINT_CONFIG, parser_of
from litft.args.finetune_commands import FINETUNE, LoRAFinetuneArgs
from litft.args.flag_names import full_flag
from litft.args.flag_types import types_of_flags
from litft.args.ignored import ignored_flags
from litft.args.keywords import from_keywords
from litft.args.parser import parse
from litft.cli import COMMANDS, run

SCRIPTS = {
    "finetune lora": "finetune/lora.py",
    "finetune adapter": "finetune/adapter.py",
    "finetune adapter_v2": "finetune/adapter_v2.py",
    "finetune full": "finetune/full.py",
    "generate": "generate/base.py",
    "chat": "generate/chat.py",
    "serve": "generate/serve.py",
    "run_eval": "scripts/run_eval.py",
    "merge_lora": "scripts/merge_lora.py",
    "prepare_data": "scripts/prepare_data.py",
    "plan": "scripts/plan.py",
    "runs": "scripts/runs.py",
    "sweep": "scripts/sweep.py",
    "recipes": "scripts/recipes.py",
    "schema": "scripts/schema.py",
    "convert_hf_checkpoint": "scripts/convert_hf_checkpoint.py",
    "convert_to_hf": "scripts/convert_to_hf.py",
    "download": "scripts/download.py",
    "upload": "scripts/upload.py",
    "convert_gguf_checkpoint": "scripts/convert_gguf_checkpoint.py",
    "convert_to_gguf": "scripts/convert_to_gguf.py",
}


def test_every_command_has_a_script():
    assert SCRIPTS.keys() == COMMANDS.keys()
    for command, path in SCRIPTS.items():
        assert f'    run("{command}")\n' in (ROOT / path).read_text("utf-8")


def test_help_begins_with_the_flags_that_matter_most(capsys):
    with pytest.raises(SystemExit):
        run("finetune full", ["--help"])
    listed = re.findall(r"^  --(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert (
        tuple(listed[:13])
        == tuple(name for name in FINETUNE["full"].main_flags if name != "lora.r")[:13]
    )
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    "method, value, expected",
    [
        ("full", "32-true", "fp32"),
        ("full", "bf16-true", "bf16-true"),
        ("full", "bf16-mixed", "bf16"),
        ("lora", "bf16-true", "bf16"),
        (
            "lora",
            "bf16-mixed",
            "--precision bf16-mixed: there is no mixed precision with frozen weights",
        ),
        ("adapter", "16-mixed", "fp16"),
        ("full", "16-true", "--precision 16-true: there is no training of fp16 weights"),
        ("lora", "fp8", "--precision fp8: expected auto or bf16 or fp16 or fp32"),
    ],
)
def test_lightnings_precisions_are_ours(method, value, expected):
    words = ["--checkpoint_dir", "m", "--data.path", "d", "--precision", value]
    if expected.startswith("--"):
        with pytest.raises(ValueError, match=re.escape(expected)):
            parse(FINETUNE[method], words)
    else:
        assert parse(FINETUNE[method], words).precision == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_flag(command, capsys):
    with pytest.raises(SystemExit) as excinfo:
        run(command, ["--help"])
    listed_flags = set(re.findall(r"^  --(\S+)", capsys.readouterr().out, re.MULTILINE))
    assert excinfo.value.code == 0
    # `sweep` has a flag of its own with the name of the parser's
    known = types_of_flags(COMMANDS[command].args).keys() | {"config", "print_config"}
    assert listed_flags == known


def test_help_describes_print_config_in_jsonargparses_words():
    described = " ".join(parser_of(flags.RunsArgs).format_help().split())
    # --print_config=comments needs another package
    assert PRINT_CONFIG in described.replace("are: comments, ", "are: ")


def test_settings_that_plan_prints_are_named_as_plan_has_them(tmp_path):
    words = ["--checkpoint_dir", str(tmp_path), "--train.micro_batch_size", "2"]
    with pytest.raises(ValueError, match="does not exist here; use --micro_batch_size 2"):
        parse(flags.PlanArgs, words)


def test_help_is_fast(tmp_path):
    """It takes less than a second of a CPU in a new interpreter, and no command imports torch for
    it."""
    seconds = []
    for _ in range(3):
        command = [sys.executable, ROOT / "finetune/lora.py", "--help"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        # unlike wall time, hardly longer beside other tests
        seconds.append(usage.ru_utime + usage.ru_stime)
    assert min(seconds) < 1
    code = "import contextlib, sys\nfrom litft.cli import COMMANDS, run\nfor command in COMMANDS:\n"
    code += (
        "    with contextlib.suppress(SystemExit): run(command, ['--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.count("usage: litft") == len(COMMANDS) and done.stdout.endswith(
        "False\n"
    )


def documented_fields(cls: type) -> list[str]:
    """Return the fields of a dataclass and its bases that have a docstring."""
    import ast
    import inspect

    field_names = []
    for base in cls.__mro__[:-1]:
        body = ast.parse(inspect.getsource(base)).body[0].body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            has_docstring = isinstance(following, ast.Expr) and isinstance(
                following.value, ast.Constant
            )
            if isinstance(statement, ast.AnnAssign) and has_docstring:
                field_names.append(statement.target.id)
    return field_names


def test_every_flag_is_documented():
    classes = [c for c in vars(flags).values() if dataclasses.is_dataclass(c)]
    assert len(classes) > 8
    for cls in classes:
        documented = documented_fields(cls)
        for field in dataclasses.fields(cls):
            assert field.name in documented or dataclasses.is_dataclass(field.type), (
                f"{cls.__name__}.{field.name}"
            )


def test_no_heavy_package_is_imported_before_the_flags_are_parsed():
    code = (
        "import sys; from litft.cli import COMMANDS, parse; parse(COMMANDS['finetune lora'].args, "
        "[]); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not {"torch", "numpy", "lightning_fabric", "tokenizers", "jinja2"} & set(
        done.stdout.split()
    )


def test_flags_win_over_config_files_wherever_they_stand(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "train: {learning_rate: 0.5, epochs: 2}\nlora:\n  targets: [q_proj, v_proj]\ndevices: 2\n"
    )
    words = [
        "--devices",
        "4",
        "--config",
        str(tmp_path / "a.yaml"),
        "--train.learning_rate=1e-3",
        "--overwrite",
    ]
    args = parse(flags.LoRAFinetuneArgs, words)
    assert (args.devices, args.train.learning_rate, args.train.epochs, args.overwrite) == (
        4,
        1e-3,
        2.0,
        True,
    )
    assert args.lora.targets == ["q_proj", "v_proj"]


def test_a_list_that_is_given_twice_is_named(capsys):
    """The last one counts, as of every flag; a user may have meant both."""
    words = ["--checkpoint_dir", "base", "--seed", "1", "--seed", "2"]
    words += ["--data.path", "a.jsonl", "--data.path", "b.jsonl"]
    assert parse(flags.LoRAFinetuneArgs, words).data.path == ["b.jsonl"]
    assert capsys.readouterr().err.count("is given twice: the last one counts") == 1


def test_lists_booleans_and_null(tmp_path):
    words = (
        "--lora.targets q_proj,mlp.* --data.mask_prompt false --eval.max_batches null "
        "--deterministic --seed 3"
    )
    args = parse(flags.LoRAFinetuneArgs, words.split())
    assert args.lora.targets == ["q_proj", "mlp.*"] and args.data.mask_prompt is False
    assert args.eval.max_batches is None and args.deterministic is True and args.seed == 3


def test_without_a_model_the_demo_recipe_is_used():
    assert parse(flags.LoRAFinetuneArgs, []).train.epochs == 6
    assert parse(flags.LoRAFinetuneArgs, ["--train.epochs", "1"]).train.epochs == 1
    custom = parse(flags.LoRAFinetuneArgs, ["--checkpoint_dir", "a", "--data.path", "b"])
    assert custom.train == flags.TrainArgs()


def test_a_resumed_run_has_its_settings_beside_overwrite_false(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.jsonl").write_text("{}")
    text = "checkpoint_dir: mine\ndata:\n  path: [mine.jsonl]\n"
    run_dir.write_config(tmp_path / "run", "lora", text, None)
    words = ["--resume", "--overwrite", "false", "--out_dir", "run"]
    args = parse(flags.LoRAFinetuneArgs, words)
    assert args.checkpoint_dir == "mine" and args.data.path == ["mine.jsonl"]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--train.decay_fraction 0.5", "--train.decay_fraction 0.5 has no effect"),
        (
            "--objective grpo --reward exact --data.train_on last",
            "--data.train_on last has no effect",
        ),
        (
            "--objective grpo --reward exact --grpo.clip_low 0.1",
            "--grpo.clip_low 0.1 has no effect",
        ),
        (
            "--train.lr_schedule constant --train.min_lr_ratio 0",
            "min_lr_ratio 0.0 has no effect",
        ),
        (
            "--train.warmup_steps 3 --train.warmup_fraction 0.2",
            "--train.warmup_steps 3 counts",
        ),
        (
            "--data.val_path b --data.val_fraction 0.2",
            "--data.val_path names the validation",
        ),
        (
            "--data.val_path b --data.seed 3",
            "--data.seed 3 has no effect: --data.val_path names",
        ),
        (
            "--data.val_fraction 0 --data.seed 3",
            "--data.val_fraction 0 chooses no examples",
        ),
        (
            "--objective distill --teacher t --distill.max_new_tokens 9",
            "--distill.max_new_tokens 9 has no effect: --distill.on_policy 0 learns the answers",
        ),
        ("--data.mask_prompt false --data.train_on last", "train_on last has no effect"),
        ("--eval.interval 0 --eval.patience 3", "--eval.patience 3 has no effect"),
        ("--data.mask_prompt false --data.reasoning mask", "reasoning mask has no effect"),
        ("--eval.max_new_tokens 0 --eval.prompts Hi", "answers no prompts"),
        (
            "--checkpoint_dir m --data.path a --lora.rslora",
            "--lora.rslora has no effect: without --lora.alpha, updates are scaled",
        ),
        ("--checkpoint_dir m --data.path a --lora.rslora --lora.alpha 16", None),
        ("--train.lr_schedule wsd --train.decay_fraction 0.5", None),
        ("--train.warmup_steps 3 --data.val_path b --eval.interval 0", None),
    ],
)
def test_flags_without_effect_are_named(words, note):
    args = parse(flags.LoRAFinetuneArgs, words.split())
    notes = list(ignored_flags(args))
    if note is None:
        assert notes == []
    else:
        (found,) = notes
        assert note in found


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--devices 8 --strategy fsdp --cpu_offload activations", "gathered weights would"),
        ("--devices 2 --cpu_offload parameters", "with ddp each device needs all weights"),
        (
            "--devices 2 --strategy fsdp --optimizer adafactor",
            "each device holds only a shard",
        ),
    ],
)
def test_the_plan_refuses_what_a_run_refuses(words, problem):
    with pytest.raises(ValueError, match=problem):
        parse(flags.PlanArgs, ["--checkpoint_dir", "m", *words.split()])


def test_what_only_a_run_generates_is_not_prepared():
    words = ["--checkpoint_dir", "m", "--data.path", "a", "--data.replay", "0.1"]
    with pytest.raises(ValueError, match="own answers are generated when a run begins"):
        parse(flags.PrepareArgs, words)


def test_a_short_name_is_not_taken_for_another_groups_flag():
    """--alpha would scale LoRA's updates by 0.3 / 32."""
    words = ["--checkpoint_dir", "m", "--data.path", "a", "--objective"]
    cases = {"distill --teacher t --alpha 0.3": "lora.alpha"}
    cases["grpo --reward number --max_new_tokens 9"] = "eval.max_new_tokens"
    for flags_of_objective, flag in cases.items():
        with pytest.raises(ValueError, match=f"stands for --{flag}, but --objective"):
            parse(flags.LoRAFinetuneArgs, [*words, *flags_of_objective.split()])
    parse(flags.LoRAFinetuneArgs, [*words, "sft", "--alpha", "0.3"])


def test_a_short_name_is_not_taken_for_another_groups_flag_elsewhere(tmp_path):
    """In a file, beside one, and in Python."""
    message = "max_new_tokens stands for --eval.max_new_tokens, but --objective grpo"
    path = tmp_path / "a.yaml"
    path.write_text("objective: grpo\nmax_new_tokens: 9\n")
    demo = ["--config", "grpo-demo", "--max_new_tokens", "9"]
    for words in (["--config", str(path)], demo):
        with pytest.raises(ValueError, match=message):
            parse(flags.LoRAFinetuneArgs, words)
    given = {"checkpoint_dir": "m", "data_path": "a", "reward": "exact"}
    for more in ({"objective": "grpo"}, {"config": "grpo-demo"}):
        with pytest.raises(ValueError, match=message):
            from_keywords("lora", {**given, **more, "max_new_tokens": 9})
    betas = [np.float64(0.5), np.float32(0.75)]
    numbers = from_keywords(
        "lora", {"checkpoint_dir": "m", "data_path": "a", "betas": betas}
    )
    assert numbers.train.betas == [0.5, 0.75]
    args = from_keywords("lora", {**given, "objective": "grpo", "grpo_max_new_tokens": 9})
    assert args.grpo.max_new_tokens == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {epochs: 3}\nlora: {r: 8}\ntrain: {learning_rate: 1e-4}",
            "train is there",
        ),
        ("train: {epochs: 3, epochs: 4}", "epochs is there twice"),
        ("epochs: 3\ntrain: {epochs: 4}", "train.epochs is there twice, also as"),
    ],
)
def test_a_setting_that_a_file_has_twice_is_refused(text, message, tmp_path):
    """YAML would take the last one, and lose what the first one says."""
    (tmp_path / "a.yaml").write_text(f"checkpoint_dir: m\ndata: {{path: d}}\n{text}\n")
    with pytest.raises(ValueError, match=message):
        parse(flags.LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])


def test_mappings_are_merged_as_yaml_says(tmp_path):
    """Own pairs win over merged ones, and of several the first one; no key is there twice."""
    path = tmp_path / "a.yaml"
    path.write_text(
        "recipe: {one: {a: &small {r: 8, dropout: 0.1}, b: &large {<<: *small, r: 64}}}\n"
        "checkpoint_dir: m\ndata: {path: x.jsonl}\nlora: {<<: [*large, *small], alpha: 16}\n"
    )
    args = parse(flags.LoRAFinetuneArgs, ["--config", str(path)])
    assert (args.lora.r, args.lora.alpha, args.lora.dropout) == (64, 16, 0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.mask_promt false", "did you mean --data.mask_prompt"),
        ("--data.packin false", "did you mean --data.packing"),
        ("--enable_thinking false", "--data.template_args enable_thinking=false"),
        ("--push_somewhere false", "leave it out"),
        ("--max_tokens null", "leave it out"),
    ],
)
def test_an_unknown_name_that_is_switched_off_may_be_a_typing_error(words, message):
    with pytest.raises(ValueError, match=message):
        parse(flags.LoRAFinetuneArgs, words.split())


def test_files_of_the_other_command_are_named(tmp_path):
    """An adapter's rate is not one for all weights."""
    path = tmp_path / "a.yaml"
    for text, of_lora, of_full in (
        (
            "model_name_or_path: m\nuse_peft: true",
            "adapts all Linears",
            "another command, finetune/lora.py",
        ),
        ("finetuning_type: full\nmodel_name_or_path: m", "finetune/full.py", "terms"),
        (
            "finetuning_type: lora\nmodel_name_or_path: m",
            "terms",
            "another command, finetune/lora.py",
        ),
    ):
        path.write_text(text)
        messages = []
        for cls in (flags.LoRAFinetuneArgs, flags.FullFinetuneArgs):
            with pytest.raises(ValueError) as error:
                parse(cls, ["--config", str(path)])
            messages.append(str(error.value))
        for message, expected, command in (
            (messages[0], of_lora, "is another command, finetune/lora.py"),
            (messages[1], of_full, "is another command here, finetune/full.py"),
        ):
            assert expected in message
            assert command not in message


def test_answers_of_an_unknown_length_do_not_step_in_the_backward_pass():
    """They may make several micro-batches of a step, of which each would be a step."""
    words = "--objective distill --teacher t --checkpoint_dir m --data.path a "
    words += "--train.optimizer_in_backward --train.max_grad_norm 0 --train.skip_nan false "
    words += "--train.oom_retry false"
    parse(flags.FullFinetuneArgs, words.split())
    with pytest.raises(ValueError, match="the student's own answers"):
        parse(flags.FullFinetuneArgs, [*words.split(), "--distill.on_policy", "0.5"])


@pytest.mark.parametrize(
    ("text", "quantize"),
    [
        ("stage: sft\nquantization_bit: 4\n", "nf4-dq"),
        ("stage: sft\nquantization_bit: 4\ndouble_quantization: false\n", "nf4"),
        ("load_in_4bit: true\nbnb_4bit_quant_type: fp4\nmodel_name_or_path: m\n", "fp4"),
        (
            "load_in_4bit: true\nuse_bnb_nested_quant: true\nmodel_name_or_path: m\n",
            "nf4-dq",
        ),
        # the type alone quantizes nothing
        ("bnb_4bit_quant_type: fp4\nmodel_name_or_path: m\n", None),
        ("stage: sft\nquantization_type: fp4\nquantization_bit: 4\n", "fp4-dq"),
        # a group of axolotl
        (
            "base_model: m\nload_in_4bit: true\n"
            "bnb_config_kwargs: {bnb_4bit_use_double_quant: false}\n",
            "nf4",
        ),
        (
            "base_model: m\nbnb_config_kwargs: {bnb_4bit_quant_type: fp4}\nload_in_4bit: true\n",
            "fp4-dq",
        ),
    ],
)
def test_the_parts_of_quantization_are_converted(text, quantize, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        parse(flags.LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])
    converted = yaml.safe_load(str(error.value).partition("no counterpart:\n")[2])
    assert converted.get("quantize") == quantize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch_dtype: bfloat16\nmodel_name_or_path: m\n", {"precision": "bf16"}),
        ("dtype: float16\nmodel_name_or_path: m\n", {"precision": "fp16"}),
        ("report_to: none\nmodel_name_or_path: m\n", {}),
        ("train:\n  save_interval: 200\n", {"save": {"interval": 200}}),
    ],
)
def test_values_of_other_programs_are_converted(text, expected, tmp_path):
    """The file that is printed is one that litft reads."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        parse(flags.LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])
    converted = yaml.safe_load(str(error.value).partition("no counterpart:\n")[2])
    for name in ("precision", "save", "logger"):
        assert converted.get(name) == expected.get(name)
    converted |= {"checkpoint_dir": "m", "data": {"path": ["a.jsonl"]}}
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(converted))
    parse(flags.LoRAFinetuneArgs, ["--config", str(tmp_path / "b.yaml")])


def test_plan_takes_the_settings_of_a_recipe(tmp_path):
    words = ["--config", "full-8b-8x80gb", "--checkpoint_dir", "a"]
    args = parse(flags.PlanArgs, words)
    assert (args.method, args.precision, args.strategy) == ("full", "bf16", "fsdp")
    assert (args.devices, args.micro_batch_size) == (8, 2)
    assert args.activation_checkpointing == "none"
    long_rows = parse(
        flags.PlanArgs, ["--config", "qlora-8b-24gb", "--checkpoint_dir", "a"]
    )
    assert (long_rows.method, long_rows.quantize, long_rows.max_seq_length) == (
        "lora",
        "nf4",
        8192,
    )
    # a copy of a recipe: what plan does not know is named
    copied = tmp_path / "mine.yaml"
    copied.write_text(
        "recipe: {method: lora}\nlora: {rr: 5}\ntrain: {micro_batch_size: auto}\n"
    )
    with pytest.raises(ValueError, match=r"--lora\.rr does not exist"):
        parse(flags.PlanArgs, ["--config", str(copied), "--checkpoint_dir", "a"])
    copied.write_text(
        "recipe: {method: lora}\nobjective: dpo\ntrain: {learning_rate: 0.1}\n"
    )
    with pytest.raises(ValueError, match="plan does not know objective dpo"):
        parse(flags.PlanArgs, ["--config", str(copied), "--checkpoint_dir", "a"])
    copied.write_text(
        "recipe: {method: lora}\nlora: {r: 5}\ntrain: {micro_batch_size: auto}\n"
    )
    planned = parse(flags.PlanArgs, ["--config", str(copied), "--checkpoint_dir", "a"])
    assert planned.lora.r == 5 and planned.micro_batch_size is None
    # flags win over the recipe
    assert parse(flags.PlanArgs, [*words, "--devices", "4"]).devices == 4
    with pytest.raises(ValueError, match="is a recipe; add the model: --checkpoint_dir"):
        parse(flags.PlanArgs, words[:2])


def test_print_config_can_be_passed_back(tmp_path):
    done = script(
        "finetune/lora.py",
        "--lora.r",
        "3",
        "--train.learning_rate",
        "1e-3",
        "--print_config",
        cwd=tmp_path,
    )
    assert yaml.safe_load(done.stdout)["lora"]["r"] == 3
    (tmp_path / "a.yaml").write_text(done.stdout)
    args = parse(flags.LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])
    assert args == parse(
        flags.LoRAFinetuneArgs, ["--lora.r", "3", "--train.learning_rate", "1e-3"]
    )


@pytest.mark.parametrize(
    "words, messages",
    [
        (
            "--train.learnin_rate 1",
            ["--train.learnin_rate does not exist; did you mean --train.learning_rate?"],
        ),
        ("--learning_rat 1", ["did you mean --train.learning_rate?"]),
        (
            "--lora.r many --devices x",
            [
                "--lora.r many: expected a whole number",
                "--devices x: expected a whole number",
            ],
        ),
        ("--strategy magic", ["--strategy magic: expected auto or ddp"]),
        (
            "--lora.r 0 --train.max_grad_norm -1",
            ["--lora.r 0: must be at least 1", "must not be negative"],
        ),
        ("--lora.r", ["--lora.r needs a value"]),
        ("lora", ["'lora' is no flag"]),
        ("--config nowhere.yaml", ["--config nowhere.yaml: no such file"]),
        ("--resume --overwrite", ["exclude each other"]),
        ("--checkpoint_dir a", ["--data.path is missing"]),
        ("--data.path a", ["--checkpoint_dir is missing"]),
        (
            "--nonsense 1 --lora.r x --also",
            ["--nonsense does not exist", "--lora.r x", "--also does not exist"],
        ),
        ("--train.lr 1", ["--train.lr does not exist; here it is --train.learning_rate 1"]),
        ("--train.learning_rate 0,001", ["expected a number or null; write 0.001"]),
    ],
)
def test_all_mistakes_are_reported_at_once(words, messages):
    with pytest.raises(ValueError) as excinfo:
        parse(flags.LoRAFinetuneArgs, words.split())
    assert all(message in str(excinfo.value) for message in messages), excinfo.value


@pytest.mark.parametrize(
    "values, message",
    [
        (
            dict(data=flags.DataArgs(path="mine.json")),
            "--data.path 'mine.json': expected list[str], found str; give a list",
        ),
        (
            dict(train=flags.TrainArgs(learning_rate="1e-4")),
            "--train.learning_rate '1e-4': expected float or nothing, found str",
        ),
        (
            dict(precision="fp8"),
            "--precision 'fp8': expected one of auto, bf16, fp16, fp32, found str",
        ),
        (dict(devices=True), "--devices True: expected int, found bool"),
        (
            dict(train={"max_steps": 3}),
            "--train {'max_steps': 3}: expected TrainArgs, found dict",
        ),
    ],
)
def test_values_from_python_are_checked_like_flags(values, message):
    with pytest.raises(ValueError) as excinfo:
        litft.finetune(flags.LoRAFinetuneArgs(checkpoint_dir="model", **values))
    assert str(excinfo.value).startswith(message)
    for cls in (
        flags.LoRAFinetuneArgs,
        flags.AdapterFinetuneArgs,
        flags.AdapterV2FinetuneArgs,
        flags.FullFinetuneArgs,
    ):
        assert not cls().problems()


@pytest.mark.parametrize("text", ["no", "010", "1:30", "1.50", "2026-11-30", "1e3"])
def test_texts_of_a_yaml_file_stay_as_they_are_written(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(
        f"checkpoint_dir: m\ndata: {{path: d, new_tokens: {text}}}\nout_dir: {text}\n"
    )
    args = parse(flags.LoRAFinetuneArgs, ["--config", str(path)])
    assert args.out_dir == text and args.data.new_tokens == [text]
    # also in a mapping that is merged
    path.write_text(f"checkpoint_dir: m\ndata: {{path: d}}\n<<: {{out_dir: {text}}}\n")
    assert parse(flags.LoRAFinetuneArgs, ["--config", str(path)]).out_dir == text


def test_text_values_are_not_parsed_as_yaml():
    """Also text that YAML would read as null, a list or a comment."""
    for text in ("# Title", "---", "~", "a: b", "[1", "'", "1", "*x"):
        assert parse(flags.GenerateArgs, [f"--prompt={text}"]).prompt == text
    assert parse(
        flags.LoRAFinetuneArgs, ["--lora.targets", "*_proj, mlp.*"]
    ).lora.targets == [
        "*_proj",
        "mlp.*",
    ]
    lists = {
        "[INST],[/INST]": ["[INST]", "[/INST]"],
        '["a,b", "c"]': ["a,b", "c"],
        "[1],🤖": ["[1]", "🤖"],
    }
    for value, expected in lists.items():
        args = parse(
            flags.LoRAFinetuneArgs,
            [f"--data.new_tokens={value}", "--checkpoint_dir=a", "--data.path=b"],
        )
        assert args.data.new_tokens == expected


def test_invalid_numbers_are_rejected():
    words = (
        "--train.learning_rate .nan --train.epochs .inf --seed -1 --data.seed 99999999999 "
        "--lora.alpha -1"
    )
    with pytest.raises(ValueError) as excinfo:
        parse(flags.LoRAFinetuneArgs, words.split())
    message = str(excinfo.value)
    for name in (
        "train.learning_rate nan",
        "train.epochs inf",
        "seed -1",
        "data.seed 99999999999",
        "lora.alpha -1.0",
    ):
        assert f"--{name}: must " in message


def test_mistakes_in_a_config_file_are_reported_with_its_name(tmp_path):
    (tmp_path / "a.yaml").write_text("train: {epoch: 2}\nlora: {r: big}\n")
    with pytest.raises(ValueError) as excinfo:
        parse(flags.LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])
    message = str(excinfo.value)
    assert (
        "a.yaml: --train.epoch does not exist; did you mean --train.epochs?" in message
        and "--lora.r big" in message
    )


RECORD = {"instruction": "a", "input": "", "output": "b"}


@pytest.fixture
def folder(tmp_path, tiny):
    """A folder with a valid model (model/) and valid data (data.json)."""
    import shutil

    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "data.json").write_text(json.dumps([RECORD] * 30))
    return tmp_path


def no_change(folder):
    pass


def small_vocabulary(folder):
    """Cut the model's vocabulary to 96 tokens; its tokenizer keeps 512."""
    from safetensors.torch import load_file, save_file

    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:96].clone()
    save_file(tensors, path)
    edit("config.json", '"vocab_size": 512', '"vocab_size": 96')(folder)


def edit(name, old, new):
    def change(folder):
        path = folder / "model" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def remove(name):
    return lambda folder: (folder / "model" / name).unlink()


def truncate(folder):
    import os

    os.truncate(folder / "model" / "model.safetensors", 9000)


def data(text):
    return lambda folder: (folder / "data.json").write_text(text)


def existing_run(folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("# A run of litft\n{}")


BAD = {
    "a missing folder": (
        no_change,
        "--checkpoint_dir nowhere",
        "; name a model folder",
    ),
    "no config.json": (remove("config.json"), "", "has no config.json; name the folder"),
    "an unknown family": (
        edit("config.json", '"llama"', '"mamba"'),
        "",
        "'mamba' is not supported: it is a network with Mamba-1 layers",
    ),
    "no weights": (
        remove("model.safetensors"),
        "",
        "holds no weights: expected model.safetensors",
    ),
    "truncated weights": (
        truncate,
        "",
        "(9,000 bytes) is truncated or not a safetensors file",
    ),
    "no tokenizer": (remove("tokenizer.model"), "", "no tokenizer; copy tokenizer.json"),
    "missing data": (no_change, "--data.path nowhere.json", "nowhere.json does not exist"),
    "a syntax error": (
        data('[{"instruction": "a",\n"output" "b"}]'),
        "",
        "data.json, line 2: invalid JSON",
    ),
    "a bad record": (
        data(json.dumps([RECORD, {"foo": "a"}])),
        "",
        "record 1: no known format has the fields 'foo'",
    ),
    "no examples": (data("[]"), "", "data.json contains no examples"),
    "another tokenizer": (small_vocabulary, "", "but the model's vocabulary ends at 95; "),
    "a taken out_dir": (
        existing_run,
        "",
        "--out_dir run already contains a run; --resume continues it, --overwrite deletes it",
    ),
    "an unknown flag": (no_change, "--lora.rank 3", "--lora.rank does not exist"),
    "no such GPU": (no_change, "--accelerator cuda --devices 99", "--accelerator cuda"),
    "a bad target": (
        no_change,
        "--lora.targets query",
        "--lora.targets query: no Linear of this model has that name",
    ),
}


@pytest.mark.parametrize("corrupt, words, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_rejected_before_training(
    folder, corrupt, words, message, capsys, monkeypatch
):
    monkeypatch.chdir(folder)
    corrupt(folder)
    argv = words.split()
    for name, value in (
        ("--checkpoint_dir", "model"),
        ("--data.path", "data.json"),
        ("--out_dir", "run"),
    ):
        argv += [] if name in argv else [name, value]
    files_before = sorted(path.name for path in folder.rglob("*"))
    assert message in refused("finetune lora", *argv, capsys=capsys)
    assert sorted(path.name for path in folder.rglob("*")) == files_before


def test_overwrite_deletes_the_run_and_nothing_else(folder):
    existing_run(folder)
    (folder / "run" / "old").touch()
    words = "--checkpoint_dir model --data.path data.json --train.max_steps 1 --out_dir"
    script("finetune/lora.py", *words.split(), "run", "--overwrite", cwd=folder)
    assert not (folder / "run" / "old").exists() and (folder / "run" / "final").is_dir()
    done = script(
        "finetune/lora.py", *words.split(), "model", "--overwrite", cwd=folder, code=2
    )
    assert (
        "is not empty and is not a litft run" in done.stderr
        and (folder / "model" / "config.json").is_file()
    )


def test_gpu_memory_is_allocated_in_expandable_segments(tmp_path):
    """Set before torch is imported, unless the user has set either variable."""
    code = (
        "import os; from litft.cli import run\n"
        "try: run('plan', ['--help'])\n"
        "except SystemExit: pass\n"
    )
    code += (
        "import sys; print(os.environ.get('PYTORCH_ALLOC_CONF'), 'torch' in sys.modules)"
    )
    for user_env, expected in (
        ({}, "expandable_segments:True False"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, "None False"),
    ):
        env = {
            name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name
        } | user_env
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.stdout.splitlines()[-1] == expected


def test_flags_of_other_programs_are_translated(capsys):
    """The message has the flag and its value; every flag that it names exists."""
    types = {
        name: kind
        for cls in FINETUNE.values()
        for name, kind in parser.types_of_flags(cls).items()
    }
    assert len(ALIASES) >= 150
    for name, alias in ALIASES.items():
        words = alias.flags.split()
        names = [word.removeprefix("--") for word in words if word.startswith("--")]
        assert (names or alias.note) and set(names) <= types.keys(), name
        assert full_flag(name, types) not in types, f"{name} is a flag here"
        value = "N" if alias.times else "7" if alias.limit > 7 else "VALUE"
        assert alias.flags.format(value=value, **BETAS) in hint_for_flag(name, "7")
    with pytest.raises(ValueError) as error:
        parser.parse(
            LoRAFinetuneArgs,
            "--lr 1e-4 --fsdp full_shard --load_in_4bit --lora.rank 3".split(),
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "--lr does not exist; here it is --train.learning_rate 1e-4"
    assert lines[1].startswith(
        "--fsdp does not exist; here it is --strategy fsdp (--devices 2"
    )
    assert lines[2] == "--load_in_4bit does not exist; here it is --quantize nf4"
    assert lines[3] == "--lora.rank does not exist; here it is --lora.r 3"
    off = {"bf16": "--precision fp32", "train_on_inputs": "--data.mask_prompt true"}
    for name, expected in off.items():
        assert (
            hint_for_flag(name, "false")
            == f"--{name} does not exist; here it is {expected}"
        )
    assert (
        "--data.val_fraction VALUE (a fraction of the examples, not a count)"
        in hint_for_flag("val_set_size", "200")
    )
    assert "--data.val_fraction 0.1 (" in hint_for_flag("val_set_size", "0.1")
    assert hint_for_flag("dataset_exact_deduplication", "true").startswith(
        "--dataset_exact_deduplication does not exist; here it is --data.dedup exact"
    )
    assert (
        hint_for_flag("load_in_4bit", "false")
        == "--load_in_4bit does not exist; leave it out"
    )
    assert hint_for_flag("use_dora", "false") == "--use_dora does not exist; leave it out"
    assert (
        hint_for_flag("flash_attention", "true")
        == "--flash_attention does not exist; leave it out (the fastest attention is chosen)"
    )
    args = parser.parse(
        LoRAFinetuneArgs,
        "--lora_r 3 --train_max_steps 4 --optimizer adamw_bnb_8bit".split(),
    )
    assert (args.lora.r, args.train.max_steps, args.train.optimizer) == (3, 4, "adamw_8bit")


AXOLOTL = """
base_model: some/model
adapter: qlora
lora_model_dir:
load_in_4bit: true
eval_table_size:
load_in_8bit: false
datasets:
  - {path: alpaca.jsonl, type: alpaca, ds_type: json}
  - path: chats.jsonl
    type: chat_template
    field_messages: turns
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant]
  - {path: faq.jsonl, type: {field_instruction: asked, field_output: reply}, split: "train[:10]"}
  - {path: prose.jsonl, type: completion, field: body}
  - {path: folder, data_files: [a.jsonl, b.jsonl], split: train}
  - {path: owner/name, type: chat_template, split: train, shards: 10, roles_to_train: [human, gpt]}
  - {path: pairs.jsonl, type: chat_template.default, field_chosen: good, field_rejected: bad, roles: {user: [customer]}}
val_set_size: 0.05
output_dir: ./outputs/x
sequence_len: 512
lora_r: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
lr_scheduler: constant_with_warmup
torch_compile: auto
resume_from_checkpoint: out/old/checkpoint-100
cosine_min_lr_ratio: 0.1
bf16: auto
evals_per_epoch: 4
special_tokens: {pad_token: "<|end|>"}
chat_template: tokenizer_default
deepspeed:
fsdp: []
"""


def test_a_config_of_axolotl_is_converted(tmp_path):
    """The message ends with the file in litft's terms, which can be used as it is."""
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    with pytest.raises(ValueError) as error:
        parser.parse(LoRAFinetuneArgs, ["--config", str(tmp_path / "axolotl.yaml")])
    problems, _, converted = str(error.value).partition(
        "in litft's terms, without what has no counterpart:"
    )
    lines = [line.partition(".yaml: ")[2] for line in problems.splitlines()]
    assert (
        "--load_in_8bit does not exist; leave it out" in lines
        and "--deepspeed does not exist; leave it out" in lines
    )
    assert (
        "--datasets does not exist; here it is --data.path ... (a list whose items may"
        in problems
    )
    (tmp_path / "litft.yaml").write_text(converted)
    args = parser.parse(LoRAFinetuneArgs, ["--config", str(tmp_path / "litft.yaml")])
    assert (args.checkpoint_dir, args.quantize, args.out_dir, args.lora.r) == (
        "some/model",
        "nf4-dq",
        "./outputs/x",
        16,
    )
    assert (
        args.train.global_batch_size,
        args.train.micro_batch_size,
        args.train.lr_schedule,
    ) == (
        8,
        2,
        "constant",
    )
    assert (args.data.max_seq_length, args.data.val_fraction, args.data.template) == (
        512,
        0.05,
        "auto",
    )
    assert (
        args.precision == "auto"
        and args.lora.targets == ["all-linear"]
        and args.strategy == "auto"
    )
    assert [item.entry() for item in args.data.paths] == [
        {"path": "alpaca.jsonl", "format": "alpaca", "template": "alpaca"},
        {"path": "chats.jsonl", "columns": {"conversations": "turns"}},
        {"path": "faq.jsonl", "columns": {"instruction": "asked", "output": "reply"}},
        {"path": "prose.jsonl", "format": "text", "columns": {"text": "body"}},
        *("a.jsonl", "b.jsonl"),
        {"path": "owner/name", "split": "train"},
        {"path": "pairs.jsonl", "columns": {"chosen": "good", "rejected": "bad"}},
    ]
    assert "--eval_table_size does not exist; leave it out" in lines
    assert any(
        line.startswith("pairs.jsonl: roles {'user': ['customer']} has no counterpart")
        for line in lines
    )
    assert (
        "owner/name: shards has no counterpart" in lines
        and not args.resume
        and args.train.min_lr_ratio == 0.1
    )
    assert (
        "owner/name: roles_to_train ['human', 'gpt'] has no counterpart: only the assistant's "
        "turns are learned" in lines
    )
    assert not any(line.startswith(("alpaca.jsonl", "chats.jsonl")) for line in lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "datasets: [{path: a.jsonl, type: alpaca}]\n"
            "lr_scheduler: linear\n"
            "lora_target_modules: '[0-9]+.(q|v)_proj'",
            {
                "data": {
                    "path": [{"path": "a.jsonl", "format": "alpaca"}],
                    "template": "alpaca",
                }
            }
            | {"train": {"lr_schedule": "linear", "min_lr_ratio": 0.0}},
        ),
        # defaults of axolotl
        (
            "base_model: m\n"
            "micro_batch_size: 2\n"
            "gradient_accumulation_steps:\n"
            "seed:\n"
            "optimizer: adamw_bnb_8bit\n"
            "lora_r:",
            {
                "checkpoint_dir": "m",
                "data": {"val_fraction": 0.0, "max_seq_length": 512},
                "train": {
                    "micro_batch_size": 2,
                    "global_batch_size": 2,
                    "optimizer": "adamw_bnb_8bit",
                    "epochs": 1,
                    "warmup_fraction": 0.03,
                    "min_lr_ratio": 0.0,
                    "betas": [0.9, 0.999],
                },
            },
        ),
        (
            "lora_model_dir: out/a\n"
            "lora_r: 4\n"
            "lora_dropout: 0.1\n"
            "lr_scheduler: cosine\n"
            "cosine_min_lr_ratio: 0.2",
            {
                "checkpoint_dir": "out/a",
                "lora": {"dropout": 0.1},
                "train": {"lr_schedule": "cosine", "min_lr_ratio": 0.2},
            },
        ),
        (
            "adam_beta1: 0.8\nadam_beta2: 0.98\neval_steps: 0.25",
            {"train": {"betas": "0.8,0.98"}},
        ),
        # defaults of LLaMA-Factory
        (
            "finetuning_type: lora\n"
            "stage: sft\n"
            "lora_rank: 64\n"
            "lora_target: all\n"
            "template: qwen\n"
            "quantization_bit: 8\n"
            "gradient_accumulation_steps: 4\n"
            "num_train_epochs: 1\n"
            "max_steps: 50",
            {
                "objective": "sft",
                "quantize": "int8",
                "lora": {"r": 64, "targets": "all-linear", "alpha": 128},
                "data": {"val_fraction": 0.0, "max_seq_length": 2048},
                "train": {
                    "max_steps": 50,
                    "learning_rate": 5e-5,
                    "lr_schedule": "linear",
                    "warmup_fraction": 0.0,
                    "min_lr_ratio": 0.0,
                    "betas": [0.9, 0.999],
                    "global_batch_size": 32,
                },
            },
        ),
        (
            "pref_loss: simpo\n"
            "stage: dpo\n"
            "per_device_train_batch_size: 2\n"
            "learning_rate: 1.0e-6\n"
            "num_train_epochs: 2\n"
            "warmup_steps: 5\n"
            "lora_rank: 8\n"
            "cutoff_len: 100\n"
            "val_size: 0.1",
            {
                "objective": "simpo",
                "preference": {"beta": 0.1, "gamma": 0.5},
                "lora": {"r": 8, "alpha": 16},
                "data": {"val_fraction": 0.1, "max_seq_length": 100},
                "train": {
                    "micro_batch_size": 2,
                    "global_batch_size": 2,
                    "learning_rate": 1e-6,
                    "epochs": 2,
                    "warmup_steps": 5,
                    "lr_schedule": "linear",
                    "min_lr_ratio": 0.0,
                    "betas": [0.9, 0.999],
                },
            },
        ),
        # defaults of TRL
        (
            "model_name_or_path: m\n"
            "dataset_name: a.jsonl\n"
            "loss_type: sigmoid\n"
            "label_smoothing: 0.1\n"
            "rpo_alpha: 0.5\n"
            "lora_target_modules: [q_proj]\n"
            "adam_beta2: 0.95",
            {
                "checkpoint_dir": "m",
                "objective": "dpo",
                "preference": {"label_smoothing": 0.1, "sft_weight": 0.5},
                "lora": {"targets": ["q_proj"], "r": 16, "alpha": 32, "dropout": 0.05},
                "data": {"path": "a.jsonl", "val_fraction": 0.0, "max_seq_length": 1024},
                "train": {
                    "betas": "0.9,0.95",
                    "epochs": 3,
                    "learning_rate": 1e-6,
                    "lr_schedule": "linear",
                    "warmup_fraction": 0.0,
                    "min_lr_ratio": 0.0,
                    "global_batch_size": 8,
                },
            },
        ),
    ],
)
def test_what_differs_is_converted(text, expected, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        parser.parse(LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])
    assert yaml.safe_load(str(error.value).partition("no counterpart:\n")[2]) == expected
    if "eval_steps" in text:
        assert (
            "eval_steps: 0.25 is no value of --eval.interval; set that flag instead"
            in str(error.value)
        )
    if "template" in text:
        assert (
            "template: qwen is a name of LLaMA-Factory; the model's own template is used"
            in str(error.value)
        )
    if text.startswith("datasets"):  # whose fields have other names here
        assert "here it is --data.path ... (a list whose items may" in str(error.value)


@pytest.mark.parametrize("flag", ["data.split", "base_dir", "train.max_time", "data.date"])
def test_a_later_null_takes_back_a_text(flag, tmp_path):
    """Also where a config file has the text: a later flag wins."""
    value = {"train.max_time": "90m", "data.date": "2026-01-02"}.get(flag, "a")
    group, _, leaf = flag.rpartition(".")
    content = {"checkpoint_dir": "m", "data": {"path": ["owner/data"]}}
    owner = content.setdefault(group, {}) if group else content
    owner[leaf] = value
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    words = ["--config", str(tmp_path / "c.yaml")]

    def read(*more):
        args = parser.parse(LoRAFinetuneArgs, [*words, *more])
        owner = getattr(args, group) if group else args
        return getattr(owner, leaf)

    assert read() == value
    assert read(f"--{flag}", "null") is None
    assert read(f"--{flag}", "null", f"--{flag}", value) == value


@pytest.mark.parametrize("word", ["true", "yes", "on", "True"])
def test_every_word_for_true_resumes_with_the_runs_flags(word, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    config = {"checkpoint_dir": str(tmp_path), "train": {"epochs": 10}}
    config["data"] = {"path": [str(tmp_path / "d.jsonl")]}
    run_dir.write_config(run, "lora", yaml.safe_dump(config), launch=None)
    args = parser.parse(LoRAFinetuneArgs, [f"--resume={word}", "--out_dir", str(run)])
    assert args.resume and args.train.epochs == 10


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        # both masks of TRL apply
        (
            "model_name_or_path: m\ncompletion_only_loss: true\nassistant_only_loss: false",
            {"data.mask_prompt": True},
            "",
        ),
        (
            "model_name_or_path: m\nassistant_only_loss: false",
            {"data.mask_prompt": False},
            "",
        ),
        (
            "model_name_or_path: m\nmax_length: null\nmax_steps: -1\nnum_train_epochs: 2",
            {"data.max_seq_length": None, "train.max_steps": None, "train.epochs": 2},
            "max_length: null means no limit in TRL",
        ),
        (
            "model_name_or_path: m\nrpo_alpha: 0.5\ncompletion_only_loss: true\nbeta: 0.2\n"
            "label_smoothing_factor: 0.2",
            {"objective": "dpo", "data.mask_prompt": None, "train.label_smoothing": None}
            | {"preference.beta": 0.2, "preference.label_smoothing": None},
            "",
        ),
        (
            "model_name_or_path: m\nwarmup_steps: 0.1\nlearning_rate: 2.0e-5\n"
            "lr_scheduler_kwargs: {min_lr: 1.0e-6}",
            {"train.warmup_fraction": 0.1, "train.warmup_steps": None}
            | {"train.min_lr_ratio": pytest.approx(0.05)},
            "",
        ),
        # the highest rate is TRL's default
        (
            "model_name_or_path: m\nuse_peft: true\nlr_scheduler_type: cosine_with_min_lr\n"
            "lr_scheduler_kwargs: {min_lr: 1.0e-5}",
            {"train.learning_rate": 2e-5, "train.min_lr_ratio": pytest.approx(0.5)},
            "",
        ),
        (
            "model_name_or_path: m\nbeta: 0.3",
            {"objective": "dpo", "preference.beta": 0.3},
            "beta: read as that of DPO; other objectives have it, too",
        ),
        (
            "model_name_or_path: m\nbeta: 0.3\ndesirable_weight: 1.5",
            {
                "objective": "kto",
                "preference.beta": 0.3,
                "preference.desirable_weight": 1.5,
            },
            "",
        ),
        (
            "model_name_or_path: m\nnum_generations: 4\nmax_completion_length: 64\nbeta: 0.04\n"
            "loss_type: dr_grpo\nepsilon: 0.1\ntemperature: 0.8\nscale_rewards: false\n"
            "gradient_accumulation_steps: 2",
            {"objective": "grpo", "grpo.group_size": 4, "grpo.max_new_tokens": 64}
            | {"data.max_seq_length": None}
            | {"grpo.beta": 0.04, "preference.beta": None, "grpo.loss": "dr_grpo"}
            | {"grpo.clip_low": 0.1, "grpo.clip_high": 0.1, "grpo.temperature": 0.8}
            | {"grpo.advantages": "group_mean", "train.global_batch_size": 4},
            "reward_funcs: name the functions with --reward",
        ),
        # a step of 32 completions has 4 prompts; the loss is named like the objective
        (
            "model_name_or_path: m\nnum_generations: 8\nper_device_train_batch_size: 8\n"
            "gradient_accumulation_steps: 4\nloss_type: grpo",
            {"grpo.group_size": 8, "train.global_batch_size": 4, "grpo.loss": "grpo"}
            | {"grpo.advantages": "group"},
            "",
        ),
        # TRL counts updates; its limit of CISPO is the ratio itself
        (
            "model_name_or_path: m\nnum_generations: 8\nnum_iterations: 2\nmax_steps: 100\n"
            "warmup_steps: 10\nsave_steps: 51\nloss_type: cispo\nepsilon_high: 5.0",
            {"grpo.updates": 2, "train.max_steps": 50, "train.warmup_steps": 5}
            | {"save.interval": 26, "grpo.loss": "cispo", "grpo.clip_high": 4.0},
            "numbers of steps are divided by it",
        ),
        (
            "model_name_or_path: m\nnum_generations: 8\nloss_type: grpo\n"
            "importance_sampling_level: sequence",
            {"grpo.loss": "gspo"},
            "",
        ),
        (
            "model_name_or_path: m\nnormalize_advantages: true",
            {"objective": "grpo", "grpo.loss": "rloo", "grpo.advantages": None}
            | {"grpo.beta": 0.05, "grpo.group_size": 2},
            "RLOO: rewards are neither clipped nor normalized here",
        ),
        # axolotl has TRL's settings in a group, and its defaults
        (
            "base_model: m\nadapter: lora\nrl: grpo\n"
            "trl:\n  num_generations: 4\n  temperature: 0.7\n  scale_rewards: none",
            {"grpo.group_size": 4, "grpo.temperature": 0.7, "grpo.loss": "dapo"}
            | {"grpo.advantages": "group_mean"},
            "",
        ),
        # axolotl quantizes the scales, too, and a teacher's labels may be of the whole text
        (
            "base_model: m\nadapter: qlora\nload_in_4bit: true\nkd_trainer: true\n"
            "train_on_inputs: true\nlearning_rate: 1.0e-4\nteacher: t",
            {"quantize": "nf4-dq", "data.mask_prompt": False, "objective": "distill"},
            "",
        ),
        # optimizers whose rate means something else here
        (
            "model_name_or_path: m\noptim: adafactor\nlearning_rate: 2.0e-5\nuse_peft: true",
            {"train.optimizer": "adafactor", "train.learning_rate": None},
            "adafactor: the rate 2e-05 is a length there",
        ),
        (
            "model_name_or_path: m\noptim: sgd\nlearning_rate: 1e-3\nuse_peft: true\n"
            "max_grad_norm: null",
            {"train.learning_rate": pytest.approx(1e-4), "train.max_grad_norm": 0},
            "sgd: has a momentum of 0.9 here",
        ),
        (
            "model_name_or_path: m\noptim: schedule_free_adamw\nlr_scheduler_type: constant\n"
            "warmup_steps: 50",
            {"train.warmup_steps": 50, "train.betas": [0.9, 0.999]},
            "",
        ),
        (
            "model_name_or_path: m\nloss_type: dft",
            {"objective": "dft", "train.learning_rate": 2e-5},
            "assistant_only_loss: TRL learns all",
        ),
        # in the order of the alphabet
        (
            "adapter_name_or_path: saves/x\nfinetuning_type: lora\nlora_rank: 16\n"
            "model_name_or_path: m\nstage: dpo",
            {"checkpoint_dir": "saves/x", "lora.r": None},
            "",
        ),
        # our own flag among another program's
        (
            "checkpoint_dir: m\nquantize: nf4\nnum_train_epochs: 2\noptimizer: sgd\n"
            "learning_rate: 0.1",
            {"quantize": "nf4", "train.epochs": 2, "train.learning_rate": 0.1},
            "",
        ),
        # litgpt's
        (
            "checkpoint_dir: m\nquantize: bnb.nf4\nlora_r: 32\nlora_key: false\nlora_mlp: true\n"
            "data:\n  class_path: litgpt.data.JSON\n  init_args: {mask_prompt: false}\n"
            "train: {lr_warmup_steps: 100, max_seq_length: 512, max_norm: null, epochs: 4}\n"
            "optimizer:\n  class_path: torch.optim.AdamW\n"
            "  init_args: {lr: 2.0e-4, weight_decay: 0.0, betas: [0.9, 0.95]}",
            {"lora.r": 32, "lora.targets": ["q_proj", "v_proj", "*.mlp.*"]}
            | {"train.warmup_steps": 100, "data.max_seq_length": 512, "train.epochs": 4}
            | {"train.max_grad_norm": 0, "train.learning_rate": 2e-4}
            | {"data.mask_prompt": False, "train.weight_decay": 0.0}
            | {"train.min_lr_ratio": 0.0, "quantize": "nf4"},
            "",
        ),
        # torchtune's batch is that of a device
        (
            "batch_size: 2\ngradient_accumulation_steps: 8\n"
            "lr_scheduler:\n  num_warmup_steps: 100",
            {"train.global_batch_size": 16, "train.min_lr_ratio": 0.0},
            "batch_size: 2 examples on each device there, and 8 times as many in a step",
        ),
        # transformers' constant schedule has no warmup
        (
            "base_model: m\nlr_scheduler: constant\nwarmup_ratio: 0.1",
            {"train.lr_schedule": "constant", "train.warmup_fraction": 0.0}
            | {"train.warmup_steps": None},
            "sequence_len: axolotl leaves longer examples out; here they are cut",
        ),
        (
            "base_model: m\nlr_scheduler: constant_with_warmup\nwarmup_ratio: 0.1",
            {"train.lr_schedule": "constant", "train.warmup_fraction": 0.1},
            "",
        ),
        (
            "model_name_or_path: m\nloss_type: sigmoid\ncpo_alpha: 1.0\nbeta: 0.1",
            {"objective": "dpo"},
            "cpo_alpha: TRL's CPO has no reference model, and no counterpart here",
        ),
        # TRL divides by the standard deviation with every loss
        (
            "model_name_or_path: m\nnum_generations: 8\nloss_type: dr_grpo",
            {"grpo.loss": "dr_grpo", "grpo.advantages": "group"},
            "",
        ),
        (
            "model_name_or_path: m\nnum_generations: 8\nscale_rewards: batch",
            {"grpo.advantages": "batch"},
            "",
        ),
        # of a program that does not say which it is; and in our own words
        (
            "num_generations: 8\nscale_rewards: none",
            {"grpo.advantages": "group_mean"},
            "",
        ),
        (
            "model_name_or_path: m\nnum_generations: 8\ngrpo: {advantages: batch}",
            {"grpo.advantages": "batch"},
            "",
        ),
        (
            "model_name_or_path: m\nloss_type: simpo",
            {"objective": "simpo"},
            "cpo_alpha: TRL and axolotl add the loss of the chosen answers",
        ),
        (
            "base_model: m\nfp16: true\nbf16: false\nwarmup_steps: 0\nwarmup_ratio: 0.1\n"
            "optimizer: muon\nadam_beta2: 0.95",
            {"precision": "fp16", "train.warmup_fraction": 0.1, "train.warmup_steps": None}
            | {"train.betas": None},
            "--train.optimizer muon has no such setting",
        ),
        (
            "model_name_or_path: m\nteacher_model_name_or_path: t\nlmbda: 0.7\nbeta: 0.3",
            {"objective": "distill", "teacher": "t", "train.learning_rate": 2e-5}
            | {"distill.on_policy": 0.7}
            | {"distill.alpha": 0.0, "distill.beta": 0.3, "distill.temperature": 0.9}
            | {"preference.beta": None},
            "",
        ),
        (
            "base_model: m\nrl: orpo\norpo_alpha: 0.5\nsample_packing: true",
            {"preference.orpo_lambda": 0.5},
            "packing: a step has packed rows there",
        ),
        (
            "base_model: m\nrl: kto\nkto_desirable_weight: 0.2\ndpo_label_smoothing: 0.1",
            {"preference.desirable_weight": 0.2, "preference.label_smoothing": None},
            "--preference.label_smoothing 0.1 is of no use with kto",
        ),
        (
            "base_model: m\nval_set_size: 100",
            {"data.val_fraction": None},
            "val_set_size: 100 is a number of examples",
        ),
        (
            "base_model: m\nlearning_rate: 1.0e-5",
            {"train.learning_rate": 1e-5},
            "adapter: without it, all weights are trained there",
        ),
        (
            "model_name_or_path: m\nuse_peft: false",
            {"checkpoint_dir": "m"},
            "use_peft: without it, all weights are trained there",
        ),
        (
            "base_model: m\ndatasets: [{path: a.jsonl, message_field_training: learn}]",
            {"data.val_fraction": 0.0},
            "a.jsonl: message_field_training 'learn' has no counterpart",
        ),
        (
            "finetuning_type: freeze\nstage: pt\npissa_init: true",
            {"lora.init": "pissa", "objective": None},
            "stage: pt has no counterpart",
        ),
        # LLaMA-Factory reads the loss of pairs in its stage dpo
        (
            "model_name_or_path: m\nstage: kto\npref_loss: sigmoid",
            {"objective": "kto"},
            "--pref_loss does not exist",
        ),
        (
            "model_name_or_path: m\nlora_rank: 4\nr: 8",
            {"lora.r": 8},
            ": both are --lora.r here, with different values; ",
        ),
        (
            "model_name_or_path: m\nloss_type: ipo\nmax_completion_length: 9",
            {"objective": "ipo", "grpo.max_new_tokens": None},
            "--grpo.max_new_tokens 9 is of no use with ipo",
        ),
        # a flag of ours with the last word of another one
        (
            "model_name_or_path: m\ngrpo: {beta: 0.1}",
            {"objective": None},
            "--grpo.beta 0.1 is of no use with sft",
        ),
        (
            "base_model: m\nrl: grpo\nsequence_len: 2048",
            {"objective": "grpo", "data.max_seq_length": None},
            "sequence_len: axolotl's GRPO does not read it",
        ),
    ],
)
def test_settings_whose_meaning_depends_on_others(text, expected, note, tmp_path):
    """None: litft's default. The converted file is accepted as it is."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        parser.parse(LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])
    message = str(error.value)
    assert note in message
    # what follows are errors in values of the other file
    converted = message.partition("no counterpart:\n\n")[2].partition("\n\n")[0]
    tree = yaml.safe_load(converted)
    for flag, value in expected.items():
        group, _, name = flag.rpartition(".")
        assert (
            tree.get(group, {}).get(name) == value if group else tree.get(name) == value
        ), flag
    (tmp_path / "b.yaml").write_text(converted)
    words = [
        "--config",
        str(tmp_path / "b.yaml"),
        "--data.path",
        "a.jsonl",
        "--checkpoint_dir",
        "m",
    ]
    if tree.get("objective") == "grpo":
        words += ["--reward", "number"]
    parser.parse(LoRAFinetuneArgs, words)


def test_configs_of_other_commands_and_resume_in_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("resume: true\n")
    with pytest.raises(
        ValueError, match=r"a\.yaml: resume continues the run in out_dir, which is missing"
    ):
        parser.parse(LoRAFinetuneArgs, ["--config", str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml").write_text(
        "checkpoint_dir: a\nquantize: nf4\ntrain: {max_steps: 3}\n"
    )
    with pytest.raises(
        ValueError,
        match=r"these are flags of finetune/lora\.py; use finetune/lora\.py --config .* --dry_run$",
    ):
        parser.parse(flags.PrepareArgs, ["--config", str(tmp_path / "a.yaml")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["axolotl.yaml"],
            "'axolotl.yaml' is no flag: flags start with --; did you mean --config axolotl.yaml?",
        ),
        (
            ["--adapter", "lora"],
            "--adapter does not exist; leave it out (the command says the method",
        ),
        (
            ["--micro_batch_size", "2", "--gradient_accumulation_steps", "4"],
            "here it is --train.global_batch_size 8",
        ),
        (["--gradient_accumulation_steps", "4"], "here it is --train.global_batch_size N"),
        (["--local_rank", "0"], "leave it out (the processes set it)"),
        (["--fsdp_version", "2"], "leave it out (it is FSDP2)"),
        (["--rl_beta", "0.2"], "here it is --preference.beta 0.2"),
        (["--nonsense", "0.2"], "--nonsense does not exist; --help lists all flags"),
    ],
)
def test_hints_for_words_of_other_programs(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parser.parse(flags.LoRAFinetuneArgs, words)


@pytest.mark.parametrize(
    ("cls", "words", "message"),
    [
        (
            flags.ChatArgs,
            ["--model", "m"],
            "--model does not exist; use --checkpoint_dir m",
        ),
        (flags.RunEvalArgs, ["--model_name_or_path", "m"], "use --checkpoint_dir m"),
        (
            flags.MergeArgs,
            ["--output_dir", "o"],
            "--output_dir does not exist; use --out_dir o",
        ),
        # chat has no counterpart of this one
        (
            flags.ChatArgs,
            ["--cutoff_len", "9"],
            "--cutoff_len does not exist; --help lists",
        ),
        (flags.GgufExportArgs, ["--outtype", "Q4_K_M"], "write q4_k_m"),
        (
            flags.GgufExportArgs,
            ["--outtype", "q3_k_s"],
            "llama.cpp's llama-quantize with Q3_K_S",
        ),
        (flags.PlanArgs, ["--method", "QLoRA"], "write --method lora --quantize nf4"),
        (flags.GenerateArgs, ["Hello"], "did you mean --prompt 'Hello'?"),
        (flags.PlanArgs, ["--tokens", "1,000"], "expected a whole number; write 1000"),
        (flags.MergeArgs, ["--adapter", "runs/a"], "use --checkpoint_dir runs/a"),
        (flags.MergeArgs, ["--out", "merged"], "use --out_dir merged"),
        (flags.MergeArgs, ["--base_model", "m"], "use --base_dir m"),
    ],
)
def test_hints_of_commands_that_train_nothing(cls, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parser.parse(cls, words)


def test_lists_may_be_several_words(tmp_path, monkeypatch):
    """As a shell writes a pattern without quotes; a text with a comma stays whole."""
    monkeypatch.chdir(tmp_path)
    words = ["--checkpoint_dir", "m", "--data.path", "a.jsonl", "b,c", "--eval.prompts"]
    words += ["Well, who are you?", "Hi", "--train.max_steps", "3"]
    args = parse(FINETUNE["lora"], words)
    assert args.data.path == ["a.jsonl", "b", "c"] and args.train.max_steps == 3
    assert args.eval.prompts == ["Well, who are you?", "Hi"]
    merge = ["--out_dir", "o", "--weights", "0.7,", "-0.3", "--checkpoint_dir"]
    (tmp_path / "lr=1,r=8").mkdir()
    args = parser.parse(flags.MergeArgs, [*merge, "lr=1,r=8", "other"])
    assert args.checkpoint_dir == ["lr=1,r=8", "other"] and args.weights == [0.7, -0.3]
    args = parser.parse(flags.GenerateArgs, ["--prompt", "p", "--stop", "a", "b, c"])
    assert args.stop == ["a", "b, c"]


def test_a_flag_of_fine_tuning_is_named_elsewhere():
    with pytest.raises(
        ValueError,
        match=r"--data\.path does not exist here; it is a flag of the fine-tuning scripts",
    ):
        parser.parse(flags.PlanArgs, ["--checkpoint_dir", "m", "--data.path", "d"])


def test_a_flag_needs_its_group_only_where_several_have_it(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("max_steps: 7\n")
    words = [
        "--checkpoint_dir",
        "m",
        "--path",
        "d",
        "--learning_rate",
        "0.5",
        "--rslora",
        "--config",
        str(config),
    ]
    args = parser.parse(LoRAFinetuneArgs, [*words, "--seed", "3"])
    assert (
        args.train.learning_rate,
        args.data.path,
        args.lora.rslora,
        args.train.max_steps,
    ) == (
        0.5,
        ["d"],
        True,
        7,
    )
    assert (args.seed, args.data.seed) == (3, 42)
    with pytest.raises(ValueError, match="--interval does not exist"):
        parser.parse(LoRAFinetuneArgs, [*words, "--interval", "3"])


@pytest.mark.parametrize(
    ("value", "stops"),
    [
        ("\n", ["\n"]),
        ("User: ", ["User: "]),
        ("a, b", ["a", "b"]),
        ("a,\n\n", ["a", "\n\n"]),
        ('["a, b"]', ["a, b"]),
    ],
)
def test_white_space_counts_in_stop_texts(value, stops):
    assert parse(flags.GenerateArgs, ["--prompt", "Hi", "--stop", value]).stop == stops


@pytest.mark.parametrize(
    ("cls", "words", "message"),
    [
        (flags.RunEvalArgs, "--tasks t --reward exact", "--reward rates answers to --data"),
        (flags.RunEvalArgs, "--num_fewshot 5", "--num_fewshot applies to --tasks"),
        (flags.RunEvalArgs, "--include_path d", "--include_path applies to --tasks"),
        (
            flags.SweepArgs,
            "--grid lora.r=2 --flags=--seed=7",
            "--flags --seed=7: the sweep sets",
        ),
    ],
)
def test_flags_that_nothing_would_read_are_refused(cls, words, message):
    with pytest.raises(ValueError, match=message):
        parse(cls, words.split())


def test_types_of_axolotl_that_say_a_prompt_are_noted(tmp_path):
    """The fields of the records say the format, but not the words of the prompt."""
    path = tmp_path / "a.yaml"
    for kind, is_noted in (("gpteacher", True), ("chat_template", False)):
        path.write_text(
            f"base_model: m\nadapter: lora\ndatasets:\n  - path: d.jsonl\n    type: {kind}\n"
        )
        with pytest.raises(ValueError) as error:
            parse(flags.LoRAFinetuneArgs, ["--config", str(path)])
        assert (f"type {kind} has no counterpart" in str(error.value)) == is_noted
