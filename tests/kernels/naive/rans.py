"""Plain references of `ops/rans.py` and `ops/coded_part.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ColumnPlan, SectionPlanes
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.streams import LOWER_BOUND, WORD_BITS, Escapes, Streams
from cuvee.codec.stages.reference import rans
from cuvee.codec.support.arrays import U8, U32
from cuvee.kernels.jobs import JobField, PartField, PlanField, Status
from cuvee.kernels.ops.arguments import DecodingTables, EncodedStreams, StreamJobs
from cuvee.kernels.ops.rans import ENTRIES

U64 = npt.NDArray[np.uint64]


def slots_of(decoding: DecodingTables) -> U32:
    """`EntropyTables.slots` of the tables that `decoding_table` was given."""
    entries = decoding.words.cpu().numpy()[:, ENTRIES:]
    freq = np.zeros(entries.shape, np.uint16)
    for row, own in zip(freq, entries, strict=True):
        used = own[own > 0]
        row[used >> 12 & 0xFF] = used >> 20
    return EntropyTables(freq, decoding.prob_bits).slots


class Decoder:
    """The streams of one job, decoded a symbol at a time; unlike the codec's it says what damaged streams decode to.

    Args:
        data: uint8, the coded parts.
        job: row of `jobs`.
        slots: uint32 `[K, 2**prob_bits]` of `slots_of`.
    """

    def __init__(self, data: U8, job: list[int], slots: U32) -> None:
        count, long = job[JobField.STREAMS], job[JobField.LONG_LENGTHS]
        self._slots, self._bits = slots, np.uint64(slots.shape[1].bit_length() - 1)
        self._mask = np.uint64(slots.shape[1] - 1)
        self._state = data.view(np.uint32)[job[JobField.STATES] :][:count].astype(np.uint64)
        wire = data.view(np.uint16)[job[JobField.LENGTHS] :][: count << long]
        length = (wire.view(np.uint32) if long else wire).astype(np.int64)
        self._words = data.view(np.uint16)[job[JobField.WORDS] :][: job[JobField.WORD_COUNT]]
        ends = np.cumsum(length)
        self._at, self._end = (np.minimum(bound, len(self._words)) for bound in (ends - length, ends))
        self._bad = bool((self._state < LOWER_BOUND).any()) or ends[-1] != len(self._words)

    def symbols(self, streams: npt.NDArray[np.int64], tables: npt.NDArray[np.integer] | int) -> U64:
        """The next symbol of some streams, each with its table."""
        x = self._state[streams]
        slot = self._slots[tables, (x & self._mask).astype(np.int64)].astype(np.uint64)
        x = (slot >> np.uint64(12) & np.uint64(0xFFF)) * (x >> self._bits) + (slot & np.uint64(0xFFF))
        need = x < LOWER_BOUND
        inside = need & (self._at[streams] < self._end[streams])
        word = np.zeros(len(streams), np.uint64)
        word[inside] = self._words[self._at[streams[inside]]]
        self._state[streams] = np.where(need, x << np.uint64(WORD_BITS) | word, x)
        self._at[streams] += need
        symbols: U64 = slot >> np.uint64(24)
        return symbols

    def finish(self) -> int:
        """What is wrong with the streams, once all symbols are decoded: bits of `Status`."""
        wrong = self._bad or bool(((self._state != LOWER_BOUND) | (self._at != self._end)).any())
        return int(Status.STREAMS) if wrong else 0


def _columns_of(job: list[int], coding: StreamJobs, classes: torch.Tensor) -> tuple[U8, ColumnPlan]:
    """The classes of a job's columns, and what the codec's coder reads of these classes."""
    columns: U8 = classes[job[JobField.COLUMNS] :][: job[JobField.TOKENS]].cpu().numpy()
    table_of = coding.tables.cpu().numpy().astype(np.uint16)
    rows = coding.plans[job[JobField.PLAN] :][: int(columns.max()) + 1].tolist()
    wide = np.zeros((len(rows), max(row[PlanField.PLANES] for row in rows)), np.uint16)
    for own, row in zip(wide, rows, strict=True):
        own[: row[PlanField.PLANES]] = table_of[row[PlanField.TABLES] :][: row[PlanField.PLANES]]
    return columns, ColumnPlan(np.array([row[PlanField.PLANES] for row in rows], np.int32), wide)


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
    """See `rans_decode`."""
    raw, slot_of = data.cpu().numpy(), slots_of(decoding)
    for index, job in enumerate(coding.jobs.tolist()):
        if not job[JobField.STREAMS]:  # a section may have no coded part
            continue
        columns, plan = _columns_of(job, coding, classes)
        decoder, target = Decoder(raw, job, slot_of), _planes_of(job, coding, planes)
        out = target.cpu().numpy().copy()
        for lanes, row in rans.stream_rows(len(columns), job[JobField.PER_STREAM]):
            own = columns[row]
            for c in range(int(plan.planes[own].max())):
                active = np.flatnonzero(plan.planes[own] > c)
                out[c, active + row.start] = decoder.symbols(active + lanes.start, plan.tables[own[active], c])
        status[index] |= decoder.finish()
        target.copy_(torch.from_numpy(out))


def coder_tables(entries: torch.Tensor) -> EntropyTables:
    """The tables that `coding_table` was made of."""
    freq = entries.cpu().numpy()[:, :, 0] >> 16
    return EntropyTables(freq, int(freq[0].sum()).bit_length() - 1)


def store_streams(found: Streams, job: list[int], region: int, streams: EncodedStreams) -> None:
    """Put a job's streams where the encoder leaves them: regions of so many words, filled from their ends."""
    states, lengths, words = streams.states, streams.lengths, streams.words
    states[job[JobField.STATES] :][: job[JobField.STREAMS]] = torch.from_numpy(found.states).to(states.device)
    lengths[job[JobField.LENGTHS] :][: job[JobField.STREAMS]] = torch.from_numpy(found.lengths).to(lengths.device)
    ends = np.cumsum(found.lengths, dtype=np.int64)
    for s, (end, length) in enumerate(zip(ends.tolist(), found.lengths.tolist(), strict=True)):
        top = job[JobField.WORDS] + (s + 1) * region
        words[top - length : top] = torch.from_numpy(found.words[end - length : end]).to(words.device)


def rans_encode_reference(
    planes: torch.Tensor,
    coding: StreamJobs,
    entries: torch.Tensor,
    classes: torch.Tensor,
    streams: EncodedStreams,
) -> None:
    """See `rans_encode`."""
    model = coder_tables(entries)
    for job in coding.jobs.tolist():
        columns, plan = _columns_of(job, coding, classes)
        symbols, per_stream = _planes_of(job, coding, planes).cpu().numpy(), job[JobField.PER_STREAM]
        (found,) = rans.rans_encode([SectionPlanes(symbols, columns, plan, per_stream)], model)
        store_streams(found, job, len(symbols) * per_stream, streams)


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
