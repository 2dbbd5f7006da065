"""Plain references of `ops/dequantize.py` and `ops/quantize.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.coding_plan import ESCAPE, CodingPlan, Quantizer
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.errors import CorruptError
from cuvee.codec.format.streams import Escapes
from cuvee.codec.stages.reference import symbols
from cuvee.codec.support.arrays import I32
from cuvee.kernels.jobs import JobField, PlanField, Status
from cuvee.kernels.ops.arguments import CodableBytes, DevicePlans


def host_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array, of any dtype that NumPy has."""
    return tensor.detach().cpu().numpy()


def _without_classes(jobs: torch.Tensor) -> list[int]:
    return [index for index, job in enumerate(jobs.tolist()) if job[JobField.CLASS_PLAN] <= 0]


class JobPart:
    """One job with its plan in the terms of `codec.symbols`."""

    def __init__(self, jobs: torch.Tensor, plans: DevicePlans, index: int) -> None:
        self.job = jobs[index].tolist()
        plan = plans.plans[self.job[JobField.PLAN]].tolist()
        self.plan_index = self.job[JobField.PLAN]
        self.rows, self.count = plan[PlanField.ROWS], plan[PlanField.PLANES]
        self.tables = plan[PlanField.TABLES]
        self.tokens = self.job[JobField.TOKENS]
        components = slice(plan[PlanField.ROW], plan[PlanField.ROW] + self.rows)
        self._floats, ints = host_array(plans.row_floats[components]), host_array(plans.row_ints[components])
        # The planes as `codec.symbols` orders them: high parts, then the low bits of the wide components.
        self.order = np.concatenate([np.arange(self.rows), ints[ints[:, 0] > 0, 1]])
        self.y_rows = torch.from_numpy(ints[:, 2].astype(np.int64))
        self._shift = ints[:, 0].astype(np.uint8)
        self.step = float(plans.steps[self.plan_index])
        # Rounded to float32, its inverse is `inverse` again.
        self.coding_step = 1.0 / float(plans.inverses[self.plan_index])

    @property
    def quantizer(self) -> Quantizer:
        """That of the job's components."""
        return Quantizer(self._floats[:, 2], self._floats[:, 3], self._floats[:, :2])

    def plan(self, tables: torch.Tensor | None = None) -> CodingPlan:
        """The plan; without `tables` its entropy tables are all 0."""
        which = np.zeros(self.count, np.uint16)
        if tables is not None:
            which = host_array(tables[self.tables : self.tables + self.count]).astype(np.uint16)[self.order]
        return CodingPlan(np.arange(self.rows, dtype=np.uint16), self._shift, which)

    def planes(self, planes: torch.Tensor) -> torch.Tensor:
        """The job's `[P, T]`, a view."""
        at = self.job[JobField.PLANES]
        return planes[at : at + self.count * self.tokens].view(self.count, self.tokens)

    def coefficients(self, y: torch.Tensor) -> torch.Tensor:
        """The job's `[R, STRIDE]`, a view."""
        at, stride = self.job[JobField.LEVELS], self.job[JobField.STRIDE]
        return y[at : at + self.rows * stride].view(self.rows, stride)

    def levels(self, y: torch.Tensor, plan: CodingPlan) -> I32:
        """Quantized, `[R, T]`."""
        source = host_array(self.coefficients(y)[:, : self.tokens])
        return symbols.quantize(source, self.coding_step, plan, self.quantizer)


def frequency_tables(freq: torch.Tensor) -> EntropyTables:
    """The tables of uint16 `[K, 256]` frequencies."""
    frequencies = host_array(freq)
    return EntropyTables(frequencies, int(frequencies[0].sum()).bit_length() - 1)


def high_parts(levels: I32, plan: CodingPlan) -> I32:
    """Levels `[R, T]` without their low bits: what a byte or an escape holds."""
    shift = plan.shift.astype(np.int32)[:, None]
    high: I32 = (levels + ((1 << shift) >> 1)) >> shift
    return high


def dequantize_reference(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    planes: torch.Tensor,
    y: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    max_rows: int,
    max_tokens: int,
) -> None:
    """See `dequantize`; the coefficients of a job with a status are zero."""
    words = host_array(data).view(np.uint32)
    for index in _without_classes(jobs):
        part = JobPart(jobs, plans, index)
        plan = part.plan()
        at, count = part.job[JobField.ESCAPES], part.job[JobField.ESCAPE_COUNT]
        escapes = Escapes(words[at : at + count], words[at + count : at + 2 * count].view(np.int32))
        coded = host_array(part.planes(planes))[part.order]
        target = part.coefficients(y)
        target.zero_()
        found[index] = int((coded[: part.rows] == ESCAPE).sum())
        try:
            levels = symbols.unpack(coded, escapes, plan)
        except CorruptError:
            status[index] |= int(Status.ESCAPES)
            continue
        back = symbols.dequantize(levels, part.step, plan, part.quantizer)
        target[:, : part.tokens] = torch.from_numpy(back).to(y)


def quantize_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    codable: CodableBytes,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
) -> None:
    """See `quantize`; a job with a status keeps its planes."""
    entropy = frequency_tables(codable.freq)
    for index in _without_classes(jobs):
        part = JobPart(jobs, plans, index)
        counts[index] = 0
        peak = np.abs(host_array(part.coefficients(y)[:, : part.tokens])).max()
        if not peak < float(plans.limits[part.plan_index]):
            status[index] |= int(Status.TOO_LARGE)
            continue
        plan = part.plan(plans.tables)
        coded, escapes = symbols.pack(part.levels(y, plan), plan, entropy)
        part.planes(planes)[torch.from_numpy(part.order).to(planes.device)] = torch.from_numpy(coded).to(planes.device)
        by_row = np.bincount(escapes.index // np.uint32(part.tokens), minlength=part.rows)
        counts[index, : part.rows] = torch.from_numpy(by_row).to(counts)


def list_escapes_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    planes: torch.Tensor,
    starts: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    max_rows: int,
) -> None:
    """See `list_escapes`."""
    for number in _without_classes(jobs):
        part = JobPart(jobs, plans, number)
        plan = part.plan()
        high = high_parts(part.levels(y, plan), plan)
        cells = np.flatnonzero(host_array(part.planes(planes)[: part.rows]) == ESCAPE)
        at = int(starts[number, 0])
        found = slice(at, at + len(cells))
        index[found] = torch.from_numpy(cells.astype(np.uint32)).to(index.device)
        value[found] = torch.from_numpy(high.ravel()[cells].astype(np.int32)).to(value.device)
