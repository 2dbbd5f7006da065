"""Kernels between byte planes and coefficients: the bytes of the codec's `symbols`, whatever the escape lists say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.world import FAMILY, POISON, STEP, World, make_world, raw, recoded

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL
from cuvee.codec.entropy.token_classes import NEUTRAL
from cuvee.codec.format.streams import Escapes
from cuvee.kernels.jobs import JobField, Status
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


def assert_dequantizes(world: World, **arguments: Any) -> None:
    """To the bytes of the codec, in all of memory; `quantizer` is that of the codec alone."""
    own = {name: value for name, value in arguments.items() if name != "quantizer"}
    y, status, found = world.dequantized(**own)
    assert not any(status) and found == [len(escapes.index) for _, escapes in world.coded]
    assert raw(y) == raw(world.expected(range(len(world.coded)), **arguments))


@pytest.mark.parametrize(("name", "group", "dtype"), CASES)
def test_dequantizing_gives_what_the_codec_says(
    device: torch.device, name: str, group: str, dtype: torch.dtype
) -> None:
    world = make_world(device, MIXES[name], group)
    assert sum(len(escapes.index) for _, escapes in world.coded) > 3
    assert_dequantizes(world, dtype=dtype)


@pytest.mark.parametrize("depth", [128, 256])
def test_zeros_reach_as_deep_as_the_columns_that_are_taken_together(device: torch.device, depth: int) -> None:
    assert_dequantizes(make_world(device, [(1, 200, "each")], "layer"), depth=depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_is_added_before_rounding(device: torch.device, dtype: torch.dtype) -> None:
    world = make_world(device, [(0, 64, "mixed"), (1, 300, "each")], "head")
    base = torch.randn(world.sizes[1], generator=torch.Generator().manual_seed(0)).to(device)
    assert_dequantizes(world, dtype=dtype, base=base)


# --- escapes


def test_values_of_any_size_wrap_alike(device: torch.device) -> None:
    world = make_world(device, [(0, 33, "mixed"), (1, 32, "one")])
    rng = np.random.default_rng(0)
    for job, (planes, escapes) in enumerate(world.coded):
        value = rng.integers(-(2**31), 2**31, len(escapes.index)).astype(np.int32)
        value[:5] = [-(2**31), 2**31 - 1, 0, -128, 1][: len(value)]
        world.coded[job] = planes, Escapes(escapes.index, value)
    assert_dequantizes(world)


def test_long_lists_and_ties_of_bfloat16(device: torch.device) -> None:
    world = make_world(device, [(0, 200, "one"), (1, 150, "one")])
    assert world.of(0).steps[NEUTRAL] == 1
    world.plans = replace(world.plans, rows=world.plans.rows.clone())
    world.plans.rows[:, :4] = 0
    exact = replace(FAMILY.quantizer, shrink=np.zeros_like(FAMILY.quantizer.shrink))
    for job, (planes, _) in enumerate(world.coded):
        rows = int(world.of(job).rows[NEUTRAL])
        planes[:rows] = ESCAPE
        index = np.arange(rows * planes.shape[1], dtype=np.uint32)
        world.coded[job] = planes, Escapes(index, index.astype(np.int32) + 250)
    assert_dequantizes(world, dtype=torch.bfloat16, quantizer=exact)


@pytest.mark.parametrize("name", ["missing", "swapped", "all beyond"])
def test_a_list_that_does_not_match_is_flagged_and_harms_no_other(device: torch.device, name: str) -> None:
    """`tests/codec/damaged.py` has more of them, as blobs."""
    world = make_world(device, [(0, 17, "mixed"), (0, 33, "mixed"), (1, 17, "one")])
    planes, escapes = world.coded[1]
    i = escapes.index
    changed = {
        "missing": i[1:],
        "swapped": np.concatenate([i[:1], i[2:3], i[1:2], i[3:]]),
        "all beyond": i | 0xFFFF0000,
    }
    world.coded[1] = planes, Escapes(changed[name], np.full(len(changed[name]), 5, np.int32))
    y, status, _ = world.dequantized()
    assert status == [0, ESCAPED, 0]
    # Nothing else is written.
    world.coefficients(y, 1)[:] = torch.nan
    assert raw(y) == raw(world.expected([0, 2]))


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
    y, status, _ = world.dequantized(below=below)
    assert status == [ESCAPED, 0]
    world.coefficients(y, 0)[:] = torch.nan
    assert raw(y) == raw(world.expected([1]))


def test_bytes_that_look_like_escapes(device: torch.device) -> None:
    world = make_world(device, [(0, 33, "one"), (1, 17, "one")])
    planes, escapes = world.coded[0]
    rows = int(world.of(0).rows[NEUTRAL])
    assert len(planes) > rows, "a component is wide"
    planes[rows, 7] = ESCAPE  # low bits are no escapes
    assert_dequantizes(world)
    other = np.flatnonzero(planes[0] != ESCAPE)[0]
    planes[0, other] = ESCAPE  # none that the list names
    assert world.dequantized()[1:] == ([ESCAPED, 0], [len(escapes.index) + 1, len(world.coded[1][1].index)])


# --- encoding


def assert_quantizes(world: World) -> None:
    """To the bytes of the codec, whose escapes are counted and listed."""
    planes, counts, status = world.quantized()
    assert not any(status) and torch.equal(planes, world.plane_offsets())
    for job, (_, escapes) in enumerate(world.coded):
        rows = escapes.index // np.uint32(world.jobs[job, JobField.TOKENS])
        assert np.array_equal(counts[job].cpu().numpy(), np.bincount(rows, minlength=counts.shape[1]))
    index, value = world.listed(planes, counts)
    assert raw(index) == np.concatenate([e.index for _, e in world.coded]).tobytes()
    assert raw(value) == np.concatenate([e.value for _, e in world.coded]).tobytes()


@pytest.mark.parametrize(("name", "group"), [(name, group) for name, group, _ in CASES])
def test_quantizing_gives_the_bytes_of_the_codec(device: torch.device, name: str, group: str) -> None:
    assert_quantizes(make_world(device, MIXES[name], group))


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
    assert_quantizes(world)


def test_escapes_of_a_row_go_on_in_the_next_tile(device: torch.device) -> None:
    world = make_world(device, [(1, 530, "one")])
    world.y[0][:2, ::7] = 1e6
    world.coded[0] = recoded(world, 0)
    assert len(world.coded[0][1].index) > 150
    assert_quantizes(world)


def test_rows_without_escapes_cost_no_entries(device: torch.device) -> None:
    world = make_world(device, [(0, 33, "mixed")])
    world.y[0][:] = 0
    world.coded[0] = recoded(world, 0)
    assert not len(world.coded[0][1].index)
    assert_quantizes(world)


def test_what_quantizing_leaves_over(device: torch.device) -> None:
    world = make_world(device, [(0, 64, "mixed"), (1, 300, "each")], "head")
    y, left = world.place_y(), world.place_y()
    planes, _, status = world.quantized(y, left)
    assert not any(status) and torch.equal(planes, world.plane_offsets())
    want = y.clone()
    for job in range(len(world.coded)):
        world.coefficients(want, job).sub_(world.tensor(world.decoded(job)))
    assert raw(left) == raw(want)


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
    assert world.quantized(y)[2] == [0, 0]
    last.fill_(limit * bad)
    planes, _, status = world.quantized(y)
    assert status == [int(Status.TOO_LARGE), 0]
    # Nothing beyond the job is touched.
    at = world.planes_of(0).stop
    assert raw(planes[at:]) == raw(world.plane_offsets()[at:])
