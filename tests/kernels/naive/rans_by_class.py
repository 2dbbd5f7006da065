"""Plain references of `ops/rans_by_class.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from tests.kernels.naive.rans import Decoder, coder_tables, slots_of, store_streams

from cuvee.codec.entropy.token_classes import CLASSES, ClassedPlan
from cuvee.codec.stages.reference import rans_by_class
from cuvee.codec.support.arrays import I32, U8, U16
from cuvee.kernels.jobs import JobField, PlanField
from cuvee.kernels.ops.arguments import DecodingTables, EncodedStreams, StreamJobs


@dataclass(frozen=True)
class _Classes:
    """What the codec's coder reads of a `ClassedPlan`: planes `[16]` and tables `[16, P]`."""

    planes: I32
    tables: U16

    @classmethod
    def of(cls, job: list[int], coding: StreamJobs) -> _Classes:
        """Those of the classes that a job's section serves."""
        rows = coding.plans[job[JobField.CLASS_PLAN] : job[JobField.CLASS_PLAN] + CLASSES].cpu().numpy()
        table_of = coding.tables.cpu().numpy().astype(np.uint16)
        planes = rows[:, PlanField.PLANES].astype(np.int32)
        wide = np.zeros((CLASSES, int(planes.max())), np.uint16)
        for own, row in zip(wide, rows.tolist(), strict=True):
            own[: row[PlanField.PLANES]] = table_of[row[PlanField.TABLES] :][: row[PlanField.PLANES]]
        return cls(planes, wide)


def _classes_of(job: list[int], classes: torch.Tensor) -> U8:
    own: U8 = classes[job[JobField.COLUMNS] :][: job[JobField.TOKENS]].cpu().numpy()
    return own


def rans_decode_classes_reference(
    data: torch.Tensor,
    coding: StreamJobs,
    decoding: DecodingTables,
    classes: torch.Tensor,
    planes: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """See `rans_decode_classes`."""
    raw, slot_of = data.cpu().numpy(), slots_of(decoding)
    for index, job in enumerate(coding.jobs.tolist()):
        if job[JobField.CLASS_PLAN] <= 0:
            continue
        plan, own, decoder = _Classes.of(job, coding), _classes_of(job, classes), Decoder(raw, job, slot_of)
        tokens = job[JobField.TOKENS]
        size = int(coding.plans[job[JobField.PLAN], PlanField.PLANES]) * tokens
        out = planes[job[JobField.PLANES] :][:size].cpu().numpy().reshape(-1, tokens)
        for lanes, columns in rans_by_class.stream_rows(tokens, job[JobField.PER_STREAM]):
            depth = plan.planes[own[columns]]
            for c in range(int(depth.max())):
                active = np.flatnonzero(depth > c)
                table = plan.tables[own[columns][active], c]
                out[c, active + columns.start] = decoder.symbols(active + lanes.start, table)
        status[index] |= decoder.finish()
        planes[job[JobField.PLANES] :][:size] = torch.from_numpy(out.ravel()).to(planes.device)


def rans_encode_classes_reference(
    planes: torch.Tensor,
    coding: StreamJobs,
    entries: torch.Tensor,
    classes: torch.Tensor,
    streams: EncodedStreams,
) -> None:
    """See `rans_encode_classes`."""
    model = coder_tables(entries)
    for job in coding.jobs.tolist():
        if job[JobField.CLASS_PLAN] <= 0:
            continue
        own = _classes_of(job, classes)
        deepest, per_stream = int(coding.plans[job[JobField.PLAN], PlanField.PLANES]), job[JobField.PER_STREAM]
        symbols = planes[job[JobField.PLANES] :][: deepest * len(own)].cpu().numpy().reshape(deepest, len(own))
        plan = cast(ClassedPlan, _Classes.of(job, coding))
        found = rans_by_class.rans_encode_classes(symbols, own, plan, model, per_stream)
        store_streams(found, job, deepest * per_stream, streams)
