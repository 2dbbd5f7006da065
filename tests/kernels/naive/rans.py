"""References of `ops/rans.py` and `ops/coded_part.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ColumnPlan, SectionPlanes
from cuvee.codec.errors import CorruptError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.streams import LOWER_BOUND, Escapes, Streams
from cuvee.codec.stages.reference import rans
from cuvee.codec.support.arrays import U8
from cuvee.kernels.jobs import JobField, PartField, PlanField, Status
from cuvee.kernels.ops.arguments import DecodingTables, EncodedStreams, StreamJobs
from cuvee.kernels.ops.rans import ENTRIES


def _columns_of(job: list[int], coding: StreamJobs, classes: torch.Tensor) -> tuple[U8, ColumnPlan]:
    """The classes of a job's columns, and what the codec's coder reads of these classes."""
    columns: U8 = classes[job[JobField.COLUMNS] :][: job[JobField.TOKENS]].cpu().numpy()
    table_of = coding.tables.cpu().numpy().astype(np.uint16)
    rows = coding.plans[job[JobField.PLAN] :][: int(columns.max()) + 1].tolist()
    planes = np.array([row[PlanField.PLANES] for row in rows], np.int32)
    planes[: int(columns.min())] = 0  # the finest class that occurs sets P
    wide = np.zeros((len(rows), int(planes.max())), np.uint16)
    for own, row, count in zip(wide, rows, planes, strict=True):
        own[:count] = table_of[row[PlanField.TABLES] :][:count]
    return columns, ColumnPlan(planes, wide)


def _planes_of(job: list[int], coding: StreamJobs, planes: torch.Tensor) -> torch.Tensor:
    """A job's `[P, T]`, a view."""
    count = int(coding.plans[job[JobField.DEEPEST], PlanField.PLANES])
    return planes[job[JobField.PLANES] :][: count * job[JobField.TOKENS]].view(count, job[JobField.TOKENS])


def rans_decode_reference(
    data: torch.Tensor,
    coding: StreamJobs,
    decoding: DecodingTables,
    classes: torch.Tensor,
    planes: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """See `rans_decode`; the planes of a job with a status keep what they hold."""
    raw, entries = data.cpu().numpy(), decoding.words.cpu().numpy()[:, ENTRIES:]
    freq = np.zeros(entries.shape, np.uint16)
    for row, own in zip(freq, entries, strict=True):
        row[own[own > 0] >> 12 & 0xFF] = own[own > 0] >> 20
    tables = EntropyTables(freq, decoding.prob_bits)
    for index, job in enumerate(coding.jobs.tolist()):
        count, long = job[JobField.STREAMS], job[JobField.LONG_LENGTHS]
        if not count:  # a section may have no coded part
            continue
        wire = raw.view(np.uint16)[job[JobField.LENGTHS] :][: count << long]
        lengths = (wire.view(np.uint32) if long else wire).astype(np.uint32)
        states = raw.view(np.uint32)[job[JobField.STATES] :][:count]
        streams = Streams(states, lengths, raw.view(np.uint16)[job[JobField.WORDS] :][: job[JobField.WORD_COUNT]])
        columns, plan = _columns_of(job, coding, classes)
        try:
            found = rans.rans_decode(streams, columns, plan, tables, job[JobField.PER_STREAM])
        except CorruptError:
            found = None
        if found is None or (states < LOWER_BOUND).any():
            status[index] |= int(Status.STREAMS)
            continue
        target, own = _planes_of(job, coding, planes), plan.planes[columns] > np.arange(len(found))[:, None]
        target[torch.from_numpy(own).to(planes.device)] = torch.from_numpy(found[own]).to(planes.device)


def rans_encode_reference(
    planes: torch.Tensor,
    coding: StreamJobs,
    entries: torch.Tensor,
    classes: torch.Tensor,
    streams: EncodedStreams,
) -> None:
    """See `rans_encode`: regions of so many words, filled from their ends."""
    freq = entries.cpu().numpy()[:, :, 0] >> 16
    tables, device = EntropyTables(freq, int(freq[0].sum()).bit_length() - 1), planes.device
    for job in coding.jobs.tolist():
        columns, plan = _columns_of(job, coding, classes)
        symbols, per_stream = _planes_of(job, coding, planes).cpu().numpy(), job[JobField.PER_STREAM]
        (found,) = rans.rans_encode([SectionPlanes(symbols, columns, plan, per_stream)], tables)
        streams.states[job[JobField.STATES] :][: len(found.states)] = torch.from_numpy(found.states).to(device)
        streams.lengths[job[JobField.LENGTHS] :][: len(found.lengths)] = torch.from_numpy(found.lengths).to(device)
        ends = np.cumsum(found.lengths, dtype=np.int64)
        for s, (end, length) in enumerate(zip(ends.tolist(), found.lengths.tolist(), strict=True)):
            top = job[JobField.WORDS] + (s + 1) * len(symbols) * per_stream
            streams.words[top - length : top] = torch.from_numpy(found.words[end - length : end]).to(device)


def count_words_reference(coding: StreamJobs, lengths: torch.Tensor, totals: torch.Tensor) -> None:
    """See `count_words`."""
    for index, job in enumerate(coding.jobs.tolist()):
        totals[index] = lengths[job[JobField.LENGTHS] :][: job[JobField.STREAMS]].to(torch.int64).sum()


def write_coded_reference(
    coding: StreamJobs,
    parts: torch.Tensor,
    streams: EncodedStreams,
    escape_index: torch.Tensor,
    escape_value: torch.Tensor,
    class_words: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `write_coded`."""
    for job, part in zip(coding.jobs.tolist(), parts.tolist(), strict=True):
        steps, per_stream = int(coding.plans[job[JobField.DEEPEST], PlanField.PLANES]), job[JobField.PER_STREAM]
        count = job[JobField.STREAMS]
        length = streams.lengths[job[JobField.LENGTHS] :][:count].cpu().numpy()
        region = streams.words[job[JobField.WORDS] :][: count * steps * per_stream].cpu().numpy().reshape(count, -1)
        words = np.concatenate([row[len(row) - n :] for row, n in zip(region, length.tolist(), strict=True)])
        found = Streams(streams.states[job[JobField.STATES] :][:count].cpu().numpy(), length, words)
        listed = slice(part[PartField.ESCAPES], part[PartField.ESCAPES] + part[PartField.ESCAPE_COUNT])
        escapes = Escapes(escape_index[listed].cpu().numpy(), escape_value[listed].cpu().numpy())
        own = class_words[job[JobField.CLASS_WORDS] :][: job[JobField.CLASS_WORD_COUNT]].cpu().numpy()
        classes = Streams(np.array([job[JobField.CLASS_STATE]], np.uint32), np.array([len(own)], np.uint32), own)
        # The planes decide how long a length is, and nothing else.
        planes = 1 << 16 if job[JobField.LONG_LENGTHS] else 0
        coded = np.frombuffer(write_coded(CodedPart(found, escapes, per_stream, classes), planes), np.uint8)
        out[part[PartField.SECTION] :][: len(coded)] = torch.from_numpy(coded.copy()).to(out.device)
