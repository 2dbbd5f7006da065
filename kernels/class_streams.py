"""Token classes on the host: write their streams, which are short, and sort columns by class.

    decode   sections --Incoming.read--> classes --sort_columns--> columns
    encode   offsets --choose_classes--> classes --sort_columns--> columns,   classes --write_classes--> class streams

All jobs of a batch go through one compiled loop each: a stream has one symbol per token, and NumPy would take tens of
calls for each of them. The coder is that of the planes.
"""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.rans import encode_class_stream
from cuvee.codec.stages.compiled.token_order import sort_columns as sort_class_columns
from cuvee.codec.support.arrays import U8, U16
from cuvee.kernels.jobs import I64


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


def write_classes(classes: U8, first: I64, tokens: I64, freq: U16, table: I64) -> tuple[U16, dict[str, I64]]:
    """Code the classes of jobs' tokens with the tables `freq` `[S, 256]`, of which `table` `[J]` names each job's.

    Returns words, arbitrary between those of the jobs; and the fields of jobs that say where each stream stands.
    """
    words = np.zeros(max(len(classes), 1), np.uint16)
    count, states = np.empty(len(first), np.int64), np.empty(len(first), np.int64)
    coders = np.cumsum(freq, axis=1, dtype=np.uint32) - freq << np.uint32(16) | freq
    _encode(classes, first, tokens, coders, table, words, count, states)
    return words, {"class_words": first, "class_word_count": count, "class_state": states}


def sort_columns(classes: U8, first: I64, tokens: I64) -> tuple[U8, U8, I64]:
    """Sort the tokens of each window by class: the order of `codec/FORMAT.md`; a job's begin at `first`.

    Returns the class of each column; its token, counted from the first of its window; and `[J, 16]`, tokens per class.
    """
    columns, order = np.empty_like(classes), np.empty_like(classes)
    counts = np.zeros((len(first), CLASSES), np.int64)
    _sort(classes, first, tokens, columns, order, counts)
    return columns, order, counts
