"""Token classes on the host: code their streams, which are short, and sort columns by class.

    decode   class streams --read_classes--> classes --sort_columns--> columns
    encode   offsets --choose_classes--> classes --sort_columns--> columns,   classes --write_classes--> class streams

All jobs of a batch go through one compiled loop each. The coder is that of `codec/stages/reference/rans.py` with one
symbol per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuvee.codec.entropy.token_classes import CLASS_BITS, CLASSES
from cuvee.codec.errors import CorruptError, FormatError
from cuvee.codec.format.streams import LOWER_BOUND
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.rans import decode_class_stream, encode_class_stream
from cuvee.codec.stages.compiled.token_order import sort_columns as sort_class_columns
from cuvee.codec.support.arrays import U8, U16, U32
from cuvee.kernels.jobs import I64, JobField


@compiled
def _decode(data, begin, count, states, tokens, slots, table, first, classes, bad):  # type: ignore[no-untyped-def]
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
        words.view(np.uint8), jobs[:, JobField.CLASS_WORDS], jobs[:, JobField.CLASS_WORD_COUNT],
        jobs[:, JobField.CLASS_STATE], jobs[:, JobField.TOKENS], slots, table, jobs[:, JobField.COLUMNS], classes, bad,
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
    coders = np.cumsum(freq, axis=1, dtype=np.uint32) - freq << np.uint32(16) | freq
    _encode(classes, jobs[:, JobField.COLUMNS], jobs[:, JobField.TOKENS], coders, table, words, count, states)
    jobs[:, JobField.CLASS_WORDS] = jobs[:, JobField.COLUMNS]
    jobs[:, JobField.CLASS_WORD_COUNT], jobs[:, JobField.CLASS_STATE] = count, states
    return words


def sort_columns(classes: U8, jobs: I64) -> tuple[U8, U8, I64]:
    """Sort the tokens of each window by class: `stages.reference.token_order.coding_order`.

    Args:
        classes: of all tokens, T of each job from COLUMNS on.
        jobs: `[J, len(JobField)]` with TOKENS and COLUMNS.

    Returns:
        the class of each column; its token, counted from the first of its window; and `[J, 16]`, tokens per class.
    """
    columns, order = np.empty_like(classes), np.empty_like(classes)
    counts = np.zeros((len(jobs), CLASSES), np.int64)
    _sort(classes, jobs[:, JobField.COLUMNS], jobs[:, JobField.TOKENS], columns, order, counts)
    return columns, order, counts
