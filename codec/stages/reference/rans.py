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
can be decoded alone. The first token of a stream may use other tables (`first`) than the tokens after it (`rest`),
because prediction (`symbols.py`) starts anew with each stream.

For the decoder every stream ends in state 2**16 with all of its words read. Anything else means damaged bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.errors import CorruptError

LOWER_BOUND = 1 << 16
WORD_BITS = 16
MAX_TOKENS_PER_STREAM_LOG2 = 7
MAX_TOKENS_PER_STREAM = 1 << MAX_TOKENS_PER_STREAM_LOG2
MIN_STREAM_BYTES = 6  # what a stream takes in a blob even without words: a state of 4 bytes and a length of 2

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Streams:
    """Coded streams: initial decoder states `[S]` uint32, word counts `[S]` uint32, and all words `[W]` uint16."""

    states: U32
    lengths: U32
    words: U16


def stream_count(tokens: int, tokens_per_stream: int) -> int:
    """How many streams hold `tokens` tokens."""
    return -(-tokens // tokens_per_stream)


def stream_error(stream: int, count: int) -> CorruptError:
    """What is wrong with a section one of whose streams ends in another state than the initial one."""
    return CorruptError(f"entropy-coded stream {stream} of {count} does not end where it must: the bytes are damaged")


def check_streams(streams: Streams, tokens_per_stream: int, tokens: int) -> None:
    """Raise CorruptError unless the parts of `streams` agree with each other and with the number of tokens."""
    count = stream_count(tokens, tokens_per_stream)
    if len(streams.states) != count or len(streams.lengths) != count:
        raise CorruptError(f"{tokens} tokens need {count} entropy-coded streams, there are {len(streams.states)}")
    if int(streams.lengths.sum(dtype=np.uint64)) != len(streams.words):
        raise CorruptError("the lengths of the entropy-coded streams do not add up to their words")


def rans_encode(symbols: U8, first: U16, rest: U16, tables: EntropyTables, tokens_per_stream: int) -> Streams:
    """Encode a matrix of bytes.

    Args:
        symbols: `[steps, tokens]` uint8, each with a frequency above zero in its table.
        first: `[steps]` uint16, the table of each step for the first token of a stream.
        rest: `[steps]` uint16, the table of each step for the other tokens.
        tables: the family that both index.
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
            table = int((rest if j else first)[c])
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


def rans_decode(
    streams: Streams, first: U16, rest: U16, tables: EntropyTables, tokens_per_stream: int, tokens: int
) -> U8:
    """Decode what `rans_encode` made, with the same arguments and the number of tokens.

    Returns:
        `[steps, tokens]` uint8.

    Raises:
        CorruptError: a stream did not end in the initial state with all of its words read.
    """
    check_streams(streams, tokens_per_stream, tokens)
    steps = len(first)
    count = len(streams.states)
    out = np.zeros((steps, tokens), dtype=np.uint8)
    state = streams.states.astype(np.uint64)
    end = np.cumsum(streams.lengths, dtype=np.int64)
    at = end - streams.lengths
    bits = np.uint64(tables.prob_bits)
    for j in range(tokens_per_stream):
        lanes = np.arange(count)[np.arange(count) * tokens_per_stream + j < tokens]
        for c in range(steps):
            slots = tables.slots[(rest if j else first)[c]]
            x = state[lanes]
            slot = slots[(x & np.uint64((1 << tables.prob_bits) - 1)).astype(np.int64)].astype(np.uint64)
            out[c, lanes * tokens_per_stream + j] = slot >> np.uint64(24)
            x = (slot >> np.uint64(12) & np.uint64(0xFFF)) * (x >> bits) + (slot & np.uint64(0xFFF))
            need = x < LOWER_BOUND
            # A damaged stream may ask for more words than it has. It gets zeros, and is found out below.
            inside = need & (at[lanes] < end[lanes])
            word = np.zeros(len(lanes), dtype=np.uint64)
            word[inside] = streams.words[at[lanes[inside]]]
            state[lanes] = np.where(need, x << np.uint64(WORD_BITS) | word, x)
            at[lanes] += need
    bad = np.flatnonzero((state != LOWER_BOUND) | (at != end))
    if bad.size:
        raise stream_error(int(bad[0]), count)
    return out
