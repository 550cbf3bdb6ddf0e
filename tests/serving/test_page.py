"""The chat page in a real browser, in a wide and a narrow window."""

import os
import re

import pytest
from conftest import adapted
from server_process import Server, copy_with_context

import litft
from litft.args import LoRAArgs
from litft.methods import LoRA

SIZES = {"wide": (1280, 800), "narrow": (360, 640)}


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    base = copy_with_context(checkpoints["stories260K"], root / "stories", 4096)
    (base / "generation_config.json").write_text('{"suppress_tokens": [2]}')  # answers end only where the context is full
    return {"stories": base, "tuned": adapted(base, root / "tuned", LoRA(LoRAArgs(r=4)))}


@pytest.fixture(scope="module")
def server(folders):
    flags = ["--adapters", f"tuned={folders['tuned']}", "--max_seq_length", "600", "--temperature", "0"]
    with Server(folders["stories"], *flags) as server:
        yield server


@pytest.fixture
def page(request, browser, server):
    """The page in a narrow window, or in the size that a test passes."""
    width, height = SIZES[getattr(request, "param", "narrow")]
    context = browser.new_context(
        viewport={"width": width, "height": height}, permissions=["clipboard-read", "clipboard-write"]
    )
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.problems, page.requested_urls = [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.on("request", lambda sent: page.requested_urls.append(sent.url))
    page.goto(server.url)
    yield page
    if folder := os.environ.get("LITFT_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{request.node.name}.png")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it has to be scrolled sideways"
    assert all(url.startswith((server.url, "data:")) for url in page.requested_urls)
    context.close()


def answers(page):
    return page.locator("article.assistant p")


def wait_until_done(page):
    """Wait until the answer is complete and a message can be sent again."""
    page.locator("#send").wait_for(state="visible")


def send(page, text):
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def expected(folder, messages, tokens):
    model, tokenizer = litft.load(folder, "fp32")
    pieces = litft.stream(model, tokenizer, messages, max_new_tokens=tokens, temperature=0, logit_bias={2: -1e6})
    return "".join(pieces).strip()


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_a_conversation(page, folders, server):
    """Two turns equal the answers of litft.stream; then one is copied and the page is cleared."""
    send(page, "Hello <b>there</b>")
    page.locator("article.assistant p:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page)
    messages = [{"role": "user", "content": "Hello <b>there</b>"}]
    first = answers(page).nth(0).text_content()
    assert first and expected(folders["stories"], messages, 400).startswith(first.strip())
    assert page.locator("article.user p").text_content() == "Hello <b>there</b>"  # shown as text, not as HTML
    server.wait_until_idle()
    send(page, "Go on")
    wait_until_done(page)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Go on"}]
    second = answers(page).nth(1).text_content()
    assert second.strip() == expected(folders["stories"], messages, 600)[: len(second.strip())] and len(second) > len(first)
    note = page.locator("article.assistant footer").nth(1).text_content()
    assert re.match(r"stories: \d+ tokens, [\d.]+ tokens/s, cut off", note), note
    page.get_by_role("button", name="Copy").nth(1).click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == second
    page.get_by_role("button", name="Clear").click()
    assert page.locator("article").count() == 0
    assert not page.problems


def test_an_adapter_can_be_selected(page, folders):
    page.get_by_label("Model", exact=True).select_option("tuned")
    send(page, "Hello")
    page.locator("article.assistant p:not(:empty)").wait_for()
    page.wait_for_timeout(300)
    page.get_by_label("Model", exact=True).select_option("stories")  # for the next message
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page)
    messages = [{"role": "user", "content": "Hello"}]
    answer = answers(page).text_content().strip()
    assert answer and expected(folders["tuned"], messages, 300).startswith(answer)
    assert not expected(folders["stories"], messages, 300).startswith(answer)
    assert page.locator("article.assistant footer").text_content().startswith("tuned: ")
    assert not page.problems


def test_clearing_stops_the_answer(page, server):
    send(page, "Hello")
    page.locator("article.assistant p:not(:empty)").wait_for()
    page.get_by_role("button", name="Clear").click()
    wait_until_done(page)
    server.wait_until_idle()
    assert page.locator("article").count() == 0
    assert not page.problems


def test_an_error_is_shown_and_the_message_can_be_sent_again(page):
    long_message = "a long word " * 300
    send(page, long_message)
    page.locator(".wrong").wait_for()
    wait_until_done(page)
    assert "shorten" in page.locator(".wrong").text_content()
    assert page.get_by_label("Message").input_value() == long_message.strip()
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page)


def test_the_page_asks_for_the_api_key(browser, folders):
    with Server(folders["stories"], "--api_key", "sesame", "--max_seq_length", "140") as server:
        page = browser.new_page()
        page.goto(server.url)
        page.locator(".wrong").wait_for()
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("API key").press("Enter")
        page.locator("#model option").wait_for(state="attached")
        send(page, "Hello")
        page.locator("article.assistant p:not(:empty)").wait_for()
        assert answers(page).text_content() and page.locator(".wrong").count() == 0
        page.close()
