"""Data sets with their own format, columns, template, weight and limit, as a list of mappings in a
--config file."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from conftest import write_records

from litft.args import DataArgs, LoRAFinetuneArgs
from litft.args.data_path import DataPath
from litft.args.parser import parse
from litft.data.dataset import load_data
from litft.data.sources import HubSplit, _load_dataset, find_sources, notes_on_sources
from litft.data.tokenizer import Tokenizer

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Chat {n}?"},
            {"role": "assistant", "content": "Yes."},
        ]
    }
    for n in range(5)
]
FAQ = [
    {"asked": f"Question {n}?", "reply": f"Answer {n}.", "text": "unused"} for n in range(7)
]
PLAIN = [
    {"prompt": f"Prompt {n}", "completion": "done", "text": f"A text, number {n}."}
    for n in range(9)
]


def load(tiny, args):
    return load_data(args, Tokenizer(tiny), 512, 256)


def same(left, right):
    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
        for a, b in pairs
    )


@pytest.fixture
def files(tmp_path):
    names = {"chats": CHATS, "faq": FAQ, "plain": PLAIN}
    return {
        name: str(write_records(tmp_path / f"{name}.jsonl", records))
        for name, records in names.items()
    }


def test_each_data_set_is_read_with_its_own_settings(tiny, files, tmp_path):
    """A set's samples are those that the same settings give as flags; they are kept in
    config.yaml."""
    items = [
        files["chats"],
        {
            "path": files["faq"],
            "columns": {"question": "asked", "answer": "reply"},
            "weight": 2,
            "template": "chatml",
        },
        {"path": files["plain"], "format": "text", "limit": 4},
    ]
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump({"data": {"path": items, "val_fraction": 0.0, "template": "zephyr"}})
    )
    args = parse(LoRAFinetuneArgs, ["--config", str(config), "--checkpoint_dir", str(tiny)])
    data, common = load(tiny, args.data), {"val_fraction": 0.0}
    alone = [
        DataArgs(path=[files["chats"]], template="zephyr", **common),
        DataArgs(
            path=[files["faq"]],
            columns=["question=asked", "answer=reply"],
            template="chatml",
            **common,
        ),
        DataArgs(path=[files["plain"]], format="text", limit=4, **common),
    ]
    assert same(data.train, [sample for args in alone for sample in load(tiny, args).train])
    assert data.train.sizes == [5, 7, 4] and data.weights == [1, 2, 1]
    for words in (
        ["--data.path", json.dumps(items)],
        ["--data.path", items[0], "--data.path", json.dumps(items[1])],
    ):
        again = parse(LoRAFinetuneArgs, ["--checkpoint_dir", str(tiny), *words]).data
        assert (
            again.paths == args.data.paths[: len(again.path)]
            if len(words) == 2
            else again.paths == args.data.paths[1:2]
        )
    entries = [item.entry() for item in args.data.paths]
    assert entries == items
    text = yaml.safe_dump(
        {"checkpoint_dir": str(tiny), "data": {"path": entries, "val_path": []}}
    )
    config.write_text(text)  # as a run's config.yaml has it
    assert parse(LoRAFinetuneArgs, ["--config", str(config)]).data.paths == args.data.paths


def test_validation_sets_have_settings_too(tiny, files):
    val_path = [
        json.dumps(
            {
                "name": "faq",
                "path": files["faq"],
                "columns": {"question": "asked", "answer": "reply"},
            }
        )
    ]
    data = load(
        tiny,
        DataArgs(path=[files["chats"]], val_path=[*val_path, f"plain={files['plain']}"]),
    )
    assert {name: len(indices) for name, indices in data.val_sets.items()} == {
        "faq": 7,
        "plain": 9,
    }


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"path": "a.jsonl", "form": "text"}, "no setting 'form'; use path, name, format"),
        ({"format": "text"}, "the path is missing"),
        (
            {"path": "a.jsonl", "format": "csv"},
            "format 'csv': expected one of messages, sharegpt",
        ),
        ({"path": "a.jsonl", "columns": ["a=b"]}, "columns ['a=b']: expected an object"),
        ({"path": "a.jsonl", "weight": -1}, "weight -1: expected a number in [0, 1000]"),
        ({"path": "a.jsonl", "limit": 0}, "limit 0: expected a whole number"),
        ({"path": "a.jsonl", "limit": True}, "limit True: expected"),
        ({"path": "a.jsonl", "name": "v1.5"}, "name 'v1.5': expected letters, digits"),
        ({"path": "a.jsonl", "name": "a"}, "only validation sets have names"),
        ("name=a.jsonl", "only validation sets have names"),
        ('{"path": ', "invalid JSON"),
    ],
    ids=str,
)
def test_invalid_settings_are_reported(item, message):
    problems = DataArgs(
        path=[item if isinstance(item, str) else json.dumps(item)]
    ).problems()
    assert any(
        message in problem and problem.startswith("--data.path ") for problem in problems
    ), problems


def test_a_file_is_a_file_whatever_its_name(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("{a}.jsonl", "a=b.jsonl"):
        write_records(tmp_path / name, CHATS)
        item = DataPath.parse(name)
        assert item == DataPath(name) == DataPath.parse(item.text()) and len(
            load(tiny, DataArgs(path=[name])).train
        )
        assert DataPath.parse(DataPath(name, "set").text()) == DataPath(name, "set")
    with pytest.raises(ValueError, match="only data sets on the hub have a split"):
        load(tiny, DataArgs(path=[json.dumps({"path": "a=b.jsonl", "split": "train"})]))


def test_one_mapping_is_a_list_of_one(files, tmp_path):
    (tmp_path / "c.yaml").write_text(
        f"data: {{path: {{path: {files['plain']}, format: text}}}}"
    )
    words = ["--config", str(tmp_path / "c.yaml"), "--checkpoint_dir", "model"]
    assert parse(LoRAFinetuneArgs, words).data.paths == [
        DataPath(files["plain"], format="text")
    ]


def test_a_field_that_only_one_set_should_have(tiny, files):
    item = {"path": files["chats"], "columns": {"question": "asked"}}
    with pytest.raises(ValueError, match="no record has the field 'asked'"):
        load(tiny, DataArgs(path=[json.dumps(item), files["plain"]]))


@pytest.mark.parametrize(
    "item",
    ["a.jsonl", "code=a.jsonl", '{"path": "a.jsonl", "format": "text", "weight": 0.5}'],
)
def test_an_item_is_written_as_it_is_read(item):
    assert DataPath.parse(item).text() == item


def test_numbered_files_and_patterns_are_read_as_one(tiny, tmp_path):
    """A folder of shards, as data sets on the hub have them, and a pattern: the samples of one file
    with all records."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        rows = PLAIN[3 * number : 3 * number + 3]
        parquet.write_table(
            table.from_pylist(rows), folder / f"train-0000{number}-of-00003.parquet"
        )
    parquet.write_table(
        table.from_pylist(PLAIN[:2]), folder / "validation-00000-of-00001.parquet"
    )
    whole = DataArgs(
        path=[str(write_records(tmp_path / "whole.jsonl", PLAIN))], val_fraction=0.0
    )
    expected = load(tiny, whole).train
    from_folder = load(tiny, DataArgs(path=[str(folder)], val_fraction=0.0))
    assert same(from_folder.train, expected) and len(from_folder.val) == 2
    pattern = str(folder / "train-*.parquet")
    assert same(load(tiny, DataArgs(path=[pattern], val_fraction=0.0)).train, expected)
    limited = load(tiny, DataArgs(path=[pattern], val_fraction=0.0, limit=4)).train
    assert same(limited, [expected[number] for number in range(4)])
    data = load(tiny, DataArgs(path=[pattern], val_path=[str(folder / "val*.parquet")]))
    assert len(data.val) == 2
    with pytest.raises(ValueError, match="no file with examples matches"):
        load(tiny, DataArgs(path=[str(tmp_path / "none-*.jsonl")]))


ERRORS = {
    "a missing field": (
        "a.jsonl",
        '{"prompt": "q"}',
        "field 'completion' is missing, which belongs to prompt",
    ),
    "an open quote": (
        "a.csv",
        'prompt,completion\nq,a\nq,"a\nq,a\nq,a\n',
        "line 3: a quotation mark opens",
    ),
    "an object": (
        "a.json",
        '{"data": [{"prompt": "q", "completion": "a"}]}',
        "its field 'data' has 1 of them",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_what_is_wrong(tiny, tmp_path, name):
    file, text, words = ERRORS[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=words):
        load(tiny, DataArgs(path=[str(tmp_path / file)]))


def test_a_folder_of_shards_never_mixes_splits(tiny, tmp_path):
    def folder(name, *files):
        path = tmp_path / name
        path.mkdir()
        for number, file in enumerate(files):
            write_records(path / file, PLAIN[number : number + 2])
        return str(path)

    named = folder(
        "named",
        "train_part_0.jsonl",
        "train_part_1.jsonl",
        "val_part_0.jsonl",
        "test_0.jsonl",
        ".cache.jsonl",
    )
    data = load(tiny, DataArgs(path=[named]))
    assert (len(data.train), len(data.val)) == (4, 2)
    one_file = folder(
        "one file and parts",
        "train.jsonl",
        "validation-0.jsonl",
        "validation-1.jsonl",
        "notes.json",
    )
    data = load(tiny, DataArgs(path=[one_file]))
    assert (len(data.train), len(data.val)) == (2, 4)
    both = folder("whole and parts", "train.jsonl", "train-00000-of-00001.jsonl")
    with pytest.raises(ValueError, match=r"train.jsonl and train-00000-of-00001.jsonl"):
        load(tiny, DataArgs(path=[both]))
    with pytest.raises(ValueError, match=r"a.jsonl, b.jsonl belong to no split"):
        load(tiny, DataArgs(path=[folder("mixed", "a.jsonl", "b.jsonl", "test-0.jsonl")]))
    with pytest.raises(ValueError, match="contains no train"):
        load(tiny, DataArgs(path=[folder("test only", "test-0.jsonl", "test-1.jsonl")]))


@pytest.mark.parametrize(
    "files, training, validation",
    [
        ("wiki.train.txt wiki.valid.txt wiki.test.txt", "wiki.train.txt", "wiki.valid.txt"),
        ("gsm8k_train.jsonl gsm8k_test.jsonl", "gsm8k_train.jsonl", None),
        ("en-train.jsonl en-validation.jsonl", "en-train.jsonl", "en-validation.jsonl"),
        ("squadTrain-1.csv squadDev-1.csv", "squadTrain-1.csv", "squadDev-1.csv"),
        ("latest_1.jsonl contest_2.jsonl", "contest_2.jsonl latest_1.jsonl", None),
        ("train_on_tasks.jsonl train_2.jsonl", "train_2.jsonl train_on_tasks.jsonl", None),
        ("train-00000-of-00001.jsonl", "train-00000-of-00001.jsonl", None),
        ("trainset.jsonl valset.jsonl testSet.jsonl", "trainset.jsonl", "valset.jsonl"),
        # beside train.*, other names are not read
        ("train.jsonl my_val.jsonl val_notes.txt dev2.jsonl", "train.jsonl", "dev2.jsonl"),
        ("train.jsonl requirements-dev.txt my-val-2.csv", "train.jsonl", None),
        (
            "part-1-of-2.jsonl part-2-of-2.jsonl",
            "part-1-of-2.jsonl part-2-of-2.jsonl",
            None,
        ),
    ],
)
def test_the_split_is_a_word_of_a_files_name(tmp_path, files, training, validation):
    """Else the test part of a folder is learned in silence."""
    for name in files.split():
        (tmp_path / name).write_text("x")
    train, val = find_sources(DataArgs(path=[str(tmp_path)]))
    sources = [*train, *(source for _, source in val)]
    found = [source.parts or (source.name,) for source in sources]
    expected = []
    for names in (training, validation):
        if names:
            expected.append(tuple(str(tmp_path / name) for name in names.split()))
    assert found == expected


@pytest.mark.parametrize(
    "files, words",
    [
        (
            ("train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"),
            "number 1 is missing",
        ),
        (("val-1-of-2.jsonl", "train.jsonl"), "number 2 is missing"),
        (("a-3-of-3.jsonl", "b.jsonl"), "number 1 is missing"),
        (("a.jsonl", "a.jsonl.gz"), "a.jsonl and a.jsonl.gz; remove one"),
        (("train_a.jsonl", "b.jsonl"), "b.jsonl belong to no split"),
        (
            ("training_data.jsonl", "training_data_val.jsonl"),
            "its name has training and val",
        ),
        (("a-train.test.jsonl", "b.jsonl"), "its name has train and test"),
        (("a-1-of-1-x.jsonl", "a-1-of-1-y.jsonl"), "a-1-of-1-x.jsonl and a-1-of-1-y.jsonl"),
        (
            ("train-00000-of-00001.jsonl", "train-00000-of-00002.jsonl"),
            "train-00000-of-00001.jsonl and train-00000-of-00002.jsonl; remove one",
        ),
        (("lab_test_1.jsonl", "lab_test_2.jsonl"), "apart from those with a name of test"),
    ],
)
def test_incomplete_folders_are_refused(tmp_path, files, words):
    """A part of a download would be learned as the whole."""
    for name in files:
        write_records(tmp_path / name, PLAIN[:2])
    with pytest.raises(ValueError, match=words):
        find_sources(DataArgs(path=[str(tmp_path)]))
    # a pattern reads what is there
    found, _ = find_sources(DataArgs(path=[str(tmp_path / "*")]))
    assert len(found[0].parts) == 2


def test_the_validation_split_of_a_hub_dataset_is_read_once(tmp_path, monkeypatch):
    """Two splits bring the same one, and a path may learn it, also with settings of its own."""
    from datasets import Dataset, DatasetDict

    split = Dataset.from_list(PLAIN[:2])
    found = DatasetDict(train=split, extra=split, validation=split)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: found)
    _load_dataset.cache_clear()
    _, val = find_sources(DataArgs(path=["o/a:train", "o/a:extra"]))
    assert [source.split for _, source in val] == ["validation"]
    learned = {"path": "o/a", "split": "validation", "format": "prompt"}
    _, val = find_sources(DataArgs(path=["o/a:train", json.dumps(learned)]))
    assert not val
    _load_dataset.cache_clear()


def test_a_folder_with_files_for_validation_is_named(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_records(folder / "train.jsonl", PLAIN)
    data = DataArgs(path=[str(folder)], val_fraction=0.3)
    assert not list(notes_on_sources(data))
    write_records(folder / "validation-00000-of-00001.jsonl", PLAIN)
    (note,) = notes_on_sources(data)
    assert f"--data.val_fraction 0.3 has no effect: {folder} (val) has" in note
    (note,) = notes_on_sources(replace(data, val_path=["b.jsonl"]))
    assert f"{folder} (val) has no effect: --data.val_path names other" in note
    data = replace(data, val_fraction=0.05)
    assert not list(notes_on_sources(data))
    for name in ("eval-1.jsonl", "notes.txt", "README.md"):
        (folder / name).write_text("x")
    assert list(notes_on_sources(data)) == [
        f"note: {folder}: eval-1.jsonl, notes.txt not read"
    ]


def test_settings_without_effect_are_refused(tiny, tmp_path):
    path = str(write_records(tmp_path / "own.jsonl", PLAIN))
    with pytest.raises(
        ValueError, match=r"--data\.subset en: no path is a data set on the hub"
    ):
        load(tiny, DataArgs(path=[path], subset="en"))
    for item in ("messages=1", "eos_token=x", "add_generation_prompt=true"):
        with pytest.raises(ValueError, match=f"{item}.* has no effect"):
            load(tiny, DataArgs(path=[path], template_args=[item]))


def test_template_arguments_apply_to_the_template_of_a_path(tiny, tmp_path):
    """Both paths have the same template: one by the flag, one as its own."""
    template = tmp_path / "styled.jinja"
    template.write_text(
        "{% for m in messages %}{{ style|default('long') + ': ' + m.content + eos_token }}"
        "{% endfor %}"
    )
    path = str(write_records(tmp_path / "own.jsonl", PLAIN))
    args = DataArgs(
        path=[path, json.dumps({"path": path, "template": str(template)})],
        template=str(template),
        template_args=["style=short"],
        val_fraction=0.0,
    )
    data = load(tiny, args)
    count = len(data.train) // 2
    for number in range(count):
        text = Tokenizer(tiny).decode(data.train[count + number].tokens.tolist())
        assert "short: " in text and "long: " not in text, text


def test_the_template_of_inference_is_the_one_that_was_learned(tiny, files):
    """`auto` on a path is that of the model's folder, not of the flags."""
    own = Tokenizer(tiny)
    other = {"path": files["chats"], "template": "chatml"}
    plain = {"path": files["chats"], "template": "auto"}

    data = load(
        tiny, DataArgs(path=[json.dumps(plain)], template="zephyr", val_fraction=0.0)
    )
    assert data.tokenizer.chat_template == own.chat_template
    assert "<|user|>" not in own.decode(data.train[0].tokens.tolist())

    # all files share another one than the flags'
    data = load(tiny, DataArgs(path=[json.dumps(other)], val_fraction=0.0))
    assert "<|im_start|>" in data.tokenizer.chat_template and data.tokenizer.has_template
    assert data.template.startswith("that of ")

    # one of two files has another one
    faq = {"path": files["faq"], "columns": {"question": "asked", "answer": "reply"}}
    paths = [json.dumps(other), json.dumps(faq)]
    data = load(tiny, DataArgs(path=paths, template="zephyr", val_fraction=0.0))
    assert "Zephyr" in data.tokenizer.chat_template
    assert "has another one, which answers after training are not rendered" in data.template


def test_a_file_with_weight_0_does_not_choose_the_template(tiny, files):
    other = {"path": files["chats"], "template": "chatml"}
    faq = {"path": files["faq"], "weight": 0}
    paths = [json.dumps(other), json.dumps(faq)]
    data = load(tiny, DataArgs(path=paths, val_fraction=0.0))
    assert "<|im_start|>" in data.tokenizer.chat_template
    assert data.unused == [files["faq"]]


def test_validation_examples_have_the_template_of_the_training_files(tiny, files):
    """The loss is that of the conversations that the result has."""
    train = json.dumps({"path": files["chats"], "template": "chatml"})
    faq = {"path": files["faq"], "columns": {"question": "asked", "answer": "reply"}}
    other = json.dumps(faq | {"template": "zephyr"})
    # a file of plain texts has no template
    texts = json.dumps({"path": files["plain"], "format": "text"})
    val = {"path": files["chats"]}
    own = val | {"template": "chatml"}
    # with several templates, it is that of the flags, unless a set has its own
    for more, held_out, expected in (
        ([], val, True),
        ([texts], val, True),
        ([other], val, False),
        ([other], own, True),
    ):
        paths = DataArgs(path=[train, *more], val_path=[json.dumps(held_out)])
        data = load(tiny, paths)
        text = Tokenizer(tiny).decode(data.val[0].tokens.tolist())
        assert ("<|im_start|>" in text) == expected


def test_each_use_of_a_name_has_a_report(tiny, files):
    """One file in three formats, and three subsets of one data set."""
    paths = []
    for template in ("chatml", "zephyr", "llama2"):
        paths.append(json.dumps({"path": files["chats"], "template": template}))
    data = load(tiny, DataArgs(path=paths, val_fraction=0.0))
    assert len(data.reports) == len(data.left_out) == 3
    subsets = {HubSplit("owner/name", subset, "train").label for subset in (None, "a", "b")}
    assert len(subsets) == 3


def test_times_beyond_the_years_of_python_are_text(tiny, tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        name: [record[name] for record in PLAIN[:2]] for name in ("prompt", "completion")
    }
    parquet.write_table(
        pa.table(columns | {"when": pa.array([10**15, 5], pa.timestamp("s"))}),
        tmp_path / "own.parquet",
    )
    data = load(tiny, DataArgs(path=[str(tmp_path / "own.parquet")], val_fraction=0.0))
    assert len(data.train) == 2


def test_a_data_set_whose_files_cannot_be_read_is_not_called_missing(tmp_path, monkeypatch):
    """Two files with other fields: `datasets` reads neither, and the message says how to go on."""
    import datasets

    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (folder / "b.jsonl").write_text('{"question": "a", "answer": 1}\n')
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    # the files of the hub, from a folder
    load = datasets.load_dataset

    def from_folder(name, subset, revision):
        return load(str(tmp_path / name), subset, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    with pytest.raises(ValueError, match="cannot read its files") as error:
        find_sources(DataArgs(path=["owner/name"]))
    assert "hf download owner/name --repo-type dataset" in str(error.value)
