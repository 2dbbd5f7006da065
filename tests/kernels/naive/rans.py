"""Plain references of `ops/rans.py` and `ops/coded_part.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.format.coded_part import write_streams
from cuvee.codec.format.streams import LOWER_BOUND, WORD_BITS, Escapes, Streams
from cuvee.codec.stages.reference import rans
from cuvee.codec.support.arrays import U8, U32
from cuvee.kernels.jobs import JobField, PlanField, Status
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


def rans_decode_reference(
    data: torch.Tensor,
    coding: StreamJobs,
    decoding: DecodingTables,
    planes: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """See `rans_decode`."""
    raw, table_of, slot_of = data.cpu().numpy(), coding.tables.cpu().numpy(), slots_of(decoding)
    for index, job in enumerate(coding.jobs.tolist()):
        if job[JobField.CLASS_PLAN] > 0 or not job[JobField.STREAMS]:  # a section may have no coded part
            continue
        plan, decoder = coding.plans[job[JobField.PLAN]].tolist(), Decoder(raw, job, slot_of)
        steps, tokens, per_stream = plan[PlanField.PLANES], job[JobField.TOKENS], job[JobField.PER_STREAM]
        out = np.empty((steps, tokens), np.uint8)
        every = np.arange(job[JobField.STREAMS])
        for j in range(per_stream):
            lanes = every[every * per_stream + j < tokens]
            for c in range(steps):
                table = int(table_of[plan[PlanField.TABLES] + c])
                out[c, lanes * per_stream + j] = decoder.symbols(lanes, table)
        status[index] |= decoder.finish()
        planes[job[JobField.PLANES] :][: steps * tokens] = torch.from_numpy(out.ravel()).to(planes.device)


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
    planes: torch.Tensor, coding: StreamJobs, entries: torch.Tensor, streams: EncodedStreams
) -> None:
    """See `rans_encode`."""
    model, table_of = coder_tables(entries), coding.tables.cpu().numpy().astype(np.uint16)
    for job in coding.jobs.tolist():
        if job[JobField.CLASS_PLAN] > 0:
            continue
        plan = coding.plans[job[JobField.PLAN]].tolist()
        steps, tokens, per_stream = plan[PlanField.PLANES], job[JobField.TOKENS], job[JobField.PER_STREAM]
        symbols = planes[job[JobField.PLANES] :][: steps * tokens].cpu().numpy().reshape(steps, tokens)
        found = rans.rans_encode(symbols, table_of[plan[PlanField.TABLES] :][:steps], model, per_stream)
        store_streams(found, job, steps * per_stream, streams)


def count_words_reference(coding: StreamJobs, lengths: torch.Tensor, totals: torch.Tensor) -> None:
    """See `count_words`."""
    for index, job in enumerate(coding.jobs.tolist()):
        totals[index] = lengths[job[JobField.LENGTHS] :][: job[JobField.STREAMS]].to(torch.int64).sum()


def write_coded_reference(
    coding: StreamJobs,
    streams: EncodedStreams,
    escape_index: torch.Tensor,
    escape_value: torch.Tensor,
    out: torch.Tensor,
    class_words: torch.Tensor | None = None,
) -> None:
    """See `write_coded`."""
    for job in coding.jobs.tolist():
        steps, per_stream = int(coding.plans[job[JobField.PLAN], PlanField.PLANES]), job[JobField.PER_STREAM]
        count = job[JobField.STREAMS]
        length = streams.lengths[job[JobField.LENGTHS] :][:count].cpu().numpy()
        region = streams.words[job[JobField.WORDS] :][: count * steps * per_stream].cpu().numpy().reshape(count, -1)
        words = np.concatenate([row[len(row) - n :] for row, n in zip(region, length.tolist(), strict=True)])
        found = Streams(streams.states[job[JobField.STATES] :][:count].cpu().numpy(), length, words)
        listed = slice(job[JobField.ESCAPES], job[JobField.ESCAPES] + job[JobField.ESCAPE_COUNT])
        escapes = Escapes(escape_index[listed].cpu().numpy(), escape_value[listed].cpu().numpy())
        classes = None
        if job[JobField.CLASS_PLAN] > 0 and class_words is not None:
            own = class_words[job[JobField.CLASS_WORDS] :][: job[JobField.CLASS_WORD_COUNT]].cpu().numpy()
            classes = Streams(np.array([job[JobField.CLASS_STATE]], np.uint32), np.array([len(own)], np.uint32), own)
        # The planes decide how long a length is, and nothing else.
        planes = 1 << 16 if job[JobField.LONG_LENGTHS] else 0
        part = np.frombuffer(write_streams(found, escapes, planes, per_stream, classes), np.uint8)
        out[job[JobField.SECTION] :][: len(part)] = torch.from_numpy(part.copy()).to(out.device)
