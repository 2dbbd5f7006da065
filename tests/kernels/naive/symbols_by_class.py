"""Plain references of `ops/symbols_by_class.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from cuvee.codec.stages.reference.symbols_by_class import class_runs
from tests.kernels.naive.symbols import JobPart, frequency_tables, high_parts, host_array

from cuvee.codec.entropy.coding_plan import ESCAPE
from cuvee.codec.errors import CorruptError
from cuvee.codec.format.streams import Escapes
from cuvee.codec.stages.reference import symbols as codec
from cuvee.kernels.jobs import JobField, PlanField, Status
from cuvee.kernels.ops.arguments import CodableBytes, DevicePlans


class ClassedPart:
    """One job: its columns, and its class `k` in the terms of `codec.symbols`."""

    def __init__(self, jobs: torch.Tensor, plans: DevicePlans, classes: torch.Tensor, index: int) -> None:
        self.job = jobs[index].tolist()
        self.tokens = self.job[JobField.TOKENS]
        self.columns: npt.NDArray[np.uint8] = host_array(classes[self.job[JobField.COLUMNS] :][: self.tokens])
        self._jobs, self._plans, self._index = jobs, plans, index

    def of(self, k: int) -> JobPart:
        """The job as if all tokens had class `k`."""
        own = self._jobs[self._index : self._index + 1].clone()
        own[0, JobField.PLAN] = own[0, JobField.CLASS_PLAN] + k
        return JobPart(own, self._plans, 0)

    def planes(self, planes: torch.Tensor) -> torch.Tensor:
        """The job's `[P, T]`, a view."""
        count = int(self._plans.plans[self.job[JobField.PLAN], PlanField.PLANES])
        return planes[self.job[JobField.PLANES] :][: count * self.tokens].view(count, self.tokens)

    def coefficients(self, y: torch.Tensor) -> torch.Tensor:
        """The job's `[rows, STRIDE]`, a view."""
        finest, stride = self.job[JobField.PLAN] - self.job[JobField.CLASS_PLAN], self.job[JobField.STRIDE]
        count = self.extent(finest)
        return y[self.job[JobField.LEVELS] :][: count * stride].view(count, stride)

    def extent(self, k: int) -> int:
        """Rows of coefficients up to the last that class `k` fills."""
        return int(self._plans.plans[self.job[JobField.CLASS_PLAN] + k, PlanField.EXTENT])


def _parts(jobs: torch.Tensor, plans: DevicePlans, classes: torch.Tensor) -> Iterator[tuple[int, ClassedPart]]:
    for index, job in enumerate(jobs.tolist()):
        if job[JobField.CLASS_PLAN] > 0:
            yield index, ClassedPart(jobs, plans, classes, index)


def dequantize_classes_reference(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    y: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
) -> None:
    """See `dequantize_classes`; the coefficients of a job with a status are zero."""
    words = host_array(data).view(np.uint32)
    for index, part in _parts(jobs, plans, classes):
        count, listed = part.job[JobField.ESCAPE_COUNT], words[part.job[JobField.ESCAPES] :]
        row, column = np.divmod(listed[:count], np.uint32(part.tokens))
        value = listed[count : 2 * count].view(np.int32)
        coded, target = host_array(part.planes(planes)), part.coefficients(y)
        for start in range(0, part.tokens, depth):
            target[: part.extent(int(part.columns[start])), start : start + depth] = 0
        escaped, matching = 0, not np.any(np.diff(listed[:count].astype(np.int64)) <= 0)
        for at, k in class_runs(part.columns):
            own, width = part.of(k), at.stop - at.start
            plan, high = own.plan(), coded[own.order][:, at]
            escaped += int((high[: own.rows] == ESCAPE).sum())
            inside = (column >= at.start) & (column < at.stop)
            local = Escapes(row[inside] * np.uint32(width) + column[inside] - np.uint32(at.start), value[inside])
            try:
                levels = codec.unpack(high, local, plan)
            except CorruptError:
                matching = False
                continue
            back = codec.dequantize(levels, own.step, plan, own.quantizer)
            target[own.y_rows, at] = torch.from_numpy(back).to(y)
        found[index] = escaped
        if not matching or escaped != count:
            status[index] |= int(Status.ESCAPES)


def quantize_classes_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    codable: CodableBytes,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
) -> None:
    """See `quantize_classes`."""
    entropy = frequency_tables(codable.freq)
    for index, part in _parts(jobs, plans, classes):
        counts[index] = 0
        target = part.planes(planes)
        for at, k in class_runs(part.columns):
            own = part.of(k)
            source = host_array(part.coefficients(y)[own.y_rows, at])
            if not np.abs(source).max(initial=0) < float(plans.limits[own.plan_index]):
                status[index] |= int(Status.TOO_LARGE)
                continue
            plan = own.plan(plans.tables)
            levels = codec.quantize(source, own.coding_step, plan, own.quantizer)
            coded, escapes = codec.pack(levels, plan, entropy)
            target[torch.from_numpy(own.order).to(planes.device), at] = torch.from_numpy(coded).to(planes.device)
            by_row = np.bincount(escapes.index // np.uint32(at.stop - at.start), minlength=own.rows)
            counts[index, : own.rows] += torch.from_numpy(by_row).to(counts)


def list_escapes_classes_reference(
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
    """See `list_escapes_classes`."""
    for number, part in _parts(jobs, plans, classes):
        cells, values = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        coded = host_array(part.planes(planes))
        for at, k in class_runs(part.columns):
            own = part.of(k)
            plan = own.plan()
            source = host_array(part.coefficients(y)[own.y_rows, at])
            levels = codec.quantize(source, own.coding_step, plan, own.quantizer)
            high = high_parts(levels, plan)
            row, column = np.nonzero(coded[: own.rows, at] == ESCAPE)
            cells.append(row * part.tokens + column + at.start)
            values.append(high[row, column])
        joined = np.concatenate(cells)
        order = np.argsort(joined)
        first = int(starts[number, 0])
        found = slice(first, first + len(order))
        index[found] = torch.from_numpy(joined[order].astype(np.uint32)).to(index.device)
        value[found] = torch.from_numpy(np.concatenate(values)[order].astype(np.int32)).to(value.device)
