"""The page of a plan: every figure in it is the plan's, nothing comes from a network."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from raising import raises
from report.net import Net
from shardwise.costs.pipeline_simulation import StageSeconds
from shardwise.costs.timeline import Event
from shardwise.layouts.layout import Layout
from shardwise.layouts.text import parse_layout
from shardwise.plans.price_scope import format_step_interval, priced_cluster
from shardwise.plans.printing import format_figures, merged_operators, plan_figures
from shardwise.plans.quantities import format_bytes, format_bytes_interval, format_seconds
from shardwise.report.page import write_page
from shardwise.report.pictures import device_grid, pieces_of
from shardwise.report.search_reports import SearchReport
from shardwise.runtime.local_shards import shard
from shardwise.runtime.step_profile import PipelineProfile, ProfileRow, StepProfile

LIBRARY = Path(sw.__file__).parent / "report" / "templates" / "echarts.min.js"


def planned(num_devices: int = 4, **settings: Any) -> sw.Plan:
    with torch.device("meta"):
        batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        cluster = sw.Cluster.load(f"h100-1x{num_devices}")
        return sw.plan(Net(), batch, cluster, search="dynamic_programming", **settings)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return planned(mesh=sw.Mesh(dp=2, tp=2))


@pytest.fixture(scope="module")
def staged() -> sw.Plan:
    return planned(stages=2, micro_batch=8)


def text_of(page: Path) -> str:
    return html.unescape(page.read_text(encoding="utf-8"))


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text)


def data_of(page: Path) -> dict[str, Any]:
    """What the page's script draws."""
    _, _, rest = page.read_text(encoding="utf-8").partition('<script type="application/json" id="pictures">')
    found: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return found


def events_in(chart: dict[str, Any]) -> list[Any]:
    return [box for box in chart["boxes"] if chart["parts"][box[3]] != "waits"]


def test_every_figure_is_the_plans(plan: sw.Plan, tmp_path: Path) -> None:
    plan.report.write(tmp_path / "plan.html")
    text = text_of(tmp_path / "plan.html")
    assert isinstance(plan.report, SearchReport)
    (known,) = plan.report.stage_figures()
    assert f'id="figures">{format_figures(plan)}</p>' in text
    assert (
        f"{format_bytes_interval(plan.prediction.peak_bytes, priced_cluster(plan))} in {plan.prediction.peak_at}"
        in text
    )
    assert known.step.seconds == pytest.approx(plan.prediction.simulated_seconds)
    for name in ("own-shares", "own-parts"):
        part = text.partition(f'id="{name}"')[2].partition("</table>")[0]
        shares = [float(share) for share in re.findall(r"([\d.]+) %</td>", part)]
        assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares)), name
    for name, size in known.step.peak.parts.items():
        assert not size or f'{name}</th><td class="number">{format_bytes(size)}<' in text
    operators, _ = merged_operators(plan.only_stage, buckets=False)
    assert text.count('<details class="op"') == len(operators)
    words = plain(text)
    assert all(strategy in words and rule in words for (_, strategy, rule, *_), _ in operators)
    assert all(entry.layout in words for entry in plan.parameters)
    chart = data_of(tmp_path / "plan.html")["plans"]["own"]["stages"][0]["time"]
    assert len(events_in(chart)) == len(known.step.events)
    assert {box[3] for box in chart["boxes"]} == set(range(len(chart["parts"])))
    waits = sum(box[2] for box in chart["boxes"] if chart["parts"][box[3]] == "waits")
    assert waits == pytest.approx(known.step.seconds - known.step.compute, rel=0.02)
    groups = {(event.name, event.stream) for event in known.step.events if event.stream}
    assert text.partition('class="messages"')[2].partition("</table>")[0].count("<tr>") == 1 + len(groups) > 1
    for kind, stream in groups:
        own = [event for event in known.step.events if (event.name, event.stream) == (kind, stream)]
        size, seconds = format_bytes(sum(e.num_bytes for e in own)), format_seconds(sum(e.seconds for e in own))
        cells = (f"{len(own):,}", size, seconds)
        row = f"<td>{kind}</td><td>messages over {plan.mesh.format_axes(stream)}</td>"
        assert row + "".join(f'<td class="number">{cell}</td>' for cell in cells) in text
    for name, why in ((row[0], plan.report.explain(names[0])) for row, names in operators[:1]):
        for own in why.alternatives[:6]:
            row = f'{format_seconds(own.step_seconds)}</td><td class="number">{format_seconds(own.seconds)}</td>'
            assert row in text, name


def test_memory_over_the_step_is_the_ledgers(plan: sw.Plan) -> None:
    assert isinstance(plan.report, SearchReport)
    (known,) = plan.report.stage_figures()
    most = max(known.over, key=lambda own: own.num_bytes)
    assert most.num_bytes == known.step.peak_bytes
    assert most.parts == known.step.peak.parts
    assert all(sum(own.parts.values()) == own.num_bytes for own in known.over)
    assert [own.phase for own in known.over] == sorted(
        (own.phase for own in known.over), key=["forward", "backward", "update"].index
    )


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"tp": 3}])
def test_shards_of_the_grid_are_those_that_ranks_hold(sizes: dict[str, int]) -> None:
    mesh = sw.Mesh(sizes)
    batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
    split = {"layers.0": "n@tp", "layers.1": "k@tp"}
    own = sw.plan(Net(), batch, mesh.num_devices, mesh=mesh, strategies=split).only_stage
    found = device_grid(own)
    for tensor in found["tensors"]:
        layout = parse_layout(tensor["layout"], mesh)
        whole = torch.arange(layout.max_local_numel * mesh.num_devices * 8)[: torch.Size(layout.shape).numel()]
        for rank in range(mesh.num_devices):
            held = shard(whole.view(layout.shape), layout, mesh.coordinates(rank))
            assert torch.equal(whole.view(layout.shape)[part_of(layout, rank)], held), tensor["name"]
        assert sum(int(count) for _, count, _ in found["held"][tensor["key"]]) == mesh.num_devices


def part_of(layout: Layout, rank: int) -> tuple[slice, ...]:
    """The indices of a rank's part, as the page's script computes them; of dims of one atom."""
    slices = []
    for ((size, axes, windows),) in pieces_of(layout):
        assert not windows
        index, count = 0, 1
        for stride, along in axes:
            index, count = index * along + rank // stride % along, count * along
        slices.append(slice(index * size // count, (index + 1) * size // count))
    return tuple(slices)


def test_merged_names_stand_for_all_their_operators(plan: sw.Plan) -> None:
    merged, _ = merged_operators(plan.only_stage, buckets=False)
    names = [name for _, members in merged for name in members]
    assert sorted(names) == sorted(operator.name for operator in plan.operators)


def test_nothing_comes_from_elsewhere_and_names_are_texts(plan: sw.Plan, tmp_path: Path) -> None:
    hostile = plan.revised(
        operators=tuple(
            type(entry)(entry.name, entry.target, "</script><script>alert(1)</script>", entry.strategy, entry.source)
            for entry in plan.operators
        )
    )
    write_page(tmp_path / "plan.html", hostile)
    raw = (tmp_path / "plan.html").read_text(encoding="utf-8")
    raw = raw.replace(LIBRARY.read_text(encoding="utf-8"), "")
    assert "alert(1)</script>" not in raw
    assert "script>alert" not in raw
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", raw)
    assert "url(http" not in raw
    assert "default-src 'none'" in raw
    assert "need the search by price that chose the plan" in raw  # no timeline of a plan without its search


def test_the_page_of_many_devices_is_one_file_of_a_few_megabytes(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)))
        batch = torch.empty(16384, 4096)
    many = sw.plan(model, batch, "h100-2048x8", mesh=sw.Mesh(dp=2048, tp=8), loss=lambda y: y.square().mean())
    assert many.num_ranks == 16384
    many.report.write(tmp_path / "plan.html")
    assert 1e5 < (tmp_path / "plan.html").stat().st_size < 5e6


def test_a_plan_without_a_prediction_says_what_to_do(tmp_path: Path) -> None:
    batch = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    by_mode = sw.plan(Net(), batch, 2, mode="data_parallel")
    with raises(sw.PlanError, "by price"):
        by_mode.report.write(tmp_path / "plan.html")
    unpriced = replace(by_mode.plan, predicted=None)
    with raises(sw.PlanError, "the plan", "no prediction"):
        write_page(tmp_path / "plan.html", unpriced)
    with raises(sw.PlanError, "other plan", "no prediction"):
        write_page(tmp_path / "plan.html", by_mode.plan, other=unpriced)


def test_a_plan_by_mode_stands_beside_one_by_price(tmp_path: Path, plan: sw.Plan) -> None:
    batch = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    other = sw.plan(Net(), batch, sw.Cluster.load("h100-1x4"), mode="data_parallel")
    plan.report.write(tmp_path / "plan.html", other=other)
    text = text_of(tmp_path / "plan.html")
    for name, second in plan_figures(other):
        assert f"<td>{second}</td>" in text, name


def test_outputs_that_no_step_brings_together_are_told_beside_the_collectives(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = torch.nn.Linear(64, 65536)
        batch = torch.randn(64, 64)
        own = sw.plan(net, batch, sw.Cluster.load("h100-1x4"), mesh=sw.Mesh(dp=4), search="dynamic_programming")
    own.report.write(tmp_path / "plan.html")
    (said,) = (line.strip() for line in str(own).splitlines() if "deliver outputs to the caller" in line)
    assert f"<p>{said}</p>" in text_of(tmp_path / "plan.html")


def test_two_plans_stand_side_by_side(plan: sw.Plan, tmp_path: Path) -> None:
    other = planned(mesh=sw.Mesh(tp=4))
    plan.report.write(tmp_path / "plan.html", other=other)
    text = text_of(tmp_path / "plan.html")
    rows = re.search(r'<table class="beside">(.*?)</table>', text, re.DOTALL)
    assert rows is not None
    for (name, own), (_, second) in zip(plan_figures(plan), plan_figures(other), strict=True):
        assert f"{name}</th><td>{own}</td><td>{second}</td>" in rows[1]
    words = plain(text)
    for name, own, second in plan.diff(other).layouts:
        assert name + own + second in words.replace("\n", "")
    assert text.count('id="other-timeline"') == 1
    plan.report.write(tmp_path / "same.html", other=plan)
    assert "The plans are equal." in text_of(tmp_path / "same.html")


def test_a_profile_is_laid_over_the_prediction(plan: sw.Plan, tmp_path: Path) -> None:
    rows = (ProfileRow("head/linear", "forward", 3e-3, 1e-3, "matmul_efficiency"),)
    events = (Event("head/linear", "forward", (), 0.0, 3e-3),), (Event("head/linear", "forward", (), 0.0, 1e-3),)
    profile = StepProfile((4e-3, 2e-3), (2048, 1024), rows, "h100", False, plan.mesh, events)
    plan.report.write(tmp_path / "plan.html", profile=profile)
    text = text_of(tmp_path / "plan.html")
    assert '4 ms</td><td class="number">2 ms</td><td class="number">0.50</td>' in text
    assert '3 ms</td><td class="number">1 ms</td><td class="number">0.33</td><td>matmul_efficiency</td>' in text
    data = data_of(tmp_path / "plan.html")
    assert [len(data["timelines"][f"measured-{i}"]["boxes"]) for i in range(2)] == [1, 1]
    assert data["bars"]["measured-ratios"]["bars"] == [["forward of head/linear", 3e-3, 1e-3]]


def test_a_pipeline_has_its_stages_and_its_schedule(tmp_path: Path, staged: sw.Plan) -> None:
    own = staged
    own.report.write(tmp_path / "plan.html")
    text = text_of(tmp_path / "plan.html")
    assert own.pipeline is not None
    assert f'id="figures">{format_figures(own)}</p>' in text
    assert format_figures(own).startswith(f"step {format_step_interval(own)}, ")
    assert re.match(
        re.escape(format_seconds(own.pipeline.compiled_seconds)) + r" \([\d.]+-[\d.]+\)$", format_step_interval(own)
    )
    cluster = priced_cluster(own)
    assert f"{format_bytes_interval(own.pipeline.memory_bytes, cluster)} of " in format_figures(own)
    assert f"Schedule of an eager step, {format_seconds(own.pipeline.step_seconds)}" in text
    schedule = data_of(tmp_path / "plan.html")["plans"]["own"]["schedule"]
    assert len(schedule["boxes"]) == 2 * 2 * own.micro_batches  # forward and backward in two stages
    # Why each operator is as it is: one choice is marked, as plan.explain says it.
    chosen = re.findall(r'<tr class="chosen"><td>chosen</td><td class="mono">(.*?)</td>', text)
    assert len(chosen) == text.count('<table class="why">') > 0
    expected = {
        row.choice
        for stage in own.stages
        for entry in stage.operators
        if entry.name.endswith("linear")
        for row in own.report.explain(entry.name).explanation.alternatives
        if row.chosen
    }
    assert expected <= {re.sub("<.*?>", "", choice) for choice in chosen}
    for stage in own.pipeline.stages:
        row = [
            format_seconds(stage.forward),
            format_seconds(stage.backward),
            format_bytes_interval(stage.peak_bytes, cluster),
        ]
        assert "".join(f"<td>{cell}</td>" for cell in row) in text
        assert f"<td>{stage.bubble:.1%}</td>" in text
    again = sw.Plan.from_json(own.to_json())
    assert again == own
    write_page(tmp_path / "again.html", again)
    of_file = text_of(tmp_path / "again.html")  # without what only the search knows
    assert "reads <a" not in of_file
    assert "need the search by price that chose the plan" in of_file
    only_known = (
        r'(<p>reads <a.*?</p>)|(<table class="why">.*?</table>(<p>and \d+ more</p>)?)|(<span class="types">.*?</span>)'
        r'|(<h2 id="own-\d+-memory">.*?(?=<h2 id="own-\d+-holds">))|(<h3>The longest operators</h3>.*?</table>)'
        r'|(<span class="time">.*?</span>)'
    )
    texts = (re.sub(only_known, "", text, flags=re.S), of_file)
    first, second = (plain(part.partition('id="own-tables">')[2].partition("</main>")[0]).split() for part in texts)
    assert first == second


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("ZBVZeroBubble", 4), ("Interleaved1F1B", 4), ("", 1)])
def test_a_trace_has_the_printed_seconds_and_memory(tmp_path: Path, schedule: str, stages: int) -> None:
    own = planned(stages=stages, schedule=schedule, micro_batch=4) if schedule else planned()
    own.report.trace(tmp_path / "step.json")
    entries = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    events = [entry for entry in entries if entry["ph"] == "X"]
    held = [entry for entry in entries if entry["ph"] == "C"]
    expected = own.prediction if own.pipeline is None else own.pipeline
    seconds = expected.simulated_seconds if own.pipeline is None else expected.step_seconds
    assert max(entry["ts"] + entry["dur"] for entry in events) / 1e6 == pytest.approx(seconds, rel=1e-9)
    assert max(sum(entry["args"].values()) for entry in held) == pytest.approx(expected.memory_bytes, abs=1)
    for row in {(entry["pid"], entry["tid"]) for entry in events}:
        own_row = sorted((e["ts"], e["dur"]) for e in events if (e["pid"], e["tid"]) == row)
        assert all(start + taken <= after + 1e-6 for (start, taken), (after, _) in pairwise(own_row))
    computed = [entry for entry in events if entry["name"].endswith("linear")]
    assert {entry["args"]["line"].partition(":")[0] for entry in computed} == {"net.py"}
    if schedule:
        assert {entry["pid"] for entry in events} == {0, 1}, "a track per place"
        done = [entry for entry in events if entry["name"].startswith("stage ") and entry["cat"] == "forward"]
        assert len(done) == stages * own.micro_batches


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("ZBVZeroBubble", 4)])
def test_stages_have_types_seconds_and_memory_of_their_own_passes(tmp_path: Path, schedule: str, stages: int) -> None:
    own = planned(stages=stages, schedule=schedule, micro_batch=8)
    assert isinstance(own.report, SearchReport)
    assert own.pipeline is not None
    own.report.write(tmp_path / "plan.html")
    text = text_of(tmp_path / "plan.html")
    known, pictures = own.report.stage_figures(), data_of(tmp_path / "plan.html")["plans"]["own"]
    assert len(known) == stages
    types = 0
    for number, (stage, expected, told) in enumerate(zip(own.stages, own.pipeline.stages, known, strict=True)):
        assert told.step.peak_bytes == round(expected.peak_bytes) == max(peak.num_bytes for peak in told.over)
        part = text.partition(f'id="own-{number}-memory"')[2].partition(f'id="own-{number}-holds"')[0]
        assert format_seconds(told.step.seconds) in part
        assert f"{format_bytes_interval(expected.peak_bytes, priced_cluster(own))} in {told.step.peak.where}" in part
        assert len(events_in(pictures["stages"][number]["time"])) == len(told.step.events)
        assert sum(pictures["stages"][number]["memory"]["peak"]) == told.step.peak_bytes
        operators = text.partition(f'id="own-{number}-operators"')[2].partition("<h2")[0]
        delivered = {entry.name: entry.layout for entry in stage.sends}
        for entry in stage.operators:
            if not entry.name.endswith("linear"):
                continue
            (layout,) = told.types(entry.name)
            assert layout in plain(operators)
            types += 1
            assert delivered.get(entry.name, layout).partition("[")[0] == layout.partition("[")[0]
            seconds = sum(e.seconds for e in told.step.events if e.name == entry.name and e.part != "update")
            assert seconds
            row = re.search(rf'data-name="{re.escape(entry.name)}"><summary>(.*?)</summary>', operators, re.S)
            assert row is None or f'<span class="time">{format_seconds(seconds)}</span>' in row[1]
    assert types == 4  # every layer


def test_a_profile_of_stages_is_laid_over_the_prediction(tmp_path: Path, plan: sw.Plan, staged: sw.Plan) -> None:
    own = staged
    assert own.pipeline is not None
    measured = (StageSeconds(2e-3, 3e-3, 1e-3, 0.0, 0.0), StageSeconds(5e-3, 6e-3, 1e-3, 0.0, 0.0))
    rows = (ProfileRow("head/linear", "forward", 3e-3, 1e-3, "matmul_efficiency"),)
    none: tuple[tuple[Event, ...], tuple[Event, ...]] = ((), ())
    of_stage = StepProfile((4e-3, 2e-3), (2048, 1024), rows, "h100", False, own.stages[1].mesh, none)
    actions = tuple(
        (Event(f"stage {i}, forward of micro-batch 0", "forward", (), 0.0, 2e-3 + i * 1e-3),) for i in range(2)
    )
    predicted = tuple(stage.seconds for stage in own.pipeline.stages)
    profile = PipelineProfile(
        (40e-3, 20e-3),
        (0.5, 0.25),
        0.2,
        measured,
        predicted,
        {0: of_stage, 1: of_stage},
        "a step of 4 micro-batches in 2 stages, 1F1B",
        own.stages[0].mesh,
        (actions, actions),
    )
    own.report.write(tmp_path / "plan.html", profile=profile)
    text = text_of(tmp_path / "plan.html")
    data = data_of(tmp_path / "plan.html")
    assert '40 ms</td><td class="number">20 ms</td><td class="number">0.50</td>' in text
    assert '50.0%</td><td class="number">25.0%</td><td class="number">0.50</td>' in text
    for number, (mine, theirs) in enumerate(zip(measured, predicted, strict=True)):
        for part, first, second in (
            ("forward", mine.forward, theirs.forward),
            ("backward", mine.input + mine.weight, theirs.input + theirs.weight),
        ):
            cells = [format_seconds(first), format_seconds(second), f"{second / first:.2f}"]
            row = "".join(f'<td class="number">{cell}</td>' for cell in cells)
            assert f'<th scope="row">stage {number}, {part}</th>{row}' in text
        assert f"measured-stage-{number}-0" in data["timelines"]
    assert '3 ms</td><td class="number">1 ms</td><td class="number">0.33</td><td>matmul_efficiency</td>' in text
    for chart in ("measured-0", "measured-1"):
        assert len(data["timelines"][chart]["boxes"]) == 2
    with raises(sw.PlanError, "profile has 2", "plan has 1"):
        plan.report.write(tmp_path / "wrong.html", profile=profile)
    with raises(sw.PlanError, "profile has 1", "plan has 2"):
        own.report.write(tmp_path / "wrong.html", profile=of_stage)
    assert not (tmp_path / "wrong.html").exists()


def test_a_pipeline_of_a_file_without_seconds_has_no_chart(tmp_path: Path, staged: sw.Plan) -> None:
    body = json.loads(staged.to_json())
    for stage in body["pipeline"]["stages"]:
        for younger in ("weight", "send", "update"):
            del stage[younger]
    del body["pipeline"]["memory_bytes"]
    write_page(tmp_path / "plan.html", sw.Plan.from_json(json.dumps(body), edited=True))
    text = text_of(tmp_path / "plan.html")
    assert "plan again for a chart of the schedule" in text
    assert "Schedule of an eager step" not in text


def test_stages_with_tensors_of_other_sizes_are_no_equal_stages(tmp_path: Path) -> None:
    """A plan file knows no types of results: these stages differ in the sizes of their parameters alone."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise((64, 64, 64, 32))))
        batch = torch.empty(64, 64)
    for number, part in enumerate(net):
        sw.stage(part, number)
    cluster = sw.Cluster.load("h100-1x4").with_devices(3)
    plan = sw.plan(net, (batch,), cluster, stages="marked", micro_batch=16, loss=lambda out: out.square().mean())
    write_page(tmp_path / "stages.html", plan)
    stages = data_of(tmp_path / "stages.html")["plans"]["own"]["stages"]
    assert [stage["like"] for stage in stages] == [0, 1, 2]


def test_rows_whose_operators_have_other_strategies_differ_however_layers_are_merged(tmp_path: Path) -> None:
    first = planned(mesh=sw.Mesh(dp=4), strategies={"layers.*": "m@dp"})
    other = planned(mesh=sw.Mesh(dp=4), strategies={"layers.0": "n@dp", "layers.[12]": "m@dp"})
    write_page(tmp_path / "beside.html", first, other=other)
    plans = data_of(tmp_path / "beside.html")["plans"]
    told = [
        {op["name"]: (op["strategy"], op["differs"]) for op in plans[name]["stages"][0]["operators"] if op["differs"]}
        for name in ("own", "other")
    ]
    assert told[0]["layers.0-2/linear"] == ("m@dp", "n@dp")
    assert told[1]["layers.0/linear"] == ("n@dp", "m@dp")
    assert "layers.1-2/linear" not in told[1]
