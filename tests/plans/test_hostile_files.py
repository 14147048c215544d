"""Files and notations that are broken or mean harm are refused in a sentence, in time that is linear in their size."""

# ruff: noqa: RUF001  (digits of other scripts are what is tested)
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from plans import fuzzing
from plans.fuzzing import Hang, limit
from raising import raises
from shardwise.costs.cluster_file import format_cluster, parse
from shardwise.errors import LaunchError, LayoutError, NotationError, PlanError, ShardwiseError
from shardwise.hosts import expand_counts, expand_nodelist, read_hostfile, read_rank_table
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement, check_placements
from shardwise.layouts.strategy import parse_choices, parse_cuts
from shardwise.layouts.text import parse_dtype, parse_layout, parse_move
from shardwise.plans.file import parse_ranks, plan_digest
from shardwise.rules.notation import parse_rule
from shardwise.untrusted_text import read_text, shorten_repr

MESH = Mesh(dp=2, tp=2)
MANY = 100_000
SECONDS = 0.5  # of the processor; the quadratic patterns took from 10 seconds to hours


def refused(error: type[ShardwiseError], read: Any, *args: Any) -> str:
    with pytest.raises(error) as caught, limit(SECONDS):
        read(*args)
    assert len(str(caught.value)) < 1_000
    str(caught.value).encode()
    return str(caught.value)


def test_the_limit_of_these_tests_stops_what_takes_longer() -> None:
    def endless() -> None:
        while True:
            pass

    with pytest.raises(Hang), limit(0.05):
        endless()


# ------------------------------------------------------------------------------------------------------------ notations

LAYOUTS = {
    "spaces": " " * MANY,
    "spaces in brackets": "[" + " " * MANY + "x]",
    "a long word": "f" * MANY,
    "spaces behind a dim": "[16" + " " * MANY + "x]",
    "spaces behind the brackets": "[16]" + " " * MANY + "x",
    "states": "[16] " + "replicated(" * MANY,
    "parentheses": "[" + "(" * MANY + "]",
    "an axis many times": "[" + "16@(" + "tp," * MANY + "tp)]",
    "one axis in many dims": "[" + "16@tp, " * MANY + "16]",
    "many dims": "[" + "1, " * MANY + "1]",
    "many parts": "[(" + "9 " * MANY + "9)]",
    "many windows": "[16@tp{" + "0:1|" * MANY + "}]",
    "windows from back to front": "[16@tp{9:2|0:1}]",
    "windows beyond the dim": "[16@tp{0:8|8:17}]",
    "a number of many digits": "[" + "9" * MANY + "]",
    "a number beyond 64 bits": "[9223372036854775808]",
    "parts that multiply beyond 64 bits": "[(9223372036854775807 2)]",
    "full-width digits": "[１６, 8]",
    "Arabic digits": "[16@tp, ٣]",
    "a line break": "[16,\n8]",
    "a line break at the end": "[16, 8]\n",
    "a lone surrogate": "[16, \ud800]",
    "a no-break space": "[16,\u00a08]",
    "a name that looks like tp": "[16@\uff54\uff50]",
}


@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
def test_a_hostile_layout_is_refused_in_milliseconds(text: str) -> None:
    refused(ShardwiseError, parse_layout, text, MESH)
    refused(ShardwiseError, parse_move, f"tp: {text} -> {text}", MESH)


STRATEGIES = {
    "spaces and a word": " " * MANY + "x",
    "a word and spaces": "n@tp" + " " * MANY + "x",
    "a long word": "n" * MANY,
    "dots": "n." * MANY,
    "no axis": "n@" * MANY,
    "parentheses": "n@" + "(" * MANY,
    "braces": "n@tp" + "{" * MANY,
    "commas in braces": "n@tp{" + "," * MANY + "}",
    "a length of many digits": "n@tp{1," + "9" * MANY + "}",
    "an axis many times": "n@tp " * MANY,
    "full-width lengths": "n@tp{１,２}",
    "a line break": "n@tp\nm@dp",
    "a lone surrogate": "n@tp\udfff",
    "a factor that is no name": "é@tp",
}


@pytest.mark.parametrize("text", STRATEGIES.values(), ids=STRATEGIES)
def test_a_hostile_strategy_is_refused_in_milliseconds(text: str) -> None:
    def read() -> None:
        parse_choices(text, MESH)
        parse_cuts(text)

    refused(ShardwiseError, read)


def test_long_texts_that_are_right_are_read() -> None:
    with limit(1.0):
        wide = Mesh(tp=4096)
        lengths = ",".join("3" for _ in range(4096))
        assert sum(parse_cuts(f"v@tp{{{lengths}}}")["v"]) == 3 * 4096
        ranges = "|".join(f"{3 * i}:{3 * i + 3}" for i in range(4096))
        assert parse_layout(f"[12288@tp{{{ranges}}}, 8]", wide).shape == (12288, 8)
        assert parse_choices(" " * MANY, MESH) == {}


def test_a_long_text_is_quoted_around_the_fault() -> None:
    said = refused(NotationError, parse_layout, "[16]" + " " * 500 + "x" + " " * 500, MESH)
    first, quoted, mark = said.splitlines()
    assert "expected replicated(axes)" in first
    assert "column 504" in first
    assert quoted[mark.index("^")] == "x"


def test_a_long_line_of_a_message_keeps_its_beginning_and_its_end() -> None:
    message = str(PlanError("what\n" + "begin" + "x" * MANY + "end\n  fix:    this"))
    assert message.startswith("what\nbeginx")
    assert message.endswith("xend\n  fix:    this")
    assert "(100,008 characters)" in message
    assert len(message) < 2_000


@pytest.mark.parametrize(
    "text",
    [" " * MANY + "(", "dp=" + "9" * MANY, "dp=２", "dp=2\n", "dp=2," * MANY, "Mesh(" * MANY, "d=1" + " " * MANY + "x"],
    ids=shorten_repr,
)
def test_a_hostile_mesh_is_refused_in_milliseconds(text: str) -> None:
    refused(ShardwiseError, Mesh.parse, text)


@pytest.mark.parametrize("size", [10**18 + 9, 2**61 - 1, 2**20 + 1, 10**5000], ids=shorten_repr)
def test_a_mesh_of_more_devices_than_there_are_is_not_divided_into_primes(size: int) -> None:
    said = refused(LayoutError, lambda: Mesh(tp=size).sub_axes)
    assert "more than 1,048,576" in said
    assert "tp" in said


def test_a_mesh_is_bounded_as_a_whole() -> None:
    assert "1024 x 1024 x 2 devices" in refused(LayoutError, lambda: Mesh(a=1024, b=1024, c=2))
    assert "more than 64" in refused(LayoutError, lambda: Mesh([(f"a{i}", 1) for i in range(MANY)]))
    assert "named twice" in refused(LayoutError, lambda: Mesh([("a", 2), ("a", 2)]))
    for name in ("a\n", "é", "a" * 65, 1):
        assert "not an identifier" in refused(LayoutError, lambda name=name: Mesh([(name, 2)]))
    with limit(1.0):
        assert len(Mesh(a=2**20).sub_axes) == 20


def test_rules_and_dtypes_are_bounded() -> None:
    for text in (" " * MANY + "!", "m " * MANY + "-> m", "m k\n-> m", "(" * MANY):
        refused(NotationError, parse_rule, text)
    refused(NotationError, parse_dtype, "f" * MANY)


@pytest.mark.parametrize(
    "text",
    ["0-99999999999", "0-3," * MANY, "0-1048576", "１", "-1", "3-", "5-4", "", "0-3\n", "9" * 5_000],
    ids=shorten_repr,
)
def test_hostile_ranks_are_refused_in_milliseconds(text: str) -> None:
    refused(PlanError, parse_ranks, text)


def test_many_stages_are_compared_in_one_pass() -> None:
    four = Mesh(tp=4)
    stages = [Placement(four, tuple(range(4 * i, 4 * i + 4))) for i in range(500)] * 2
    with limit(SECONDS):
        check_placements(stages, 2000)
    crossing = Placement(four, (1, 2, 3, 4))
    assert "stages 0 and 1000 share 3 ranks" in refused(LayoutError, check_placements, [*stages, crossing], 2000)


# ----------------------------------------------------------------------------------------------------------- plan files


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    listed, priced = (json.loads(text) for text in (fuzzing.seeds()[0], fuzzing.seeds()[2]))
    content: dict[str, Any] = {**listed, "pricing": priced["pricing"]}
    return content


def signed(data: dict[str, Any]) -> str:
    """The file of a plan with a digest that is right: only what is in it can be wrong."""
    body = {key: data[key] for key in data if key not in ("format", "version", "digest")}
    return json.dumps({**data, "digest": plan_digest(body)})


BROKEN = {
    "brackets": "[" * MANY,
    "brackets in an object": '{"format": ' + "[" * MANY,
    "objects": '{"a":' * MANY,
    "quotes": '"' * MANY,
    "escaped quotes": '["' + '\\"' * MANY,
    "spaces": " " * MANY,
    "digits": "9" * MANY,
    "a number beyond floats": '{"format": 1e999}',
    "not a number": '{"format": NaN}',
    "infinity": '{"format": -Infinity}',
    "a name twice": '{"format": "shardwise-plan", "format": "shardwise-plan"}',
    "a lone surrogate": '{"format": "\\ud800"}',
    "a lone surrogate in a name": '{"\\udc00": 1}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_in_milliseconds(text: str) -> None:
    assert "cannot be read" in refused(PlanError, sw.Plan.from_json, text)


ENTRIES: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "true for a number": (("bucket_bytes",), True, "bucket_bytes is true, not a whole number"),
    "less than nothing": (("bucket_bytes",), -1, "bucket_bytes is -1, not a number from 0"),
    "true for a version": (("version",), True, "plan version True"),
    "a float for a version": (("version",), 5.0, "plan version 5.0"),
    "a number for true": (("training",), 1, "training is 1, not true or false"),
    "true for a size": (("stages", 0, "mesh", "tp"), True, "not True"),
    "a huge mesh": (("stages", 0, "mesh", "tp"), 10**18 + 9, "more than 1,048,576"),
    "a text for a size": (("stages", 0, "mesh", "tp"), "4", "positive whole number"),
    "more ranks than devices": (("stages", 0, "ranks"), "0-1048575", "4 devices, the placement names 1048576 ranks"),
    "a size that is true": (("stages", 0, "parameters", "out.bias", "shape"), [True], "not a list of sizes"),
    "a size below nothing": (("stages", 0, "parameters", "out.bias", "shape"), [-8], "not a list of sizes"),
    "a layout of spaces": (("stages", 0, "parameters", "out.bias", "layout"), " " * MANY, "a layout reads"),
    "a strategy of spaces": (
        ("stages", 0, "operators", "out/linear", "strategy"),
        " " * MANY + "x",
        "a strategy reads",
    ),
    "full-width digits": (("stages", 0, "parameters", "out.bias", "layout"), "f32[８]", "not a plain character"),
    "a line break in a name": (("mode",), "auto\n", "not a line"),
    "a control character": (("search",), "\x1b[2J", "not a line"),
    "paths that are no texts": (("stages", 0, "conversions", 0, "path"), [1], "path[0] is 1, not a text"),
    "axes that are no texts": (("pricing", "separate"), [{}], "separate[0] is {}, not a text"),
    "a source that is no layout": (("stages", 0, "conversions", 0, "source"), "f32[9", "']' is missing"),
    "a bucket below nothing": (("stages", 0, "conversions", 0, "bucket"), -3, "not a number from 0"),
    "many unknown entries": (("stages", 0, "mesh"), {f"a{i}": 1 for i in range(5_000)}, "more than 64"),
    "an unknown entry of a wild name": (("\n" * 9_000,), 1, "unknown entry"),
    "many stages": (("stages",), [{}] * 2_000, "1,024 at most"),
}


@pytest.mark.parametrize(("path", "value", "said"), ENTRIES.values(), ids=ENTRIES)
def test_a_hostile_entry_is_refused_with_its_place(
    data: dict[str, Any], path: tuple[str | int, ...], value: Any, said: str
) -> None:
    changed = json.loads(json.dumps(data))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    assert said in refused(PlanError, sw.Plan.from_json, signed(changed))


def test_buckets_whose_conversions_differ_are_refused(data: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(data))
    first, second = changed["stages"][0]["conversions"][:2]
    first["bucket"] = second["bucket"] = 77
    first["forward"], second["forward"] = [], [{"kind": "all_reduce", "axes": "tp", "num_bytes": 4}]
    assert "bucket 77" in refused(PlanError, sw.Plan.from_json, signed(changed))


def test_faults_without_number_are_not_all_told(data: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(data))
    operator = changed["stages"][0]["operators"]["out/linear"] | {"strategy": "?"}
    changed["stages"][0]["operators"] |= {f"op{i}": operator for i in range(500)}
    with raises(PlanError, 480), limit(2.0):
        sw.Plan.from_json(signed(changed))


def test_what_could_not_be_read_again_is_not_written() -> None:
    plan = sw.Plan.from_json(fuzzing.seeds()[0])
    (stage,) = plan.stages
    for name in ("a\nb", "a" * 2_000, "\ud800"):
        operators = (*stage.operators[:-1], replace(stage.operators[-1], name=name))
        with pytest.raises(ShardwiseError):
            plan.revised(operators=operators).to_json()


def test_a_file_without_an_end_is_not_read_to_its_end() -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("no /dev/zero here")
    with raises(ShardwiseError, "1,048,576", "/dev/zero"):
        read_text("/dev/zero", 2**20)


# -------------------------------------------------------------------------------------------------------- cluster files

LEVEL = '[[levels]]\nname = "node"\nsize = 4\nbandwidth = "100 GB/s"\nlatency = "2 us"\n'
SMALL = f'name = "small"\n[device]\nlike = "h100"\n{LEVEL}'
CLUSTERS = {
    "brackets": ("", "a = " + "[" * 4_000, "nested too deep"),
    "brackets on many lines": ("", "a = [\n" + "[\n" * 5_000, "nested too deep"),
    "nesting that is closed": ("", "a = " + "[" * 30 + "]" * 30, "more than 16 deep"),
    "a dotted name": ("", ".".join("a" * 2_000) + " = 1", "more than 16 parts"),
    "many dotted names": (
        "",
        "\n".join(f'x{i}."a".' + "b . " * 900 + "c = 1" for i in range(70)),
        "more than 16 parts",
    ),
    "many levels": ("", "[[levels]]\n" * 5_000, "are 5,001, more than 256"),
    "many lines": ("", "[[levels]]\n" * 20_000, "lines, more than 8,192"),
    "a long line": ("", "a = " + " " * MANY, "a line of 100,004 characters"),
    "a large file": ("", "# x\n" * 100_000, "more than 262,144"),
    "a billion devices": ("size = 4", "size = 1_000_000_000", "not a whole number from 1 to 1048576"),
    "levels that multiply": (LEVEL, LEVEL.replace("4", "1024") * 3, "at most 1048576 devices"),
    "many empty levels": (LEVEL, LEVEL.replace("size = 4", "size = 1") * 20, "at most 16"),
    "true for a size": ("size = 4", "size = true", "True is not a whole number"),
    "a float for a size": ("size = 4", "size = 4.0", "4.0 is not a whole number"),
    "a tiny bandwidth": ('"100 GB/s"', "1e-300", "not between 1 and 1e+18 B/s"),
    "a huge bandwidth": ('"100 GB/s"', "1e300", "not between"),
    "a number beyond floats": ('"100 GB/s"', "1e999", "not finite"),
    "an integer beyond floats": ('"100 GB/s"', "9" * 400, "not finite"),
    "digits": ('"100 GB/s"', "9" * 5_000, "not TOML"),
    "an absurd latency": ('"2 us"', '"1e-320 s"', "not between"),
    "not a number": ('"2 us"', "nan", "not finite"),
    "full-width digits": ('"100 GB/s"', '"１００ GB/s"', "not a number with a unit"),
    "full-width units": ('"100 GB/s"', '"100 ＧB/s"', "not a number with a unit"),
    "spaces in a figure": ('"100 GB/s"', '"1' + " " * 4_000 + 'x y"', "not a number with a unit"),
    "a line break in a name": ('"small"', '"small\\n"', "not a name"),
    "a long name": ('"small"', '"' + "x" * 4_000 + '"', "not a name"),
    "a number of units in other digits": (
        "size = 4",
        'size = 4\ngroup_bandwidths = {"２" = 1e9}',
        "not a number of units",
    ),
    "a number of units twice": (
        "size = 4",
        "size = 4\ngroup_bandwidths = {2 = 1e9, 02 = 1e9}",
        "not a number of units",
    ),
    "a line of other digits": ("size = 4", 'size = 4\nlines = {"all_reduce over ２" = [0, 1]}', "is not like"),
    "like what is no name": ('"h100"', "[]", "[] is not one of"),
    "a table for a source": (LEVEL, LEVEL + "[sources]\nx = {a = 1}\n", "sources.x: "),
    "a lone surrogate": ('"small"', '"\ud800"', "surrogate"),
}


@pytest.mark.parametrize(("old", "new", "said"), CLUSTERS.values(), ids=CLUSTERS)
def test_a_hostile_cluster_file_is_refused_in_milliseconds(old: str, new: str, said: str) -> None:
    text = SMALL.replace(old, new, 1) if old else f"{new}\n{SMALL}"
    assert said in refused(ShardwiseError, parse, text)


def test_a_name_with_quotes_and_backslashes_is_written_so_that_it_is_read_again() -> None:
    name = 'a "quoted\\ name é 漢 \U0001f600'
    cluster = parse(SMALL).renamed(name)
    assert parse(format_cluster(cluster)).name == name


# ---------------------------------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    "line",
    [
        "node1 slots=9999999999",
        "node1 slots=２",
        "node1:²",
        "node1 slots=" + "9" * 5_000,
        "node1 " + "slots " * MANY,
        "n" + " " * MANY + "x",
    ],
    ids=shorten_repr,
)
def test_a_hostile_hostfile_is_refused_in_milliseconds(line: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(line)
    refused(LaunchError, read_hostfile, str(path))


@pytest.mark.parametrize("rank", ["２", "9" * 5_000, True, 1.0, -1, None, "0\n"], ids=shorten_repr)
def test_a_hostile_rank_table_is_refused_in_milliseconds(rank: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    device = {"device_id": "0", "rank_id": rank}
    path.write_text(json.dumps({"server_list": [{"server_id": "a", "device": [device]}]}))
    refused(LaunchError, read_rank_table, str(path))
    path.write_text("[" * MANY)
    refused(LaunchError, read_rank_table, str(path))


def test_slurms_lists_are_bounded() -> None:
    with limit(SECONDS):
        for text in ("node[0-99999999999]", "node[x]"):
            with pytest.raises(ValueError, match=r"more than|invalid"):
                expand_nodelist(text)
        with raises(ValueError, "'1(x99999999999)'", 1048576):
            expand_counts("1(x99999999999)")


# ---------------------------------------------------------------------------------------------------------- mutations


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_mutated_plans_are_read_or_refused(first: int) -> None:
    outcomes = {fuzzing.try_plan(number) for number in range(first, first + 50)}
    assert outcomes == {"refused", "read", "bound"}


def test_a_long_name_of_an_operator_is_not_quoted_whole() -> None:
    assert fuzzing.try_plan(771_088) == "read"


def test_mutated_clusters_are_read_or_refused() -> None:
    assert {fuzzing.try_cluster(number) for number in range(100)} == {"refused", "read"}
