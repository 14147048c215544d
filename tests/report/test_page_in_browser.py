"""The page of a plan in a headless browser: it opens without complaints, and answers to the mouse and to keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from report.net import Net
from shardwise.report.page import write_page

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here (pip install playwright)")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    with torch.device("meta"):
        batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        cluster, mesh = sw.Cluster.load("h100-1x4"), sw.Mesh(dp=2, tp=2)
        split = {"layers.0": "n@tp", "layers.1": "k@tp"}
        return sw.plan(Net(), batch, cluster, search="dynamic_programming", mesh=mesh, strategies=split)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, plan: sw.Plan) -> Path:
    """Two pages: a plan beside another one, and a pipeline beside another one."""
    found = tmp_path_factory.mktemp("pages")
    with torch.device("meta"):
        batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        cluster = sw.Cluster.load("h100-1x4")
        other = sw.plan(Net(), batch, cluster, search="dynamic_programming", mesh=sw.Mesh(tp=4))
        staged = sw.plan(Net(), batch, cluster, search="dynamic_programming", stages=2, micro_batch=8)
        interleaved = sw.plan(
            Net(), batch, cluster, search="dynamic_programming", stages=4, schedule="Interleaved1F1B", micro_batch=8
        )
    plan.report.write(found / "plan.html", other=other)
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
def test_every_width_shows_whole_pictures(browser: Any, folder: Path, name: str) -> None:
    page = browser.new_page(viewport={"width": 1600, "height": 9000})
    page.goto((folder / f"{name}.html").as_uri())
    page.locator("#other-map canvas").wait_for()
    for width in (1600, 1000, 500):
        page.set_viewport_size({"width": width, "height": 9000})
        # Until all are drawn anew: drawing a picture changes where the next ones are.
        drawn = "Object.values(figures).every((own) => own.chart && own.width === own.element.clientWidth)"
        page.evaluate(f"new Promise((done) => (function look() {{ {drawn} ? done() : setTimeout(look, 20) }})())")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for figure in page.locator(".figure:visible").all():
            canvas, room = figure.locator("canvas").bounding_box(), figure.bounding_box()
            assert canvas["width"] == pytest.approx(room["width"], abs=1)
            assert canvas["width"] > min(width / 4, 240), figure.get_attribute("id")
            assert canvas["height"] > 20
    page.close()


def contrast(first: str, second: str) -> float:
    """The ratio of two colours' luminance, as WCAG 2.2 (section 1.4.3) has it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def says(page: Any, figure: str) -> str:
    found: str = page.locator(f"#{figure}-says").text_content()
    return found


def press(page: Any, figure: str, *keys: str) -> str:
    """What a figure says after these keys."""
    page.locator(f"#{figure}").focus()
    page.locator(f"#{figure} canvas").wait_for()
    for key in keys:
        page.keyboard.press(key)
    return says(page, figure)


AT = """([id, text]) => {
  const { boxes, chart, element } = figures[id], box = boxes.find((own) => own.says?.startsWith(text));
  const middle = [(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2], within = element.closest(".tall");
  const [x, y] = chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, middle);
  element.scrollIntoView();
  if (within) within.scrollTop = y - 100;
  const { left, top } = element.getBoundingClientRect();
  return [left + x, top + y];
}"""


def click(page: Any, figure: str, box: str) -> None:
    """Click the first box of a figure whose text begins so."""
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    page.locator(f"#{figure} canvas").wait_for()
    page.mouse.click(*page.evaluate(AT, [figure, box]))


def test_a_click_on_an_operator_shows_what_devices_hold_of_it(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "plan.html").as_uri())
    for name in ("layers.0/linear", "head/linear"):
        click(page, "own-map", name)
        assert page.locator("#own-picked").text_content().startswith(name)
        shown = says(page, "own-devices")
        assert shown.startswith(f"result of {name} f32[")
        parts = page.evaluate("figures['own-devices'].boxes.map((box) => box.says)")
        assert [text.split(":")[0] for text in parts] == [f"rank {rank}" for rank in range(4)]
        assert all("part" in text for text in parts)
    page.locator("#own-picked a").click()
    assert focused(page) == "head/linear"
    page.close()


def test_names_are_texts_in_pictures_too(browser: Any, tmp_path: Path, plan: sw.Plan) -> None:
    hostile = "</script><img src=x onerror=\"document.title = 'taken'\">"
    entries = tuple(replace(entry, source=hostile) for entry in plan.operators)
    write_page(tmp_path / "hostile.html", plan.revised(operators=entries))
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "hostile.html").as_uri())
    click(page, "own-map", "head/linear")
    assert hostile in page.locator("#own-picked").text_content()
    assert page.title().startswith("plan ")
    assert page.locator("img").count() == 0
    page.close()


def test_every_device_holds_the_part_that_its_rank_has(browser: Any, folder: Path, plan: sw.Plan) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "plan.html").as_uri())
    page.locator("#own-devices canvas").wait_for()
    shown = 0
    for number, title in enumerate(page.locator("#own-tensor option").all_text_contents()):
        kind, name = title.split(" ", 1)
        layout = plan.only_stage.layouts.get(name)
        if kind == "result" or layout is None:  # several tensors
            continue
        page.locator("#own-tensor").select_option(index=number)
        shown += 1
        for rank, text in enumerate(page.evaluate("figures['own-devices'].boxes.map((box) => box.says)")):
            coordinates = layout.mesh.coordinates(rank)
            pieces = [layout.atom_pieces(d, 0, coordinates) for d in range(len(layout.dims))]
            sizes = zip(pieces, layout.shape, strict=True)
            dims = [":" if held == size else f"{at}:{at + held}" for (at, held), size in sizes]
            assert text.endswith(f", [{', '.join(dims)}]"), (title, rank)
    assert shown > 3
    page.close()


def test_pictures_answer_to_the_mouse_and_to_keys(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "plan.html").as_uri())
    first, last = press(page, "own-timeline", "Home"), press(page, "own-timeline", "End")
    assert first.startswith("operators wait for")  # for the host to start the first kernel
    assert last.startswith("update of ")
    assert "all_" in press(page, "own-timeline", "ArrowDown")  # a message
    click(page, "own-timeline", first)
    assert says(page, "own-timeline") == first  # by the mouse
    press(page, "own-timeline", "+", "+")
    assert page.evaluate("figures['own-timeline'].chart.getOption().dataZoom[0].end") < 100
    assert "parameters" in press(page, "own-over", "ArrowRight")
    assert press(page, "own-peak", "ArrowDown").startswith("parameters: ")
    assert press(page, "own-devices", "End").startswith("rank ")
    operator = press(page, "own-map", "Home", "ArrowDown")
    press(page, "own-map", "Enter")
    assert page.locator("#own-picked").text_content().startswith(operator.partition("\n")[0])
    page.close()


def test_tables_are_folded_and_found(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "plan.html").as_uri())
    graph = page.locator(".graph").first
    assert not graph.is_visible()
    page.locator("nav a", has_text="tables").click()
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
    assert focused(page) in operator.locator("a").all_text_contents()
    page.close()


def test_two_plans_stand_side_by_side_by_their_difference(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "plan.html").as_uri())
    assert page.locator("table.beside th", has_text="step").first.is_visible()
    for number, unit in ((0, "us"), (1, "iB")):
        text = press(page, f"difference-{number}", "Home")
        assert "this plan" in text
        assert unit in text.partition("the other")[2]
    marked = page.evaluate("figures['own-map'].boxes.filter((box) => box.label?.startsWith('≠')).length")
    assert marked > 0
    page.close()


def test_a_pipeline_has_its_schedule_and_the_passes_of_its_stages(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "staged.html").as_uri())
    changes = page.locator("details.changes summary").all_text_contents()
    assert any(text.startswith("cuts") for text in changes), changes
    for own in ("own", "other"):
        assert press(page, f"{own}-schedule", "Home").startswith("forward of stage 0, micro-batch 0")
    first = press(page, "own-timeline", "Home")
    page.locator("#own-stage").select_option("1")
    assert press(page, "own-timeline", "Home") != first
    click(page, "own-map", "head/linear")  # of the other stage
    ranks = page.evaluate("figures['own-devices'].boxes.map((box) => box.says.includes('nothing'))")
    assert ranks == [True, True, False, False]
    page.locator("nav a", has_text="tables").click()
    for number, name in ((0, "layers.0/linear"), (1, "head/linear")):
        operators = page.locator(f"#own-{number}-operators + section.graph")
        operators.locator("input").fill(name)
        operator = operators.locator(".op").filter(has_text=name).first
        operator.locator("summary").focus()
        page.keyboard.press("Enter")
        assert operator.locator("table.why tr").count() > 2
        assert operator.locator("summary .types").text_content().startswith("→ f32[")
        assert operator.locator("summary .time").text_content().endswith(" us")
    longest = page.locator("h3", has_text="The longest operators").first.locator("+ table a").first
    longest.click()
    assert focused(page) == longest.text_content()
    page.close()


def test_links_of_names_with_commas_lead_to_their_operator(browser: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        split = {"layers.[13]": "n@tp", "layers.[024]": "m@dp"}
        plan = sw.plan(Net(5), batch, "h100-1x4", mesh=sw.Mesh(dp=2, tp=2), strategies=split)
    write_page(tmp_path / "commas.html", plan)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "commas.html").as_uri())
    name = page.evaluate(
        "pictures.plans.own.stages[0].operators.map((own) => own.name).find((own) => own.includes(','))"
    )
    click(page, "own-map", name)
    page.locator("#own-picked a").click()
    assert focused(page) == name
    page.close()


def test_a_plan_without_operators_has_its_page(browser: Any, tmp_path: Path) -> None:
    plan = sw.plan(nn.Identity(), torch.empty(8, 8, device="meta"), "h100-1x8")
    plan.report.write(tmp_path / "empty.html")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "empty.html").as_uri())
    assert page.locator("#own-tensor option").count() == 1
    assert press(page, "own-devices", "Home").startswith("rank 0: part")
    assert complaints == []
    page.close()


def test_a_picture_that_fails_leaves_the_tables(browser: Any, tmp_path: Path, plan: sw.Plan) -> None:
    write_page(tmp_path / "broken.html", plan)
    broken = (tmp_path / "broken.html").read_text().replace('"tensors":[', '"lost":[')
    (tmp_path / "broken.html").write_text(broken)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "broken.html").as_uri())
    page.locator("nav a", has_text="tables").click()
    page.locator(".graph input").first.fill("head/linear")
    assert "found" in page.locator(".found").first.text_content()
    page.close()
