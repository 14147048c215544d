"""The page of a plan in a headless browser: it opens without complaints, and answers to the mouse and to keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from report.net import Net

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here (pip install playwright)")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pages: a plan beside another one, and a pipeline beside another one."""
    found = tmp_path_factory.mktemp("pages")
    with torch.device("meta"):
        batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        cluster = sw.Cluster.load("h100-1x4")
        first = sw.plan(Net(), batch, cluster, search="dynamic_programming", mesh=sw.Mesh(dp=2, tp=2))
        other = sw.plan(Net(), batch, cluster, search="dynamic_programming", mesh=sw.Mesh(tp=4))
        staged = sw.plan(Net(), batch, cluster, search="dynamic_programming", stages=2, micro_batch=8)
        interleaved = sw.plan(
            Net(), batch, cluster, search="dynamic_programming", stages=4, schedule="Interleaved1F1B", micro_batch=8
        )
    first.report.write(found / "plan.html", other=other)
    staged.report.write(found / "staged.html", other=interleaved)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        own = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield own
        own.close()


def focused(page: Any) -> str:
    """What a link has led to. Browsers follow links within a page after the click."""
    page.locator("summary:focus").wait_for()
    found: str = page.evaluate("document.activeElement.parentElement.dataset.name")
    return found


@pytest.mark.parametrize("name", ["plan", "staged"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_complaints_in_light_and_dark(browser: Any, folder: Path, name: str, scheme: str) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folder / f"{name}.html").as_uri())
    shot = page.screenshot(path=str(folder / f"{name}-{scheme}.png"))
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    page.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len(shot) > 10_000
    assert contrast(ink, paper) > 7


@pytest.mark.parametrize("name", ["plan", "staged"])
def test_a_narrow_window_shows_the_whole_width(browser: Any, folder: Path, name: str) -> None:
    page = browser.new_page(viewport={"width": 480, "height": 900})
    page.goto((folder / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 480
    page.close()


def contrast(first: str, second: str) -> float:
    """The ratio of two colours' luminance, as WCAG 2.2 (section 1.4.3) has it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_it_answers_to_the_mouse_and_to_keys(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "plan.html").as_uri())
    boxes = page.locator("#own-timeline .box")
    says = page.locator("#own-timeline-says")
    page.locator("#own-timeline").focus()
    page.keyboard.press("End")
    last_of_first_row = page.locator("#own-timeline g.row").first.locator(".box").last
    assert says.text_content() == last_of_first_row.get_attribute("data-says")
    page.keyboard.press("Home")
    assert says.text_content() == boxes.first.get_attribute("data-says")
    page.keyboard.press("ArrowDown")
    assert "all_" in says.text_content()  # a message
    boxes.nth(1).hover(force=True)
    assert says.text_content() == boxes.nth(1).get_attribute("data-says")
    width = page.locator("#own-timeline").bounding_box()["width"]
    page.locator("button[data-of=own-timeline]").first.click()
    assert page.locator("#own-timeline").bounding_box()["width"] == pytest.approx(2 * width)
    page.locator("#own-over").focus()
    page.keyboard.press("ArrowRight")
    assert "parameters" in page.locator("#own-over-says").text_content()

    # Who holds a tensor: by focus, then by the mouse.
    grid = page.locator(".holdings").first
    tensor = grid.locator(".tensor").nth(2)
    tensor.locator("summary").focus()
    assert grid.locator("output").text_content().startswith(tensor.get_attribute("data-name"))
    assert all(text.startswith("rank") and "shard" in text for text in grid.locator(".cell").all_text_contents())
    grid.locator(".tensor").first.hover()
    assert grid.locator("output").text_content().startswith(grid.locator(".tensor").first.get_attribute("data-name"))

    # The graph: closed, found, opened by the keyboard, followed.
    graph = page.locator(".graph").first
    operator = graph.locator(".op", has_text="head/linear").first
    assert not operator.is_visible()
    graph.locator("input").fill("head/linear")
    assert operator.is_visible()
    assert "found" in graph.locator(".found").text_content()
    operator.locator("summary").focus()
    page.keyboard.press("Enter")
    assert operator.locator("table.why tr.chosen").is_visible()
    graph.locator("input").fill("")
    operator.locator("a").first.click()
    target = focused(page)
    assert target in operator.locator("a").all_text_contents()
    page.close()


def test_pipelines_stand_side_by_side_and_say_why(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "staged.html").as_uri())
    beside = page.locator("table.beside")
    assert beside.locator("th", has_text="step").first.is_visible()
    assert len(beside.locator("tr").all()) > 3
    changes = page.locator("details.changes summary").all_text_contents()
    assert any(text.startswith("cuts") for text in changes), changes
    for own in ("own", "other"):
        assert page.locator(f"#{own}-schedule .box").count() > 4
    for number, name in ((0, "layers.0/linear"), (1, "head/linear")):
        operators = page.locator(f"#own-{number}-operators + section.graph")
        operators.locator("input").fill(name)
        operator = operators.locator(".op").filter(has_text=name).first
        operator.locator("summary").focus()
        page.keyboard.press("Enter")
        assert operator.locator("table.why tr.chosen").is_visible()
        assert operator.locator("table.why tr").count() > 2
        assert operator.locator("summary .types").text_content().startswith("→ f32[")
        assert operator.locator("summary .time").text_content().endswith(" us")
    page.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_has_its_own_timeline_and_memory_by_the_keyboard(browser: Any, folder: Path, number: int) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "staged.html").as_uri())
    page.locator("nav a", has_text="memory").click()
    assert page.locator("#own-0-memory").is_visible()
    stage = page.locator(f"#own-{number}-memory + details.pass")
    chart = page.locator(f"#own-{number}-timeline")
    assert not chart.is_visible()
    stage.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert chart.is_visible()
    for which in ("timeline", "over"):
        chart, says = (page.locator(f"#own-{number}-{which}{end}") for end in ("", "-says"))
        chart.focus()
        page.keyboard.press("Home")
        first = says.text_content()
        page.keyboard.press("ArrowRight")
        assert first != says.text_content() == chart.locator(".now").get_attribute("data-says")
    longest = page.locator("h3", has_text="The longest operators").first.locator("+ table a").first
    longest.click()
    assert focused(page) == longest.text_content()
    page.close()
