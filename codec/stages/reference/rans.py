"""Interleaved rANS, the reference implementation: plain NumPy, with every step visible. It is the specification.

    state x in [2**16, 2**32), words of 16 bits, tables of `prob_bits` (8 … 12) bits   (Duda, arXiv 1311.2540)

    encode a symbol with frequency f, cumulative c      decode a symbol
      if x >= f << (32 - prob_bits):                      slot = x mod 2**prob_bits
          emit x mod 2**16;  x >>= 16                     find s with c[s] <= slot < c[s] + f[s]
      x = (x div f) << prob_bits | (x mod f) + c          x = f[s] * (x >> prob_bits) + slot - c[s]
                                                          if x < 2**16:  x = x << 16 | next word

At most one word moves per symbol, in both directions. After one word has moved the state is back in its range, since
tables have fewer than 16 bits. The encoder walks the symbols backwards, so that the decoder reads words forwards.

**Streams.** The symbols form a matrix `[steps, tokens]`. Stream s holds the tokens `s*n … s*n + n - 1`, with `n` =
tokens_per_stream; the last stream may be shorter. A stream goes token after token, and within a token step after step.
All streams use the same table at the same step, so that the lanes of a GPU gather from one table. Any run of streams
can be decoded alone.

For the decoder every stream ends in state 2**16 with all of its words read. Anything else means damaged bytes.
"""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.streams import LOWER_BOUND, WORD_BITS, Streams, check_streams, stream_count, stream_error
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.support.arrays import U8, U16


def rans_encode(symbols: U8, which: U16, tables: EntropyTables, tokens_per_stream: int) -> Streams:
    """Encode a matrix of bytes.

    Args:
        symbols: `[steps, tokens]` uint8, each with a frequency above zero in its table.
        which: `[steps]` uint16, the table of each step.
        tables: the family that `which` indexes.
        tokens_per_stream: `n` above.
    """
    steps, tokens = symbols.shape
    count = stream_count(tokens, tokens_per_stream)
    freq, cumulative = tables.freq.astype(np.uint64), tables.cumulative.astype(np.uint64)
    bits = np.uint64(tables.prob_bits)
    state = np.full(count, LOWER_BOUND, dtype=np.uint64)
    words: list[list[int]] = [[] for _ in range(count)]
    for j in range(tokens_per_stream - 1, -1, -1):
        lanes = np.arange(count)[np.arange(count) * tokens_per_stream + j < tokens]
        if not lanes.size:
            continue
        for c in range(steps - 1, -1, -1):
            table = int(which[c])
            symbol = symbols[c, lanes * tokens_per_stream + j]
            f, low = freq[table, symbol], cumulative[table, symbol]
            x = state[lanes]
            full = x >= f << (np.uint64(32) - bits)
            for lane in lanes[full]:
                words[lane].append(int(state[lane]) & 0xFFFF)
            x = np.where(full, x >> np.uint64(WORD_BITS), x)
            state[lanes] = (x // f << bits) + x % f + low
    lengths = np.array([len(w) for w in words], dtype=np.uint32)
    flat = np.array([word for w in words for word in reversed(w)], dtype=np.uint16)
    return Streams(state.astype(np.uint32), lengths, flat)


def rans_decode(streams: Streams, which: U16, tables: EntropyTables, tokens_per_stream: int, tokens: int) -> U8:
    """Invert `rans_encode`, given the same arguments and the number of tokens.

    Returns:
        `[steps, tokens]` uint8.

    Raises:
        CorruptError: a stream did not end in the initial state with all of its words read.
    """
    check_streams(streams, tokens_per_stream, tokens)
    steps = len(which)
    count = len(streams.states)
    out = np.zeros((steps, tokens), dtype=np.uint8)
    state = streams.states.astype(np.uint64)
    end = np.cumsum(streams.lengths, dtype=np.int64)
    at = end - streams.lengths
    bits = np.uint64(tables.prob_bits)
    for j in range(tokens_per_stream):
        lanes = np.arange(count)[np.arange(count) * tokens_per_stream + j < tokens]
        for c in range(steps):
            slots = tables.slots[which[c]]
            x = state[lanes]
            slot = slots[(x & np.uint64((1 << tables.prob_bits) - 1)).astype(np.int64)].astype(np.uint64)
            out[c, lanes * tokens_per_stream + j] = slot >> np.uint64(24)
            x = (slot >> np.uint64(12) & np.uint64(0xFFF)) * (x >> bits) + (slot & np.uint64(0xFFF))
            need = x < LOWER_BOUND
            # A damaged stream may ask for more words than it has. It gets zeros, and the check below finds it.
            inside = need & (at[lanes] < end[lanes])
            word = np.zeros(len(lanes), dtype=np.uint64)
            word[inside] = streams.words[at[lanes[inside]]]
            state[lanes] = np.where(need, x << np.uint64(WORD_BITS) | word, x)
            at[lanes] += need
    bad = np.flatnonzero((state != LOWER_BOUND) | (at != end))
    if bad.size:
        raise stream_error(int(bad[0]), count)
    return out
