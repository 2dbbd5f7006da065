"""Plain references of `ops/dequantize.py` and `ops/quantize.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.coding_plan import ESCAPE, CodingPlan, Quantizer
from cuvee.codec.entropy.family import PROB_BITS
from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables, normalize_counts
from cuvee.codec.errors import CorruptError
from cuvee.codec.format.streams import Escapes
from cuvee.codec.stages.reference import symbols as codec
from cuvee.codec.support.arrays import I32
from cuvee.kernels.jobs import JobField, PlanField, Status
from cuvee.kernels.ops.arguments import DevicePlans


def host_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array, of any dtype that NumPy has."""
    return tensor.detach().cpu().numpy()


class ClassPart:
    """What one class of a job's tokens has, in the terms of `stages/reference/symbols.py`."""

    def __init__(self, plans: DevicePlans, index: int) -> None:
        plan = plans.plans[index].tolist()
        self.rows, self.count, self._tables = (plan[f] for f in (PlanField.ROWS, PlanField.PLANES, PlanField.TABLES))
        components = slice(plan[PlanField.ROW], plan[PlanField.ROW] + self.rows)
        self._floats, ints = host_array(plans.row_floats[components]), host_array(plans.row_ints[components])
        # The planes as the codec orders them: high parts, then the low bits of the wide components.
        self.order = np.concatenate([np.arange(self.rows), ints[ints[:, 0] > 0, 1]])
        self.y_rows = torch.from_numpy(ints[:, 2].astype(np.int64))
        self._shift = ints[:, 0].astype(np.uint8)
        self.step, self.limit = float(plans.steps[index]), float(plans.limits[index])
        # Rounded to float32, its inverse is `inverse` again.
        self.coding_step = 1.0 / float(plans.inverses[index])

    @property
    def quantizer(self) -> Quantizer:
        """That of the class's components."""
        return Quantizer(self._floats[:, 2], self._floats[:, 3], self._floats[:, :2])

    def plan(self, tables: torch.Tensor | None = None) -> CodingPlan:
        """The plan; without `tables` its entropy tables are all 0."""
        which = np.zeros(self.count, np.uint16)
        if tables is not None:
            which = host_array(tables[self._tables : self._tables + self.count]).astype(np.uint16)[self.order]
        return CodingPlan(np.arange(self.rows, dtype=np.uint16), self._shift, which)


class JobPart:
    """One job and its columns."""

    def __init__(self, jobs: torch.Tensor, plans: DevicePlans, classes: torch.Tensor, index: int) -> None:
        self.job, self._plans = jobs[index].tolist(), plans
        self.tokens = self.job[JobField.TOKENS]
        self.columns: npt.NDArray[np.uint8] = host_array(classes[self.job[JobField.COLUMNS] :][: self.tokens])

    def runs(self) -> Iterator[tuple[slice, ClassPart]]:
        """Runs of adjacent columns of one class."""
        for at, k in codec.class_runs(self.columns):
            yield at, ClassPart(self._plans, self.job[JobField.PLAN] + k)

    def planes(self, planes: torch.Tensor) -> torch.Tensor:
        """The job's `[P, T]`, a view."""
        count = int(self._plans.plans[self.job[JobField.DEEPEST], PlanField.PLANES])
        return planes[self.job[JobField.PLANES] :][: count * self.tokens].view(count, self.tokens)

    def coefficients(self, y: torch.Tensor) -> torch.Tensor:
        """The job's `[rows, STRIDE]`, a view."""
        count, stride = int(self._plans.plans[self.job[JobField.DEEPEST], PlanField.EXTENT]), self.job[JobField.STRIDE]
        return y[self.job[JobField.COEFFICIENTS] :][: count * stride].view(count, stride)

    def extent(self, column: int) -> int:
        """Rows of coefficients up to the last that a column fills."""
        return int(self._plans.plans[self.job[JobField.PLAN] + int(self.columns[column]), PlanField.EXTENT])


def tables_that_reach(reach: npt.NDArray[np.int32]) -> EntropyTables:
    """Tables that code the values `[K, 2]`, the least and the greatest, and those between them."""
    value = np.arange(SYMBOLS, dtype=np.uint8).view(np.int8)
    coded = (value >= reach[:, :1]) & (value <= reach[:, 1:])
    return EntropyTables(normalize_counts(coded, PROB_BITS), PROB_BITS)


def dequantize_reference(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    classes: torch.Tensor,
    planes: torch.Tensor,
    y: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
    base: torch.Tensor | None = None,
) -> None:
    """See `dequantize`; the coefficients of a job with a status are zero."""
    words = host_array(data).view(np.uint32)
    for index in range(len(jobs)):
        part = JobPart(jobs, plans, classes, index)
        count, listed = part.job[JobField.ESCAPE_COUNT], words[part.job[JobField.ESCAPES] :]
        row, column = np.divmod(listed[:count], np.uint32(part.tokens))
        value = listed[count : 2 * count].view(np.int32)
        coded, target = host_array(part.planes(planes)), part.coefficients(y)
        out = torch.zeros(target.shape, device=y.device)
        escaped, matching = 0, not np.any(np.diff(listed[:count].astype(np.int64)) <= 0)
        for at, own in part.runs():
            width = at.stop - at.start
            high = coded[own.order][:, at]
            escaped += int((high[: own.rows] == ESCAPE).sum())
            inside = (column >= at.start) & (column < at.stop)
            local = Escapes(row[inside] * np.uint32(width) + column[inside] - np.uint32(at.start), value[inside])
            try:
                levels = codec.unpack(high, local, own.plan())
            except CorruptError:
                matching = False
                continue
            back = codec.dequantize(levels, own.step, own.plan(), own.quantizer)
            out[own.y_rows, at] = torch.from_numpy(back).to(y.device)
        for start in range(0, part.tokens, depth):
            run = slice(0, part.extent(start)), slice(start, start + depth)
            known = 0.0 if base is None else part.coefficients(base)[run]
            target[run] = (out[run] + known).to(y.dtype)
        found[index] = escaped
        if not matching or escaped != count:
            status[index] |= int(Status.ESCAPES)


def quantize_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    reach: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
    left: torch.Tensor | None = None,
) -> None:
    """See `quantize`; columns of a class with a status keep their planes."""
    entropy = tables_that_reach(host_array(reach))
    for index in range(len(jobs)):
        part = JobPart(jobs, plans, classes, index)
        counts[index] = 0
        target = part.planes(planes)
        for at, own in part.runs():
            source = host_array(part.coefficients(y)[own.y_rows, at])
            if not np.abs(source).max(initial=0) < own.limit:
                status[index] |= int(Status.TOO_LARGE)
                continue
            plan = own.plan(plans.tables)
            levels = codec.quantize(source, own.coding_step, plan, own.quantizer)
            if left is not None:
                known = codec.dequantize(levels, own.step, plan, own.quantizer)
                part.coefficients(left)[own.y_rows, at] = torch.from_numpy(source - known).to(left.device)
            coded, escapes = codec.pack(levels, plan, entropy)
            target[torch.from_numpy(own.order).to(planes.device), at] = torch.from_numpy(coded).to(planes.device)
            by_row = np.bincount(escapes.index // np.uint32(at.stop - at.start), minlength=own.rows)
            counts[index, : own.rows] += torch.from_numpy(by_row).to(counts)


def list_escapes_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    classes: torch.Tensor,
    planes: torch.Tensor,
    starts: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    max_rows: int,
) -> None:
    """See `list_escapes`."""
    for number in range(len(jobs)):
        part = JobPart(jobs, plans, classes, number)
        cells, values = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        coded = host_array(part.planes(planes))
        for at, own in part.runs():
            plan = own.plan()
            levels: I32 = codec.quantize(
                host_array(part.coefficients(y)[own.y_rows, at]), own.coding_step, plan, own.quantizer
            )
            shift = plan.shift.astype(np.int32)[:, None]
            high = (levels + ((1 << shift) >> 1)) >> shift  # what a byte or an escape holds
            row, column = np.nonzero(coded[: own.rows, at] == ESCAPE)
            cells.append(row * part.tokens + column + at.start)
            values.append(high[row, column])
        joined = np.concatenate(cells)
        order = np.argsort(joined)
        found = slice(int(starts[number, 0]), int(starts[number, 0]) + len(order))
        index[found] = torch.from_numpy(joined[order].astype(np.uint32)).to(index.device)
        value[found] = torch.from_numpy(np.concatenate(values)[order].astype(np.int32)).to(value.device)
