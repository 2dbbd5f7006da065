"""Sections of a learned profile as jobs of the kernels: plans, columns of several classes, coefficients and planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.codec.reference import symbols

from cuvee.codec.entropy.coding_plan import Quantizer
from cuvee.codec.entropy.family import default_family
from cuvee.codec.entropy.token_classes import CLASSES, NEUTRAL, ClassedPlan, class_frequencies
from cuvee.codec.format.streams import Escapes
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.sections import partition
from cuvee.codec.support.arrays import F32, U8
from cuvee.kernels.class_streams import sort_columns
from cuvee.kernels.jobs import JobField, PlanField, job_table
from cuvee.kernels.ops.arguments import DevicePlans, PlaneJobs
from cuvee.kernels.ops.dequantize import MIN_DEPTH, dequantize
from cuvee.kernels.ops.quantize import list_escapes, quantize
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.workspace import coefficient_offsets, plane_offsets, running_offsets

FAMILY = default_family()
POISON = 0xAB
GAP = 16
STEP = 0
SPECIAL = np.array([0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 1.0, -1.0, 127.5, -128.5, 3e4, -1e6], np.float32)  # steps
LAYOUT = KVLayout("tiny", (LayerLayout(1, 6, 4, Rope((1.0, 0.1))), LayerLayout(2, 5, 3, None)), "float32", 4096)


@cache
def profile_of(group: str = "unit", top: int = 10) -> Profile:
    """A profile whose components fall from some `top` octaves over the step, with the blocks that the group has.

    The finest classes of its first section are not served: components would be too many steps wide.
    """
    rng = np.random.default_rng(0)
    learned = []
    for index, section in enumerate(partition(LAYOUT, group)):
        scale, maps = [], []
        for block, size in enumerate(section.blocks):
            scale.append(np.sort(64 * (top - index) - rng.integers(0, 64 * 14, size))[::-1] - 32 * block)
            basis = torch.linalg.qr(torch.from_numpy(rng.normal(size=(size, size))))[0]
            maps.append(BlockMap.of(basis.T, scale[-1].astype(np.int16)))
        n = section.values
        basis = SectionBasis(torch.zeros(n), torch.ones(2, n), tuple(maps))
        freq = class_frequencies(np.arange(CLASSES)[:: 1 if index else -1] + 1.0)
        widths = np.linspace(3 - index, -40, CLASSES).round().astype(np.int16)
        learned.append(SectionProfile(basis, np.concatenate(scale).astype(np.int16), None, freq, widths))
    return Profile(LAYOUT, group, "fitted", FAMILY, tuple(learned), min_step_index=-10 * 64)


@cache
def plan_of(group: str, device: torch.device) -> TransformPlan:
    return TransformPlan(profile_of(group), STEP, device, torch.float32)


def mix(tokens: int, kind: str, finest: int, seed: int = 0) -> U8:
    """Classes of tokens: all of one class, as different as can be, or as they come."""
    if kind == "one":
        return np.full(tokens, max(NEUTRAL, finest), np.uint8)
    if kind == "each":
        return (finest + np.arange(tokens)[::-1] % (CLASSES - finest)).astype(np.uint8)
    return np.clip(np.round(np.random.default_rng(seed).normal(8, 1.5, tokens)), finest, CLASSES - 1).astype(np.uint8)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@dataclass
class World:
    """Jobs whose tokens have classes; what they own lies apart."""

    plan: TransformPlan
    device: torch.device
    sections: list[int]
    jobs: npt.NDArray[np.int64]
    columns: U8
    order: U8
    sizes: tuple[int, int]  # of all planes and of all coefficients
    plans: DevicePlans = field(init=False)
    reach: torch.Tensor = field(init=False)
    y: list[F32] = field(default_factory=list)  # `[extent, T]` of each job, in coding order
    coded: list[tuple[U8, Escapes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plans = self.plan.device_plans
        self.reach = self.tensor(FAMILY.tables.reach)

    def of(self, job: int) -> ClassedPlan:
        return self.plan.coding[0].sections[self.sections[job]].classed

    def own(self, job: int) -> U8:
        """Classes of the columns of a job."""
        first = self.jobs[job, JobField.COLUMNS]
        return self.columns[first : first + self.jobs[job, JobField.TOKENS]]

    def tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def poison(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.full((count * dtype.itemsize,), POISON, dtype=torch.uint8, device=self.device).view(dtype)

    def flags(self) -> torch.Tensor:
        return torch.zeros(len(self.jobs), dtype=torch.int32, device=self.device)

    def extent(self, job: int) -> int:
        """Rows of coefficients of a job."""
        return int(self.plan.plans[self.jobs[job, JobField.DEEPEST], PlanField.EXTENT])

    def coefficients(self, y: torch.Tensor, job: int) -> torch.Tensor:
        """The view `[extent, STRIDE]` of a job."""
        at, stride = self.jobs[job, [JobField.COEFFICIENTS, JobField.STRIDE]]
        return y[at : at + self.extent(job) * stride].view(-1, stride)

    def rows_of(self, job: int, k: int) -> npt.NDArray[np.int64]:
        """Row of coefficients of each component of a class."""
        coding = self.plan.coding[0].sections[self.sections[job]]
        begin = np.cumsum([0, *coding.class_ranks[coding.classed.finest]])
        parts = [b + np.arange(r) for b, r in zip(begin, coding.class_ranks[k], strict=False)]
        rows: npt.NDArray[np.int64] = np.concatenate(parts).astype(np.int64)
        return rows

    def planes_of(self, job: int) -> slice:
        first = self.jobs[job, JobField.PLANES]
        return slice(first, first + self.coded[job][0].size)

    def plane_offsets(self, below: int = POISON) -> torch.Tensor:
        """The planes of all jobs; poison between them, and `below` the last plane of a column."""
        out = self.poison(self.sizes[0])
        for job, (coded, _) in enumerate(self.coded):
            kept = self.of(job).planes[self.own(job)] > np.arange(len(coded))[:, None]
            out[self.planes_of(job)] = self.tensor(np.where(kept, coded, below).astype(np.uint8).ravel())
        return out

    def coded_jobs(self, planes: torch.Tensor) -> PlaneJobs:
        return PlaneJobs(self.tensor(self.jobs), self.plans, self.tensor(self.columns), planes)

    def place_y(self) -> torch.Tensor:
        out = torch.full((self.sizes[1],), float("nan"), device=self.device)
        for job, y in enumerate(self.y):
            self.coefficients(out, job)[:, : y.shape[1]] = self.tensor(y)
        return out

    def place_escapes(self) -> torch.Tensor:
        """The lists of all jobs; sets the fields of the jobs that say where."""
        words = [np.full(1, POISON, np.uint32)]
        for job, (_, escapes) in zip(self.jobs, self.coded, strict=True):
            job[JobField.ESCAPES], job[JobField.ESCAPE_COUNT] = sum(map(len, words)), len(escapes.index)
            words += [escapes.index, escapes.value.view(np.uint32), np.full(1, POISON, np.uint32)]
        return self.tensor(np.concatenate(words).view(np.uint8))

    def dequantized(
        self, dtype: torch.dtype = torch.float32, depth: int = MIN_DEPTH, base: torch.Tensor | None = None,
        below: int = POISON,
    ) -> tuple[torch.Tensor, list[int], list[int]]:  # fmt: skip
        """Coefficients, status and found ESCAPE bytes of each job."""
        data, status, found = self.place_escapes(), self.flags(), self.flags()
        y = torch.full((self.sizes[1],), float("nan"), dtype=dtype, device=self.device)
        dequantize(
            data, self.coded_jobs(self.plane_offsets(below)), y, status, found,
            int(self.plan.plans[:, PlanField.EXTENT].max()), int(self.jobs[:, JobField.TOKENS].max()),
            depth, base,
        )  # fmt: skip
        return y, status.tolist(), found.tolist()

    def decoded(self, job: int, quantizer: Quantizer = FAMILY.quantizer) -> F32:
        """What the codec makes of a job's planes, `[extent, STRIDE]`; zero where a column has no component."""
        own, (planes, escapes) = self.own(job), self.coded[job]
        back = symbols.from_planes(planes, own, escapes, self.of(job), quantizer).numpy()
        dense = np.zeros((self.extent(job), self.jobs[job, JobField.STRIDE]), np.float32)
        for k in np.unique(own):
            at, rows = np.flatnonzero(own == k), self.rows_of(job, int(k))
            dense[np.ix_(rows, at)] = back[: len(rows), at]
        return dense

    def expected(
        self, jobs: Sequence[int], dtype: torch.dtype = torch.float32, depth: int = MIN_DEPTH,
        base: torch.Tensor | None = None, quantizer: Quantizer = FAMILY.quantizer,
    ) -> torch.Tensor:  # fmt: skip
        """The coefficients of some jobs, to the depth of the first of `depth` columns; NaN elsewhere."""
        y = torch.full((self.sizes[1],), float("nan"), dtype=dtype, device=self.device)
        for job in jobs:
            dense, own = self.tensor(self.decoded(job, quantizer)), self.own(job)
            dense = dense if base is None else dense + self.coefficients(base, job)
            for start in range(0, len(own), depth):
                plan = self.jobs[job, JobField.PLAN] + own[start]
                run = slice(0, self.plan.plans[plan, PlanField.EXTENT]), slice(start, start + depth)
                self.coefficients(y, job)[run] = dense[run].to(dtype)
        return y

    def quantized(
        self, y: torch.Tensor | None = None, left: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Planes, counts and status."""
        max_rows = int(self.plan.plans[:, PlanField.ROWS].max())
        planes, status = self.poison(self.sizes[0]), self.flags()
        counts = torch.full((len(self.jobs), max_rows), -1, dtype=torch.int32, device=self.device)
        quantize(
            self.place_y() if y is None else y, self.coded_jobs(planes), self.reach, counts, status, max_rows, left,
        )  # fmt: skip
        return planes, counts, status.tolist()

    def listed(self, planes: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Escapes of all jobs; checks that nothing is written behind them."""
        flat = counts.flatten().to(torch.int64)
        starts, total = (flat.cumsum(0) - flat).view(counts.shape), int(flat.sum())
        index, value = self.poison(total + 5, torch.uint32), self.poison(total + 5, torch.int32)
        list_escapes(
            self.place_y(), self.coded_jobs(planes), starts, index[:total], value[:total], counts.shape[1],
        )  # fmt: skip
        assert raw(index[total:]) == raw(value[total:]) == bytes([POISON] * 20)
        return index[:total], value[:total]


def make_world(device: torch.device, jobs: Sequence[tuple[int, int, str]], group: str = "unit", seed: int = 0) -> World:
    """Jobs of (section, tokens, mix of classes), coded by the reference."""
    plan = plan_of(group, device)
    rng = np.random.default_rng(seed)
    sections, tokens = (np.array([job[i] for job in jobs], np.int64) for i in (0, 1))
    classes = [
        mix(size, kind, int(plan.finest[0, section]), seed + number)
        for number, (section, size, kind) in enumerate(jobs)
    ]
    first, _ = running_offsets(tokens)
    columns, order, counts = sort_columns(np.concatenate(classes), first, tokens)
    deepest = plan.rows(sections, (counts > 0).argmax(1))
    plans, gaps = plan.plans[deepest], GAP * np.arange(1, len(jobs) + 1)
    planes, plane_bytes = plane_offsets(plans[:, PlanField.PLANES], tokens)
    at, stride, coefficients = coefficient_offsets(plans[:, PlanField.EXTENT], tokens)
    rows = job_table(
        len(jobs), tokens=tokens, plan=plan.rows(sections), deepest=deepest, columns=first, planes=planes + gaps,
        coefficients=at + gaps, stride=stride,
    ).copy()  # fmt: skip
    room = GAP * (len(jobs) + 2)
    world = World(plan, device, sections.tolist(), rows, columns, order, (plane_bytes + room, coefficients + room))
    for job in range(len(jobs)):
        code(world, job, rng)
    return world


def code(world: World, job: int, rng: np.random.Generator) -> None:
    """Draw coefficients as large as expected, special ones among them, and let the reference code them."""
    own, classed = world.own(job), world.of(job)
    y = rng.normal(0, 1e6, (world.extent(job), len(own))).astype(np.float32)  # what no column has may be anything
    for k in np.unique(own):
        at, rows = np.flatnonzero(own == k), world.rows_of(job, int(k))
        level = classed.level_table[k, : len(rows)] / 4.0 - 2 + classed.shift[k, : len(rows)]
        values = rng.laplace(0, 0.7 * classed.steps[k] * 2.0 ** level[:, None], (len(rows), len(at))).astype(np.float32)
        values[rng.random(values.shape) < 0.05] *= 40  # some escape
        where = rng.permutation(values.size)[: len(SPECIAL)]
        values.ravel()[where] = SPECIAL[: len(where)] * classed.steps[k]
        y[np.ix_(rows, at)] = values
    world.y.append(y)
    world.coded.append(recoded(world, job))


def recoded(world: World, job: int) -> tuple[U8, Escapes]:
    """What the reference makes of the coefficients of a job."""
    own, classed = world.own(job), world.of(job)
    dense = np.zeros((int(classed.rows[own].max(initial=0)), len(own)), np.float32)
    for k in np.unique(own):
        at, rows = np.flatnonzero(own == k), world.rows_of(job, int(k))
        dense[: len(rows), at] = world.y[job][np.ix_(rows, at)]
    return symbols.to_planes(dense, own, classed, FAMILY.quantizer, FAMILY.tables)
