"""The work that a stage does in one call, counted from what it gets and returns.

| unit | what is counted |
|---|---|
| decoded symbols, encoded symbols | bytes that the entropy coder codes |
| float32 operations, bfloat16 operations | of matrix products, as executed: skipped zeros do not count |
| bytes | of the arrays that a stage reads and writes, each once |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.token_classes import ClassedPlan
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.sections import Section
from cuvee.codec.profiles.step_coding import SectionCoding, StepCoding
from cuvee.codec.stages.compiled import coded_part, product
from cuvee.codec.stages.compiled.byte_planes import LayersIndex
from cuvee.codec.stages.compiled.sections import SectionIndex
from cuvee.codec.stages.reference.rans_by_class import ClassedPlanes
from cuvee.codec.stages.reference.sections import Coefficients
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.arrays import F32, I32, U8

__all__ = ["BYTES", "COUNTED", "DECODED", "DENSE", "ENCODED", "PRODUCTS", "Work", "count_work"]

Work = dict[str, float]

DECODED, ENCODED, BYTES = "decoded symbols", "encoded symbols", "bytes"
PRODUCTS = {torch.float32: "float32 operations", torch.bfloat16: "bfloat16 operations"}
DENSE = "dense operations"  # what the product would execute without skipping; beside one of PRODUCTS


def count_work(stage: str, arguments: Sequence[Any], result: Any) -> Work:
    """Count the work of one call of a compiled stage.

    Args:
        stage: its name in `Stages`, or that of another function that `stages.py` times.
        arguments: of the call. Iterators among them must not have been consumed.
        result: of the call.

    Returns:
        the amounts by unit: see the head of this module, and `DENSE`. Empty for a function that is only timed.
    """
    return COUNTED[stage](result, *arguments) if stage in COUNTED else {}


def _gather(x: torch.Tensor, chunk: KVChunk, section: Section, *_: Any) -> Work:
    return {BYTES: x.numel() * chunk.layout.torch_dtype.itemsize + x.nbytes}


def _classes(result: Any, coding: SectionCoding, x: torch.Tensor, *_: Any) -> Work:
    predictor = coding.learned.predictor
    if predictor is None:
        return {}
    parts = coding.learned.basis.leading(predictor.components).parts
    return {PRODUCTS[x.dtype]: sum(2 * matrix.numel() * len(x) for _, _, matrix in parts)}


def _analyze(
    y: torch.Tensor,
    basis: SectionBasis,
    x: torch.Tensor,
    ranks: tuple[int, ...],
    out: torch.Tensor | None,
    known: int,
    dtype: torch.dtype,
) -> Work:
    values = 0  # of the maps
    for matrix, rank in zip(basis.forward, ranks, strict=True):
        values += max(rank - known, 0) * matrix.shape[1]
        known = 0
    return {PRODUCTS[dtype]: 2 * values * len(x), BYTES: values * dtype.itemsize + x.nbytes + y.nbytes}


def _synthesize(
    x: torch.Tensor, y: torch.Tensor, inverse: Any, runs: Iterable[tuple[slice, Sequence[int]]], out: torch.Tensor
) -> Work:
    _, depth, width = y.shape
    values = x.numel() // max(width, 1)  # of a token, over all blocks
    maps = depth * values  # values of the maps that are read
    return {
        **{PRODUCTS[dtype]: each for dtype, each in product.executed_operations(y, inverse, list(runs)).items()},
        DENSE: 2 * maps * width,
        BYTES: maps * y.element_size() + y.nbytes + x.nbytes,
    }


def _quantize(levels: I32, y: F32, *_: Any) -> Work:
    return {BYTES: y.nbytes + levels.nbytes}


def _pack(result: tuple[U8, Any], levels: I32, *_: Any) -> Work:
    return {BYTES: levels.nbytes + result[0].nbytes}


def _to_planes(result: tuple[U8, Any], y: F32, classes: U8, plan: ClassedPlan, *_: Any) -> Work:
    return {BYTES: int(plan.rows[classes].sum()) * y.itemsize + int(plan.planes[classes].sum())}


def _rans_encode(result: Any, symbols: U8, *_: Any) -> Work:
    return {ENCODED: symbols.size}


def _encode_classed(result: Any, sections: Sequence[ClassedPlanes], *_: Any) -> Work:
    # Each token's class is a symbol, too.
    return {ENCODED: sum(int(own.plan.planes[own.columns].sum()) + len(own.classes) for own in sections)}


def _index_sections(index: SectionIndex, coding: StepCoding, parts: Sequence[Any], tokens: int) -> Work:
    return {DECODED: int(np.count_nonzero(index.found[:, coded_part.MODE])) * tokens}  # their classes


def _decode_sections(tiles: list[Coefficients], index: SectionIndex, at: slice, *_: Any) -> Work:
    total = 0
    for number, tile in zip(index.numbers, tiles, strict=True):
        section = index.coding.sections[number]
        if tile.classes is None:
            total += section.plan.planes * (at.stop - at.start)
        else:
            total += int(section.classed.planes[tile.classes].sum())
    return {DECODED: total}


def _place(
    result: None, x: torch.Tensor, mean: Any, section: Section, layout: KVLayout, rotation: Any, at: slice,
    keys: Sequence[Rows | None], values: Sequence[Rows | None], *_: Any,
) -> Work:  # fmt: skip
    written = 0
    for unit in section.units(layout):
        rows = (values if unit.is_value else keys)[unit.layer]
        if rows is not None:
            written += (at.stop - at.start) * unit.heads * unit.size * rows.memory.element_size()
    return {BYTES: x.nbytes + written}


def _split_unit(result: Any, unit: torch.Tensor) -> Work:
    return {BYTES: 2 * unit.nbytes}


def _index_layers(index: LayersIndex, sections: Sequence[memoryview], *_: Any) -> Work:
    return {BYTES: 4 * len(index.words_at)}  # the sections stay where they are


def _decode_layers(result: None, index: LayersIndex, which: slice, at: slice, *_: Any) -> Work:
    channels, width = index.channels[which], at.stop - at.start
    coded, every = int(channels[index.planes[which, :, 0] != 0].sum()), int(channels.sum())
    return {DECODED: coded * width, BYTES: (every - coded) * width + every * width}


COUNTED: dict[str, Callable[..., Work]] = {
    "classes": _classes,
    "gather_centered": _gather,
    "analyze": _analyze,
    "quantize": _quantize,
    "pack": _pack,
    "to_planes": _to_planes,
    "split_unit": _split_unit,
    "rans_encode": _rans_encode,
    "encode_classed": _encode_classed,
    "index_sections": _index_sections,
    "decode_sections": _decode_sections,
    "index_layers": _index_layers,
    "decode_layers": _decode_layers,
    "synthesize": _synthesize,
    "place": _place,
}
