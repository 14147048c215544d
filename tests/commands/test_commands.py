"""The subcommands about plans: what they print, their exit codes, and a user's own errors shown as his."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise import cli
from shardwise.commands import plans
from shardwise.commands.command import Parser, as_options
from shardwise.commands.models import add_model, model_of
from shardwise.commands.plans import add_settings, settings_of
from shardwise.costs.cluster_file import families
from shardwise.graph.segments import WAYS
from shardwise.plans.schedule import SCHEDULES
from shardwise.search.modes import MODES

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return net, (torch.randn(8, 8), torch.randint(4, (8,))), F.cross_entropy


tp = {"0": ColwiseParallel(), "2": RowwiseParallel()}
wrong = {"0": ColwiseParallel()}


def broken():
    return widths(3)


def empty():
    return nn.Linear(2, 2), None


def widths(count):
    raise KeyError("no width for " + str(count))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return cli.main(arguments)


def test_a_plan_with_settings_is_saved_explained_compared_and_proven(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--cluster", "2", "--global-batch", "8", "--micro-batch", "4", "--zero", "2", "--optimizer", "sgd"]
    assert run("plan", "net.py:build", *settings, "-o", "plan.json") == 0
    plan = sw.Plan.load("plan.json")
    assert (plan.micro_batches, plan.optimizer) == (2, "sgd")
    by_hand = ["--cluster", "2", "--mesh", "tp=2", "--strategy", "0=n@tp", "--precision", "compute=bf16,parameter=f32"]
    assert run("plan", "net.py:build", *by_hand, "-o", "other.json") == 0
    other = sw.Plan.load("other.json")
    assert other.strategies["0/linear"] == "n@tp"
    assert str(other.precision.compute) == "torch.bfloat16"
    capsys.readouterr()
    assert run("explain", "0/linear", "other.json") == 0
    assert "n@tp" in capsys.readouterr().out
    assert run("explain", "0.weight", "other.json") == 0
    assert "[16@tp, 8]" in capsys.readouterr().out
    assert run("explain", "nothing", "other.json") == 2
    assert "the plan has no 'nothing'" in capsys.readouterr().err
    assert run("verify", "net.py:build", "plan.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_trace_is_the_simulated_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["net.py:build", "--cluster", "h100-1x2", "--mesh", "dp=2"]
    assert run("trace", *arguments, "-o", "step.json") == 0
    assert run("plan", *arguments, "-o", "plan.json") == 0
    prediction = sw.Plan.load("plan.json").prediction
    events = [e for e in json.loads((folder / "step.json").read_text())["traceEvents"] if e["ph"] == "X"]
    last = max(e["ts"] + e["dur"] for e in events)
    assert last / 1e6 == pytest.approx(prediction.simulated_seconds, rel=1e-9)
    rows = {e["tid"] for e in events}
    for row in rows:  # one after the other on every stream
        own = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == row)
        assert all(a + b <= c + 1e-6 for (a, b), (c, _) in pairwise(own))
    assert {e["args"]["part"] for e in events} == {"forward", "backward", "update"}
    held = [e for e in json.loads((folder / "step.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in held) == prediction.peak_bytes
    assert [e["ts"] for e in held] == sorted(e["ts"] for e in held)


def test_diff_has_an_exit_code_for_growth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for optimizer in ("sgd", "adamw"):
        assert (
            run("plan", "net.py:build", "--cluster", "h100-1x2", "--optimizer", optimizer, "-o", f"{optimizer}.json")
            == 0
        )
    capsys.readouterr()
    assert run("diff", "sgd.json", "adamw.json") == 0
    assert "predicted memory: +" in capsys.readouterr().out
    assert run("diff", "sgd.json", "adamw.json", "--max-growth", "1", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    small, large = (sw.Plan.load(f"{name}.json").prediction for name in ("sgd", "adamw"))
    assert small is not None
    assert large is not None
    assert data["growth"]["memory"] == pytest.approx(large.memory_bytes / small.memory_bytes - 1)
    assert run("diff", "adamw.json", "sgd.json", "--max-growth", "1") == 0
    assert run("verify", "net.py:build", "sgd.json", "--steps", "0") == 2
    assert "nothing would be compared" in capsys.readouterr().err
    assert run("plan", "net.py:build", "--cluster", "h100-1x2", "--mode", "data_parallel", "-o", "dp.json") == 0
    assert run("diff", "dp.json", "adamw.json", "--json") == 0
    assert run("fits", "net.py:build", "--cluster", "h100-1x2", "--mode", "data_parallel", "--seconds", "0") == 0
    capsys.readouterr()
    replace(sw.Plan.load("dp.json"), predicted=None).save("unpriced.json")
    assert run("diff", "adamw.json", "unpriced.json", "--max-growth", "1") == 2
    assert "has no prediction" in capsys.readouterr().err


def test_check_says_equal_or_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--devices", "2", "--no-price", "--json"]
    assert run("check", "net.py:build", "--plan", "net.py:tp", *few) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "equal"
    assert run("check", "net.py:build", "--plan", "net.py:wrong", *few) == 1
    assert json.loads(capsys.readouterr().out)["first_wrong"]["what"] == "2/linear"
    (folder / "styles.json").write_text("{]")
    assert run("check", "net.py:build", "--plan", "styles.json", *few) == 2
    assert "cannot read styles.json" in capsys.readouterr().err


def test_fits_of_a_configuration_on_disk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps({**config, **heads}))
    arguments = [
        "--cluster",
        "h100-1x2",
        "--batch",
        "4",
        "--sequence",
        "8",
        "--mesh",
        "tp=2",
        "--seconds",
        "0",
        "--json",
    ]
    assert run("fits", "config.json", *arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is True
    assert data["tokens_per_second"] == pytest.approx(32 / data["step_seconds"])
    assert sum(data["peak_parts"].values()) == data["peak_bytes"]
    assert run("fits", "meta-llama/Llama-3.1-8B", "--cluster", "2") == 2
    assert "nothing is downloaded" in capsys.readouterr().err


@pytest.mark.parametrize("named", [{}, {"architectures": ["LlamaForCausalLM"]}])
def test_a_configuration_has_its_own_dtype(folder: Path, named: dict[str, list[str]]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "dtype": "bfloat16", "vocab_size": 64, **sizes, **named}
    (folder / "config.json").write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    add_model(parser)
    module = model_of(parser.parse_args(["config.json"])).module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_fits_has_an_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fits", "net.py:build", "--cluster", "2", "--memory", "1 KiB", "--seconds", "0", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is False
    assert "no plan fits" in data["refused"]


def test_advice_names_options_that_the_command_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fits", "net.py:build", "--cluster", "h100-1x4", "--stages", "2", "--seconds", "0") == 0
    shown = capsys.readouterr().out
    parser = argparse.ArgumentParser()
    add_settings(parser, cluster=False)
    advised = [text for text in re.findall(r"\(([^()]*--[^()]*)\)", shown) if not text.startswith("no ")]
    settings = [settings_of(parser.parse_args(["net.py:build", *shlex.split(text)])) for text in advised]
    assert {"precision", "schedule", "recompute"} <= {name for each in settings for name in each}
    assert "(no --stages)" in shown
    assert run("plan", "net.py:build", "--cluster", "2", "--schedule", "1F1B") == 2
    shown += capsys.readouterr().err
    assert "give --stages 4, or --stages marked" in shown
    assert not re.search(r"sw\.|(?<![\w-])(?:stages|recompute|schedule|precision)=", shown)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("smaller batches (global_batch=8, micro_batch=4)", "smaller batches (--global-batch 8 --micro-batch 4)"),
        ("a mesh=, stages= or recompute=", "a --mesh, --stages or --recompute"),
        ("give mesh=sw.Mesh(dp=2, tp=4)", "give --mesh dp=2,tp=4"),
        ('sw.plan(..., search="x"), or ask sw.fits', "shardwise plan --search x, or ask shardwise fits"),
        ('states there (optimizer="adamw on host")', "states there (--optimizer 'adamw on host')"),
        ("leave imbalance= out; loss=3 and sw.planned", "leave --imbalance out; loss=3 and sw.planned"),
        ("sw.plan(..., mesh=sw.Mesh(dp=4), zero=3)", "shardwise plan --mesh dp=4 --zero 3"),
        ("per_micro_batch=['aux', 'z']", "--per-micro-batch aux --per-micro-batch z"),
        ("pass layouts=... or zero=2.", "pass --layout ... or --zero 2."),
    ],
)
def test_calls_of_python_are_written_as_options(text: str, says: str) -> None:
    parser = Parser()
    add_settings(parser, cluster=False)
    parser.set_defaults(execute=None, options=parser.options)
    assert as_options(text, parser.parse_args(["net.py:build"])) == says


@pytest.mark.parametrize(
    "text",
    [
        "cannot read runs/mesh=dp4/zero=1/plan.json: No such file or directory",
        "'/data/zero=3.json' is no plan",
        "zero=3/plan.json is no plan",
        "written to zero=3.html, mode=fast",
        "fix: sw.plan(..., strategies={'a.b': 'n@tp'})",
        "pass layouts={'x': '[32@dp, 512]'}",
        "stages=[...]",
        "sw.plan(model, 'a/b', zero=3)",
        "stages=[[1], [2]]",
        "sw.plan(module, (x,), cluster, zero=3)",
        "in sw.plan(model, loss=f(x), zero=3) here",
        "sw.fits(...).plan(zero=3)",
        "precision=Precision(compute=torch.bfloat16)",
        "memory_bytes=2**30",
        "execute=1, json=True and model=tp",
        "'mesh=dp=2'",
    ],
)
def test_what_is_no_advice_on_settings_stays_as_it_is(text: str) -> None:
    test_calls_of_python_are_written_as_options(text, text)


def test_names_of_folders_are_said_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "zero=3").mkdir()
    (folder / "zero=3" / "plan.json").write_text("{}")
    assert run("diff", "zero=3/plan.json", "zero=3/plan.json") == 2
    assert "zero=3/plan.json" in capsys.readouterr().err
    assert run("trace", "net.py:build", "--cluster", "h100-1x2", "-o", "zero=3/t.json") == 0
    assert "written to zero=3/t.json: open it" in capsys.readouterr().out


def test_an_error_of_the_users_own_function_is_shown_from_his_line_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "net.py:broken", "--cluster", "2") == 1
    shown = capsys.readouterr().err
    assert "in broken" in shown
    assert "KeyError: 'no width for 3'" in shown
    assert "shardwise/commands" not in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategy", "0"], "has no ="),
        (["--precision", "compute=int8"], "cannot parse --precision"),
        (["--memory", "much"], "--memory"),
        (["--max-mesh-axes", "0"], "at least one axis"),
    ],
)
def test_settings_that_cannot_be_read_say_so(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run("plan", "net.py:build", "--cluster", "2", *arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("place", "says"), [("nowhere/plan.json", "there is no folder nowhere"), (".", "is a folder")])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    folder: Path, capsys: pytest.CaptureFixture[str], place: str, says: str
) -> None:
    for command in (["plan", "net.py:missing"], ["report", "missing.json"], ["trace", "net.py:missing"], ["calibrate"]):
        cluster = [] if command == ["calibrate"] else ["--cluster", "2"]
        with pytest.raises(SystemExit) as ended:
            run(*command, *cluster, "-o", place)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


def test_a_file_that_may_not_be_written_is_refused_before_any_work_and_a_full_disk_is_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("plan", "net.py:build", "--cluster", "2", "-o", "plan.json") == 0
    for command in (["plan", "net.py:build"], ["trace", "net.py:build"], ["report", "net.py:build"]):
        assert run(*command, "--cluster", "2", "-o", "/dev/full") == 2
        assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err
    assert run("report", "plan.json", "-o", "/dev/full") == 2
    assert "fix:    give another file with -o" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SystemExit) as ended:
        run("plan", "net.py:missing", "--cluster", "2", "-o", "other.json")
    assert ended.value.code == 2
    assert "no permission to write other.json" in capsys.readouterr().err


def test_a_number_of_devices_has_the_memory_it_takes_as_in_python(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = sw.Cluster.local(2)
    small = replace(small, device=replace(small.device, memory_bytes=1024.0, reserve_bytes=0.0))
    monkeypatch.setattr(sw.Cluster, "local", staticmethod(lambda number: small))
    assert run("plan", "net.py:build", "--cluster", "2") == 0
    assert run("plan", "net.py:build", "--cluster", "2", "--memory", "1 KiB") == 2
    assert "no plan fits" in capsys.readouterr().err
    assert run("plan", "net.py:build", "--cluster", "2", "--compare", "--json") == 0
    assert {row["error"] for row in json.loads(capsys.readouterr().out)} == {None}


def test_every_setting_of_plan_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    options = {action.dest for action in parser._actions}
    named = {"memory_bytes": "memory", "strategies": "strategy", "layouts": "layout"}
    wanted = inspect.signature(sw.plan).parameters.keys() - {"module", "example_inputs", "kwargs", "loss"}
    assert {named.get(name, name) for name in wanted} <= options


def test_a_pipeline_is_planned_looked_at_and_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--cluster", "h100-1x2", "--stages", "2", "--schedule", "gpipe", "--micro-batch", "4"]
    assert run("plan", "net.py:build", *settings, "-o", "plan.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == "GPipe"
    assert run("report", "plan.json", "-o", "plan.html", "--other", "plan.json", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data == {"written": "plan.html", "bytes": (folder / "plan.html").stat().st_size}
    assert "The plans are equal." in (folder / "plan.html").read_text()
    assert run("diff", "plan.json", "plan.json", "--max-growth", "0", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["growth"] == {"step": 0.0, "memory": 0.0}
    plan = sw.Plan.load("plan.json")
    sent = sum(entry["bytes"] for entry in data["communication"][0] if entry["direction"] == "backward")
    assert sent == sum(entry.num_bytes for entry in plan.collectives(backward=True))
    assert run("explain", "0/linear", "net.py:build", *settings, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["name"], data["stage"], data["alike"]) == ("0/linear", 0, None)
    assert [own["choice"] for own in data["alternatives"] if own["chosen"]] == [plan.strategies["0/linear"] or "whole"]
    assert run("top", "net.py:build", *settings, "-k", "2", "--json") == 0
    ranked = json.loads(capsys.readouterr().out)["pipelines"]
    assert ranked[0]["changed"] == "" != ranked[1]["changed"]
    assert run("plan", "net.py:build", "--cluster", "h100-1x2", "--stages", "two") == 2
    assert "stages is 'two'" in capsys.readouterr().err


def test_json_of_what_was_tried_has_units_in_its_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["net.py:build", "--cluster", "h100-1x2", "--global-batch", "8", "--json"]
    assert run("explain", "micro_batch", *settings) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["taken"] in [one["micro_batch"] for one in data["tried"] if one["step_seconds"] and one["bytes"]]
    assert run("explain", "stages", *settings, "--stages", "auto") == 0
    data = json.loads(capsys.readouterr().out)
    (taken,) = (one for one in data["considered"] if data["taken"].items() <= one.items())
    assert taken["bound_seconds"] <= taken["step_seconds"]
    assert all(one["step_seconds"] or one["refused"] or one["faster_seconds"] for one in data["considered"])
    assert data["taken"].keys() == {"stages", "schedule", "micro_batch", "passes"}


def test_a_plan_file_that_is_none_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name, says in (("missing.json", "there is no file missing.json"), ("bytes.json", "is not JSON")):
        assert run("explain", "0/linear", name, "--cluster", "2") == 2
        assert says in capsys.readouterr().err


def test_json_is_one_document_whose_numbers_are_those_of_the_library(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["net.py:build", "--cluster", "h100-1x2", "--mesh", "dp=2"]
    assert run("plan", *settings, "-o", "plan.json", "--json") == 0
    prediction = sw.Plan.load("plan.json").prediction
    assert json.loads(capsys.readouterr().out)["prediction"]["compute"] == prediction.compute
    assert run("explain", "0/linear", *settings, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    (chosen,) = (own for own in data["alternatives"] if own["chosen"])
    assert chosen["choice"] == (sw.Plan.load("plan.json").strategies["0/linear"] or "whole")
    assert chosen["step_at_least_seconds"] == pytest.approx(prediction.additive_price)
    assert run("top", *settings, "-k", "2", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plans"][0]["additive_price_seconds"] == pytest.approx(prediction.additive_price)
    assert data["plans"][0]["changes"] == []
    assert data["plans"][1]["changes"] != []
    assert run("explain", "0.weight", "plan.json", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["shape"], data["layout"], data["stage"]) == ([16, 8], "f32[16, 8]", 0)
    assert run("trace", *settings, "-o", "step.json", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"written": "step.json"}
    assert run("clusters", "h100-2x8", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    cluster = sw.Cluster.load("h100-2x8")
    assert (data["num_devices"], data["device"]["memory_bytes"]) == (16, cluster.device.memory_bytes)
    assert run("clusters", "--json") == 0
    assert all(one["levels"] for one in json.loads(capsys.readouterr().out))


def test_a_reader_that_has_enough_ends_a_command_without_a_word() -> None:
    command = (sys.executable, "-m", "shardwise.cli", "clusters", "h100")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()  # before it writes: it has yet to start
        assert running.stderr.read() == ""
    assert running.returncode == 141


def test_a_plan_of_a_mode_has_a_page(folder: Path) -> None:
    assert run("report", "net.py:build", "--cluster", "h100-1x2", "--mode", "data_parallel", "-o", "dp.html") == 0
    assert "Plans of a mode or by hand have none" in (folder / "dp.html").read_text()


def test_a_plan_is_written_before_it_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "show", mock.Mock(side_effect=BrokenPipeError))
    run("plan", "net.py:build", "--cluster", "2", "-o", "plan.json")
    assert sw.Plan.load("plan.json").mesh.num_devices == 2


def test_an_interrupt_ends_a_command_in_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "slow.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    assert run("plan", "slow.py:build", "--cluster", "2") == 130
    assert capsys.readouterr().err == "shardwise: interrupted\n"


def test_a_command_ends_well_without_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after >&-
    assert run("clusters", "h100") == 0


def test_shells_complete_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh"):
        with pytest.raises(SystemExit) as ended:
            run("--print-completion", shell)
        assert ended.value.code == 0
        script = capsys.readouterr().out
        assert all(word in script for word in ("calibrate", "--global-batch", "--schedule", "--json"))
        values = {*families(), *SCHEDULES, *WAYS, *MODES, "bf16"}
        assert {value for value in values if value not in script} == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "net.py:build", "--cluster", "2", "--memory", "0"), "memory_bytes is 0"),
        (("plan", "net.py:empty", "--cluster", "h100-1x2"), "the example inputs are None"),
        (("plan", "net.py:build", "--cluster", "h10"), "did you mean h100?"),
        (
            ("plan", "net.py:build", "--cluster", "2", "--precision", "bf15"),
            "each f64, f32, bf16, f16; products=float8",
        ),
        (("check", "net.py:build", "--plan", "plan.json"), "a plan of shardwise, not of another tool"),
        (
            ("plan", "net.py:build", "--cluster", "2", "--global-batch", str(10**21)),
            "at most 1,099,511,627,776 samples",
        ),
        (("plan", "net.py:build", "--cluster", "3", "--mesh", "", "--mode", "auto"), "Mesh() needs 1 devices"),
        (("fits", "net.py:build", "--cluster", "2", "--price", "-1"), "the price of a device and hour is -1"),
        (("fits", "net.py:build", "--cluster", "2", "--price", "nan"), "the price of a device and hour is nan"),
        (("fits", "net.py:build", "--cluster", "2", "--price", "inf"), "the price of a device and hour is inf"),
        (("fits", "net.py:build", "--cluster", "2", "--seconds", "-1"), "seconds is -1"),
        (("fits", "net.py:build", "--cluster", "2", "--seconds", "nan"), "seconds is nan"),
        (("fits", "net.py:build", "--cluster", "2", "--mesh", "dp=3"), "Mesh(dp=3) needs 3 devices"),
        (("fits", "net.py:build", "--cluster", "2", "--schedule", "X"), "unknown schedule 'X'"),
        (("fits", "org/a-model", "--cluster", "2"), "if this is a model on a hub: nothing is downloaded"),
        (("fits", "", "--cluster", "2"), "'' names no function"),
        (("fits", "plan.json", "--cluster", "2"), "plan.json is a plan file, not a model"),
        (("fits", "net.py:build", "--cluster", "2", "--batch", "-1"), "--batch is -1"),
        (("fits", "net.py:build", "--cluster", "2", "--sequence", "0"), "--sequence is 0"),
        (("fits", "net.py:build", "--cluster", "2", "--batch", "4"), "--batch is for transformers configurations"),
        (("top", "net.py:build", "--cluster", "2", "-k", "-1"), "k is -1"),
        (("top", "net.py:build", "--cluster", "2", "-k", str(10**21)), "a whole number from 1 to 1,000"),
        (("diff", "plan.json", "plan.json", "--max-growth", "nan"), "--max-growth is not a number"),
        (("verify", "net.py:build", "plan.json", "--steps", str(10**21)), "an integer up to 1,000,000"),
        (("check", "net.py:build", "--plan", "net.py:none", "--devices", "2"), "net.py has no none"),
        (("report", "broken.json", "-o", "page.html"), "broken.json is not JSON"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    (folder / "broken.json").write_text("{broken")
    if "plan.json" in arguments:
        assert run("plan", "net.py:build", "--cluster", "2", "-o", "plan.json") == 0
    capsys.readouterr()
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "fix:" in captured.err
    assert not captured.out


def test_any_number_of_axes_is_as_many_as_there_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for most in ("1", str(10**21)):
        assert run("plan", "net.py:build", "--cluster", "2", "--max-mesh-axes", most, "-o", f"{most}.json") == 0
    assert sw.Plan.load("1.json") == sw.Plan.load(f"{10**21}.json")


def test_the_limit_of_a_plan_is_the_one_that_was_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["net.py:build", "--cluster", "h100-1x2", "--mesh", "dp=2"]
    for more, said in (
        ([], " of 74.3 GiB a device"),
        (["--memory", "60 GiB"], " of 60 GiB a device"),
        (["--memory", "1 MiB", "--stages", "2", "--mesh", "dp=1"], " of 1 MiB a device"),
    ):
        assert run("plan", *settings, *more, "-o", "plan.json") == 0
        assert said in capsys.readouterr().out.splitlines()[1]
        assert said in str(sw.Plan.load("plan.json")).splitlines()[1]
    assert run("plan", "net.py:build", "--cluster", "2", "-o", "plan.json") == 0  # devices with the memory it takes
    assert " of " not in capsys.readouterr().out.splitlines()[1]


def test_help_and_clusters_need_no_torch():
    script = (
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None  # importing it would raise\n"
        "from shardwise.cli import main\nmain(sys.argv[1:])"
    )
    for arguments in (["--help"], ["plan", "--help"], ["clusters"]):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        ("paln", "invalid choice: 'paln'", "did you mean plan?"),
        ("plan", "required: MODEL, --cluster", "shardwise plan --help"),
        ("plan net.py:build --clster=h100-1x4", "unrecognized arguments: --clster", "did you mean --cluster?"),
        ("plan net.py:build --cluster 2 --precison=bf16", "unrecognized arguments: --precison=bf16", "--precision?"),
        ("fits net.py:build --cluster 2 --mode data-parallel", "--mode: invalid choice", "did you mean data_parallel?"),
        ("plan net.py:build --cluster 2 --zero 4", "invalid choice: 4 (choose from 1, 2, 3)", "shardwise plan --help"),
    ],
)
def test_wrong_arguments_take_two_lines_with_the_nearest_word(
    arguments: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments.split())
    first, second = capsys.readouterr().err.splitlines()
    assert what in first
    assert second.startswith("  fix:    ")
    assert second.endswith(fix)


def test_a_dtype_alone_is_that_of_computing(folder: Path) -> None:
    for text in ("bf16", "compute=bf16"):
        assert run("plan", "net.py:build", "--cluster", "2", "--precision", text, "-o", f"{text}.json") == 0
    plan = sw.Plan.load("bf16.json")
    assert plan == sw.Plan.load("compute=bf16.json")
    assert plan.precision.compute == torch.bfloat16
