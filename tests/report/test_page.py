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

import shardwise as sw
from raising import raises
from report.net import Net
from shardwise.costs.pipeline_simulation import StageSeconds
from shardwise.costs.timeline import Event
from shardwise.layouts.text import parse_layout
from shardwise.plans.price_scope import format_step_interval, priced_cluster
from shardwise.plans.printing import format_figures, merged_operators, plan_figures
from shardwise.plans.quantities import format_bytes, format_bytes_interval, format_seconds
from shardwise.report.device_grid import Grid, device_grid
from shardwise.report.page import write_page
from shardwise.report.search_reports import MeshReport, PipelineReport
from shardwise.runtime.local_shards import shard
from shardwise.runtime.pipeline_profile import PipelineProfile
from shardwise.runtime.step_profile import ProfileRow, StepProfile


def planned(num_devices: int = 4, **settings: Any) -> sw.Plan:
    with torch.device("meta"):
        batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        cluster = sw.Cluster.load(f"h100-1x{num_devices}")
        return sw.plan(Net(), batch, cluster, search="dynamic_programming", **settings)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return planned(mesh=sw.Mesh(dp=2, tp=2))


def text_of(page: Path) -> str:
    return html.unescape(page.read_text(encoding="utf-8"))


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text)


def test_every_figure_is_the_plans(plan: sw.Plan, tmp_path: Path) -> None:
    plan.report.write(tmp_path / "plan.html")
    text = text_of(tmp_path / "plan.html")
    assert isinstance(plan.report, MeshReport)
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
    assert text.count('<rect class="box') == len(known.step.events)
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
    assert isinstance(plan.report, MeshReport)
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
    assert found["ranks"] == list(range(mesh.num_devices))
    for tensor in found["tensors"]:
        layout = parse_layout(tensor["layout"], mesh)
        whole = torch.arange(layout.max_local_numel * mesh.num_devices * 8)[: torch.Size(layout.shape).numel()]
        shards = found["shards"][tensor["key"]]
        parts = [shard(whole.view(layout.shape), layout, mesh.coordinates(rank)) for rank in found["ranks"]]
        for first, number in zip(parts, shards["of"], strict=True):
            for second, other in zip(parts, shards["of"], strict=True):
                same = first.shape == second.shape and torch.equal(first, second)
                assert same == (number == other), tensor["name"]
        assert sum(int(count) for _, count, _ in found["held"][tensor["key"]]) == mesh.num_devices


def test_a_grid_of_many_devices_shows_the_first_along_every_axis() -> None:
    grid = Grid.of(sw.Mesh(pp=16, dp=128, tp=8))
    assert len(grid.ranks) <= 128
    assert "of 16,384 devices" in grid.caption
    assert grid.ranks[: grid.columns] == tuple(range(grid.columns))


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
    assert "alert(1)</script>" not in raw
    assert "script>alert" not in raw
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", raw)
    assert "url(http" not in raw
    assert "default-src 'none'" in raw
    assert "need the search that chose the plan" in raw  # no timeline of a plan without its search


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
    assert 'id="measured-0"' in text
    assert 'id="measured-1"' in text


def test_a_pipeline_has_its_stages_and_its_schedule(tmp_path: Path) -> None:
    own = planned(stages=2, micro_batch=8)
    own.report.write(tmp_path / "plan.html")
    text = text_of(tmp_path / "plan.html")
    assert own.pipeline is not None
    assert f'id="figures">{format_figures(own)}</p>' in text
    assert format_figures(own).startswith(f"step {format_step_interval(own)}, ")
    assert re.match(
        re.escape(format_seconds(own.pipeline.step_seconds)) + r" \([\d.]+-[\d.]+\)$", format_step_interval(own)
    )
    cluster = priced_cluster(own)
    assert f"{format_bytes_interval(own.pipeline.memory_bytes, cluster)} of " in format_figures(own)
    assert f"Schedule of a step, {format_seconds(own.pipeline.step_seconds)}" in text
    schedule = text.partition('id="own-schedule"')[2].partition("</svg>")[0]
    assert schedule.count('<rect class="box') == 2 * 2 * own.micro_batches  # forward and backward in two stages
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
    assert "need the search that chose the plan" in of_file
    only_known = (
        r'(<p>reads <a.*?</p>)|(<table class="why">.*?</table>(<p>and \d+ more</p>)?)|(<span class="types">.*?</span>)'
        r'|(<h2 id="own-\d+-memory">.*?(?=<h2 id="own-\d+-holds">))|(<h3>The longest operators</h3>.*?</table>)'
        r'|(<span class="time">.*?</span>)|(<a href="#own-0-memory">memory</a>)'
    )
    rest = re.sub(r"<p>A timeline, memory over the step, types .*?</p>", "", of_file, flags=re.S)
    assert plain(re.sub(only_known, "", text, flags=re.S)).split() == plain(rest).split()


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
    assert isinstance(own.report, PipelineReport)
    assert own.pipeline is not None
    own.report.write(tmp_path / "plan.html")
    text = text_of(tmp_path / "plan.html")
    known = own.report.stage_figures()
    assert len(known) == stages
    types = 0
    for number, (stage, expected, told) in enumerate(zip(own.stages, own.pipeline.stages, known, strict=True)):
        assert told.step.peak_bytes == round(expected.peak_bytes) == max(peak.num_bytes for peak in told.over)
        part = text.partition(f'id="own-{number}-memory"')[2].partition(f'id="own-{number}-holds"')[0]
        assert format_seconds(told.step.seconds) in part
        assert f"{format_bytes_interval(expected.peak_bytes, priced_cluster(own))} in {told.step.peak.where}" in part
        timeline = part.partition(f'id="own-{number}-timeline"')[2].partition("</svg>")[0]
        assert timeline.count('<rect class="box') == len(told.step.events)
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


def test_a_profile_of_stages_is_laid_over_the_prediction(tmp_path: Path, plan: sw.Plan) -> None:
    own = planned(stages=2, micro_batch=8)
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
        assert f'id="measured-stage-{number}-0"' in text
    assert '3 ms</td><td class="number">1 ms</td><td class="number">0.33</td><td>matmul_efficiency</td>' in text
    for chart in ("measured-0", "measured-1"):
        assert text.partition(f'id="{chart}"')[2].partition("</svg>")[0].count('<rect class="box') == 2
    with raises(sw.PlanError, "profile has 2", "plan has 1"):
        plan.report.write(tmp_path / "wrong.html", profile=profile)
    with raises(sw.PlanError, "profile has 1", "plan has 2"):
        own.report.write(tmp_path / "wrong.html", profile=of_stage)
    assert not (tmp_path / "wrong.html").exists()


def test_a_pipeline_of_a_file_without_seconds_has_no_chart(tmp_path: Path) -> None:
    body = json.loads(planned(stages=2, micro_batch=8).to_json())
    for stage in body["pipeline"]["stages"]:
        for younger in ("weight", "send", "update"):
            del stage[younger]
    del body["pipeline"]["memory_bytes"]
    write_page(tmp_path / "plan.html", sw.Plan.from_json(json.dumps(body), edited=True))
    text = text_of(tmp_path / "plan.html")
    assert "plan again for a chart of the schedule" in text
    assert "Schedule of a step" not in text
