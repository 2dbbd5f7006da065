"""Kernels between byte planes and coefficients: the bytes of `codec.symbols`, whatever the escape lists say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.kernels.naive.symbols import dequantize_reference, list_escapes_reference, quantize_reference

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL, MAX_SHIFT, CodingPlan, Quantizer
from cuvee.codec.entropy.family import TABLES, coding_plan, default_family
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.format.streams import Escapes
from cuvee.codec.stages.reference import symbols
from cuvee.codec.support.arrays import F32, U8, U32
from cuvee.kernels.jobs import JobField, Status
from cuvee.kernels.ops.arguments import CodableBytes, DevicePlans
from cuvee.kernels.ops.dequantize import MIN_DEPTH, dequantize
from cuvee.kernels.ops.quantize import list_escapes, quantize
from cuvee.kernels.ops.symbols import level_limit

FAMILY_TABLES = default_family().tables
WIDEST = TABLES - 1 + 4 * MAX_SHIFT
POISON = 0xAB


def quantizer(seed: int = 0) -> Quantizer:
    """Different thresholds and reconstructions for every table."""
    rng = np.random.default_rng(seed)
    rounding = rng.uniform(0.25, 0.5, TABLES).astype(np.float32)
    dead = (1 - rounding + rng.uniform(0, 0.2, TABLES)).astype(np.float32)
    return Quantizer(dead, rounding, rng.uniform(-0.25, 0.25, (TABLES, 2)).astype(np.float32))


def plan_of(rows: int, seed: int = 0) -> CodingPlan:
    """Rows from the narrowest table to the widest component, in no order."""
    rng = np.random.default_rng(seed)
    return coding_plan(rng.permutation(np.linspace(0, WIDEST, rows).round().astype(np.int32)))


def coefficients(plan: CodingPlan, tokens: int, step: float, seed: int = 0) -> F32:
    """As large as the plan expects, with some on and next to thresholds, zeros of both signs, and far outside."""
    rng = np.random.default_rng(seed)
    deviation = step * 2.0 ** (plan.level_table / 4.0 - 2 + plan.shift)
    y = rng.laplace(0, deviation[:, None] * 0.7, (len(plan.shift), tokens)).astype(np.float32)
    special = np.array([0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 0.6, 1.0, -1.0, 127.5, -128.5, 3e4, -1e6, 1e7], np.float32)
    where = rng.permutation(y.size)[: len(special)]
    y.ravel()[where] = special[: len(where)] * np.float32(step)
    return y


@dataclass
class Case:
    """Some jobs as the kernels take them; every array has poisoned gaps between the jobs."""

    plans: Sequence[CodingPlan]
    steps: Sequence[float]
    jobs: list[list[int]]
    escapes: list[Escapes]
    coded: list[U8]
    source: list[F32]
    device: torch.device
    gap: int = 16

    def __post_init__(self) -> None:
        own = quantizer()
        rows: list[list[int]] = []
        tables: list[np.ndarray[tuple[int, ...], np.dtype[np.uint16]]] = []
        floats, ints = [np.full((3, 4), np.nan)], [np.full((3, 4), 7)]
        at_row, at_table = 3, 0
        maps: list[int] = []
        for plan in self.plans:
            count = len(plan.shift)
            rows.append([plan.planes, count, at_table, at_row, count, len(maps)])
            maps += range(count)
            tables.append(plan.tables)
            low = np.full(count, -1)
            low[plan.wide] = count + np.arange(len(plan.wide))
            table = plan.level_table
            floats.append(np.column_stack([own.shrink[table], own.dead_zone[table], own.rounding[table]]))
            ints.append(np.column_stack([plan.shift, low, np.arange(count), np.zeros(count)]))
            at_row, at_table = at_row + count, at_table + plan.planes
        self.plan_table = self.tensor(np.array(rows, np.int64))
        self.row_floats = self.tensor(np.concatenate(floats).astype(np.float32))
        self.row_ints = self.tensor(np.concatenate(ints).astype(np.int32))
        self.row_maps = self.tensor(np.array([*maps, *[-1] * 16], np.int32))
        self.step_table = self.tensor(np.array(self.steps, np.float32))
        self.inverses = self.tensor(np.array([np.float32(1.0 / step) for step in self.steps]))
        self.limits = self.tensor(np.array([level_limit(step) for step in self.steps], np.float32))
        self.tables = self.tensor(np.concatenate(tables).astype(np.int32))
        self.codable = CodableBytes(self.tensor(FAMILY_TABLES.freq), self.tensor(FAMILY_TABLES.reach))
        self.max_rows = max(len(plan.shift) for plan in self.plans)
        self.max_tokens = max(job[JobField.TOKENS] for job in self.jobs)
        self.classes = torch.zeros(self.max_tokens, dtype=torch.uint8, device=self.device)  # of all jobs
        self.place()

    def tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def place(self) -> None:
        """Lay out planes, coefficients and escape lists, and fill in where they are."""
        planes, levels, lists = self.gap, self.gap, 2
        for job, escapes in zip(self.jobs, self.escapes, strict=True):
            plan = self.plans[job[JobField.PLAN]]
            job[JobField.PLANES], job[JobField.COEFFICIENTS], job[JobField.ESCAPES] = planes, levels, lists
            planes += plan.planes * job[JobField.TOKENS] + self.gap
            levels += len(plan.shift) * job[JobField.STRIDE] + self.gap
            lists += 2 * len(escapes.index) + 1
        self.sizes = planes, levels, lists
        self.job_table = self.tensor(np.array(self.jobs, np.int64))

    def data(self) -> torch.Tensor:
        words = np.full(self.sizes[2], POISON, np.uint32)
        for job, escapes in zip(self.jobs, self.escapes, strict=True):
            both = np.concatenate([escapes.index, escapes.value.view(np.uint32)])
            words[job[JobField.ESCAPES] : job[JobField.ESCAPES] + len(both)] = both
        return self.tensor(words.view(np.uint8))

    def planes(self) -> torch.Tensor:
        out = np.full(self.sizes[0], POISON, np.uint8)
        for job, coded in zip(self.jobs, self.coded, strict=True):
            out[job[JobField.PLANES] : job[JobField.PLANES] + coded.size] = coded.ravel()
        return self.tensor(out)

    def y(self) -> torch.Tensor:
        out = np.full(self.sizes[1], np.nan, np.float32)
        for job, source in zip(self.jobs, self.source, strict=True):
            at, stride = job[JobField.COEFFICIENTS], job[JobField.STRIDE]
            out[at : at + len(source) * stride].reshape(len(source), stride)[:, : job[JobField.TOKENS]] = source
        return self.tensor(out)

    @property
    def device_plans(self) -> DevicePlans:
        return DevicePlans(
            self.plan_table, self.tables, self.row_floats, self.row_ints, self.row_maps, self.step_table,
            self.inverses, self.limits,
        )  # fmt: skip

    def dequantized(self, kernel: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = torch.full((self.sizes[1],), float("nan"), dtype=dtype, device=self.device)
        found, status = (torch.zeros(len(self.jobs), dtype=torch.int32, device=self.device) for _ in range(2))
        (dequantize if kernel else dequantize_reference)(
            self.data(), self.job_table, self.device_plans, self.classes, self.planes(), y, status, found,
            self.max_rows, self.max_tokens, MIN_DEPTH,
        )  # fmt: skip
        return y, status, found

    def quantized(self, kernel: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        planes = torch.full((self.sizes[0],), POISON, dtype=torch.uint8, device=self.device)
        counts = torch.full((len(self.jobs), self.max_rows), -1, dtype=torch.int32, device=self.device)
        status = torch.zeros(len(self.jobs), dtype=torch.int32, device=self.device)
        (quantize if kernel else quantize_reference)(
            self.y(),
            self.job_table,
            self.device_plans,
            self.codable,
            self.classes,
            planes,
            counts,
            status,
            self.max_rows,
        )
        return planes, counts, status

    def listed(self, kernel: bool, planes: torch.Tensor, starts: torch.Tensor, total: int) -> list[torch.Tensor]:
        index = torch.from_numpy(np.full(total + 5, POISON, np.uint32)).to(self.device)
        value = torch.full((total + 5,), POISON, dtype=torch.int32, device=self.device)
        (list_escapes if kernel else list_escapes_reference)(
            self.y(), self.job_table, self.device_plans, self.classes, planes, starts, index[:total], value[:total],
            self.max_rows,
        )  # fmt: skip
        return [index, value]

    def written(self, index: int) -> slice:
        """The coefficients of a job."""
        job = self.jobs[index]
        return slice(
            job[JobField.COEFFICIENTS],
            job[JobField.COEFFICIENTS] + len(self.plans[job[JobField.PLAN]].shift) * job[JobField.STRIDE],
        )


def make_case(
    device: torch.device,
    plans: Sequence[CodingPlan],
    sizes: Sequence[tuple[int, int]],
    steps: Sequence[float] = (1.0, 0.3, 777.0, 2.0**-13 / 3),
    stride: int = 16,
    gap: int = 16,
) -> Case:
    """Jobs of (plan, tokens), coded by the reference."""
    jobs, escapes, coded, source = [], [], [], []
    for seed, (which, tokens) in enumerate(sizes):
        plan = plans[which]
        y = coefficients(plan, tokens, steps[which], seed)
        levels = symbols.quantize(y, steps[which], plan, quantizer())
        packed, listed = symbols.pack(levels, plan, default_family().tables)
        job = [0] * len(JobField)
        job[JobField.TOKENS], job[JobField.PLAN], job[JobField.DEEPEST] = tokens, which, which
        job[JobField.STRIDE] = -(-tokens // stride) * stride
        job[JobField.ESCAPE_COUNT] = len(listed.index)
        jobs.append(job)
        escapes.append(listed)
        coded.append(packed)
        source.append(y)
    return Case(plans, steps[: len(plans)], jobs, escapes, coded, source, device, gap)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


# Rows of each plan, then plan and tokens of each job; 16, 64 and 256 tokens take the aligned path.
MIXES = {
    "one plan": ([9], [(0, 63), (0, 64)]),
    "several tiles": ([11], [(0, 65), (0, 256), (0, 257)]),
    "short": ([3, 1, 10], [(0, 15), (1, 33), (0, 16), (1, 1), (2, 24)]),
    "all": ([8, 9, 2, 1], [(1, 15), (0, 257), (2, 48), (3, 1), (1, 32)]),
}


def mixed(device: torch.device, name: str, stride: int = 16, gap: int = 16) -> Case:
    rows, sizes = MIXES[name]
    return make_case(device, [plan_of(count, i) for i, count in enumerate(rows)], sizes, stride=stride, gap=gap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(MIXES))
def test_dequantize_gives_the_bytes_of_the_reference(device: torch.device, name: str, dtype: torch.dtype) -> None:
    case = mixed(device, name)
    assert sum(len(e.index) for e in case.escapes) > 3
    got, want = case.dequantized(True, dtype), case.dequantized(False, dtype)
    assert not want[1].any() and torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2])
    assert raw(got[0]) == raw(want[0])


@pytest.mark.parametrize(("stride", "gap"), [(1, 3), (8, 8), (24, 4), (16, 9), (256, 16)])
def test_dequantize_at_any_offset_and_stride(device: torch.device, stride: int, gap: int) -> None:
    case = mixed(device, "short", stride, gap)
    got, want = case.dequantized(True, torch.bfloat16), case.dequantized(False, torch.bfloat16)
    assert raw(got[0]) == raw(want[0])


def test_quantize_and_back_is_the_codec(device: torch.device) -> None:
    case = mixed(device, "all")
    y, _, _ = case.dequantized(True, torch.float32)
    for index, job in enumerate(case.jobs):
        plan, tokens = case.plans[job[JobField.PLAN]], job[JobField.TOKENS]
        levels = symbols.quantize(case.source[index], case.steps[job[JobField.PLAN]], plan, quantizer())
        want = symbols.dequantize(levels, case.steps[job[JobField.PLAN]], plan, quantizer())
        got = y[case.written(index)].view(len(want), -1).cpu().numpy()
        assert got[:, :tokens].tobytes() == want.tobytes() and not got[:, tokens:].any()


def test_hostile_escape_values_wrap_alike(device: torch.device) -> None:
    case = make_case(device, [plan_of(9)], [(0, 33), (0, 32)])
    rng = np.random.default_rng(0)
    case.coded[0][:9][rng.random((9, 33)) < 0.5] = ESCAPE
    for number, coded in enumerate(case.coded):
        index = np.flatnonzero(coded[:9] == ESCAPE).astype(np.uint32)
        value = rng.integers(-(2**31), 2**31, len(index)).astype(np.int32)
        value[:5] = [-(2**31), 2**31 - 1, 0, -128, 1][: len(index)]
        case.escapes[number] = Escapes(index, value)
        case.jobs[number][JobField.ESCAPE_COUNT] = len(index)
    case.place()
    got, want = case.dequantized(True, torch.float32), case.dequantized(False, torch.float32)
    assert not got[1].any() and not want[1].any()
    assert raw(got[0]) == raw(want[0])


def test_long_lists_and_ties_of_bfloat16(device: torch.device) -> None:
    case = make_case(device, [plan_of(3), plan_of(2)], [(0, 200), (1, 150)], steps=[1.0, 1.0])
    case.row_floats[:, :2] = 0
    for number, rows in enumerate((3, 2)):
        case.coded[number][:rows] = ESCAPE
        count = rows * case.jobs[number][JobField.TOKENS]
        case.escapes[number] = Escapes(np.arange(count, dtype=np.uint32), np.arange(count, dtype=np.int32) + 250)
        case.jobs[number][JobField.ESCAPE_COUNT] = count
    case.place()
    got, want = case.dequantized(True, torch.bfloat16), case.dequantized(False, torch.bfloat16)
    assert not got[1].any() and raw(got[0]) == raw(want[0])


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
    "beyond the rows": lambda i: np.append(i[:-1], np.uint32(9 * 33)),
    "far beyond": lambda i: np.append(i[:-1], np.uint32(0xFFFFFFFF)),
    "all beyond": lambda i: np.full_like(i, 0xFFFFFFFF),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_lists_that_do_not_match_are_flagged(device: torch.device, name: str) -> None:
    case = make_case(device, [plan_of(9)], [(0, 17), (0, 33), (0, 17)])
    damaged = HOSTILE[name](case.escapes[1].index)
    case.escapes[1] = Escapes(damaged, np.full(len(damaged), 5, np.int32))
    case.jobs[1][JobField.ESCAPE_COUNT] = len(damaged)
    case.place()
    got, want = case.dequantized(True, torch.float32), case.dequantized(False, torch.float32)
    assert want[1].tolist() == [0, int(Status.ESCAPES), 0]
    assert torch.equal(got[1], want[1])
    # The others come out right, and nothing else is written.
    for tensor in (got[0], want[0]):
        tensor[case.written(1)] = 0
    assert raw(got[0]) == raw(want[0])


def test_low_bits_are_no_escapes(device: torch.device) -> None:
    case = make_case(device, [coding_plan(np.array([WIDEST, 4], np.int32))], [(0, 33)], steps=[1.0])
    case.coded[0][:2] = 0
    case.coded[0][0, 5] = case.coded[0][2, 7] = ESCAPE
    case.escapes[0] = Escapes(np.array([2 * 33 + 7], np.uint32), np.zeros(1, np.int32))
    case.jobs[0][JobField.ESCAPE_COUNT] = 1
    case.place()
    _, status, found = case.dequantized(True, torch.float32)
    assert status.tolist() == [int(Status.ESCAPES)] and found.tolist() == [1]


def test_escape_bytes_without_a_list_are_flagged(device: torch.device) -> None:
    case = make_case(device, [plan_of(9)], [(0, 33), (0, 17)])
    case.coded[0][4, 7] = ESCAPE if case.coded[0][4, 7] != ESCAPE else 0
    _, status, found = case.dequantized(True, torch.float32)
    assert status.tolist() == [int(Status.ESCAPES), 0]
    assert found.tolist() == [int((coded[:9] == ESCAPE).sum()) for coded in case.coded]


# --- encoding


@pytest.mark.parametrize(("stride", "gap"), [(16, 16), (1, 3)])
@pytest.mark.parametrize("name", sorted(MIXES))
def test_quantize_gives_the_bytes_of_the_reference(device: torch.device, name: str, stride: int, gap: int) -> None:
    case = mixed(device, name, stride, gap)
    got, want = case.quantized(True), case.quantized(False)
    for mine, theirs in zip(got, want, strict=True):
        assert raw(mine) == raw(theirs)
    assert raw(got[0]) == raw(case.planes())
    flat = got[1].flatten().to(torch.int64)
    starts, total = (flat.cumsum(0) - flat).view(got[1].shape), int(flat.sum())
    assert total == sum(len(e.index) for e in case.escapes) > 3
    lists = case.listed(True, got[0], starts, total)
    assert [raw(t) for t in lists] == [raw(t) for t in case.listed(False, got[0], starts, total)]
    assert raw(lists[0][:total]) == np.concatenate([e.index for e in case.escapes]).tobytes()
    assert raw(lists[1][:total]) == np.concatenate([e.value for e in case.escapes]).tobytes()


def test_bytes_that_a_table_leaves_out_escape(device: torch.device) -> None:
    case = make_case(device, [plan_of(9)], [(0, 70)], steps=[0.3])
    within, _, _ = case.quantized(True)
    freq = FAMILY_TABLES.freq.copy()
    freq[:, 2] += freq[:, 1]
    freq[:, 1] = 0
    assert (EntropyTables(freq, FAMILY_TABLES.prob_bits).reach == (0, -1)).all()
    case.codable = CodableBytes(case.tensor(freq), None)
    got, want = case.quantized(True), case.quantized(False)
    assert [raw(t) for t in got] == [raw(t) for t in want]
    assert int(got[1].sum()) > int((within == 1).sum()) // 2 > 9


def test_quantize_agrees_on_the_thresholds_themselves(device: torch.device) -> None:
    own, plan = quantizer(), plan_of(57)
    case = make_case(device, [plan], [(0, 18)], steps=[0.3])
    edge = np.stack([own.dead_zone, 1 - own.rounding, 2 - own.rounding, 7 - own.rounding], axis=1)[plan.level_table]
    edge = (edge * np.float32(0.3)).astype(np.float32)
    near = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
    case.source[0] = np.concatenate([*near, -edge, edge[:, :2] * 40], axis=1)
    assert [raw(t) for t in case.quantized(True)] == [raw(t) for t in case.quantized(False)]


def test_escapes_of_a_row_go_on_in_the_next_tile(device: torch.device) -> None:
    case = make_case(device, [plan_of(5)], [(0, 530)], steps=[1.0])
    case.source[0][[0, 4], ::7] = 1e7
    planes, counts, status = case.quantized(True)
    assert [raw(t) for t in (planes, counts, status)] == [raw(t) for t in case.quantized(False)]
    flat = counts.flatten().to(torch.int64)
    starts, total = (flat.cumsum(0) - flat).view(counts.shape), int(flat.sum())
    assert total > 150
    lists = case.listed(True, planes, starts, total)
    assert [raw(t) for t in lists] == [raw(t) for t in case.listed(False, planes, starts, total)]


def test_rows_without_escapes_cost_no_entries(device: torch.device) -> None:
    case = make_case(device, [plan_of(9)], [(0, 33)])
    case.source[0] = np.zeros_like(case.source[0])
    planes, counts, status = case.quantized(True)
    assert not counts.any() and not status.any()
    starts = torch.zeros(1, 9, dtype=torch.int64, device=device)
    index, value = case.listed(True, planes, starts, 0)
    assert (index.cpu().numpy() == POISON).all() and (value == POISON).all()


@pytest.mark.parametrize("step", [0.3, 1.0, 2.0 ** (1 / 64), 2.0 ** (-5 / 64)])
def test_limit_is_that_of_the_encoder(step: float) -> None:
    limit = np.float32(level_limit(step))
    assert float(limit) >= MAX_LEVEL * step > float(np.nextafter(limit, np.float32(0)))


@pytest.mark.parametrize("bad", ["limit", "-limit", "inf", "nan", "below"])
def test_what_is_too_large_is_flagged(device: torch.device, bad: str) -> None:
    step = 2.0 ** (1 / 64)
    case = make_case(device, [plan_of(6)], [(0, 17), (0, 17)], steps=[step])
    limit = np.float32(level_limit(step))
    below = np.nextafter(limit, np.float32(0))
    values = {"limit": limit, "-limit": -limit, "inf": np.inf, "nan": np.nan, "below": -below}
    case.source[1][4, 9] = values[bad]
    got, want = case.quantized(True), case.quantized(False)
    assert want[2].tolist() == [0, 0 if bad == "below" else int(Status.TOO_LARGE)]
    assert torch.equal(got[2], want[2])
    end = case.jobs[1][JobField.PLANES] if want[2][1] else case.sizes[0]
    assert raw(got[0][:end]) == raw(want[0][:end])
    assert (got[0][case.sizes[0] - case.gap :] == POISON).all()
    if not want[2][1]:
        assert raw(got[1]) == raw(want[1])
