"""Reward functions: those that are built in, those of files, and what happens to broken ones."""

import json
import math
import time
from pathlib import Path

import pytest

from litft.args.lists import as_list, next_values, whole_patterns
from litft.evaluation.rewards.call import Completed
from litft.evaluation.rewards.reward import load_function, of_functions, parse_rewards
from litft.evaluation.rewards.scorer import RewardError, RewardScorer


def completed(text: str, answer: str = "", tokens: int = 1, **columns) -> Completed:
    return Completed(
        text, tokens, [{"role": "user", "content": "How?"}], columns | {"answer": answer}
    )


@pytest.mark.parametrize(
    ("source", "text", "answer", "expected"),
    [
        ("exact", " 42\n", "42", 1),
        ("exact", "42.", "42", 0),
        ("contains", "It is Paris.", "Paris", 1),
        ("contains", "It is Rome.", "Paris", 0),
        # GSM8K's form, and numbers as people write them
        ("number", "so 3 and 4 give 1,234", "2 * 617 = 1234\n#### 1,234", 1),
        ("number", "5,234", "1,234", 0),
        ("number", "The result is 12.50 dollars.", "12.5", 1),
        ("number", "10-2=8", "8", 1),
        ("number", "it is -3", "-3", 1),
        ("number", "it is 3", "-3", 0),
        ("number", "x = \u22123", "-3", 1),
        ("number", "x = \u22123", "3", 0),
        ("number", "a loss of -$3", "-3", 1),
        ("number", "a loss of -$3", "3", 0),
        ("number", "about 1e3", "1000", 1),
        ("number", "no idea", "3", 0),
        # no thousands
        ("number", "the point (12,2023)", "2023", 1),
        ("number", "the point (12,2023)", "3", 0),
        ("number", "x = 1,5000", "5000", 1),
        ("number", "5,2023", "3", 0),
        # thousands and dollars as LaTeX writes them
        ("number", r"\boxed{10{,}080}", "10080", 1),
        ("number", r"\boxed{10,\!080}", "10080", 1),
        ("number", r"$10\,080$", "10080", 1),
        ("number", r"$1\ 000\ 000$", "1000000", 1),
        ("number", "80", "10{,}080", 0),
        ("number", r"-\$5", "-5", 1),
        # a list has alternatives
        ("exact", "mice", ["mouses", "mice"], 1),
        ("exact", "rats", ["mouses", "mice"], 0),
        ("contains", "two mice", ["mouses", "mice"], 1),
        ("number", "it is 4", ["3", "4"], 1),
        ("math", "$0.5$", [r"\frac{1}{3}", r"\frac{1}{2}"], 1),
        ("exact", "", ["", None], None),
        ("exact", "None", None, None),
        ("contains", "anything", "", None),
        ("number", "3", "none", None),
        (r"regex:^\d+$", "42", "", 1),
        (r"regex:^\d+$", "42!", "", 0),
        ("format:think", "<think>a</think>b", "", 1),
        ("format:think", "a</think>\n\nb", "", 1),
        ("format:think", "<think>a</think>  ", "", 0),
        ("format:think", "<think></think>b", "", 0),
        ("format:think", "b", "", 0),
        ("format:think", "<think>a</think>b</think>c", "", 0),
        ("format:think", "<think>a<think>b</think>c", "", 0),
        ("math", r"so it is $\frac{2}{4}$", "0.5", 1),
        ("math", "so it is $0.4$", r"$\frac{1}{2}$", 0),
        # LaTeX without marks
        ("math", r"$\boxed{3\sqrt{13}}$", r"3\sqrt{13}", 1),
        ("math", r"$\boxed{3}$", r"3\sqrt{13}", 0),
        ("math", r"$\boxed{6 - 5i}$", "6 - 5i", 1),
        ("math", r"$\boxed{5}$", "6 - 5i", 0),
        ("math", r"$\boxed{2k+2}$", "2k+2", 1),
        ("math", r"$\boxed{(-\infty, 3)}$", r"(-\infty, 3)", 1),
        ("math", r"$\boxed{3}$", r"(-\infty, 3)", 0),
        ("math", r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}", 1),
        ("math", r"$\boxed{14}$", "14 dollars", 1),
        ("math", r"$\boxed{1234}$", "1,234", 1),
        ("math", r"$\boxed{5^{10}}$", "5^{10}", 1),
        ("math", r"$\boxed{5}$", "5^{10}", 0),
    ],
)
def test_built_in_functions(source, text, answer, expected):
    (row,) = RewardScorer(of_functions([load_function(source)]), 10).score(
        [completed(text, answer)]
    )
    assert row == [expected]


def test_patterns_may_have_commas():
    rewards = parse_rewards(["regex:^[a", "b]{1", "3}$=0.5", "exact"])
    assert [(item.source, item.weight) for item in rewards] == [
        ("regex:^[a,b]{1,3}$", 0.5),
        ("exact", 1.0),
    ]


@pytest.mark.parametrize(
    "pattern", [r"regex:(\d+, \d+)", "regex:[, ]+$", "regex:(a,,b)", r"regex:^\w(, \w){2}$"]
)
def test_patterns_keep_white_space_after_their_commas(pattern):
    """On the command line, as in a file."""
    text = f"{pattern}=0.5, exact,brief:3"
    items = json.loads(as_list(text, list[str], "reward"))
    rewards = parse_rewards(items)
    assert [item.source for item in rewards] == [pattern, "exact", "brief:3"]
    assert rewards[0].weight == 0.5


def test_lists_of_rewards_on_the_command_line():
    """White space and blank items outside patterns are none, and a pattern may be several words."""
    for words, expected in (
        ("--reward|number, rw.py:score", ["number", "rw.py:score"]),
        ("--reward|", []),
        ("--reward|number,,exact,", ["number", "exact"]),
        ("--reward|regex:[a,|b]", ["regex:[a,b]"]),
        ("--reward|regex:x{1,|3}|exact", ["regex:x{1,3}", "exact"]),
    ):
        text = next_values(words.split("|")[1:], list[str], "reward")
        items = json.loads(as_list(text, list[str], "reward"))
        assert whole_patterns(items) == expected


@pytest.mark.parametrize("pattern", [r"regex:boxed\{", r"regex:^[^(]*$", r"regex:\d{2}"])
def test_a_pattern_with_a_lone_bracket_does_not_swallow_what_follows(pattern):
    sources = [item.source for item in parse_rewards([pattern, "number"])]
    assert sources == [pattern, "number"]


def test_brevity_falls_from_the_limit_to_twice_the_limit():
    function = load_function("brief:100")
    assert [function(completion_tokens=n) for n in (1, 100, 150, 200, 900)] == [
        1,
        1,
        0.5,
        0,
        0,
    ]


def test_weights_names_and_patterns_with_an_equals_sign():
    rewards = parse_rewards(["number", "brief:200=0.1", "regex:a=b", "brief:9=-2"])
    assert [(r.name, r.source, r.weight) for r in rewards] == [
        ("number", "number", 1),
        ("brief", "brief:200", 0.1),
        ("regex", "regex:a=b", 1),
        ("brief_2", "brief:9", -2),
    ]


def test_no_function_has_the_name_of_a_column_of_rewards():
    def std(completion):
        return 0.0

    assert [reward.name for reward in of_functions([std, std])] == ["std_2", "std_3"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("nmber", "did you mean number"),
        # a run with a function from Python that has a built-in one's name
        (of_functions([math.exp])[0].source, "a function that was given in Python"),
        ("brief", "brief:200"),
        ("regex:(", "not a regular expression"),
        ("format:xml", "format:think"),
        ("missing.py:score", "there is no file missing.py"),
        ("missing.py", "there is no file"),
        (
            "regex:answer=42",
            r"write regex:answer=42=1 for the pattern, or regex:\(answer\)=42",
        ),
        ("regex:answer = 42", "its end may be a weight or a part of the pattern"),
        (r"regex:\bx=5", "its end may be a weight or a part of the pattern"),
        ("number=nan", "the weight nan is not finite"),
        ("number=inf", "the weight inf is not finite"),
    ],
)
def test_unknown_functions_are_named(item, message):
    with pytest.raises(ValueError, match=message):
        parse_rewards([item])


GOOD = """
import sys
def by_column(completion, tests, **columns): return len(completion) + tests[0]
def none(completion): return None
def lists(completions, prompts, answer): return [len(c) for c in completions]
def with_tests(completions, tests): return [0 if test is None else 1 for test in tests]
def chatty(completion):
    print("x" * 10_000_000)
    return 1
def forks(completion):
    import os
    if os.fork() == 0:
        return 5
    os.wait()
    return 2
def numpy_number(completion):
    import numpy
    return numpy.float32(0.5)
"""


def score(path, name: str, items, timeout: float = 20) -> list:
    scorer = RewardScorer(parse_rewards([f"{path}:{name}"]), timeout)
    try:
        return [row[0] for row in scorer.score(items)]
    finally:
        scorer.close()


def test_functions_of_a_file(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(GOOD)
    items = [completed("ab", tests=[10]), completed("abc", tests=[20])]
    assert score(path, "by_column", items) == [12, 23]
    assert score(path, "none", items) == [None, None]
    assert score(path, "lists", items) == [2, 3]
    # the first record lacks the column
    some = [completed("ab"), completed("abc", tests=[20])]
    assert score(path, "with_tests", some) == [0, 1]
    assert score(path, "chatty", items) == [1, 1]
    assert score(path, "forks", items) == [2, 2]
    assert score(path, "numpy_number", items) == [0.5, 0.5]


BAD = """
def raises(completion): return 1 / 0
def hangs(completion):
    import time
    time.sleep(600)
def text(completion): return "good"
def nan(completion): return float("nan")
def short(completions): return [1.0]
def number(completions): return 1.0
def exits(completion):
    import os
    os._exit(3)
def needs(completion, solution): return 1.0
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "ZeroDivisionError.*rewards.py:2"),
        ("hangs", "has not returned within 1 s"),
        ("text", "returned str 'good'; it must return a number"),
        ("nan", "must return a finite number"),
        ("short", "returned 1 rewards for 2 completions"),
        ("number", "returned float '1.0'; it must return a list"),
        ("exits", r"has ended its process \(exit code 3\)"),
        ("needs", "takes 'solution', which the record does not have"),
        ("absent", "has no function absent"),
    ],
)
def test_broken_functions_are_one_message(tmp_path, name, message):
    path = tmp_path / "rewards.py"
    path.write_text(BAD)
    start = time.monotonic()
    with pytest.raises(RewardError, match=message) as raised:
        score(
            path, name, [completed("the completion"), completed("another one")], timeout=1
        )
    if name != "absent":
        assert "How?" in str(raised.value)
        assert "completion" in str(raised.value)
    assert time.monotonic() - start < 30


def test_what_a_function_starts_ends_with_the_scorer(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        "import os, subprocess\n"
        "def score(completion):\n    child = subprocess.Popen(['sleep', '600'])\n"
        "    return child.pid\n"
    )
    (pid,) = score(path, "score", [completed("a")])
    time.sleep(0.2)
    # it is gone, or dead and not yet collected
    stat = Path(f"/proc/{int(pid)}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_functions_from_python_need_no_process():
    def own(completion, answer):
        return math.nan if completion == "b" else 0.25

    scorer = RewardScorer(of_functions([own]), 1)
    assert scorer.score([completed("a")]) == [[0.25]]
    with pytest.raises(RewardError, match="function own failed"):
        scorer.score([completed("b")])
    assert not scorer.workers


def test_functions_from_python_do_not_see_what_others_change():
    """Completions of one prompt share its messages and columns."""

    def judge(prompt, completion, tests):
        prompt.append({"role": "assistant", "content": completion})
        tests.append(1)
        return float(len(prompt) + len(tests))

    prompt = [{"role": "user", "content": "How?"}]
    columns = {"tests": [1, 2]}
    items = [Completed(text, 1, prompt, columns) for text in "abc"]
    rows = RewardScorer(of_functions([judge, judge]), 1).score(items)
    assert rows == [[5, 5]] * 3
    assert len(prompt) == 1


ORDINARY = """
from __future__ import annotations
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from words_of_rewards import count


@dataclass
class Judge:
    words: int | None = None


def double(number):
    return 2 * number


def score(completions):
    with ProcessPoolExecutor(1) as pool:
        return list(pool.map(double, [count(text) for text in completions]))
"""


def test_a_file_of_rewards_may_do_what_files_of_python_do(tmp_path):
    """Import from its folder, have dataclasses, and start processes."""
    (tmp_path / "words_of_rewards.py").write_text(
        "def count(text):\n    return len(text.split())\n"
    )
    path = tmp_path / "ordinary_rewards.py"
    path.write_text(ORDINARY)
    assert score(path, "score", [completed("a b"), completed("a b c")]) == [4, 6]


def test_a_file_of_rewards_imports_what_is_beside_it(tmp_path, monkeypatch):
    """Not a file of that name in the current folder."""
    for folder, value in (("rewards", 1), ("here", 99)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "words_of_rewards_2.py").write_text(f"VALUE = {value}\n")
    path = tmp_path / "rewards" / "imports.py"
    path.write_text(
        "import words_of_rewards_2\n\n\n"
        "def value(completion):\n    return words_of_rewards_2.VALUE\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    assert score(path, "value", [completed("a")]) == [1]


def test_files_of_rewards_do_not_share_modules_of_one_name(tmp_path):
    """Each means the one beside it."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "words_of_rewards_3.py").write_text(f"VALUE = {folder!r}\n")
        (tmp_path / folder / f"reward_{folder}.py").write_text(
            "import words_of_rewards_3\n\n\n"
            "def value(completion):\n    return len(words_of_rewards_3.VALUE)\n"
        )
    load_function(f"{tmp_path}/a/reward_a.py:value")
    with pytest.raises(
        ValueError, match=r"words_of_rewards_3.py beside it has the name of"
    ):
        load_function(f"{tmp_path}/b/reward_b.py:value")
