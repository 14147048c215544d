"""Seconds of collectives: where groups are, closed forms, what concurrent groups share, order of algorithms."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raising import raises
from shardwise.costs.cluster import Cluster, Level
from shardwise.costs.cluster_file import family, parse
from shardwise.costs.collectives import KINDS, TREE_PACE, LinkPrice, Links, Span, affine_terms, num_steps, share_sent
from shardwise.costs.units import Figures
from shardwise.errors import LayoutError, PlanError
from shardwise.layouts.conversions import Move
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.text import parse_layout
from shardwise.search.mesh_shapes import mesh_shapes

# Two nodes of four; powers of ten, so that expected times can be read.
CLUSTER = parse(
    """
    name = "two nodes of four"
    [device]
    name = "A"
    memory = "1 GB"
    memory_bandwidth = "1 GB/s"
    kernel_latency = 0
    flops = {f32 = 1e12}
    [[levels]]
    name = "node"
    size = 4
    bandwidth = "100 GB/s"
    latency = "1 us"
    launch = "10 us"
    [[levels]]
    name = "network"
    size = 2
    bandwidth = "10 GB/s"
    latency = "100 us"
    launch = "20 us"
    """
)
MESH = Mesh(dp=2, tp=4)
DP, TP, BOTH = MESH.expand("dp"), MESH.expand("tp"), MESH.sub_axes
BYTES = 1e9


def links(cluster: Cluster = CLUSTER, mesh: Mesh = MESH) -> Links:
    return Links(cluster, mesh)


def with_network(**changes: object) -> Cluster:
    node, network = CLUSTER.levels
    return replace(CLUSTER, levels=(node, replace(network, **changes)))  # type: ignore[arg-type]


def fastest(links: Links, kind: str, axes: tuple[str, ...], num_bytes: float = 25 * 2**20) -> tuple[float, float]:
    """(seconds, seconds per byte) of the algorithm that is the fastest for a bucket of gradients, or ``num_bytes``."""
    return min(links.algorithms(kind, axes), key=lambda affine: affine[0] + affine[1] * num_bytes)


def test_groups_are_where_the_order_of_the_axes_puts_them() -> None:
    assert links().span(DP).units == (2, 2, 1)
    assert links().span(TP).units == (4, 1, 1)
    assert links().span(BOTH).units == (8, 2, 1)
    assert links().span((TP[0],)).units == (2, 1, 1)
    assert links().span((*DP, TP[1])).units == (4, 2, 1)
    assert links(mesh=Mesh(tp=4, dp=2)).span(("tp",)).units == (4, 2, 1)
    assert links().level_names(DP) == ("network",)
    assert links().level_names(TP) == ("node",)
    assert links().level_names(BOTH) == ("node", "network")


@given(st.randoms(use_true_random=False))
def test_spans_are_those_of_the_ranks(randomly: random.Random) -> None:
    """Against counting, for nodes that do not fit the axes as well."""
    mesh = Mesh({f"a{i}": randomly.choice((1, 2, 3, 4, 6)) for i in range(randomly.randint(1, 3))})
    inner = randomly.choice([n for n in range(1, mesh.num_devices + 1) if mesh.num_devices % n == 0])
    rest = mesh.num_devices // inner
    middle = randomly.choice([n for n in range(1, rest + 1) if rest % n == 0])
    level = CLUSTER.levels[0]
    sizes = (inner, middle, rest // middle)
    cluster = replace(CLUSTER, levels=tuple(replace(level, size=size) for size in sizes))
    axes = tuple(axis for axis in mesh.sub_axes if randomly.random() < 0.5)
    groups = {mesh.group(axes, rank) for rank in range(mesh.num_devices)}
    expected = tuple(
        max(len({rank // unit for rank in group}) for group in groups) for unit in (1, inner, inner * middle)
    )
    assert Links(cluster, mesh).span(axes).units == (*expected, 1)


@given(st.randoms(use_true_random=False))
def test_spans_of_a_placement_are_those_of_its_ranks(randomly: random.Random) -> None:
    """Against counting, for any ranks of a cluster of three levels."""
    sizes = tuple(randomly.choice((1, 2, 3, 4)) for _ in range(3))
    cluster = replace(CLUSTER, levels=tuple(replace(CLUSTER.levels[0], size=size) for size in sizes))
    num_ranks = cluster.num_devices
    inner = randomly.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
    mesh = Mesh(a=inner, b=randomly.randint(1, num_ranks // inner))
    place = Placement(mesh, tuple(sorted(randomly.sample(range(num_ranks), mesh.num_devices))))
    axes = tuple(axis for axis in mesh.sub_axes if randomly.random() < 0.5)
    groups = {place.group(axes, rank) for rank in place.ranks}
    blocks = (1, sizes[0], sizes[0] * sizes[1])
    expected = tuple(max(len({rank // block for rank in group}) for group in groups) for block in blocks)
    assert Links.of(cluster, place).span(axes).units == (*expected, 1)


def test_a_stage_inside_a_node_never_leaves_it_and_one_across_nodes_does() -> None:
    """Two nodes of four (``CLUSTER``): the same mesh on four ranks of one node, and on two of each."""
    inside = Links.of(CLUSTER, Placement(Mesh(dp=2, tp=2), (4, 5, 6, 7)))
    across = Links.of(CLUSTER, Placement(Mesh(dp=2, tp=2), (0, 1, 6, 7)))
    assert inside.level_names(("dp", "tp")) == ("node",)
    assert across.level_names(("tp",)) == ("node",)
    assert across.level_names(("dp",)) == ("network",)
    first = Links.of(CLUSTER, Placement(Mesh(dp=2, tp=2), (0, 1, 2, 3)))
    for axes in (("dp",), ("tp",), ("dp", "tp")):
        assert inside.seconds("all_reduce", axes, 1e6) == first.seconds("all_reduce", axes, 1e6)
    assert across.seconds("all_reduce", ("dp",), 1e6) > inside.seconds("all_reduce", ("dp",), 1e6)
    assert hash(inside) != hash(first)
    assert inside != first
    whole = Placement.whole(Mesh(dp=2, tp=4))
    assert Links.of(CLUSTER, whole) == Links(CLUSTER, whole.mesh)


def test_a_placement_beyond_the_cluster_is_refused() -> None:
    with raises(PlanError, "6, 7, 8, 9", 8, 2, 7, "devices"):
        Links.of(CLUSTER, Placement(Mesh(dp=2, tp=2), (6, 7, 8, 9)))


@pytest.mark.parametrize(
    ("kind", "fixed", "per_byte"),
    [
        ("all_gather", 10e-6 + 3e-6, 0.75 / 1e11),
        ("reduce_scatter", 10e-6 + 3e-6, 0.75 / 1e11),
        ("all_reduce", 10e-6 + 6e-6, 1.5 / 1e11),
        ("all_to_all", 10e-6 + 3e-6, 0.75 / 1e11),
        ("collective_permute", 10e-6 + 1e-6, 1 / 1e11),
        ("halo_exchange", 10e-6 + 2e-6, 1 / 1e11),
    ],
)
def test_inside_a_node_times_are_the_textbooks(kind: str, fixed: float, per_byte: float) -> None:
    assert links().algorithms(kind, TP) == (pytest.approx((fixed, per_byte)),)
    assert links().seconds(kind, TP, BYTES) == pytest.approx(fixed + per_byte * BYTES)
    assert num_steps(kind, 4) == round((fixed - 10e-6) / 1e-6)
    assert share_sent(kind, 4) == pytest.approx(per_byte * 1e11)


def test_groups_across_nodes_have_their_own_part_of_the_network() -> None:
    """Four groups over dp, one card each; where the node has one card for all, each has a quarter of it; where a card
    is as fast as four, nothing is lost."""
    alone = fastest(links(), "all_gather", DP)
    assert alone == pytest.approx((20e-6 + 100e-6, 0.5 / 1e10))
    assert fastest(links(with_network(shared_by=4)), "all_gather", DP) == pytest.approx((120e-6, 0.5 / 2.5e9))
    assert fastest(links(with_network(shared_by=4, bandwidth=4e10)), "all_gather", DP) == pytest.approx(alone)


def test_a_ring_over_nodes_has_the_cards_of_all_its_members() -> None:
    fixed, per_byte = fastest(links(), "all_gather", BOTH)
    assert fixed == pytest.approx(20e-6 + 6 * 1e-6 + 1 * 100e-6)
    assert per_byte == pytest.approx(7 / 8 / 4e10)
    fast_network = with_network(bandwidth=1e12)
    assert fastest(links(fast_network), "all_gather", BOTH)[1] == pytest.approx(7 / 8 / 1e11)


def test_small_all_reduces_over_many_nodes_take_the_tree() -> None:
    mesh = Mesh(dp=1024, tp=8)
    across = Links(Cluster.load("h100-1024x8"), mesh)
    axes = mesh.expand("dp")
    ring, tree = across.algorithms("all_reduce", axes)
    assert tree[0] < ring[0] / 50
    assert tree[1] * TREE_PACE == pytest.approx(ring[1] * 1024 / 1023)
    assert fastest(across, "all_reduce", axes, 1e3) == tree
    assert fastest(across, "all_reduce", axes, 1e12) == ring
    for num_bytes in (1e3, 1e6, 1e9, 1e12):
        assert across.seconds("all_reduce", axes, num_bytes) == min(f + s * num_bytes for f, s in (ring, tree))


def test_a_hierarchical_library_sends_only_slices_across() -> None:
    """HCCL: reduce-scatter inside, all-reduce of a quarter across, all-gather inside."""
    (fixed, per_byte) = fastest(links(with_network(hierarchical=True)), "all_reduce", BOTH)
    assert fixed == pytest.approx(10e-6 + 20e-6 + 6 * 1e-6 + 2 * 100e-6)
    assert per_byte == pytest.approx(2 * 0.75 / 1e11 + 2 * 0.5 / 4 / 1e10)


def test_a_switch_that_reduces_helps_large_groups_only() -> None:
    node = replace(CLUSTER.levels[0], size=8, in_switch=0.8)
    mesh = Mesh(tp=8)
    own = Links(replace(CLUSTER, levels=(node,)), mesh)
    without = Links(replace(CLUSTER, levels=(replace(node, in_switch=0.0),)), mesh)
    axes = mesh.expand("tp")
    assert fastest(own, "all_reduce", axes)[1] == pytest.approx(9 / 8 / 0.8e11)
    assert fastest(own, "all_reduce", axes)[1] < fastest(without, "all_reduce", axes)[1]
    for few in (axes[:1], axes[:2]):
        assert own.seconds("all_reduce", few, BYTES) == without.seconds("all_reduce", few, BYTES)
    assert own.algorithms("all_gather", axes) == without.algorithms("all_gather", axes)


def test_an_all_to_all_is_limited_by_what_crosses_nodes() -> None:
    fixed, per_byte = fastest(links(), "all_to_all", BOTH)
    assert fixed == pytest.approx(20e-6 + 3 * 1e-6 + 4 * 100e-6)
    assert per_byte == pytest.approx(max(3 / 8 / 1e11, 4 / 8 / 1e10))


def test_a_halo_exchange_crosses_nodes_only_at_their_ends_and_a_permutation_everywhere() -> None:
    assert fastest(links(), "halo_exchange", BOTH)[1] == pytest.approx(1 / 4e10)
    assert fastest(links(), "collective_permute", BOTH)[1] == pytest.approx(1 / 1e10)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for axes in (DP, TP, BOTH):
        parts = [fastest(links(), kind, axes) for kind in ("reduce_scatter", "all_gather")]
        ring = links().algorithms("all_reduce", axes)[0]
        launch = 10e-6 if axes == TP else 20e-6
        assert ring[1] == pytest.approx(parts[0][1] + parts[1][1])
        assert ring[0] + launch == pytest.approx(parts[0][0] + parts[1][0])


@pytest.mark.parametrize("kind", KINDS)
def test_prices_are_sane(kind: str) -> None:
    """Nothing is free but a group of one; more bytes, more members and more levels never cost less."""
    mesh = Mesh(pod=4, dp=16, tp=8)
    many = Links(Cluster.load("a100-80-64x8"), mesh)
    assert many.seconds(kind, (), BYTES) == 0
    seconds = [many.seconds(kind, mesh.expand("tp")[:count], BYTES) for count in range(4)]
    assert seconds == sorted(seconds)
    for axes in (mesh.expand("tp"), mesh.expand("dp"), mesh.sub_axes):
        fixed, per_byte = fastest(many, kind, axes)
        assert fixed > 0
        assert per_byte > 0
        assert many.seconds(kind, axes, 2 * BYTES) > many.seconds(kind, axes, BYTES)
    assert many.seconds(kind, mesh.expand("dp"), BYTES) > many.seconds(kind, mesh.expand("tp"), BYTES)


def test_what_leaves_a_pod_takes_the_cards_of_its_nodes() -> None:
    """Pods with uplinks that are faster than a card: the card is what limits groups with one member per pod."""
    node, network = CLUSTER.levels
    pods = replace(network, name="pods", size=3, bandwidth=1e12, latency=1e-3)
    far = Links(replace(CLUSTER, levels=(node, network, pods)), Mesh(pod=3, dp=2, tp=4))
    axes = far.mesh.expand("pod")
    assert far.level_names(axes) == ("pods",)
    assert fastest(far, "all_gather", axes) == pytest.approx((20e-6 + 2e-3, 2 / 3 / 1e10))
    assert fastest(far, "all_to_all", axes)[1] == pytest.approx(2 / 3 / 1e10)
    assert fastest(far, "collective_permute", axes)[1] == pytest.approx(1 / 1e10)
    slow = replace(pods, bandwidth=1e9)
    near = Links(replace(CLUSTER, levels=(node, network, slow)), far.mesh)
    assert fastest(near, "all_gather", axes)[1] == pytest.approx(2 / 3 / 1e9)


def test_swapped_bandwidths_swap_the_prices() -> None:
    node, network = CLUSTER.levels
    swapped = replace(
        CLUSTER,
        levels=(replace(node, bandwidth=network.bandwidth), replace(network, bandwidth=node.bandwidth)),
    )
    assert links().seconds("all_gather", TP, BYTES) < links().seconds("all_gather", DP, BYTES)
    assert links(swapped).seconds("all_gather", TP, BYTES) > links(swapped).seconds("all_gather", DP, BYTES)


def test_a_mesh_of_another_size_is_refused() -> None:
    with raises(PlanError, "2 x 2 = 4", 8):
        Links(CLUSTER, Mesh(dp=2, tp=2))
    with raises(LayoutError, "'pp'", "(dp=2, tp=4)"):
        links().seconds("all_gather", ("pp",), 1.0)
    with raises(ValueError, "'broadcast'"):
        links().seconds("broadcast", TP, 1.0)


def test_launches_and_efficiency_belong_to_a_kind() -> None:
    node = replace(CLUSTER.levels[0], efficiency=Figures({"all_gather": 0.5}), launches=Figures({"all_gather": 1e-3}))
    own = links(replace(CLUSTER, levels=(node, CLUSTER.levels[1])))
    assert fastest(own, "all_gather", TP) == pytest.approx((1e-3 + 3e-6, 0.75 / 5e10))
    assert fastest(own, "all_reduce", TP) == fastest(links(), "all_reduce", TP)
    node = replace(CLUSTER.levels[0], efficiency=Figures({"collective_permute": 0.5}))
    own = links(replace(CLUSTER, levels=(node, CLUSTER.levels[1])))
    assert fastest(own, "halo_exchange", TP)[1] == fastest(own, "collective_permute", TP)[1] == 1 / 5e10


def test_a_measured_line_counts_for_just_such_groups() -> None:
    node = replace(CLUSTER.levels[0], lines=(("all_reduce", 4, 1.0, 2.0),))
    own = links(replace(CLUSTER, levels=(node, CLUSTER.levels[1])))
    assert own.algorithms("all_reduce", TP) == ((1.0, 2.0),)
    for kind, axes in (("all_gather", TP), ("all_reduce", TP[:1]), ("all_reduce", DP), ("all_reduce", BOTH)):
        assert own.algorithms(kind, axes) == links().algorithms(kind, axes)


def test_bandwidths_of_group_sizes_are_interpolated() -> None:
    level = Level("node", 8, 100.0, 0.0, group_bandwidths=((2, 10.0), (4, 30.0), (8, 40.0)))
    assert [level.link_bandwidth(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [10, 10, 20, 30, 35, 40, 40]
    assert Level("node", 8, 100.0, 0.0).link_bandwidth(3) == 100


def test_redistribution_takes_the_prices() -> None:
    """The list that a price chooses costs no more, by that price, than the list with the fewest bytes."""
    price = links().price(itemsize=4)
    assert hash(price) == hash(links().price(4))
    assert price == links().price(4)
    assert price("slice", TP, 100.0) == (0.0,)
    for way in ("halo_exchange", "halo_add"):
        assert price(way, TP, 100.0) == (links().seconds("halo_exchange", TP, 400),)
    elements = 3 * 1000.0  # an all-gather over 4 of shards of 1,000 elements: a rank sends 3,000
    assert price("all_gather", TP, elements) == (links().seconds("all_gather", TP, 4 * 4000),)
    assert price("all_reduce", TP, 2 * 3 / 4 * 1000) == (pytest.approx(links().seconds("all_reduce", TP, 4 * 1000)),)
    pairs = [
        ("[64@(dp,tp), 64]", "[64, 64@(dp,tp)]"),
        ("[64@(tp,dp), 64]", "[64, 64]"),
        ("[64@dp, 64]", "[64@tp, 64@dp]"),
    ]
    for source, target in [tuple(parse_layout(text, MESH) for text in pair) for pair in pairs]:
        own, bytes_only = (redistribute(source, target, price=given) for given in (price, None))
        assert own[-1].target == target.canonical()
        assert 0 < seconds_of(own, price) <= seconds_of(bytes_only, price) * (1 + 1e-9)


def seconds_of(moves: tuple[Move, ...], price: LinkPrice) -> float:
    return sum(
        price(primitive, move.axes, move.num_sent(backward))[0]
        for move in moves
        for backward, primitive in ((False, move.entry.forward), (True, move.entry.backward))
    )


HYBRID_CUBE_MESH = (  # NVLinks between the GPUs of a DGX-1 with V100: `nvidia-smi topo -m`
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)


def num_rings(size: int) -> int:
    """The most rings through the first ``size`` GPUs that use every link once per direction."""
    cycles = [(0, *rest) for rest in permutations(range(1, size))]
    edges = [[(cycle[i], cycle[(i + 1) % size]) for i in range(size)] for cycle in cycles]
    free = [list(row[:size]) for row in HYBRID_CUBE_MESH[:size]]

    def most(first: int) -> int:
        found = 0
        for index in range(first, len(edges)):
            if all(free[a][b] for a, b in edges[index]):
                for a, b in edges[index]:
                    free[a][b] -= 1
                found = max(found, 1 + most(index))
                for a, b in edges[index]:
                    free[a][b] += 1
                if found == min(map(sum, free)):
                    break
        return found

    return most(0)


def test_bandwidths_of_v100_groups_are_the_rings_of_its_links() -> None:
    per_ring = 22.5e9
    bandwidths = dict(family("v100").levels[0].group_bandwidths)
    assert {size: num_rings(size) * per_ring for size in (2, 3, 4, 6, 7, 8)} == {
        size: bandwidth for size, bandwidth in bandwidths.items() if size != 5
    }
    assert num_rings(5) == 0  # relayed through another GPU: assumed


@pytest.mark.parametrize(
    ("devices", "max_axes", "shapes"),
    [
        (64, 2, {(8, 8)}),
        (64, 3, {(8, 4, 2), (4, 2, 8)}),
        (1024, 3, {(128, 4, 2), (64, 2, 8), (32, 4, 8), (16, 8, 8)}),
        (64, 1, {(64,)}),
        (8, 1, {(8,)}),
        (8, 3, {(2, 2, 2)}),
        (8, 5, {(2, 2, 2)}),
        (1, 2, {()}),
    ],
)
def test_mesh_shapes_respect_the_levels(devices: int, max_axes: int, shapes: set[tuple[int, ...]]) -> None:
    assert (
        set(mesh_shapes(Cluster.load("h100").with_devices(devices) if devices <= 8 else big(devices), max_axes))
        == shapes
    )


def big(devices: int) -> Cluster:
    return family("h100").with_devices(devices)


def test_with_fewer_axes_than_levels_neighbouring_levels_share_one() -> None:
    three = Cluster.load("ascend-910a-4x8")
    assert set(mesh_shapes(three, 2)) == {(8, 4), (4, 8)}
    assert set(mesh_shapes(three, 3)) == {(4, 2, 4)}
    with raises(ValueError, 0, "max_mesh_axes"):
        mesh_shapes(three, 0)


def test_every_axis_of_a_shape_is_inside_one_level() -> None:
    cluster = family("h100").with_devices(1024)
    for shape in mesh_shapes(cluster, 4):
        mesh = Mesh({f"a{i}": size for i, size in enumerate(shape)})
        own = Links(cluster, mesh)
        assert all(len(own.level_names(mesh.expand(name))) == 1 for name, _ in mesh.axes), shape


def test_affines_of_one_algorithm_are_what_nccl_would_do_on_two_nodes() -> None:
    """The formula of NCCL's tuning model, written out: ring, Simple, 2 nodes of 8."""
    levels = Cluster.load("h100-2x8").levels
    ring, _ = affine_terms("all_reduce", levels, Span((16, 2, 1)))
    steps, between = 2 * 15, 2 * 1
    assert ring[0] == pytest.approx(8.4e-6 + (steps - between) * 3.4e-6 + between * 9.6e-6)
    assert ring[1] == pytest.approx(steps / 16 / (8 * 46e9))
