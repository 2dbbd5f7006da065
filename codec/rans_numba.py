"""Interleaved rANS for the CPU: the same bytes as `rans.py`, but compiled. It releases the GIL."""

from __future__ import annotations

import numpy as np

from cuvee.codec.compiled import compiled
from cuvee.codec.errors import CorruptError
from cuvee.codec.rans import LANES, U8, U16, Streams, check_streams, stream_count
from cuvee.codec.tables import EntropyTables


@compiled
def _encode(symbols, first, rest, freq, cumulative, prob_bits, n, states, lengths, words):  # type: ignore[no-untyped-def]
    steps, tokens = symbols.shape
    shift = np.uint32(prob_bits)
    limit = np.uint64(32 - prob_bits)
    scratch = np.empty(n * steps, np.uint16)
    filled = 0
    for s in range(len(states)):
        x = np.uint32(65536)
        at = len(scratch)
        for j in range(min(n, tokens - s * n) - 1, -1, -1):
            table_of = rest if j else first
            t = s * n + j
            for c in range(steps - 1, -1, -1):
                table = table_of[c]
                symbol = symbols[c, t]
                f = np.uint32(freq[table, symbol])
                if np.uint64(x) >= np.uint64(f) << limit:
                    at -= 1
                    scratch[at] = np.uint16(x & np.uint32(0xFFFF))
                    x = x >> np.uint32(16)
                quotient = x // f
                x = (quotient << shift) + (x - quotient * f) + np.uint32(cumulative[table, symbol])
        count = len(scratch) - at
        words[filled : filled + count] = scratch[at:]
        filled += count
        lengths[s] = count
        states[s] = x
    return filled


@compiled
def _decode(states, start, end, words, first, rest, slots, prob_bits, n, out):  # type: ignore[no-untyped-def]
    steps, tokens = out.shape
    count = len(states)
    mask = np.uint32((1 << prob_bits) - 1)
    shift = np.uint32(prob_bits)
    x = np.empty(LANES, np.uint32)
    at = np.empty(LANES, np.uint32)
    last = np.uint32(len(words) - 1)  # the caller pads with one word, so there is always one to read
    for base in range(0, count, LANES):
        width = min(LANES, count - base)
        for lane in range(width):
            x[lane] = states[base + lane]
            at[lane] = start[base + lane]
        for j in range(n):
            # Only the very last stream can be short, so the active lanes come first.
            active = width
            while active and (base + active - 1) * n + j >= tokens:
                active -= 1
            table_of = rest if j else first
            for c in range(steps):
                table = slots[table_of[c]]
                row = out[c]
                column = base * n + j
                for lane in range(active):
                    v = x[lane]
                    slot = table[v & mask]
                    row[column + lane * n] = np.uint8(slot >> np.uint32(24))
                    v = ((slot >> np.uint32(12)) & np.uint32(0xFFF)) * (v >> shift) + (slot & np.uint32(0xFFF))
                    need = v < np.uint32(65536)
                    word = np.uint32(words[min(at[lane], last)])
                    x[lane] = (v << np.uint32(16)) | word if need else v
                    at[lane] += np.uint32(1) if need else np.uint32(0)
        for lane in range(width):
            if x[lane] != np.uint32(65536) or at[lane] != end[base + lane]:
                return base + lane
    return -1


def rans_encode(symbols: U8, first: U16, rest: U16, tables: EntropyTables, tokens_per_stream: int) -> Streams:
    """See `cuvee.codec.rans.rans_encode`: the same arguments, the same bytes."""
    steps, tokens = symbols.shape
    count = stream_count(tokens, tokens_per_stream)
    states, lengths = np.empty(count, np.uint32), np.empty(count, np.uint32)
    words = np.empty(steps * tokens, np.uint16)  # a bound: at most one word per symbol
    filled = _encode(
        symbols,
        first,
        rest,
        tables.freq,
        tables.cumulative,
        tables.prob_bits,
        tokens_per_stream,
        states,
        lengths,
        words,
    )
    return Streams(states, lengths, words[:filled].copy())


def rans_decode(
    streams: Streams, first: U16, rest: U16, tables: EntropyTables, tokens_per_stream: int, tokens: int
) -> U8:
    """See `cuvee.codec.rans.rans_decode`: the same arguments, result and errors."""
    check_streams(streams, tokens_per_stream, tokens)
    out = np.empty((len(first), tokens), np.uint8)
    end = np.cumsum(streams.lengths, dtype=np.int64)
    words = np.append(streams.words, np.uint16(0))
    bad = _decode(
        streams.states, end - streams.lengths, end, words, first, rest, tables.slots, tables.prob_bits,
        tokens_per_stream, out,
    )  # fmt: skip
    if bad >= 0:
        raise CorruptError(
            f"entropy-coded stream {bad} of {len(end)} does not end where it must: the bytes are damaged"
        )
    return out
