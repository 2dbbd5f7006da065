"""Token classes on the host: code their streams, which are short, and sort columns by class.

    decode   class streams --read_classes--> classes --sort_columns--> columns
    encode   offsets --choose_classes--> classes --sort_columns--> columns,   classes --write_classes--> class streams

All jobs of a batch go through one compiled loop each. The coder is that of `codec/stages/reference/rans.py` with one
symbol per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuvee.codec.entropy.token_classes import CLASS_BITS, CLASSES, WINDOW
from cuvee.codec.errors import CorruptError, FormatError
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.reference.rans import LOWER_BOUND
from cuvee.codec.stages.reference.symbols import U8, U16, U32
from cuvee.kernels.jobs import I64, JobField


@compiled
def _decode(words, begin, count, states, tokens, slots, table, first, classes, bad, bits, bound):  # type: ignore[no-untyped-def]
    mask = np.uint32((1 << bits) - 1)
    shift = np.uint32(bits)
    for job in range(len(begin)):
        x = np.uint32(states[job])
        at = begin[job]
        end = at + count[job]
        own = slots[table[job]]
        for t in range(first[job], first[job] + tokens[job]):
            slot = own[x & mask]
            classes[t] = np.uint8(slot >> np.uint32(24))
            x = ((slot >> np.uint32(12)) & np.uint32(0xFFF)) * (x >> shift) + (slot & np.uint32(0xFFF))
            if x < np.uint32(bound):
                # A damaged stream may need more words than it has: it reads zeros and is detected below.
                x = (x << np.uint32(16)) | np.uint32(words[at] if at < end else 0)
                at += 1
        bad[job] = x != np.uint32(bound) or at != end


@compiled
def _encode(classes, first, tokens, freq, cumulative, table, words, count, states, bits, bound):  # type: ignore[no-untyped-def]
    shift = np.uint32(bits)
    limit = np.uint64(32 - bits)
    for job in range(len(first)):
        x = np.uint32(bound)
        end = first[job] + tokens[job]
        at = end
        for t in range(end - 1, first[job] - 1, -1):
            k = classes[t]
            f = np.uint32(freq[table[job], k])
            if np.uint64(x) >= np.uint64(f) << limit:
                at -= 1
                words[at] = np.uint16(x & np.uint32(0xFFFF))
                x = x >> np.uint32(16)
            quotient = x // f
            x = (quotient << shift) + (x - quotient * f) + np.uint32(cumulative[table[job], k])
        states[job] = x
        count[job] = end - at


@compiled
def _sort(classes, first, tokens, columns, order, counts, window):  # type: ignore[no-untyped-def]
    places = np.empty(counts.shape[1], np.int64)
    own = np.empty(counts.shape[1], np.int64)
    for job in range(len(first)):
        stop = first[job] + tokens[job]
        for begin in range(first[job], stop, window):
            end = min(begin + window, stop)
            own[:] = 0
            for t in range(begin, end):
                own[classes[t]] += 1
            at = begin
            for k in range(len(own)):
                places[k] = at
                at += own[k]
                counts[job, k] += own[k]
            for t in range(begin, end):
                k = classes[t]
                columns[places[k]] = k
                order[places[k]] = np.uint8(t - begin)
                places[k] += 1


def read_classes(words: U16, jobs: I64, slots: U32, table: I64, finest: I64, names: Sequence[str]) -> U8:
    """Decode the class streams of some jobs.

    Args:
        words: the array that CLASS_WORDS points into.
        jobs: `[J, len(JobField)]` with TOKENS, CLASS_WORDS, CLASS_WORD_COUNT and CLASS_STATE; COLUMNS says where the
            classes of a job's tokens go, T of them, one job after the other.
        slots: `[S, 4096]` of the tables.
        table: `[J]`, number of each job's table.
        finest: `[J]`, finest class that the profile serves.
        names: name of each job, for messages.

    Returns:
        the classes of all tokens.

    Raises:
        FormatError: a state is out of range, or the profile does not serve a class.
        CorruptError: a stream that does not end where it must.
    """
    classes = np.empty(int(jobs[:, JobField.TOKENS].sum()), np.uint8)
    low = jobs[:, JobField.CLASS_STATE] < LOWER_BOUND
    if low.any():
        raise FormatError(f"{names[int(np.argmax(low))]}: its token classes begin in a state below the lower bound")
    bad = np.zeros(len(jobs), np.bool_)
    _decode(
        words, jobs[:, JobField.CLASS_WORDS], jobs[:, JobField.CLASS_WORD_COUNT], jobs[:, JobField.CLASS_STATE],
        jobs[:, JobField.TOKENS],
        slots, table, jobs[:, JobField.COLUMNS], classes, bad, CLASS_BITS, LOWER_BOUND,
    )  # fmt: skip
    if bad.any():
        raise CorruptError(
            f"{names[int(np.argmax(bad))]}: the stream of its token classes does not end where it must: "
            "the bytes are damaged"
        )
    least = np.minimum.reduceat(classes, jobs[:, JobField.COLUMNS])
    fine = least < finest
    if fine.any():
        job = int(np.argmax(fine))
        raise FormatError(f"{names[job]}: has token classes outside {finest[job]} … {CLASSES - 1}")
    return classes


def write_classes(classes: U8, jobs: I64, freq: U16, table: I64) -> U16:
    """Code the classes of some jobs' tokens; the inverse of `read_classes`.

    Args:
        classes: of all tokens, T of each job from COLUMNS on.
        jobs: `[J, len(JobField)]` with TOKENS and COLUMNS; CLASS_WORDS, CLASS_WORD_COUNT and CLASS_STATE are written.
        freq: `[S, 256]` of the tables.
        table: `[J]`, number of each job's table.

    Returns:
        the array that CLASS_WORDS points into; words between those of the jobs are arbitrary.
    """
    words = np.zeros(max(len(classes), 1), np.uint16)
    count, states = np.empty(len(jobs), np.int64), np.empty(len(jobs), np.int64)
    cumulative = np.cumsum(freq, axis=1, dtype=np.uint32) - freq
    _encode(
        classes, jobs[:, JobField.COLUMNS], jobs[:, JobField.TOKENS], freq, cumulative, table, words, count, states,
        CLASS_BITS,
        LOWER_BOUND,
    )  # fmt: skip
    jobs[:, JobField.CLASS_WORDS] = jobs[:, JobField.COLUMNS] + jobs[:, JobField.TOKENS] - count
    jobs[:, JobField.CLASS_WORD_COUNT], jobs[:, JobField.CLASS_STATE] = count, states
    return words


def sort_columns(classes: U8, jobs: I64) -> tuple[U8, U8, I64]:
    """Sort the tokens of each window by class: `token_classes.coding_order`.

    Args:
        classes: of all tokens, T of each job from COLUMNS on.
        jobs: `[J, len(JobField)]` with TOKENS and COLUMNS.

    Returns:
        the class of each column; its token, counted from the first of its window; and `[J, 16]`, tokens per class.
    """
    columns, order = np.empty_like(classes), np.empty_like(classes)
    counts = np.zeros((len(jobs), CLASSES), np.int64)
    _sort(classes, jobs[:, JobField.COLUMNS], jobs[:, JobField.TOKENS], columns, order, counts, WINDOW)
    return columns, order, counts
