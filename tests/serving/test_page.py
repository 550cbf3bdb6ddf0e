"""The chat page in a real browser, in a wide and a narrow window."""

import hashlib
import json
import os
import re
from pathlib import Path

import httpx
import pytest
from conftest import adapted
from server_process import Server, copy_with_context

import litft
from litft.args import LoRAArgs
from litft.methods import LoRA

SIZES = {"wide": (1280, 800), "narrow": (360, 640)}
ALLOWED_TAGS = {
    "a",
    "blockquote",
    "br",
    "button",
    "code",
    "del",
    "details",
    "em",
    "hr",
    "h1",
    "h2",
    "li",
    "ol",
    "p",
    "pre",
}
ALLOWED_TAGS |= {"strong", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul"}
ALLOWED_ATTRIBUTES = {"align", "href", "open", "rel", "start", "target", "title", "type"}
REASONING = "I am *thinking*."
MARKDOWN = """# A title

Some **bold** words and `code`, 1 < 2 & <b>no HTML</b>:

1. one
2. two

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return "<i>"
```

> quoted, with [a link](https://example.com/?a=1&b=2)
- [x] done
"""
INJECTIONS = [
    "<script>hacked = true</script>",
    "<img src=x onerror='hacked = true'>",
    "<svg onload='hacked = true'><script>hacked = true</script></svg>",
    "[click](javascript:hacked=true) [click](JaVaScRiPt&colon;hacked=true) "
    "[click](data:text/html,x)",
    "<javascript:hacked=true> [click](vbscript:x) [click](<java\tscript:hacked=true>)",
    "![a](https://evil.example/pixel.png) ![a](x'onerror='hacked=true) ![<img src=x "
    "onerror=hacked=true>](y)",
    '[a](https://a.example/"onmouseover="hacked=true) [b](https://b.example "title\\" onclick=hacked=true x=")',
    "```html\n</code></pre><img src=x onerror=hacked=true>\n```",
    '```" onclick=hacked=true x="\n code\n```',
    "| <img src=x onerror=hacked=true> |\n|---|\n| <iframe src=https://evil.example></iframe> |",
    "<math><mtext><table><mglyph><style><!--</style><img title='--><img src=1 "
    "onerror=hacked=true>'>",
    "<style>body { display: none }</style><link rel=stylesheet "
    "href=https://evil.example/x.css><base href=https://evil.example>",
    "<form action=https://evil.example><input name=key><button>Send</button></form><a "
    "id=form>clobber</a>",
    "<think><img src=x onerror=hacked=true></think><think></think><img src=x onerror=hacked=true>",
]


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    base = copy_with_context(checkpoints["stories"], root / "stories", 4096)
    # answers end only where the context is full
    (base / "generation_config.json").write_text('{"suppress_tokens": [2]}')
    return {"stories": base, "tuned": adapted(base, root / "tuned", LoRA(LoRAArgs(r=4)))}


@pytest.fixture(scope="module")
def server(folders):
    flags = [
        "--adapters",
        f"tuned={folders['tuned']}",
        "--max_seq_length",
        "600",
        "--temperature",
        "0",
    ]
    with Server(folders["stories"], *flags) as server:
        yield server


@pytest.fixture
def page(request, browser, server):
    """The page in a narrow window, in the size that a test passes, or without its content security
    policy."""
    kind = getattr(request, "param", "narrow")
    width, height = SIZES.get(kind, SIZES["narrow"])
    context = browser.new_context(
        viewport={"width": width, "height": height},
        permissions=["clipboard-read", "clipboard-write"],
        bypass_csp=kind == "without policy",
    )
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.problems, page.requested_urls = [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on(
        "console",
        lambda message: message.type == "error" and page.problems.append(message.text),
    )
    page.on("request", lambda sent: page.requested_urls.append(sent.url))
    page.goto(server.url)
    yield page
    if folder := os.environ.get("LITFT_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{request.node.name}.png")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "it has to be scrolled sideways"
    )
    assert all(url.startswith((server.url, "data:")) for url in page.requested_urls)
    context.close()


def answers(page):
    return page.locator("article.assistant .text")


def answer_texts(page):
    """Return the answers of the page as they were generated, through the buttons that copy them."""
    texts = []
    for article in page.locator("article.assistant").all():
        article.locator("footer").get_by_role("button", name="Copy").click()
        article.locator("footer").get_by_role("button", name="Copied").wait_for()
        texts.append(page.evaluate("navigator.clipboard.readText()"))
    return texts


def wait_until_done(page):
    """Wait until the answer is complete and a message can be sent again."""
    page.locator("#send").wait_for(state="visible")


def send(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def set_fields(page, **fields):
    page.get_by_role("button", name="Settings").click()
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(str(value))
    page.get_by_role("button", name="Settings").click()


def expected(folder, messages, tokens):
    model, tokenizer = litft.load(folder, "fp32")
    pieces = litft.stream(
        model,
        tokenizer,
        messages,
        max_new_tokens=tokens,
        temperature=0,
        logit_bias={2: -1e6},
    )
    return "".join(pieces).strip()


def chat(*texts):
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    "page", ["wide", pytest.param("narrow", marks=pytest.mark.slow)], indirect=True
)
def test_a_conversation(page, folders, server):
    """Two turns equal the answers of litft.stream; then the page is cleared."""
    send(page, "Hello <b>there</b>")
    page.locator("article.assistant .text:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page)
    first = answer_texts(page)[0]
    assert first and expected(
        folders["stories"], chat("Hello <b>there</b>"), 400
    ).startswith(first.strip())
    # shown as text, not as HTML
    assert page.locator("article.user .text").text_content() == "Hello <b>there</b>"
    server.wait_until_idle()
    send(page, "Go on")
    wait_until_done(page)
    second = answer_texts(page)[1]
    whole = expected(folders["stories"], chat("Hello <b>there</b>", first, "Go on"), 600)
    # the first one has as many tokens as came before the click
    assert second.strip() and second.strip() == whole[: len(second.strip())]
    assert page.locator("article.assistant h2").nth(1).text_content() == "stories"
    note = page.locator("article.assistant .note").nth(1).text_content()
    assert re.match(r"\d+ tokens, [\d.]+ tokens/s, cut off", note), note
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    assert not page.problems


def test_an_adapter_can_be_selected(page, folders):
    page.get_by_label("Model", exact=True).select_option("tuned")
    send(page, "Hello")
    page.locator("article.assistant .text:not(:empty)").wait_for()
    page.wait_for_timeout(300)
    page.get_by_label("Model", exact=True).select_option("stories")  # for the next message
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page)
    answer = answer_texts(page)[0].strip()
    assert answer and expected(folders["tuned"], chat("Hello"), 300).startswith(answer)
    assert not expected(folders["stories"], chat("Hello"), 300).startswith(answer)
    assert page.locator("article.assistant h2").text_content() == "tuned"
    assert not page.problems


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_two_models_are_compared(page, folders):
    """Both answer each question, each after its own earlier answers."""
    page.get_by_label("Compare with").select_option("tuned")
    set_fields(page, Max_tokens=20)
    for question in ("Hello", "Go on"):
        send(page, question)
        wait_until_done(page)
    texts = answer_texts(page)
    assert (
        page.locator("article.assistant h2").all_text_contents() == ["stories", "tuned"] * 2
    )
    for column, name in enumerate(("stories", "tuned")):
        first, second = (text.strip() for text in texts[column::2])
        assert first == expected(folders[name], chat("Hello"), 20)
        assert second == expected(folders[name], chat("Hello", texts[column], "Go on"), 20)
    left, right = (
        box.bounding_box() for box in page.locator("article.assistant").all()[:2]
    )
    is_wide = page.viewport_size["width"] > 1000
    assert (left["y"] == right["y"]) == is_wide and (left["x"] == right["x"]) == (
        not is_wide
    )
    assert not page.problems


def test_settings_are_sent(page, folders):
    bodies = []
    page.on(
        "request",
        lambda request: (
            bodies.append(request.post_data_json) if request.method == "POST" else None
        ),
    )
    page.get_by_role("button", name="Settings").click()
    # the server's default
    page.locator("[placeholder='0']").and_(page.get_by_label("Temperature")).wait_for()
    page.get_by_role("button", name="Settings").click()
    set_fields(
        page, System_prompt="Tell stories.", Temperature="0.5", Top_p="0.25", Max_tokens="7"
    )
    send(page, "Hello")
    wait_until_done(page)
    messages = [{"role": "system", "content": "Tell stories."}, *chat("Hello")]
    settings = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 7}
    assert bodies[0] == {
        "model": "stories",
        "messages": messages,
        "stream": True,
    } | settings | {"stream_options": {"include_usage": True}}
    assert page.locator(".note").text_content().startswith("7 tokens")
    set_fields(page, Temperature="")
    send(page, "Go on")
    wait_until_done(page)
    assert bodies[1].keys() == bodies[0].keys() - {"temperature"}


def test_regenerate_and_edit(page, folders):
    set_fields(page, Max_tokens=20)
    for question in ("Hello", "Go on"):
        send(page, question)
        wait_until_done(page)
    before = answer_texts(page)
    assert page.get_by_role("button", name="Regenerate").count() == 1  # of the last answer
    page.get_by_label("Model", exact=True).select_option("tuned")
    page.get_by_role("button", name="Regenerate").click()
    wait_until_done(page)
    after = answer_texts(page)
    assert after[0] == before[0]
    assert (
        after[1].strip()
        == expected(folders["tuned"], chat("Hello", before[0], "Go on"), 20)
        != before[1].strip()
    )
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit message").fill("discarded")
    page.get_by_role("button", name="Cancel").click()
    assert page.locator("article.user .text").all_text_contents() == ["Hello", "Go on"]
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit message").fill("Good morning")
    page.locator("article.user").get_by_role("button", name="Send").click()
    wait_until_done(page)
    assert page.locator("article.user .text").all_text_contents() == ["Good morning"]
    assert [text.strip() for text in answer_texts(page)] == [
        expected(folders["tuned"], chat("Good morning"), 20)
    ]
    assert not page.problems


def test_clearing_stops_the_answer(page, server):
    send(page, "Hello")
    page.locator("article.assistant .text:not(:empty)").wait_for()
    page.get_by_role("button", name="New chat").click()
    wait_until_done(page)
    server.wait_until_idle()
    assert page.locator("article").count() == 0
    assert not page.problems


def test_an_error_is_shown_and_the_message_can_be_sent_again(page):
    long_message = "a long word " * 300
    send(page, long_message)
    page.locator(".error").wait_for()
    wait_until_done(page)
    assert "shorten" in page.locator(".error").text_content()
    assert page.get_by_label("Message", exact=True).input_value() == long_message.strip()
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page)


def test_the_page_asks_for_the_api_key(browser, folders):
    with Server(
        folders["stories"], "--api_key", "sesame", "--max_seq_length", "140"
    ) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.locator(".error").wait_for()
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("API key").press("Enter")
        page.locator("#model option").wait_for(state="attached")
        send(page, "Hello")
        page.locator("article.assistant .text:not(:empty)").wait_for()
        assert answers(page).text_content() and page.locator(".error").count() == 0
        page.close()


def reply_with(page, text, reasoning=""):
    """Let the page receive `text` as the answer, in pieces of three characters, after
    `reasoning`."""
    pieces = [
        {"reasoning_content": reasoning[start : start + 3]}
        for start in range(0, len(reasoning), 3)
    ]
    pieces += [{"content": text[start : start + 3]} for start in range(0, len(text), 3)]
    events = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in pieces
    ]
    body = (
        "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    )
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    count = page.locator("article.assistant").count()
    send(page, "Hello")
    # before that, the page can still send
    page.locator("article.assistant").nth(count).wait_for(state="attached")
    wait_until_done(page)


@pytest.mark.parametrize("page", SIZES, indirect=True)
def test_markdown_is_formatted(page):
    reply_with(page, MARKDOWN, REASONING)
    answer = answers(page)
    texts = {
        tag: answer.locator(tag).text_content()
        for tag in ("h1", "strong", "p code", "blockquote a", "details pre")
    }
    assert texts == {
        "h1": "A title",
        "strong": "bold",
        "p code": "code",
        "blockquote a": "a link",
        "details pre": "I am *thinking*.",
    }
    assert answer.locator("ol li").all_text_contents() == ["one", "two"]
    assert answer.locator("td").all_text_contents() == ["1", "2"]
    assert "1 < 2 & <b>no HTML</b>:" in answer.text_content()
    assert "\u2611 done" in answer.locator("ul li").text_content()
    link = answer.locator("a")
    assert link.get_attribute("href") == "https://example.com/?a=1&b=2"
    assert (link.get_attribute("target"), link.get_attribute("rel")) == (
        "_blank",
        "noopener noreferrer",
    )
    assert not answer.locator("details pre").is_visible()  # folded until it is opened
    answer.locator("pre").get_by_role("button", name="Copy").click()
    answer.locator("pre").get_by_role("button", name="Copied").wait_for()
    assert (
        page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<i>"\n'
    )
    assert answer_texts(page) == [MARKDOWN]
    assert not page.problems


@pytest.mark.parametrize("escapes_html", [True, False])
@pytest.mark.parametrize("page", ["narrow", "without policy"], indirect=True)
def test_an_answer_cannot_inject_scripts(page, escapes_html):
    """Each of the protections suffices alone: the sanitizer without the policy, and without the
    renderer's escapes."""
    if not escapes_html:
        unsafe = "{ html: ({ text }) => text, image: ({ href }) => `<img src='${href}'>` }"
        page.evaluate(f"marked.use({{ renderer: {unsafe} }}), 0")
    for text in INJECTIONS:
        reply_with(page, text, reasoning=text)
    for link in page.locator("article a").all():
        link.dispatch_event("mouseover")
    page.wait_for_timeout(200)
    assert page.evaluate("typeof hacked") == "undefined"
    nodes = "[...document.querySelectorAll('article .text *')]"
    assert (
        set(page.evaluate(f"{nodes}.map(node => node.tagName.toLowerCase())"))
        <= ALLOWED_TAGS
    )
    assert (
        set(page.evaluate(f"{nodes}.flatMap(node => node.getAttributeNames())"))
        <= ALLOWED_ATTRIBUTES
    )
    links = page.evaluate(
        "[...document.querySelectorAll('article a[href]')].map(link => link.protocol)"
    )
    assert links and set(links) <= {"https:", "http:", "mailto:"}
    assert len(page.locator("article.assistant").all()) == len(INJECTIONS)
    assert not (escapes_html and page.problems)


def test_degenerate_output_is_shown_as_it_is(page):
    """Markdown's parser fails on it; the page must go on."""
    loop = ">" * 3000
    reply_with(page, loop)
    assert (
        answer_texts(page) == [loop]
        and answers(page).locator("pre code").text_content() == loop
    )
    reply_with(page, "fine")
    assert answer_texts(page)[1] == "fine" and not page.problems


def test_vendored_files_are_unchanged(server):
    """They equal the versions that their README states, and the server sends them as they are."""
    folder = Path(litft.__file__).parent / "serving" / "page" / "vendor"
    stated = dict(
        re.findall(
            r"^\| (\S+\.js) \|.*\| (\w{64}) \|$",
            (folder / "README.md").read_text(),
            re.MULTILINE,
        )
    )
    assert stated == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.js")
    }
    for name in stated:
        response = httpx.get(f"{server.url}/assets/{name}")
        assert response.content == (folder / name).read_bytes()
        assert response.headers["x-content-type-options"] == "nosniff"
    for name in ("README.md", "..%2f..%2froutes.py", "routes.py"):
        assert httpx.get(f"{server.url}/assets/{name}").status_code == 404
