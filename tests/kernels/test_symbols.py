"""Kernels between byte planes and coefficients: the bytes of the codec's `symbols`, whatever the escape lists say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.world import FAMILY, GAP, POISON, STEP, World, make_world, raw, recoded

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL
from cuvee.codec.entropy.token_classes import NEUTRAL
from cuvee.codec.format.streams import Escapes
from cuvee.codec.stages.reference import symbols
from cuvee.codec.support.arrays import U32
from cuvee.kernels.jobs import JobField, PlanField, Status
from cuvee.kernels.ops.symbols import level_limit

ESCAPED = int(Status.ESCAPES)
MIXES = {
    "short": [(0, 15, "mixed"), (1, 33, "one"), (0, 16, "one"), (1, 1, "one"), (0, 24, "each")],
    "tiles": [(0, 64, "mixed"), (1, 63, "each")],
    "windows": [(1, 257, "each"), (1, 272, "mixed"), (0, 200, "one")],
}
CASES = [
    ("short", "head", torch.float32), ("tiles", "unit", torch.bfloat16), ("tiles", "layer", torch.float32),
    ("windows", "head", torch.bfloat16), ("windows", "unit", torch.float32),
]  # fmt: skip


def assert_same(world: World, depth: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Kernel and reference decode to the same bytes and status; returns the coefficients."""
    got, want = (world.dequantized(kernel, dtype, depth) for kernel in (True, False))
    assert got[1:] == want[1:] and raw(got[0]) == raw(want[0])
    return got[0]


@pytest.mark.parametrize(("name", "group", "dtype"), CASES)
def test_dequantizing_gives_what_the_codec_says(
    device: torch.device, name: str, group: str, dtype: torch.dtype
) -> None:
    world = make_world(device, MIXES[name], group)
    assert sum(len(escapes.index) for _, escapes in world.coded) > 3
    y = assert_same(world, dtype=dtype).float()
    for job, (planes, escapes) in enumerate(world.coded):
        own, classed = world.own(job), world.of(job)
        back = symbols.from_planes(planes, own, escapes, classed, FAMILY.quantizer).to(dtype).float().numpy()
        found = world.coefficients(y, job).cpu().numpy()
        for column, k in enumerate(own):
            inside = world.rows_of(job, int(k))
            assert np.array_equal(found[inside, column], back[: len(inside), column])
            # Zero in the other rows of the first column of its 64, nothing below.
            first = int(own[column // 64 * 64])
            deepest = int(world.plan.arrays.plans[world.jobs[job, JobField.PLAN] + first, PlanField.EXTENT])
            assert (found[np.setdiff1d(np.arange(deepest), inside), column] == 0).all()
            assert np.isnan(found[deepest:, column]).all()


@pytest.mark.parametrize("depth", [128, 256])
def test_zeros_reach_as_deep_as_the_columns_that_are_taken_together(device: torch.device, depth: int) -> None:
    assert_same(make_world(device, [(1, 200, "each")], "layer"), depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_is_added_before_rounding(device: torch.device, dtype: torch.dtype) -> None:
    world = make_world(device, [(0, 64, "mixed"), (1, 300, "each")], "head")
    base = torch.randn(world.sizes[1], generator=torch.Generator().manual_seed(0)).to(device)
    got, want = (world.dequantized(kernel, dtype, base=base) for kernel in (True, False))
    assert raw(got[0]) == raw(want[0]) != raw(world.dequantized(True, dtype)[0])
    assert got[1] == want[1] == [0, 0]


# --- escapes


def test_values_of_any_size_wrap_alike(device: torch.device) -> None:
    world = make_world(device, [(0, 33, "mixed"), (1, 32, "one")])
    rng = np.random.default_rng(0)
    for job, (planes, escapes) in enumerate(world.coded):
        value = rng.integers(-(2**31), 2**31, len(escapes.index)).astype(np.int32)
        value[:5] = [-(2**31), 2**31 - 1, 0, -128, 1][: len(value)]
        world.coded[job] = planes, Escapes(escapes.index, value)
    assert_same(world)
    assert world.dequantized()[1] == [0, 0]


def test_long_lists_and_ties_of_bfloat16(device: torch.device) -> None:
    world = make_world(device, [(0, 200, "one"), (1, 150, "one")])
    assert world.of(0).steps[NEUTRAL] == 1
    world.plans = replace(world.plans, row_floats=torch.zeros_like(world.plans.row_floats))
    for job, (planes, _) in enumerate(world.coded):
        rows = int(world.of(job).rows[NEUTRAL])
        planes[:rows] = ESCAPE
        index = np.arange(rows * planes.shape[1], dtype=np.uint32)
        world.coded[job] = planes, Escapes(index, index.astype(np.int32) + 250)
    assert_same(world, dtype=torch.bfloat16)
    assert world.dequantized()[1] == [0, 0]


HOSTILE: dict[str, Callable[[U32], U32]] = {
    "missing": lambda i: i[:-1],
    "missing first": lambda i: i[1:],
    "none": lambda i: i[:0],
    "extra": lambda i: np.append(i, np.uint32(i[-1] + 1)),
    "extra inside": lambda i: np.insert(i, 1, i[0] + 1),
    "elsewhere": lambda i: np.append(i[:-1], i[-1] + np.uint32(1)),
    "unsorted": lambda i: i[::-1].copy(),
    "swapped": lambda i: np.concatenate([i[:1], i[2:3], i[1:2], i[3:]]),
    "twice": lambda i: np.insert(i, 1, i[0]),
    "twice instead": lambda i: np.concatenate([i[:1], i[:1], i[2:]]),
    "beyond the rows": lambda i: np.append(i[:-1], np.uint32(1 << 20)),
    "far beyond": lambda i: np.append(i[:-1], np.uint32(0xFFFFFFFF)),
    "all beyond": lambda i: np.full_like(i, 0xFFFFFFFF),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_lists_that_do_not_match_are_flagged(device: torch.device, name: str) -> None:
    world = make_world(device, [(0, 17, "mixed"), (0, 33, "mixed"), (1, 17, "one")])
    planes, escapes = world.coded[1]
    index = HOSTILE[name](escapes.index)
    world.coded[1] = planes, Escapes(index, np.full(len(index), 5, np.int32))
    got, want = world.dequantized(True), world.dequantized(False)
    assert got[1] == want[1] == [0, ESCAPED, 0]
    # The others come out right, and nothing else is written.
    for y in (got[0], want[0]):
        world.coefficients(y, 1)[:] = 0
    assert raw(got[0]) == raw(want[0])


@pytest.mark.parametrize("below", [POISON, ESCAPE])
def test_an_escape_of_a_row_that_its_column_lacks(device: torch.device, below: int) -> None:
    """Whatever stands in the planes there: nothing has been written."""
    world = make_world(device, [(1, 40, "each"), (0, 33, "mixed")])
    planes, escapes = world.coded[0]
    own, index = world.own(0), escapes.index.copy()
    # In place of the last one, of the coarsest column, which has fewer components than the finest.
    row = int(world.of(0).rows[own[-1]])
    assert row < world.of(0).rows[own[0]]
    index[-1] = row * len(own) + len(own) - 1
    order = np.argsort(index, kind="stable")
    planes[row, -1] = below
    world.coded[0] = planes, Escapes(index[order], escapes.value[order])
    got, want = world.dequantized(below=below), world.dequantized(False)
    assert got[1] == want[1] == [ESCAPED, 0]
    at = int(world.jobs[1, JobField.COEFFICIENTS])
    assert raw(got[0][at:]) == raw(want[0][at:]) and raw(got[0][:GAP]) == raw(want[0][:GAP])


def test_bytes_that_look_like_escapes(device: torch.device) -> None:
    world = make_world(device, [(0, 33, "one"), (1, 17, "one")])
    planes, escapes = world.coded[0]
    rows = int(world.of(0).rows[NEUTRAL])
    assert len(planes) > rows, "a component is wide"
    planes[rows, 7] = ESCAPE  # low bits are no escapes
    assert_same(world)
    assert world.dequantized()[1:] == ([0, 0], [len(e.index) for _, e in world.coded])
    other = np.flatnonzero(planes[0] != ESCAPE)[0]
    planes[0, other] = ESCAPE  # none that the list names
    assert world.dequantized()[1:] == ([ESCAPED, 0], [len(escapes.index) + 1, len(world.coded[1][1].index)])


# --- encoding


@pytest.mark.parametrize(("name", "group"), [(name, group) for name, group, _ in CASES])
def test_quantizing_gives_the_bytes_of_the_codec(device: torch.device, name: str, group: str) -> None:
    world = make_world(device, MIXES[name], group)
    planes, counts, status = world.quantized()
    assert not any(status) and torch.equal(planes, world.place_planes())
    for job, (_, escapes) in enumerate(world.coded):
        rows = escapes.index // np.uint32(world.jobs[job, JobField.TOKENS])
        assert np.array_equal(counts[job].cpu().numpy(), np.bincount(rows, minlength=counts.shape[1]))
    index, value = world.listed(True, planes, counts)
    assert raw(index) == np.concatenate([e.index for _, e in world.coded]).tobytes()
    assert raw(value) == np.concatenate([e.value for _, e in world.coded]).tobytes()


def assert_same_bytes(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel and reference quantize, count and list alike; returns planes and counts."""
    got, want = world.quantized(True), world.quantized(False)
    assert got[2] == want[2] and [raw(t) for t in got[:2]] == [raw(t) for t in want[:2]]
    lists = [world.listed(kernel, got[0], got[1]) for kernel in (True, False)]
    assert [raw(t) for t in lists[0]] == [raw(t) for t in lists[1]]
    return got[0], got[1]


def test_thresholds_themselves(device: torch.device) -> None:
    world = make_world(device, [(0, 48, "mixed"), (1, 40, "one")], "layer")
    own = FAMILY.quantizer
    edges = np.stack([own.dead_zone, 1 - own.rounding, 2 - own.rounding, 7 - own.rounding], axis=1)
    for job, y in enumerate(world.y):
        for column, k in enumerate(world.own(job)):
            rows, classed = world.rows_of(job, int(k)), world.of(job)
            level = classed.level_table[k, : len(rows)]
            edge = (edges[level, column % 4] * classed.steps[k]).astype(np.float32)
            toward = np.float32((0, np.inf, 0)[column % 3])
            near = edge if column % 3 == 2 else np.nextafter(edge, toward)
            y[rows, column] = near * (-1) ** (column // 4)
        world.coded[job] = recoded(world, job)
    assert torch.equal(assert_same_bytes(world)[0], world.place_planes())


def test_escapes_of_a_row_go_on_in_the_next_tile(device: torch.device) -> None:
    world = make_world(device, [(1, 530, "one")])
    world.y[0][:2, ::7] = 1e6
    _, counts = assert_same_bytes(world)
    assert int(counts.sum()) > 150


def test_rows_without_escapes_cost_no_entries(device: torch.device) -> None:
    world = make_world(device, [(0, 33, "mixed")])
    world.y[0][:] = 0
    _, counts = assert_same_bytes(world)
    assert not counts.any()


def test_what_quantizing_leaves_over(device: torch.device) -> None:
    world = make_world(device, [(0, 64, "mixed"), (1, 300, "each")], "head")
    y, found = world.place_y(), []
    for kernel in (True, False):
        left = y.clone()
        planes, counts, status = world.quantized(kernel, y, left)
        assert not any(status) and torch.equal(planes, world.place_planes())
        found.append((raw(left), raw(counts)))
        assert bool((left != y)[~y.isnan()].any())
    assert found[0] == found[1]


@pytest.mark.parametrize("step", [0.3, 1.0, 2.0 ** (1 / 64), 2.0 ** (-5 / 64)])
def test_limit_is_that_of_the_encoder(step: float) -> None:
    limit = np.float32(level_limit(step))
    assert float(limit) >= MAX_LEVEL * step > float(np.nextafter(limit, np.float32(0)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [1.0, -1.0, float("inf"), float("nan")])
def test_coefficients_too_large_for_their_class(device: torch.device, bad: float) -> None:
    world = make_world(device, [(0, 40, "mixed"), (1, 20, "mixed")])
    assert STEP == 0
    own = world.own(0)
    limit = MAX_LEVEL * float(world.of(0).steps[own[-1]])
    y = world.place_y()
    last = world.coefficients(y, 0)[0, len(own) - 1 : len(own)]
    last.fill_(np.nextafter(np.float32(limit), np.float32(0)).item())
    assert world.quantized(True, y)[2] == world.quantized(False, y)[2] == [0, 0]
    last.fill_(limit * bad)
    got, want = world.quantized(True, y), world.quantized(False, y)
    assert got[2] == want[2] == [int(Status.TOO_LARGE), 0]
    # Nothing beyond the job is touched.
    at = world.planes_of(0).stop
    assert raw(got[0][at:]) == raw(want[0][at:])
