"""The command `generate`: stdout, files, samples, resuming and generation_config.json."""

import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import script, write_records

import litft
from litft.args import GenerateArgs, ModelArgs, Sampling, ServeArgs
from litft.args.parser import parse
from litft.cli import run as command
from litft.commands.generate import run_generation
from litft.inference.answer_file import write_settings
from litft.inference.prompt_files import encode_prompt, messages_of, read_prompts
from litft.inference.session import open_session


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints["stories"]


def complete(folder, prompt="One day", **settings):
    model, tokenizer = litft.load(folder, precision="fp32")
    return "".join(
        litft.stream(
            model, tokenizer, prompt, **{"temperature": 0, "max_new_tokens": 20} | settings
        )
    )


def generate(folder, tmp_path, *arguments, code=0, greedy=True):
    flags = ["--temperature", "0"] if greedy else []
    command = [
        "generate/base.py",
        "--checkpoint_dir",
        folder,
        "--max_new_tokens",
        "20",
        *flags,
    ]
    return script(*command, *arguments, cwd=tmp_path, code=code)


def test_only_the_completion_is_on_stdout(checkpoints, tmp_path):
    model, tokenizer = litft.load(checkpoints["stories"])
    command = [
        "generate/base.py",
        "--checkpoint_dir",
        checkpoints["stories"],
        "--temperature",
        "0",
    ]
    done = script(*command, "--max_new_tokens", "20", "--prompt", "One day", cwd=tmp_path)
    expected = "".join(
        litft.stream(model, tokenizer, "One day", max_new_tokens=20, temperature=0)
    )
    assert done.stdout == expected + "\n" and "tokens/s" in done.stderr
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "One day", "id": 7}\n{"prompt": "Lily"}\n'
    )
    script(
        *command,
        "--max_new_tokens",
        "20",
        "--prompts",
        "in.jsonl",
        "--out",
        "out.jsonl",
        cwd=tmp_path,
    )
    first, second = (
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    )
    assert (
        first == {"prompt": "One day", "id": 7, "completion": expected}
        and second["completion"]
    )


def test_all_prompts_are_checked_before_the_first_answer(checkpoints, tmp_path):
    command = [
        "generate/base.py",
        "--checkpoint_dir",
        checkpoints["stories"],
        "--prompts",
        "in.jsonl",
    ]
    for bad in (
        {"text": "a"},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"prompt": "once upon a time " * 600},
    ):
        (tmp_path / "in.jsonl").write_text(
            json.dumps({"prompt": "One day"}) + "\n" + json.dumps(bad) + "\n"
        )
        script(*command, "--out", "out.jsonl", cwd=tmp_path, code=2)
        assert not (tmp_path / "out.jsonl").exists()
    assert (
        "is the prompts file"
        in script(*command, "--out", "in.jsonl", cwd=tmp_path, code=2).stderr
    )


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_answers_of_training_records_are_no_part_of_the_prompt(folder, tmp_path):
    """So that held-out records can be answered as they are."""
    question = {"role": "user", "content": "One day"}
    records = [
        {"messages": [question]},
        {"messages": [question, {"role": "assistant", "content": "GOLD"}]},
    ]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    done = generate(folder, tmp_path, "--prompts", "in.jsonl", "--out", "out.jsonl")
    alone, with_answer = (record["completion"] for record in lines(tmp_path / "out.jsonl"))
    assert alone == with_answer
    assert (
        "1 of 2 records end with an answer, which is left out of the prompt" in done.stderr
    )


def test_a_file_of_prompts_is_answered_in_order_and_resumed(folder, tmp_path):
    prompts = [{"prompt": "One day", "id": n} for n in range(3)] + [
        {"prompt": "Lily and Tom went to the park. " * 4},
        {"prompt": "A"},
    ]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in prompts)
    )
    flags = [
        "--prompts",
        "in.jsonl",
        "--out",
        "out.jsonl",
        "--batch_size",
        "3",
        "--temperature",
        "1",
        "--seed",
        "3",
    ]
    generate(folder, tmp_path, *flags, greedy=False)
    expected, out = (tmp_path / "out.jsonl").read_text(), tmp_path / "out.jsonl"
    records = lines(out)
    assert [
        {key: value for key, value in record.items() if key != "completion"}
        for record in records
    ] == prompts
    assert records[3]["completion"] == complete(
        folder, prompts[3]["prompt"], temperature=1, seed=6
    ), "seeds increase by one"
    assert len({record["completion"] for record in records[:3]}) == 3
    # killed in the middle of the second line
    out.write_text(expected[: expected.index("\n") + 9])
    assert (
        "exists; --resume continues it"
        in generate(folder, tmp_path, *flags, greedy=False, code=2).stderr
    )
    generate(folder, tmp_path, *flags, "--resume", greedy=False)
    assert out.read_text() == expected
    generate(folder, tmp_path, *flags, "--resume", greedy=False)
    assert out.read_text() == expected, "nothing was left to generate"
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Other"}) + "\n")
    assert (
        "line 1 of out.jsonl does not answer in.jsonl"
        in generate(folder, tmp_path, *flags, "--resume", greedy=False, code=2).stderr
    )
    generate(folder, tmp_path, *flags, "--overwrite", greedy=False)
    assert len(lines(out)) == 1


def test_samples_share_one_prefill(folder, tmp_path):
    flags = ["--temperature", "1", "--seed", "1", "--num_samples", "3"]
    done = generate(folder, tmp_path, "--prompt", "One day", *flags, greedy=False)
    assert done.stdout == "".join(
        complete(folder, temperature=1, seed=seed) + "\n" for seed in (1, 2, 3)
    )
    assert "prefill: 0)" in done.stderr.split("--- 2 of 3")[1].split("\n")[0]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "One day"}) + "\n")
    generate(
        folder,
        tmp_path,
        "--prompts",
        "in.jsonl",
        "--out",
        "out.jsonl",
        *flags,
        greedy=False,
    )
    assert lines(tmp_path / "out.jsonl")[0]["completions"] == done.stdout.split("\n")[:3]


@pytest.mark.parametrize(
    "stored, expected",
    [
        ({}, Sampling(0.7, top_p=0.9)),
        ({"max_new_tokens": 9}, Sampling(0.7, top_p=0.9)),
        ({"do_sample": True}, Sampling(1.0, top_k=50)),
        ({"do_sample": False}, Sampling(0.0)),
        ({"temperature": 0.6}, Sampling(0.6)),
        ({"top_p": 0.5}, Sampling(1.0, top_p=0.5)),
    ],
    ids=str,
)
def test_default_sampling_settings(tiny, tmp_path, stored, expected):
    """A file without sampling settings gives our defaults; otherwise missing settings get
    transformers' defaults."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(stored))
    assert open_session(ModelArgs(checkpoint_dir=str(folder))).sampling == expected


@pytest.mark.slow
def test_generation_config_applies_and_flags_override_it(folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    stored = (
        json.loads((copy / "generation_config.json").read_text())
        if (copy / "generation_config.json").is_file()
        else {}
    )

    def write(**values):
        (copy / "generation_config.json").write_text(json.dumps(stored | values))

    command = ["generate/base.py", "--checkpoint_dir", copy, "--prompt", "One day"]
    write(do_sample=False, max_new_tokens=12)
    assert script(*command, cwd=tmp_path).stdout == complete(copy, max_new_tokens=12) + "\n"
    write(
        do_sample=True,
        temperature=0.9,
        top_k=7,
        top_p=0.8,
        repetition_penalty=1.2,
        max_new_tokens=12,
    )
    settings = dict(
        temperature=0.9,
        top_k=7,
        top_p=0.8,
        repetition_penalty=1.2,
        max_new_tokens=12,
        seed=1,
    )
    assert (
        script(*command, "--seed", "1", cwd=tmp_path).stdout
        == complete(copy, **settings) + "\n"
    )
    flags = ["--temperature", "0", "--repetition_penalty", "1", "--max_new_tokens", "15"]
    assert (
        script(*command, *flags, cwd=tmp_path).stdout
        == complete(folder, max_new_tokens=15) + "\n"
    )
    write(do_sample=False, max_new_tokens=30)
    text = complete(copy, max_new_tokens=30)
    stop = text.split()[-3]
    write(do_sample=False, stop_strings=[stop], max_new_tokens=30)
    assert script(*command, cwd=tmp_path).stdout == text[: text.index(stop)] + "\n"
    write(temperature="hot")
    assert "temperature 'hot': not valid" in script(*command, cwd=tmp_path, code=2).stderr
    write(top_p=3)
    assert (
        "generation_config.json: top_p 3: must lie in"
        in script(*command, cwd=tmp_path, code=2).stderr
    )


@pytest.mark.parametrize(
    "stored, message",
    [
        ({"temperature": True}, "temperature True"),
        ({"top_k": 5.5}, "top_k 5.5"),
        ({"stop_strings": ["a", ""]}, "stop_strings"),
        ({"stop_strings": {"a": 1}}, "stop_strings"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens"),
        ({"max_new_tokens": 0}, "generation_config.json: max_new_tokens 0"),
        ({"temperature": -1}, "generation_config.json: temperature -1: must lie in"),
        ({"temperature": 10**400}, "temperature"),
        ({"suppress_tokens": [-1]}, "suppress_tokens"),
        ({"suppress_tokens": list(range(512))}, "leaves no token to sample"),
    ],
    ids=str,
)
def test_invalid_generation_configs_are_reported(folder, tmp_path, stored, message):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=message):
        open_session(GenerateArgs(checkpoint_dir=str(tmp_path / "model"), prompt="a"))


def test_other_fields_of_a_generation_config(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    stored = {
        "top_k": 0,
        "suppress_tokens": [7, 100_000],
        "stop_strings": "\n",
        "do_sample": True,
    }
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stored))
    session = open_session(GenerateArgs(checkpoint_dir=str(tmp_path / "model"), prompt="a"))
    assert session.sampling == Sampling(
        1.0, logit_bias={7: -float("inf")}
    ) and session.stop == ["\n"]
    assert session.request([1], 3).sampling.seed is None and session.max_new_tokens == 256


def test_answers_of_other_settings_are_not_continued(folder, tmp_path, monkeypatch):
    """The settings are beside an --out until it is complete."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "One"}\n{"prompt": "day"}\n')
    flags = [
        "--prompts",
        "in.jsonl",
        "--out",
        "out.jsonl",
        "--temperature",
        "1",
        "--seed",
        "3",
    ]
    generate(folder, tmp_path, *flags, greedy=False)
    out = tmp_path / "out.jsonl"
    expected = out.read_text()
    settings = tmp_path / "out.jsonl.settings.json"
    assert not settings.exists()

    # as an interrupted command leaves them
    out.write_text(expected[: expected.index("\n") + 1])
    monkeypatch.chdir(tmp_path)
    length = ["--max_new_tokens", "20"]
    started = parse(GenerateArgs, ["--checkpoint_dir", str(folder), *flags, *length])
    write_settings(started)
    other = [*flags, "--temperature", "0.5", "--resume"]
    failed = generate(folder, tmp_path, *other, greedy=False, code=2)
    assert "--temperature was 1.0, and is 0.5; repeat them" in failed.stderr
    done = generate(folder, tmp_path, *flags, "--resume", "--batch_size", "1", greedy=False)
    assert out.read_text() == expected
    assert not settings.exists() and "is missing" not in done.stderr

    # the same folder, trained again
    out.write_text(expected[: expected.index("\n") + 1])
    write_settings(started)
    saved = json.loads(settings.read_text())
    saved["model"]["model.safetensors"][1] += 1
    settings.write_text(json.dumps(saved))
    failed = generate(folder, tmp_path, *flags, "--resume", greedy=False, code=2)
    assert "the files of the model have changed since the answers in" in failed.stderr
    settings.unlink()

    # a copy has no record
    out.write_text(expected[: expected.index("\n") + 1])
    done = generate(folder, tmp_path, *other, greedy=False)
    assert (
        "warning: out.jsonl.settings.json is missing, so it is not known with"
        in done.stderr
    )


def test_a_file_cut_inside_a_character_is_resumed(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"é{n}"}, ensure_ascii=False) + "\n" for n in range(3)
        )
    )
    flags = ["--prompts", "in.jsonl", "--out", "out.jsonl"]
    generate(folder, tmp_path, *flags)
    expected = (out := tmp_path / "out.jsonl").read_bytes()
    out.write_bytes(expected[: expected.index("é1".encode()) + 1])
    generate(folder, tmp_path, *flags, "--resume")
    assert out.read_bytes() == expected
    failed = generate(folder, tmp_path, *flags, "--resume", "--num_samples", "2", code=2)
    assert (
        "does not answer in.jsonl with --num_samples 2" in failed.stderr
        and out.read_bytes() == expected
    )


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "a", "completion": "b"}, "already has a field 'completion'"),
        (
            {"prompt": "a", "reasoning_content": "b"},
            "already has a field 'reasoning_content'",
        ),
        ({"prompt": "a", "id": "\ud83d"}, "cannot be written as JSON"),
        ({"prompt": "a " * 600}, "the prompt has"),
    ],
    ids=str,
)
def test_an_invalid_record_is_reported_with_its_line(folder, tmp_path, record, message):
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"prompt": "a"}) + "\n" + json.dumps(record) + "\n"
    )
    failed = generate(
        folder, tmp_path, "--prompts", "in.jsonl", "--out", "out.jsonl", code=2
    )
    assert "in.jsonl" in failed.stderr and "2" in failed.stderr and message in failed.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_an_empty_prompts_file_is_reported(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    assert (
        "in.jsonl contains no examples"
        in generate(folder, tmp_path, "--prompts", "in.jsonl", code=2).stderr
    )


def test_speculative_decoding_does_not_change_the_output(folder, checkpoints, tmp_path):
    plain = generate(folder, tmp_path, "--prompt", "One day").stdout
    for flags in (["--lookup"], ["--draft_dir", folder]):
        done = generate(folder, tmp_path, "--prompt", "One day", *flags)
        assert done.stdout == plain
    assert "draft tokens accepted" in done.stderr
    failed = generate(
        folder, tmp_path, "--prompt", "One day", "--draft_dir", checkpoints["demo"], code=2
    )
    assert "its vocabulary differs from the model's" in failed.stderr


def test_all_mistakes_are_reported_at_once(folder, tmp_path):
    arguments = [
        "--prompt",
        "a",
        "--top_p",
        "0",
        "--min_p",
        "2",
        "--logit_bias",
        "x",
        "--lookup",
        "--draft_dir",
        "y",
        "--resume",
    ]
    done = generate(folder, tmp_path, *arguments, "--num_samples", "0", code=2)
    for part in (
        "--top_p 0.0: must lie in",
        "--min_p 2.0",
        "--logit_bias x: expected JSON",
        "leave the other out",
        "--resume applies only to",
    ):
        assert part in done.stderr, part
    assert "--num_samples 0: must be at least 1" in done.stderr
    failed = generate(
        folder, tmp_path, "--prompt", "a", "--logit_bias", '{"512": 1}', code=2
    )
    assert "--logit_bias 512: the model's vocabulary has 512 tokens" in failed.stderr
    banned = next(litft.stream(*litft.load(folder), "One day", temperature=0)).tokens[0]
    biased = generate(
        folder,
        tmp_path,
        "--prompt",
        "One day",
        "--logit_bias",
        json.dumps({str(banned): -100}),
    )
    assert biased.stdout != complete(folder) + "\n"


@pytest.mark.parametrize("stored", ["bf16", "fp32"])
def test_precision_auto_is_the_fastest_dtype_of_the_cpu(
    tiny, tmp_path, stored, monkeypatch, capsys
):
    """bf16 only for bf16 weights and a CPU that has bf16 arithmetic, and never for scores. A line
    says so."""
    folder = tmp_path / "model"
    command(
        "convert_hf_checkpoint",
        ["--checkpoint_dir", str(tiny), "--out_dir", str(folder), "--precision", stored],
    )
    for has_bf16 in (True, False):
        monkeypatch.setattr(
            "litft.distributed.devices.cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16
        )
        expected = torch.bfloat16 if has_bf16 and stored == "bf16" else torch.float32
        for args, dtype in (
            (GenerateArgs, expected),
            (ServeArgs, expected),
            (ModelArgs, torch.float32),
        ):
            assert open_session(args(checkpoint_dir=str(folder))).model.dtype == dtype
            printed = capsys.readouterr().err
            assert ("computing in bf16" in printed) == (dtype == torch.bfloat16)
        assert (
            open_session(
                GenerateArgs(checkpoint_dir=str(folder), precision="fp32")
            ).model.dtype
            == torch.float32
        )


def test_settings_that_litft_does_not_support_are_named(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "model")
    stored = {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[5]],
        "length_penalty": 2.0,
        "max_length": 4096,
        "dola_layers": "high",
        "token_healing": True,
        "encoder_no_repeat_ngram_size": 2,
    }
    # these change nothing
    stored |= {"typical_p": 1.0, "min_length": 0, "guidance_scale": None, "top_k": 0}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stored))
    open_session(ModelArgs(checkpoint_dir=str(tmp_path / "model")))
    printed = capsys.readouterr().err
    for name in (
        "num_beams 4",
        "no_repeat_ngram_size 3",
        "bad_words_ids [[5]]",
        "length_penalty 2.0",
        "max_length 4096",
        "dola_layers high",
        "token_healing True",
        "encoder_no_repeat_ngram_size 2",
    ):
        assert name in printed
    for name in ("typical_p", "min_length", "guidance_scale"):
        assert name not in printed


def test_messages_in_parts_are_texts(folder):
    """As OpenAI's clients write them, in all functions of the Python API."""
    model, tokenizer = litft.load(folder, precision="fp32")
    settings = dict(max_new_tokens=8, temperature=0)
    parts = [{"role": "user", "content": [{"type": "text", "text": "One day"}]}]
    whole = [{"role": "user", "content": "One day"}]
    answers = {
        litft.generate(model, tokenizer, prompt, **settings) for prompt in (parts, whole)
    }
    assert len(answers) == 1


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_of_0_or_minus_1_means_off(folder, top_k):
    model = litft.load(folder, precision="fp32")
    settings = dict(max_new_tokens=12, temperature=1.5, seed=4)
    assert litft.generate(*model, "One day", top_k=top_k, **settings) == litft.generate(
        *model, "One day", **settings
    )


PROMPT_TEMPLATE = """{%- for message in messages -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
{%- if loud is defined and loud %}!{% endif -%}
<assistant>"""


@pytest.fixture
def chat_session(folder, tmp_path):
    """A session of a model whose template has no tools."""
    shutil.copytree(folder, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(PROMPT_TEMPLATE)
    return open_session(ModelArgs(checkpoint_dir=str(tmp_path / "chat")))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi", "system": "Be kind."}, "<system>Be kind.<user>Hi<assistant>"),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "system": "Be kind."},
            "<system>Be kind.<user>Hi<assistant>",
        ),
        ({"prompt": "Hi", "chat_template_kwargs": {"loud": True}}, "<user>Hi!<assistant>"),
        (
            {"prompt": "Hi", "history": [["One.", "Two.</s>"]], "system": "Be kind."},
            "<system>Be kind.<user>One.<assistant>Two.<user>Hi<assistant>",
        ),
    ],
)
def test_prompts_have_the_fields_that_training_reads(chat_session, record, expected):
    prompt = encode_prompt(chat_session, "line 1", record, in_template=True)
    assert prompt.text == "<s>" + expected


def test_fields_that_cannot_be_rendered_are_refused(chat_session):
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    record = {"prompt": "Hi", "tools": [tool]}
    with pytest.raises(ValueError, match=r"line 1: .* does not support tools"):
        encode_prompt(chat_session, "line 1", record, in_template=True)
    with pytest.raises(ValueError, match="does not support tools"):
        model, tokenizer = chat_session.model, chat_session.tokenizer
        litft.generate(model, tokenizer, [{"role": "user", "content": "Hi"}], tools=[tool])
    with pytest.raises(ValueError, match="line 1: system needs a chat template"):
        record = {"prompt": "Hi", "system": "Be kind."}
        encode_prompt(chat_session, "line 1", record, in_template=False)
    with pytest.raises(ValueError, match="line 1: history needs a chat template"):
        record = {"prompt": "Hi", "history": [["One.", "Two."]]}
        encode_prompt(chat_session, "line 1", record, in_template=False)


def test_a_prompt_of_messages_is_read_from_any_file(tmp_path):
    message = {"role": "user", "content": "Hi"}
    records = [{"prompt": [message]}]
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(records), parquet)
    for path in (parquet, write_records(tmp_path / "a.jsonl", records)):
        ((_, record),) = read_prompts(path, out=None, key="completion")
        assert record == {"prompt": [message]}, path
        assert messages_of(record, "", in_template=True) == [message]


def test_an_output_line_has_the_record_as_it_was(chat_session, tmp_path, capsys):
    content = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    record = {"messages": [{"role": "user", "content": content, "weight": 0, "id": 7}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(record))
    flags = f"--checkpoint_dir {tmp_path}/chat --prompts {tmp_path}/in.jsonl"
    command(
        "generate", [*flags.split(), "--out", str(tmp_path / "o"), "--max_new_tokens", "2"]
    )
    (line,) = lines(tmp_path / "o")
    assert {name: line[name] for name in record} == record
    with pytest.raises(SystemExit):
        command("generate", [*flags.split(), "--template", "none"])
    assert "--template none continues plain text, but the record" in capsys.readouterr().err


def test_python_obeys_the_generation_config(folder, tmp_path):
    """What a call does not set is as the command sets it."""
    shutil.copytree(folder, tmp_path / "model")
    stored = {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 12}
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps(stored))
    opened = litft.load(tmp_path / "model", precision="fp32")
    expected = complete(folder, max_new_tokens=12, repetition_penalty=1.3)
    assert "".join(litft.stream(*opened, "One day")) == expected
    assert complete(tmp_path / "model", max_new_tokens=3) != expected
    stop = expected.split()[-2]
    path.write_text(json.dumps(stored | {"stop_strings": [stop], "num_beams": 4}))
    with pytest.warns(UserWarning, match="num_beams 4: ignored"):
        assert "".join(litft.stream(*opened, "One day")) == expected[: expected.index(stop)]


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "message"),
    [
        (
            "One day",
            {"max_new_tokens": 0},
            ValueError,
            "max_new_tokens 0: must be at least 1",
        ),
        ("One day", {"temprature": 1}, TypeError, "'temprature' is not a setting, did you"),
        ("One day", {"max_tokens": 1}, TypeError, "did you mean 'max_new_tokens'"),
        (
            "One day",
            {"logit_bias": {-1: 5.0}},
            ValueError,
            "-1: the model's vocabulary has",
        ),
        ("One day", {"logit_bias": {10**6: 5.0}}, ValueError, "1000000: the model's vocab"),
        ([3, 4], {}, TypeError, "a list of messages"),
        (["One", "Two"], {}, TypeError, "several prompts need a call each"),
    ],
)
def test_invalid_calls_from_python_are_reported(folder, prompt, settings, error, message):
    opened = litft.load(folder, precision="fp32")
    with pytest.raises(error, match=message):
        next(litft.stream(*opened, prompt, **settings))
    with pytest.raises(error, match=message):
        litft.generate(*opened, prompt, **settings)


def test_names_of_a_logit_bias_may_be_texts(folder):
    """As in JSON, where names of objects are texts."""
    first = litft.load(folder)[1].encode(complete(folder, max_new_tokens=1), bos=False)[0]
    banned = complete(folder, max_new_tokens=1, logit_bias={first: -100})
    assert complete(folder, max_new_tokens=1, logit_bias={str(first): -100}) == banned


def test_messages_to_a_model_without_a_template_are_noted(folder, tmp_path, capsys):
    """They are written in Alpaca style."""
    records = [{"messages": [{"role": "user", "content": "Once"}]}]
    path = write_records(tmp_path / "p.jsonl", records)
    args = GenerateArgs(checkpoint_dir=str(folder), prompts=str(path), max_new_tokens=2)
    run_generation(replace(args, out=str(tmp_path / "out.jsonl")))
    assert "the model has no chat template" in capsys.readouterr().err
