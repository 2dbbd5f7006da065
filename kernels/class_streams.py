"""Token classes on the host: code their streams, which are short, and sort columns by class.

    decode   class streams --read_classes--> classes --sort_columns--> columns
    encode   offsets --choose_classes--> classes --sort_columns--> columns,   classes --write_classes--> class streams

All jobs of a batch go through one compiled loop each: a stream has one symbol per token, and NumPy would take tens of
calls for each of them. The coder is that of `codec/stages/reference/rans.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cuvee.codec.entropy.token_classes import CLASS_BITS, CLASSES
from cuvee.codec.format import rules
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.rans import decode_class_stream, encode_class_stream
from cuvee.codec.stages.compiled.token_order import sort_columns as sort_class_columns
from cuvee.codec.support.arrays import U8, U16, U32
from cuvee.kernels.incoming import job_error
from cuvee.kernels.jobs import I64


@compiled
def _decode(data, begin, count, states, first, tokens, slots, table, classes, bad):  # type: ignore[no-untyped-def]
    for job in range(len(begin)):
        own = classes[first[job] : first[job] + tokens[job]]
        bad[job] = not decode_class_stream(
            data, 2 * begin[job], count[job], states[job], slots[table[job]], CLASS_BITS, own
        )


@compiled
def _encode(classes, first, tokens, coders, table, words, count, states):  # type: ignore[no-untyped-def]
    for job in range(len(first)):
        at, end = first[job], first[job] + tokens[job]
        states[job], count[job] = encode_class_stream(classes[at:end], coders[table[job]], words[at:end])


@compiled
def _sort(classes, first, tokens, columns, order, counts):  # type: ignore[no-untyped-def]
    for job in range(len(first)):
        at, end = first[job], first[job] + tokens[job]
        # A window has 256 tokens: as a byte, a token of the job is one of its window.
        sort_class_columns(classes[at:end], order[at:end], columns[at:end])
        for t in range(at, end):
            counts[job, classes[t]] += 1


def read_classes(
    data: U8,
    coded: Mapping[str, I64],
    first: I64,
    tokens: I64,
    slots: U32,
    table: I64,
    finest: I64,
    names: Sequence[str],
) -> U8:
    """Decode the class streams of jobs.

    Args:
        data: the bytes that hold them.
        coded: of `read_coded`.
        first: `[J]`, where the classes of a job's tokens go; one job after the other.
        tokens: `[J]`.
        slots: `[S, 4096]` of the tables.
        table: `[J]`, number of each job's table.
        finest: `[J]`, finest class that the profile serves.
        names: name of each job, for messages.

    Returns:
        the classes of all tokens.

    Raises:
        FormatError: the profile does not serve a class.
        CorruptError: a stream that does not end where it must.
    """
    classes = np.empty(int(tokens.sum()), np.uint8)
    bad = np.zeros(len(first), np.bool_)
    _decode(
        data, coded["class_words"], coded["class_word_count"], coded["class_state"], first, tokens, slots, table,
        classes, bad,
    )  # fmt: skip
    if bad.any():
        raise job_error(rules.CLASS_STREAM, names[int(np.argmax(bad))])
    fine = np.minimum.reduceat(classes, first) < finest
    if fine.any():
        job = int(np.argmax(fine))
        raise job_error(rules.CLASS_RANGE, names[job], int(finest[job]))
    return classes


def write_classes(classes: U8, first: I64, tokens: I64, freq: U16, table: I64) -> tuple[U16, dict[str, I64]]:
    """Code the classes of jobs' tokens; the inverse of `read_classes`.

    Args:
        classes: of all tokens.
        first: `[J]`, where those of a job begin.
        tokens: `[J]`.
        freq: `[S, 256]` of the tables.
        table: `[J]`, number of each job's table.

    Returns:
        words, arbitrary between those of the jobs; and the fields of jobs that say where each stream stands.
    """
    words = np.zeros(max(len(classes), 1), np.uint16)
    count, states = np.empty(len(first), np.int64), np.empty(len(first), np.int64)
    coders = np.cumsum(freq, axis=1, dtype=np.uint32) - freq << np.uint32(16) | freq
    _encode(classes, first, tokens, coders, table, words, count, states)
    return words, {"class_words": first, "class_word_count": count, "class_state": states}


def sort_columns(classes: U8, first: I64, tokens: I64) -> tuple[U8, U8, I64]:
    """Sort the tokens of each window by class: `stages.reference.token_order.coding_order`.

    Args:
        classes: of all tokens.
        first: `[J]`, where those of a job begin.
        tokens: `[J]`.

    Returns:
        the class of each column; its token, counted from the first of its window; and `[J, 16]`, tokens per class.
    """
    columns, order = np.empty_like(classes), np.empty_like(classes)
    counts = np.zeros((len(first), CLASSES), np.int64)
    _sort(classes, first, tokens, columns, order, counts)
    return columns, order, counts
