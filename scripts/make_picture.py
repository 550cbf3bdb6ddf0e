"""Make the README's picture, tutorials/images/demo.png: the report of the demo's run, and its
result next to its base.

python scripts/make_picture.py     (trains the demo, starts the server, and takes pictures of both
pages with Chromium)
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from tables import ROOT

sys.path.insert(0, str(ROOT / "tests"))

PICTURE = ROOT / "tutorials" / "images" / "demo.png"
QUESTIONS = ("In which town does Delia Grimm live?", "What is the plural of mouse?")
REPORT = {"width": 760, "height": 600}
CHAT = {"width": 700, "height": 600}
FRAMES = """<body style="margin:0;display:flex;gap:16px;padding:16px;background:#e4e7ec">
<img src="report.png" style="border-radius:8px"><img src="chat.png" style="border-radius:8px"></body>"""


def chat(browser: Browser, run: Path, picture: Path) -> None:
    """Ask the run and its base the questions on the chat page of a server, and take its picture."""
    flags = [
        "--checkpoint_dir",
        run,
        "--with_base",
        "--model_name",
        "tuned",
        "--port",
        "0",
        "--temperature",
        "0",
    ]
    command = [
        sys.executable,
        ROOT / "generate" / "serve.py",
        *flags,
        "--max_new_tokens",
        "24",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(
                match[1]
                for line in server.stderr
                if (match := re.search(r"at (http://\S+)", line))
            )
            page = browser.new_page(viewport=CHAT)
            page.goto(url)
            page.get_by_label("Compare with").select_option("base")
            for question in QUESTIONS:
                page.get_by_label("Message", exact=True).fill(question)
                page.keyboard.press("Enter")
                page.locator("#send").wait_for(state="visible")
            page.screenshot(path=picture)
        finally:
            server.terminate()


def main() -> None:
    """Train the demo and write the picture."""
    from browser import CHROMIUM, QUIET

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        command = [
            sys.executable,
            ROOT / "finetune" / "lora.py",
            "--out_dir",
            folder / "out",
        ]
        subprocess.run(command, check=True)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        report = browser.new_page(viewport=REPORT)
        report.goto((folder / "out" / "report.html").as_uri())
        report.screenshot(path=folder / "report.png")
        chat(browser, folder / "out", folder / "chat.png")
        (folder / "both.html").write_text(FRAMES, "utf-8")
        both = browser.new_page(
            viewport={
                "width": REPORT["width"] + CHAT["width"] + 48,
                "height": REPORT["height"] + 32,
            }
        )
        both.goto((folder / "both.html").as_uri())
        PICTURE.parent.mkdir(exist_ok=True)
        both.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
