"""Coefficients of tokens with classes to byte planes and back, the reference: `symbols.py`, class by class.

    y [R, T] float32, columns sorted by class --to_planes--> planes [P, T] uint8, escapes --from_planes--> y^ [R, T]

`symbols.quantize` and `symbols.pack` code each run of columns of one class, with the plan and step of the class.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL, Escapes, Quantizer, escape_error, too_large_error
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ClassedPlan
from cuvee.codec.stages.reference import symbols
from cuvee.codec.support.arrays import F32, U8


def class_runs(classes: U8) -> Iterator[tuple[slice, int]]:
    """Yield the runs of adjacent columns of one class, each with its class."""
    edges = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(classes)]
    for start, stop in pairwise(edges):
        if start < stop:
            yield slice(start, stop), int(classes[start])


def to_planes(
    y: F32, classes: U8, plan: ClassedPlan, quantizer: Quantizer, tables: EntropyTables
) -> tuple[U8, Escapes]:
    """Quantize and pack.

    Args:
        y: `[R, T]` float32, columns sorted by class within windows. R is at least the number of components of the
            finest class in `classes`.
        classes: `[T]` uint8, the class of each column; none is finer than `plan.finest`.
        plan: how each class is coded.
        quantizer: the quantizer of the profile's family.
        tables: the tables of the profile's family.

    Returns:
        planes `[P, T]` uint8, zero below a column's last plane, where P is the number of planes of the finest class in
        `classes`; and the escapes, numbered row * T + column.

    Raises:
        InputError: a coefficient is too many steps large, or not a number.
    """
    tokens = len(classes)
    planes = np.zeros((int(plan.planes[classes].max(initial=0)), tokens), np.uint8)
    index, value = [np.empty(0, np.uint32)], [np.empty(0, np.int32)]
    for at, k in class_runs(classes):
        own = plan.of(k)
        rows, width = len(own.shift), at.stop - at.start
        of_class = np.ascontiguousarray(y[:rows, at])
        with np.errstate(over="ignore"):  # infinitely many steps are refused below
            largest = np.abs(of_class).max(initial=0) * (np.float32(1) / plan.steps[k])
        if not largest < MAX_LEVEL:
            raise too_large_error(float(largest))
        levels = symbols.quantize(of_class, float(plan.steps[k]), own, quantizer)
        coded, escapes = symbols.pack(levels, own, tables)
        planes[: own.planes, at] = coded
        row, column = np.divmod(escapes.index, np.uint32(width))
        index.append(row * np.uint32(tokens) + column + np.uint32(at.start))
        value.append(escapes.value)
    joined = np.concatenate(index)
    order = np.argsort(joined, kind="stable")
    return planes, Escapes(joined[order], np.concatenate(value)[order])


def from_planes(
    planes: U8,
    classes: U8,
    escapes: Escapes,
    plan: ClassedPlan,
    quantizer: Quantizer,
    rows: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Invert `to_planes`: return `[rows, T]` of `dtype` (float32 or bfloat16), zero below a column's last component.

    Raises:
        CorruptError: the escape list and the ESCAPE bytes disagree.
    """
    tokens = len(classes)
    out = np.zeros((rows, tokens), np.float32)
    row, column = np.divmod(escapes.index, np.uint32(max(tokens, 1)))
    found = 0
    for at, k in class_runs(classes):
        own = plan.of(k)
        width = at.stop - at.start
        inside = (column >= at.start) & (column < at.stop)
        local = Escapes(row[inside] * np.uint32(width) + column[inside] - np.uint32(at.start), escapes.value[inside])
        found += int((planes[: len(own.shift), at] == ESCAPE).sum())
        levels = symbols.unpack(np.ascontiguousarray(planes[: own.planes, at]), local, own)
        out[: len(own.shift), at] = symbols.dequantize(levels, float(plan.steps[k]), own, quantizer)
    if found != len(escapes.index):
        raise escape_error()
    return torch.from_numpy(out).to(dtype)
