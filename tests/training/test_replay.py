"""--data.replay: the model's own answers to ordinary questions are learned beside the examples."""

import json
from dataclasses import replace

import pytest
from conftest import refused

import litft
from litft.args import DataArgs, LoRAFinetuneArgs, ModelArgs, TrainArgs
from litft.commands.finetune import prepare_run
from litft.evaluation.forgetting import NUM_QUESTIONS, ordinary_questions
from litft.inference.session import open_session
from litft.training.replay import own_answers


@pytest.fixture
def chatty(tiny, tmp_path, monkeypatch):
    """The folder of a model that ends about half of its answers at once."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "kept"))
    _, tokenizer = litft.load(tiny)
    folder = tmp_path / "chatty"
    folder.mkdir()
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.end_id, *range(60, 70)]})
    )
    return folder


def args_of(folder, examples, **data):
    return LoRAFinetuneArgs(
        checkpoint_dir=str(folder),
        data=DataArgs(path=[str(examples)], val_fraction=0.25, **data),
        train=TrainArgs(max_steps=2, global_batch_size=2),
        precision="fp32",
    )


def test_own_answers_join_the_training_examples(chatty, examples, tmp_path):
    """They are generated once, are answers that the model has ended, and none is held out."""
    plain = prepare_run(args_of(chatty, examples)).schedule.data
    data = prepare_run(args_of(chatty, examples, replay=0.5)).schedule.data
    (kept,) = (tmp_path / "kept" / "litft" / "replay").glob("*.jsonl")
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(records) == round(0.5 * len(plain.train))
    assert len(data.train) == len(plain.train) + len(records)
    assert data.val_digest == plain.val_digest and data.train_digest != plain.train_digest
    asked = set(ordinary_questions()[NUM_QUESTIONS:])
    for record in records:
        assert record["messages"][0]["content"] in asked
        assert record["messages"][1]["content"]

    tokens = data.train[len(data.train) - 1].tokens.tolist()
    assert records[-1]["messages"][1]["content"] in data.tokenizer.decode(tokens)

    written = kept.stat().st_mtime_ns
    again = prepare_run(args_of(chatty, examples, replay=0.5)).schedule.data
    assert kept.stat().st_mtime_ns == written and again.train_digest == data.train_digest
    kept.unlink()
    anew = prepare_run(args_of(chatty, examples, replay=0.5)).schedule.data
    assert anew.train_digest == data.train_digest


def test_the_share_is_of_an_epoch_whose_files_have_weights(chatty, examples):
    plain = prepare_run(args_of(chatty, examples)).schedule.data
    data = prepare_run(args_of(chatty, examples, replay=0.5, weights=[0.4])).schedule.data
    added = len(data.train) - len(plain.train)
    assert added == round(0.5 * round(0.4 * len(plain.train)))


def test_an_adapter_has_answers_of_its_own(chatty, examples, tmp_path):
    kept = tmp_path / "kept" / "litft" / "replay"
    args = args_of(chatty, examples, replay=0.5)
    args.out_dir = str(tmp_path / "run")
    litft.finetune(args)
    prepare_run(args_of(tmp_path / "run" / "final", examples, replay=0.5))
    assert len(list(kept.glob("*.jsonl"))) == 2


def test_questions_have_the_system_prompt_of_the_data(chatty, tmp_path):
    records = []
    for number in range(8):
        messages = [{"role": "system", "content": "Be a parrot."}]
        messages.append({"role": "user", "content": f"Question {number}"})
        messages.append({"role": "assistant", "content": f"Answer {number}"})
        records.append(json.dumps({"messages": messages}))
    path = tmp_path / "system.jsonl"
    path.write_text("\n".join(records))
    data = prepare_run(args_of(chatty, path, replay=0.5)).schedule.data
    assert len(data.reports) == 2 and data.system_prompt == "Be a parrot."


def test_a_run_learns_them(chatty, examples, tmp_path):
    args = args_of(chatty, examples, replay=0.5)
    args.out_dir = str(tmp_path / "run")
    result = litft.finetune(args)
    assert "replay: 0.5" in (result.folder / "config.yaml").read_text()


@pytest.mark.slow
def test_a_question_is_asked_again_if_there_are_too_few(chatty):
    session = open_session(ModelArgs(checkpoint_dir=str(chatty), compile="false"))
    pairs = own_answers(session, count=400, seed=1)
    assert len(pairs) == 400
    asked = [question for question, _ in pairs]
    assert len(set(asked)) < 301 and len(set(pairs)) > 350


def test_a_model_that_ends_no_answer_is_refused(tiny, examples, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    # with one token there is no room for an answer and its end
    monkeypatch.setattr("litft.training.replay.ANSWER_TOKENS", 1)
    with pytest.raises(ValueError, match="ends none of its answers"):
        prepare_run(args_of(tiny, examples, replay=0.5))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data.replay", "2"], "--data.replay 2: must lie between 0 and 1"),
        (
            ["--data.replay", "0.1", "--objective", "dpo"],
            "does not apply to --objective dpo",
        ),
        (
            ["--data.replay", "0.1", "--data.path", "text.txt"],
            "the examples are texts to continue",
        ),
    ],
)
def test_what_replay_cannot_do(
    tiny, examples, tmp_path, capsys, monkeypatch, flags, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text to continue. " * 50)
    base = ["--checkpoint_dir", tiny]
    if "--data.path" not in flags:
        base += ["--data.path", examples]
    assert message in refused("finetune lora", *base, *flags, capsys=capsys)


def test_questions_with_new_tokens_are_refused(chatty, examples, tmp_path):
    """The network that answers has no rows for them, or untrained ones of a padded vocabulary."""
    args = args_of(chatty, examples, replay=0.5, new_tokens=["|im_end|"], template="chatml")
    for dry_run in (True, False):
        with pytest.raises(
            ValueError, match=r"contain the new tokens \|im_end\|, which it"
        ):
            litft.finetune(replace(args, dry_run=dry_run, out_dir=str(tmp_path / "run")))
    # tokens that no question has change nothing
    args = args_of(chatty, examples, replay=0.5, new_tokens=["<unused>"])
    assert litft.finetune(replace(args, out_dir=str(tmp_path / "run"))).folder.is_dir()
