"""The day with a GPU: its figures, its clock and its report, tried without one."""

import csv
import json
import subprocess
import sys

import pytest
from conftest import ENV, ROOT, script

FOLDER = ROOT / "scripts" / "gpu_day"
sys.path.insert(0, str(FOLDER))

from figures import RESULTS, Figures, read_figures  # noqa: E402
from report import NONE_YET, day_folders, page, read_cards  # noqa: E402

STEP = {
    "tokens_per_second": 9000,
    "mfu": 0.42,
    "seconds": 0.91,
    "host_seconds": 0.03,
    "peak_gib": 40.0,
    "planned_gib": 41.0,
}
MACHINE = "/opt/bin/python3 2.11.0+cu130 13.0 NVIDIA H100 80GB HBM3\n"


def write_day(folder, parts, machine=MACHINE):
    """Write the results of a day: the values of each part, in the order of their lines."""
    folder.mkdir()
    (folder / "machine.txt").write_text(machine)
    lines = [json.dumps({"part": name, "at": 1.0, **values}) for name, values in parts]
    (folder / RESULTS).write_text("\n".join(lines) + '\n{"part": "torn')
    return folder


def test_a_part_that_fails_loses_nothing_else(tmp_path):
    figures = Figures(tmp_path, seconds=30)
    figures.measure("first", lambda: {"seconds": 1.0})
    figures.measure("broken", lambda: {"seconds": 1 / 0})
    figures.measure("long", lambda: {"seconds": 1.0}, needs=60)
    figures.measure("last", lambda: {"seconds": 2.0})
    parts = read_figures(tmp_path)
    assert parts["first"]["seconds"] == 1.0 and parts["last"]["seconds"] == 2.0
    assert (
        "ZeroDivisionError" in parts["broken"]["error"] and "30" in parts["long"]["skipped"]
    )


def test_the_report_merges_days_of_one_card(tmp_path):
    """The newest figures count, but no failure replaces figures."""
    write_day(
        tmp_path / "day-1", [("8B LoRA", STEP), ("8B decode", {"error": "no kernel"})]
    )
    faster = {**STEP, "tokens_per_second": 9500}
    parts = [("8B LoRA", faster), ("kernels of 8B LoRA", {"launches": 2345})]
    write_day(tmp_path / "day-2", [*parts, ("8B LoRA", {"skipped": "5 s were left"})])
    other = MACHINE.replace("H100 80GB HBM3", "H200")
    write_day(tmp_path / "day-3", [("8B LoRA", STEP)], machine=other)
    (tmp_path / "day-2" / "parts-1.csv").write_text("LoRA,0,40\nquick tests,124,90\n")
    first, second = read_cards(day_folders(tmp_path))
    assert first.title == "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, day-2"
    text = "\n".join(page(first))
    assert (
        "| 8B LoRA | 9,500 | 42% | 0.910 | 0.030 | 40.00 | 41.00 (+2.5%) | 2,345 |" in text
    )
    assert "Not measured: 8B decode (no kernel); quick tests (exit 124)." in text
    assert "9,000" in "\n".join(page(second))


def test_the_guide_has_what_the_report_writes(tmp_path):
    """Without results of a GPU, the guide says that nothing was measured."""
    days = ROOT / "scripts" / "gpu_days"
    cards = read_cards(day_folders(days)) if days.is_dir() else []
    lines = []
    for card in cards:
        lines += page(card)
    expected = "\n".join(lines).strip() or NONE_YET
    assert expected in (ROOT / "tutorials" / "performance.md").read_text("utf-8")


@pytest.mark.slow
def test_every_subject_runs_on_a_cpu(tmp_path):
    """The one that needs no compiler; the others run on the pretended GPU."""
    words = ["--subject", "decoding", "--model", "tiny", "--accelerator", "cpu"]
    script("scripts/gpu_day/measure.py", *words, "--out", tmp_path, cwd=tmp_path)
    parts = read_figures(tmp_path)
    measured = parts["tiny decode eager 1 x 32, capacity 512"]
    assert measured["tokens_per_second"] > 0 and 0 < measured["prefill_seconds"] < 10
    assert "x aten::" in (tmp_path / "kernels.txt").read_text()
    done = script("scripts/gpu_day/report.py", "--days", tmp_path, "--print", cwd=tmp_path)
    assert "| tiny decode eager 1 x 32, capacity 512 | " in done.stdout


@pytest.mark.slow
def test_a_stopped_part_leaves_its_output_and_time_for_the_others(tmp_path):
    """An interpreter whose tests never end: they are stopped, and what they printed is kept."""
    slow = tmp_path / "python"
    slow.write_text(
        '#!/bin/sh\necho "started $*"\n[ "$1" = -m ] && exec sleep 60\nexit 0\n'
    )
    slow.chmod(0o755)
    env = {**ENV, "OUT": str(tmp_path / "day"), "MODEL": "tiny", "PYTHON": str(slow)}
    command = ["timeout", "100", "bash", ROOT / "scripts" / "gpu_day.sh", "2", "32"]
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False)
    log = (tmp_path / "day" / "log-2.txt").read_text()
    assert "started -m pytest" in log and "## plan: no time is left" in log
    with (tmp_path / "day" / "parts-2.csv").open() as file:
        statuses = {name: status for name, status, _ in csv.reader(file)}
    assert statuses["more tests"] == "124" and statuses["attention"] == "skipped"
