"""A real browser for the tests of pages: the fixture `browser`."""

import shutil

import pytest

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-sync".split()
)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, of the extra 'test'"
    )
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*QUIET, "--disable-component-update"]
        )
        yield browser
        browser.close()
