"""The compiled functions that Python cannot call, as functions that it can."""

from __future__ import annotations

from cuvee.codec.stages.compiled import coded_part, rans
from cuvee.codec.stages.compiled.compiler import compiled


@compiled
def find_part(data, begin, end, tokens, planes, rows, found, problem):  # type: ignore[no-untyped-def]
    return coded_part.find_part(data, begin, end, tokens, planes, rows, found, problem)


@compiled
def list_words(data, found, words_at):  # type: ignore[no-untyped-def]
    coded_part.list_words(data, found, words_at)


@compiled
def decode_class_stream(data, at, words, state, slots, classes):  # type: ignore[no-untyped-def]
    return rans.decode_class_stream(data, at, words, state, slots, classes)
