"""report.html in a real browser: values under the pointer, the logarithmic axis, smoothing; nothing
is fetched."""

import pytest

from litft.training.output.report import Report, SummaryTile, write_report

LOSSES = [8.0, 4.0, 2.0, 1.0, 0.5]


@pytest.fixture
def page(browser, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    rows = "".join(f"{step},{loss}\n" for step, loss in enumerate(LOSSES, 1))
    (tmp_path / "metrics.csv").write_text(f"step,loss\n{rows}")
    answers = [
        {
            "step": 1,
            "prompt": "<script>window.injected = 1</script>",
            "answer": "<img src=x onerror=alert(1)>",
        }
    ]
    write_report(
        tmp_path,
        Report(
            "a run",
            "finished",
            [SummaryTile("loss", "0.5")],
            {},
            [],
            [],
            [(1, 2, 3)],
            answers,
            "Loss",
        ),
    )
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.problems, page.requests = [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on(
        "console",
        lambda message: message.type == "error" and page.problems.append(message.text),
    )
    page.on("request", lambda sent: page.requests.append(sent.url))
    page.goto((tmp_path / "report.html").as_uri())
    yield page
    assert (
        not page.problems
        and len(page.requests) == 1
        and page.evaluate("window.injected") is None
    )
    page.close()


def labels(page):
    return page.locator(".plot .y").first.locator("span").all_text_contents()


def heights(page):
    """Return the curve's heights, as fractions of the plot's."""
    points = page.locator("polyline").first.get_attribute("points").split()
    return [1 - float(point.split(",")[1]) / 100 for point in points]


def test_the_value_under_the_pointer(page):
    box = page.locator("svg").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.62, box["y"] + 20)
    assert page.locator(".tip").first.text_content() == "training, step 3: 2"
    page.mouse.move(1, 1)
    assert not page.locator(".tip").first.is_visible()


def test_the_logarithmic_axis(page):
    linear, before = labels(page), heights(page)
    page.get_by_label("logarithmic loss").check()
    assert labels(page) == ["8", "4", "2", "1", "0.5"]
    assert heights(page) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0], abs=1e-6)
    page.get_by_label("logarithmic loss").uncheck()
    assert labels(page) == linear and heights(page) == before


def test_smoothing(page):
    """An exponential moving average whose first weights are corrected, as of Adam's moments."""
    page.get_by_label("smoothing").fill("0.5")
    average, weight, expected = 0.0, 0.0, []
    for loss in LOSSES:
        average, weight = 0.5 * average + 0.5 * loss, 0.5 * weight + 0.5
        expected.append(average / weight)
    top, bottom = (float(labels(page)[index]) for index in (-1, 0))
    assert heights(page) == pytest.approx(
        [(value - bottom) / (top - bottom) for value in expected], abs=1e-4
    )
