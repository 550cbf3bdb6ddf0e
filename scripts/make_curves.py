"""Make the picture of tutorials/choosing.md, tutorials/images/curves.png: curves of good and bad
runs on the demo's model.

python scripts/make_curves.py     (trains six times, some minutes on two cores; needs Chromium)
"""

import html
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, sync_playwright
from tables import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PICTURE = ROOT / "tutorials" / "images" / "curves.png"
WIDTH = 460
STYLE = (
    "body{margin:0;padding:16px;display:grid;grid-template-columns:repeat(3,auto);gap:16px;"
    "background:#e4e7ec;font:15px system-ui,sans-serif;width:max-content}"
    "div{background:#fff;border-radius:8px;padding:12px}p{margin:0 0 8px;font-weight:600}"
)
# the demo's flags, for runs on a part of its data
DEMO_FLAGS = (
    "--train.global_batch_size 32 --train.micro_batch_size 8 --train.learning_rate 0.002 "
    "--lora.r 16 --lora.alpha 32 --eval.max_new_tokens 0"
)


class Curve(NamedTuple):
    """A run, and the chart of its report that is shown."""

    caption: str
    chart: str  # how its title begins
    flags: str


CURVES = (
    Curve(
        "Good: both fall, and flatten out",
        "Loss",
        f"{DEMO_FLAGS} --data.path {{folder}}/all.jsonl --train.epochs 4",
    ),
    Curve(
        "Overfitting: training falls to 0, validation does not",
        "Loss",
        f"{DEMO_FLAGS} --data.path {{folder}}/few.jsonl --data.val_path {{folder}}/val.jsonl "
        "--train.epochs 60 --train.lr_schedule constant",
    ),
    Curve(
        "Too short: stops at 2.5, and the first run at 0.01",
        "Loss",
        f"{DEMO_FLAGS} --data.path {{folder}}/all.jsonl --train.max_steps 12",
    ),
    Curve(
        "Learning rate too high: jumps, then stays high",
        "Loss",
        f"{DEMO_FLAGS} --data.path {{folder}}/all.jsonl --train.epochs 2 --train.learning_rate 0.3",
    ),
    Curve(
        "DPO, good: the margin grows, also in validation",
        "Margin",
        "--objective dpo --data.path {folder}/pairs.jsonl --train.epochs 3 "
        "--train.global_batch_size 32 --train.learning_rate 0.0005 --eval.max_new_tokens 0",
    ),
    Curve(
        "GRPO, good: the reward rises through the noise",
        "Reward",
        "--objective grpo --reward exact --data.path {folder}/all.jsonl --train.max_steps 40 "
        "--grpo.max_new_tokens 8 --train.global_batch_size 16 --train.learning_rate 0.002 "
        "--eval.max_new_tokens 0",
    ),
)


def write_data(folder: Path) -> None:
    """Write all examples of the demo, few of them, its validation examples, and pairs."""
    from litft.pretrained.folder import DEMO

    texts = {}
    for name in ("train", "val"):
        texts[name] = (DEMO / f"{name}.jsonl").read_text("utf-8").splitlines()
    pairs = []
    for line in texts["train"][:800]:
        record = json.loads(line)
        other = json.loads(texts["train"][-1 - len(pairs)])
        pair = {"prompt": record["instruction"], "chosen": record["output"]}
        pairs.append(json.dumps(pair | {"rejected": other["output"]}))
    files = {
        "all": texts["train"],
        "few": texts["train"][:64],
        "val": texts["val"],
        "pairs": pairs,
    }
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def picture(browser: Browser, folder: Path, number: int, curve: Curve) -> str:
    """Train, take the picture of the chart, and return the HTML that shows it."""
    from litft.pretrained.folder import DEMO

    # completions that are sometimes right can be learned from
    start = "tuned" if "grpo" in curve.flags else "base"
    run = folder / f"run{number}"
    flags = curve.flags.format(folder=folder).split()
    command = [
        sys.executable,
        ROOT / "finetune" / "lora.py",
        "--checkpoint_dir",
        DEMO / start,
    ]
    # a run that diverges ends with an error, and has a report
    subprocess.run([*command, "--out_dir", run, *flags], check=False)
    page = browser.new_page(viewport={"width": WIDTH, "height": 900})
    page.goto((run / "report.html").as_uri())
    figure = page.locator("figure").filter(has_text=curve.chart).first
    figure.screenshot(path=folder / f"{number}.png")
    page.close()
    return f"<div><p>{html.escape(curve.caption)}</p><img src='{number}.png'></div>"


def main() -> None:
    """Train, and write the picture."""
    from browser import CHROMIUM, QUIET

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        write_data(folder)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        tiles = [picture(browser, folder, *item) for item in enumerate(CURVES)]
        (folder / "all.html").write_text(f"<style>{STYLE}</style>{''.join(tiles)}", "utf-8")
        page = browser.new_page()
        page.goto((folder / "all.html").as_uri())
        page.locator("body").screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
