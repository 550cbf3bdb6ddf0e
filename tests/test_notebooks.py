"""The notebooks in tutorials/notebooks run as they are, but for the cell that installs."""

import os
import sys

import pytest
from conftest import ENV, ROOT

# files that each notebook writes below out/
WRITTEN = {
    "quickstart": ("demo/report.html", "mine/metrics.csv", "merged/config.json"),
    "rewards": ("exact/report.html", "close/report.html"),
    "t4": ("mine/metrics.csv", "merged/config.json", "gguf/model-Q4_K_M.gguf"),
}
# the demo is trained whole by the test of the quickstart guide
SHORTER = {
    "quickstart": ("--out_dir out/demo", "--out_dir out/demo --max_steps 10"),
    "t4": ("--max_steps 60", "--max_steps 10"),
}
NOTEBOOKS = sorted((ROOT / "tutorials" / "notebooks").glob("*.ipynb"))


CASES = []
for found in NOTEBOOKS:
    # a new user's first one runs with each commit
    marks = [] if found.stem == "quickstart" else [pytest.mark.weekly]
    CASES.append(pytest.param(found, marks=marks, id=found.stem))


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    # `python` in a cell is the one that runs the tests
    folder = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # without a network
    monkeypatch.setenv("LITFT_MODEL", str(ROOT / "litft" / "demo" / "base"))
    notebook = nbformat.read(path, as_version=4)
    cells = []
    for cell in notebook.cells:
        if "install" in cell.metadata.get("tags", []):
            continue
        if path.stem in SHORTER and "finetune lora" in cell.source:
            cell.source = cell.source.replace(*SHORTER[path.stem])
        cells.append(cell)
    notebook.cells = cells
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources
    )
    client.execute()
    printed = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            printed += output.get("text", "")
    assert "Traceback" not in printed and "error:" not in printed
    for name in WRITTEN[path.stem]:
        assert (tmp_path / "out" / name).is_file()
