"""The chat page in a real browser, wide and narrow."""

import os
import re
import shutil

import pytest
from conftest import adapted
from server_process import Server, lengthened

import litft
from litft.args import LoRAArgs
from litft.methods import LoRA

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra 'test'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync".split()
SIZES = {"wide": (1280, 800), "narrow": (360, 640)}


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, "--disable-component-update"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    base = lengthened(checkpoints["stories260K"], root / "stories", 4096)
    (base / "generation_config.json").write_text('{"suppress_tokens": [2]}')  # an answer ends where there is no more room
    return {"stories": base, "tuned": adapted(base, root / "tuned", LoRA(LoRAArgs(r=4)))}


@pytest.fixture(scope="module")
def server(folders):
    flags = ["--adapters", f"tuned={folders['tuned']}", "--max_seq_length", "600", "--temperature", "0"]
    with Server(folders["stories"], *flags) as server:
        yield server


@pytest.fixture
def page(request, browser, server):
    """The page in a narrow window, or in the one that a test asks for."""
    width, height = SIZES[getattr(request, "param", "narrow")]
    context = browser.new_context(
        viewport={"width": width, "height": height}, permissions=["clipboard-read", "clipboard-write"]
    )
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.problems, page.asked = [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.on("request", lambda asked: page.asked.append(asked.url))
    page.goto(server.url)
    yield page
    if folder := os.environ.get("LITFT_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{request.node.name}.png")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it has to be scrolled sideways"
    assert all(url.startswith((server.url, "data:")) for url in page.asked)
    context.close()


def answers(page):
    return page.locator("article.assistant p")


def settled(page):
    """The answer is done: one may send again."""
    page.locator("#send").wait_for(state="visible")


def say(page, words):
    page.get_by_label("Message").fill(words)
    page.keyboard.press("Enter")


def expected(folder, messages, tokens):
    model, tokenizer = litft.load(folder, "fp32")
    pieces = litft.stream(model, tokenizer, messages, max_new_tokens=tokens, temperature=0, logit_bias={2: -1e6})
    return "".join(pieces).strip()


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_a_conversation(page, folders, server):
    """Two turns, with the answers that litft gives; then copied, and cleared."""
    say(page, "Hello <b>there</b>")
    page.locator("article.assistant p:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    settled(page)
    talk = [{"role": "user", "content": "Hello <b>there</b>"}]
    first = answers(page).nth(0).text_content()
    assert first and expected(folders["stories"], talk, 400).startswith(first.strip())
    assert page.locator("article.user p").text_content() == "Hello <b>there</b>"  # as it was typed
    server.idle()
    say(page, "Go on")
    settled(page)
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "Go on"}]
    second = answers(page).nth(1).text_content()
    assert second.strip() == expected(folders["stories"], talk, 600)[: len(second.strip())] and len(second) > len(first)
    note = page.locator("article.assistant footer").nth(1).text_content()
    assert re.match(r"stories: \d+ tokens, [\d.]+ tokens/s, cut off", note), note
    page.get_by_role("button", name="Copy").nth(1).click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == second
    page.get_by_role("button", name="Clear").click()
    assert page.locator("article").count() == 0
    assert not page.problems


def test_an_adapter_is_chosen(page, folders):
    page.get_by_label("Model", exact=True).select_option("tuned")
    say(page, "Hello")
    page.locator("article.assistant p:not(:empty)").wait_for()
    page.wait_for_timeout(300)
    page.get_by_label("Model", exact=True).select_option("stories")  # the next is asked of; the note names who was asked
    page.get_by_role("button", name="Stop").click()
    settled(page)
    talk = [{"role": "user", "content": "Hello"}]
    said = answers(page).text_content().strip()
    assert said and expected(folders["tuned"], talk, 300).startswith(said)
    assert not expected(folders["stories"], talk, 300).startswith(said)
    assert page.locator("article.assistant footer").text_content().startswith("tuned: ")
    assert not page.problems


def test_clearing_ends_an_answer(page, server):
    say(page, "Hello")
    page.locator("article.assistant p:not(:empty)").wait_for()
    page.get_by_role("button", name="Clear").click()
    settled(page)
    server.idle()
    assert page.locator("article").count() == 0
    assert not page.problems


def test_what_goes_wrong_is_shown_and_can_be_sent_again(page):
    long = "a long word " * 300
    say(page, long)
    page.locator(".wrong").wait_for()
    settled(page)
    assert "shorten" in page.locator(".wrong").text_content()
    assert page.get_by_label("Message").input_value() == long.strip()
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").click()
    settled(page)


def test_a_key_is_asked_for(browser, folders):
    with Server(folders["stories"], "--api_key", "sesame", "--max_seq_length", "140") as server:
        page = browser.new_page()
        page.goto(server.url)
        page.locator(".wrong").wait_for()
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("API key").press("Enter")
        page.locator("#model option").wait_for(state="attached")
        say(page, "Hello")
        page.locator("article.assistant p:not(:empty)").wait_for()
        assert answers(page).text_content() and page.locator(".wrong").count() == 0
        page.close()
