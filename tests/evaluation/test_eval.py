"""Scores: lm-evaluation-harness's tasks on litft's own network, and a user's own examples."""

import importlib.util
import json
import math
import re
from shutil import copyfile, copytree

import pytest
import torch
import torch.nn.functional as F
from conftest import adapted, refused, script
from transformers import AutoModelForCausalLM, LlamaConfig

import litft
from litft.args import DataArgs, LoRAArgs, LoRAFinetuneArgs, RunEvalArgs, TrainArgs
from litft.data.dataset import load_data
from litft.data.tokenizer import Tokenizer
from litft.evaluation.examples import compared_sources, readable_by_all
from litft.inference.session import open_session, source_of
from litft.methods import LoRA

if importlib.util.find_spec("lm_eval") is None:  # its import takes seconds, which only these tests wait for
    pytest.skip("needs lm-eval, of the extra 'eval'", allow_module_level=True)
QUESTIONS = [
    {"question": "What is the capital of France?", "choices": ["Paris", "London", "a potato"], "answer": 0},
    {"question": "What do calves drink?", "choices": ["water", "milk", "petrol"], "answer": 1},
    {"question": "2 + 2 =", "choices": ["5", "4", "seventeen"], "answer": 1},
    {"question": "The sky is", "choices": ["green", "blue"], "answer": 1},
    {"question": "Who wrote Hamlet?", "choices": ["Goethe", "Shakespeare", "Plato"], "answer": 1},
    {"question": "Water boils at", "choices": ["a hundred degrees", "ten degrees"], "answer": 0},
]
BEGINNING = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.jsonl
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
metadata:
  version: 1
"""
KINDS = {
    "choice": """\
output_type: multiple_choice
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
""",
    "said": """\
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: !function judge.holds
    aggregation: mean
    higher_is_better: true
""",
    "text": """\
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{choices}}"
metric_list:
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
""",
}
# the package `evaluate`, whose name no file of the scripts' folder may have
JUDGE = """\
import evaluate

def holds(predictions, references):
    assert callable(evaluate.load) and "site-packages" in evaluate.__file__
    return float(references[0].lower() in predictions[0].lower())
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """YAML files of one task of each kind, and what they need."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps(own) + "\n" for own in QUESTIONS))
    (folder / "judge.py").write_text(JUDGE)
    for name, text in KINDS.items():
        (folder / f"{name}.yaml").write_text(BEGINNING.format(name=f"own_{name}", folder=folder) + text)
    return folder


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints["stories260K"]


@pytest.fixture(scope="module")
def tuned(folder, tmp_path_factory):
    method = LoRA(LoRAArgs(r=4, targets=["v_proj", "down_proj"]))
    return adapted(folder, tmp_path_factory.mktemp("tuned") / "tuned", method)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "own.jsonl"
    texts = [("Who is it?", "Lily"), ("What did she see?", "a big dog in the park"), ("And then?", "they were happy")] * 3
    path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in texts))
    return path


def evaluated(tmp_path, *words, code=0):
    """What a command writes and prints."""
    done = script("scripts/run_eval.py", "--out", "out.json", *words, cwd=tmp_path, code=code)
    return (json.loads((tmp_path / "out.json").read_text()) if code == 0 else None), done


def asked(*args, kind="loglikelihood"):
    """The harness's requests."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, own, number) for number, own in enumerate(args)]


@pytest.fixture(scope="module")
def ours(folder):
    from litft.evaluation.lm_eval_model import HarnessModel

    args = RunEvalArgs(tasks=["any"], precision="fp32")
    return HarnessModel(open_session(args.model(str(folder))), batch_size=3)


PAIRS = [
    ("Once upon a", " time there was"),
    ("", "The dog"),
    ("Lily ", "ran"),
    ("Lily", " ran"),
    ("Lily", " saw"),
    ("a " * 400, "b"),
]


@torch.no_grad()
def test_log_probabilities_are_the_models(ours, folder):
    """In batches, with texts of other lengths beside them, too long ones cut, and choices that share what they follow."""
    model, tokenizer = litft.load(folder, "fp32")
    found = ours.loglikelihood(asked(*PAIRS), disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        whole = tokenizer.encode(context + continuation) if context else [*tokenizer.encode("The dog")]
        before = len(tokenizer.encode(context.rstrip())) if context else 1
        kept = whole[-model.config.max_positions - 1 :]
        logprobs = model(torch.tensor([kept[:-1]]))[0].log_softmax(-1)[-(len(whole) - before) :]
        ids = torch.tensor(whole[before:])
        assert math.isclose(total, float(logprobs.gather(1, ids[:, None]).sum()), abs_tol=1e-3)
        assert greedy == bool((logprobs.argmax(-1) == ids).all())


@torch.no_grad()
def test_a_texts_windows_predict_each_token_once(ours, folder):
    model, tokenizer = litft.load(folder, "fp32")
    text = "Lily and Tom went to the park. They saw a big dog. " * 60
    (found,) = ours.loglikelihood_rolling(asked((text,)), disable_tqdm=True)
    ids, context, total = tokenizer.encode(text), model.config.max_positions, 0.0
    assert len(ids) > 2 * context
    whole = [ours.prefix_token_id, *ids]
    for start in range(0, len(ids), context):
        end = min(start + context, len(ids))
        begin = max(0, end - context)  # the last window reaches back as far as it can
        logprobs = model(torch.tensor([whole[begin:end]]))[0].log_softmax(-1)
        total += float(logprobs.gather(1, torch.tensor(whole[begin + 1 : end + 1])[:, None])[start - begin :].sum())
    assert math.isclose(found, total, rel_tol=1e-4)


def test_answers_end_where_a_task_says(ours, folder):
    model = litft.load(folder, "fp32")
    settings = {"until": ["."], "max_gen_toks": 40, "do_sample": False}
    prompts = ["Once upon a time", "Lily saw", "a " * 500]
    found = ours.generate_until(asked(*((prompt, settings) for prompt in prompts), kind="generate_until"), disable_tqdm=True)
    unsaid = {"until": ["."], "max_gen_toks": 40}  # a task that says no more is answered greedily
    again = ours.generate_until(asked(*((prompt, unsaid) for prompt in prompts), kind="generate_until"), disable_tqdm=True)
    assert again == found
    for prompt, text in zip(prompts[:2], found[:2], strict=True):
        whole = "".join(litft.stream(*model, prompt, max_new_tokens=40, temperature=0))
        assert text == whole.partition(".")[0]
    assert found[2]
    sampled = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 2.0}
    several = ours.generate_until(asked(*[(prompts[0], sampled)] * 4, kind="generate_until"), disable_tqdm=True)
    assert len(set(several)) > 1


@pytest.mark.slow
def test_scores_are_those_of_the_harness_s_hugging_face_back_end(checkpoints, tasks, tmp_path):
    """SmolLM2: every log-probability, answer and score."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from litft.evaluation.lm_eval_model import HarnessModel

    folder = checkpoints["SmolLM2-135M-Instruct"]
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
    ours = HarnessModel(open_session(RunEvalArgs(tasks=["any"], precision="fp32").model(str(folder))), 4)
    pairs = [(f"Question: {own['question']}\nAnswer:", f" {choice}") for own in QUESTIONS for choice in own["choices"]]
    for (expected, greedy), found in zip(*(own.loglikelihood(asked(*pairs)) for own in (theirs, ours)), strict=True):
        assert math.isclose(expected, found[0], abs_tol=2e-3) and greedy == found[1]
    settings = {"until": ["\n"], "max_gen_toks": 20, "do_sample": False}
    prompts = [(f"Question: {own['question']}\nAnswer:", settings) for own in QUESTIONS]
    assert ours.generate_until(asked(*prompts)) == theirs.generate_until(asked(*prompts))
    names = [str(tasks / f"{name}.yaml") for name in KINDS]
    expected = lm_eval.simple_evaluate(theirs, tasks=names, task_manager=TaskManager(), log_samples=False)["results"]
    found, _ = evaluated(tmp_path, "--checkpoint_dir", folder, "--precision", "fp32", "--tasks", ",".join(names))
    results = found["harness"][folder.name]["results"]
    assert results.keys() == expected.keys() and len(results) == 3
    for task, scores in expected.items():
        for name, value in scores.items():
            if "," in name and isinstance(value, float):
                assert math.isclose(results[task][name], value, rel_tol=1e-4), (task, name)


@pytest.mark.slow
def test_base_and_tuned_side_by_side(folder, tuned, tasks, examples, tmp_path):
    """Tasks and examples in one table; what stands under base is what the base alone gets."""
    words = [
        "--tasks",
        ",".join(str(tasks / f"{name}.yaml") for name in KINDS),
        "--data.path",
        examples,
        "--precision",
        "fp32",
    ]
    both, done = evaluated(tmp_path, "--checkpoint_dir", tuned, *words)
    alone, _ = evaluated(tmp_path, "--checkpoint_dir", folder, *words)
    assert both["scores"].keys() == {"base", "tuned"} and alone["scores"].keys() == {folder.name}
    for name, value in alone["scores"][folder.name].items():
        assert math.isclose(both["scores"]["base"][name], value, rel_tol=1e-4), name
    assert both["scores"]["tuned"]["loss"] != both["scores"]["base"]["loss"]
    assert {"loss", "perplexity", "exact_match", "own_choice: acc", "own_said: holds", "own_text: word_perplexity"} <= both[
        "scores"
    ]["base"].keys()
    lines = done.stdout.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == ["", "", "base", "tuned", ""]
    assert sum(line.startswith("|") for line in lines) == 2 + len(both["scores"]["base"])
    assert "prompt:" in done.stdout and "expected: " in done.stdout and "tuned:    " in done.stdout
    only, _ = evaluated(
        tmp_path, "--checkpoint_dir", tuned, "--data.path", examples, "--precision", "fp32", "--against", "none"
    )
    assert only["scores"].keys() == {"tuned"}
    against, _ = evaluated(
        tmp_path, "--checkpoint_dir", folder, "--data.path", examples, "--against", tuned, "--precision", "fp32"
    )
    assert list(against["scores"]) == ["tuned", folder.name]
    assert against["scores"]["tuned"] == only["scores"]["tuned"]


@torch.no_grad()
def test_scores_on_ones_own_examples(folder, examples, tmp_path):
    """The loss is transformers', a token; an answer is right to the letter, and ends there, or not."""
    text = examples.read_text().splitlines()
    asked = [{"role": "user", "content": "Who is it?"}]
    pieces = litft.stream(*litft.load(folder, "fp32"), asked, max_new_tokens=6, temperature=0)
    ends = [token for piece in pieces for token in piece.tokens][-1]  # a base model's answers never end by themselves
    folder = copytree(folder, tmp_path / folder.name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ends]}))
    model, tokenizer = litft.load(folder, "fp32")
    said = "".join(litft.stream(model, tokenizer, asked, max_new_tokens=6, temperature=0))
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join([*text[:3], json.dumps({"prompt": "Who is it?", "completion": said})]) + "\n")
    found, _ = evaluated(
        tmp_path, "--checkpoint_dir", folder, "--data.path", mine, "--precision", "fp32", "--max_new_tokens", "6"
    )
    scores = found["scores"][folder.name]
    theirs, total, count = AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), 0.0, 0
    for line in mine.read_text().splitlines():
        record = json.loads(line)
        talk = [{"role": "user", "content": record["prompt"]}]
        before = tokenizer.apply_chat_template(talk, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*talk, {"role": "assistant", "content": record["completion"]}])
        ids = [*tokenizer.encode(whole, bos=False)]
        ids += [] if ids[-1] in tokenizer.stop_ids else tokenizer.stop_ids[-1:]
        start = len(tokenizer.encode(before, bos=False))
        logits = theirs(torch.tensor([ids])).logits[0]
        total += float(F.cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="sum"))
        count += len(ids) - start
    assert math.isclose(scores["loss"], total / count, rel_tol=1e-4)
    assert math.isclose(scores["perplexity"], math.exp(scores["loss"]), rel_tol=1e-9)
    assert scores["examples"] == 4 and len(found["answers"]) == 4
    assert found["answers"][3][folder.name] == said.strip() == found["answers"][3]["expected"]
    assert scores["exact_match"] == 0.25
    words = ["--checkpoint_dir", folder, "--data.path", mine, "--precision", "fp32"]
    cut, _ = evaluated(tmp_path, *words, "--max_new_tokens", "5")  # the same text, which would go on
    assert cut["answers"][3][folder.name] == said.strip() and cut["scores"][folder.name]["exact_match"] == 0


def test_plain_texts_have_a_perplexity_alone(folder, tmp_path):
    (tmp_path / "text.txt").write_text("Lily saw a dog. " * 20)
    found, _ = evaluated(tmp_path, "--checkpoint_dir", folder, "--data.path", "text.txt")
    assert found["scores"][folder.name].keys() == {"examples", "loss", "perplexity"} and not found["answers"]


def test_a_run_is_scored_on_what_it_held_out(folder, tmp_path, monkeypatch):
    """By its own flags, whether its file is named or not; any other file is scored whole."""
    records = [{"q": f"Number {n}?", "completion": "Lily " * (n % 4 + 1)} for n in range(60)]
    for name in ("mine", "other"):
        text = "".join(json.dumps(record | {"from": name}) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    data = DataArgs(path=["mine.jsonl"], columns=["prompt=q"], val_fraction=0.2, seed=3, template="chatml")
    train = TrainArgs(max_steps=1, global_batch_size=2)
    run = litft.finetune(
        LoRAFinetuneArgs(checkpoint_dir=str(folder), data=data, train=train, out_dir=str(tmp_path / "run"))
    ).folder
    tokenizer = Tokenizer(run / "final")
    held = load_data(data, tokenizer, 512, 256).val
    own = [tokenizer.decode(sample.answer[0].tolist(), skip_special=False) for sample in held]
    assert 3 < len(own) < 25
    for words in ([], ["--data.path", "mine.jsonl"]):
        found, done = evaluated(tmp_path, "--checkpoint_dir", run, "--max_new_tokens", "1", *words)
        assert [answer["prompt"] for answer in found["answers"]] == own
        assert "scoring the part that was held out (--data.val_fraction 0.2, --data.seed 3)" in done.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "copy.jsonl").write_bytes((tmp_path / "mine.jsonl").read_bytes())  # it is the file that counts
    words = ["--data.path", "other/copy.jsonl", "--against", run, "--max_new_tokens", "1"]
    found, done = evaluated(tmp_path, "--checkpoint_dir", folder, *words)
    assert len(found["answers"]) == len(own) and "held out" in done.stderr
    words = ["--data.path", "copy.jsonl", "--data.columns", "prompt=q", "--max_new_tokens", "1"]
    _, done = evaluated(tmp_path / "other", "--checkpoint_dir", run, *words)
    assert "was trained on mine.jsonl, which is not found from this folder" in done.stderr
    words = ["--data.path", "mine.jsonl,other.jsonl", "--data.columns", "prompt=q"]
    _, done = evaluated(tmp_path, "--checkpoint_dir", run, *words, code=2)
    assert "not the same files as" in done.stderr and "score other files alone" in done.stderr
    words = ["--data.path", "other.jsonl", "--data.columns", "prompt=q", "--max_new_tokens", "1"]
    found, done = evaluated(tmp_path, "--checkpoint_dir", run / "final", *words)
    assert len(found["answers"]) == 60 and "held out" not in done.stderr


def test_models_are_scored_on_what_all_can_read(folder, checkpoints, make_model, tmp_path):
    """Each skips records of its own where tokenizers or contexts differ: answers stand beside those to the same question."""
    short = make_model(LlamaConfig, vocab_size=512, max_position_embeddings=160)[1]
    for path in folder.glob("*token*"):
        copyfile(path, short / path.name)
    records = [{"prompt": "word " * (n * 7 % 60) + f"Number {n}?", "completion": "Lily."} for n in range(24)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--data.path", "own.jsonl", "--max_new_tokens", "2"]
    found, done = evaluated(tmp_path, "--checkpoint_dir", folder, "--against", short, *words)
    count = len(found["answers"])
    assert 4 < count < 24 and "--data.max_seq_length 160, which all models can read" in done.stderr
    assert {own["examples"] for own in found["scores"].values()} == {count}
    alone, _ = evaluated(tmp_path, "--checkpoint_dir", folder, *words)
    said = {answer["prompt"]: answer[folder.name] for answer in alone["answers"]}
    assert all(said[answer["prompt"]] == answer[folder.name] for answer in found["answers"]) and len(said) == 24
    (tmp_path / "story.txt").write_text("Once upon a time there was a girl. " * 80)  # in windows of the same length
    words = ["--data.path", "story.txt", "--limit", "2"]
    found, _ = evaluated(tmp_path, "--checkpoint_dir", folder, "--against", short, *words)
    alone, _ = evaluated(tmp_path, "--checkpoint_dir", folder, "--data.max_seq_length", "160", *words)
    assert found["scores"][folder.name] == alone["scores"][folder.name]


def test_models_with_other_tokenizers_are_scored_on_what_all_can_read(folder, shared, tmp_path, capsys):
    """With other tokens an example is longer or shorter, and one that a model cannot read is scored of none."""
    other = tmp_path / "other"
    copytree(shared / "tokenizers" / "gpt2", other)
    for name in ("config.json", "model.safetensors"):
        copyfile(folder / name, other / name)
    records = [{"prompt": "word " * (n * 7 % 60) + f"Number {n}?", "completion": "Lily."} for n in range(24)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataArgs(path=[str(tmp_path / "own.jsonl")], val_fraction=0.0, max_seq_length=160)
    args = RunEvalArgs(str(folder), data=data, against=str(other))
    sources = compared_sources(args, source_of(args.model(str(folder))))
    in_common, alone = readable_by_all(args, sources), readable_by_all(args, sources[1:])
    said = capsys.readouterr().err
    assert 4 < len(in_common) < 24 == len(alone) and in_common < alone
    others = 24 - len(in_common)
    assert (
        f"scoring the {len(in_common)} examples whose answers all models read to the same end, not {others} others" in said
    )
    assert "the tokenizers differ" in said


@pytest.mark.slow
def test_a_base_without_the_new_tokens(folder, examples, tmp_path):
    """It reads the examples with the tokens that it knows."""
    flags = [
        "--checkpoint_dir",
        folder,
        "--data.path",
        examples,
        "--data.new_tokens",
        "<who>,Lily",
        "--train.max_steps",
        "1",
    ]
    script("finetune/lora.py", *flags, "--out_dir", "tuned", cwd=tmp_path)
    both, _ = evaluated(tmp_path, "--checkpoint_dir", "tuned", "--data.path", examples, "--precision", "fp32")
    held_out = ("--data.path", examples, "--data.val_fraction", "0.05")  # as the run did
    alone, _ = evaluated(tmp_path, "--checkpoint_dir", folder, *held_out, "--precision", "fp32")
    assert both["scores"]["base"] == alone["scores"][folder.name] != both["scores"]["tuned"]
    done = script(
        "generate/chat.py", "--checkpoint_dir", "tuned", "--max_new_tokens", "5", cwd=tmp_path, text="/base hello\n"
    )
    assert done.stdout.strip()


def test_what_is_no_file_is_left_alone(folder, examples, tmp_path):
    done = script(
        "scripts/run_eval.py",
        "--checkpoint_dir",
        folder,
        "--data.path",
        examples,
        "--out",
        "/dev/null",
        cwd=tmp_path,
        code=2,
    )
    assert "/dev/null is not a file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantized(checkpoints, examples, quantize, tmp_path):
    pytest.importorskip("bitsandbytes")
    words = ["--data.path", examples, "--limit", "3"]
    plain, _ = evaluated(tmp_path, "--checkpoint_dir", checkpoints["stories260K"], *words)
    found, _ = evaluated(tmp_path, "--checkpoint_dir", checkpoints["stories260K"], *words, "--quantize", quantize)
    losses = [own["scores"]["stories260K"]["loss"] for own in (plain, found)]
    assert losses[0] != losses[1] and math.isclose(*losses, rel_tol=0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --data.path or --tasks"),
        pytest.param(["--tasks", "hellaswagg"], "did you mean hellaswag?", marks=pytest.mark.slow),
        (["--tasks", "nowhere.yaml"], "no such file"),
        (["--data.path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--data.path", "nowhere.jsonl", "--out", "nowhere/out.json"], "the folder nowhere does not exist"),
        (["--data.path", "nowhere.jsonl", "--limit", "0"], "--limit 0"),
        (["--tasks", "piqa", "--devices", "2"], "--layers_per_device"),
    ],
    ids=str,
)
def test_what_cannot_be_scored(folder, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused("run_eval", "--checkpoint_dir", folder, *words, capsys=capsys)


@pytest.fixture(scope="module")
def manager():
    """What knows the harness's tasks, which takes seconds to find."""
    from litft.evaluation.lm_eval_model import find_tasks

    return find_tasks([], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: [broken", "ParserError"),
        ("task: x", "TypeError"),
        (BEGINNING.replace("{{{{question}}}}", "{{{{qestion}}}}") + KINDS["choice"], "'qestion' is undefined"),
        (BEGINNING.replace("{{{{question}}}}", "{{{{question}}") + KINDS["choice"], "TemplateSyntaxError"),
    ],
    ids=["yaml", "no data", "field", "template"],
)
def test_a_task_that_is_wrong(folder, tasks, manager, text, said, tmp_path):
    from litft.evaluation.lm_eval_model import run_tasks

    (tmp_path / "wrong.yaml").write_text(text.format(name="wrong", folder=tasks))
    session = open_session(RunEvalArgs(tasks=["any"]).model(str(folder)))
    with pytest.raises(ValueError, match=f"{re.escape(said)}.*look at the task's YAML"):
        run_tasks(session, [str(tmp_path / "wrong.yaml")], manager, 1, {})


@pytest.mark.parametrize("package", ["lm_eval", "evaluate"])
def test_without_the_packages_one_message_says_what_to_install(folder, package, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none', name='{package}')")
    words = ["scripts/run_eval.py", "--checkpoint_dir", folder, "--tasks", "piqa"]
    done = script(*words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, code=2)
    assert done.stderr.splitlines()[-1] == f"error: --tasks needs the package {package}; pip install 'litft[eval]'"


def finished(folder, tmp_path, name, **data):
    """A run of one step, whose folder is returned."""
    train = TrainArgs(max_steps=1, global_batch_size=2)
    args = LoRAFinetuneArgs(checkpoint_dir=str(folder), data=DataArgs(**data), train=train, out_dir=str(tmp_path / name))
    return litft.finetune(args).folder


def test_a_runs_own_split_is_the_only_one(folder, tmp_path, monkeypatch, capsys):
    """A part of its files, another seed, or another run on the same file would call training examples held out."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "data/train", "data/val"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        records = ({"prompt": f"{name} {n}?", "completion": "Lily"} for n in range(20))
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = finished(folder, tmp_path, "run", path=["a.jsonl", "b.jsonl"], val_fraction=0.3)
    words = ["--checkpoint_dir", run, "--max_new_tokens", "1"]
    capsys.readouterr()
    assert "not the same files" in refused("run_eval", *words, "--data.path", "b.jsonl", capsys=capsys)
    said = refused("run_eval", *words, "--data.seed", "1", capsys=capsys)
    assert "held out other examples (--data.seed 42)" in said and "leave it out" in said
    said = refused("run_eval", *words, "--data.columns", "prompt=q,completion=a", capsys=capsys)
    assert "--data.columns prompt=q,completion=a: " in said
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "mixed.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": "New?", "completion": "Lily"})]) + "\n")
    warned = evaluated(tmp_path, *words, "--data.path", "mixed.jsonl")[1].stderr
    count = int(re.search(r"trained on (\d+) of the 21 scored examples", warned)[1])
    assert 10 <= count < 20  # those that were held out are none of them
    other = finished(folder, tmp_path, "other", path=["a.jsonl", "b.jsonl"], val_fraction=0.0)
    capsys.readouterr()
    said = refused("run_eval", *words, "--against", other, capsys=capsys)
    assert "was trained on some of what" in said
    chained = finished(run, tmp_path, "chained", path=["a.jsonl", "b.jsonl"], val_fraction=0.3, seed=3)
    capsys.readouterr()
    assert "was trained on some of what" in refused("run_eval", "--checkpoint_dir", chained, capsys=capsys)
    assert "is the model itself" in refused("run_eval", *words, "--against", run, capsys=capsys)
    whole = finished(folder, tmp_path, "whole", path=["data"])
    capsys.readouterr()
    said = refused("run_eval", "--checkpoint_dir", whole, "--data.val_path", "a.jsonl", capsys=capsys)
    assert "held out other examples (without --data.val_path)" in said
    words = ["--checkpoint_dir", whole, "--max_new_tokens", "1", "--data.path", "data/train.jsonl"]
    words += ["--data.val_path", str(tmp_path / "data" / "val.jsonl")]  # the same file by another name
    found, _ = evaluated(tmp_path, *words)  # the folder's validation file is the held-out part
    assert all("data/val" in answer["prompt"] for answer in found["answers"]) and len(found["answers"]) == 20


def test_tokens_within_a_padded_vocabulary_are_new_to_the_base(folder, make_model, tmp_path):
    base = make_model(LlamaConfig, vocab_size=520, max_position_embeddings=256)[1]
    for path in folder.glob("*token*"):
        copyfile(path, base / path.name)
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "Who?", "completion": "Lily"}) + "\n")
    run = finished(base, tmp_path, "run", path=[str(tmp_path / "own.jsonl")], new_tokens=["<who>"])
    args = RunEvalArgs(str(run))
    source = source_of(args.model(str(run)))
    assert len(compared_sources(args, source)) == 2
