"""The stages that code a section on the CPU, in two implementations that give the same bytes.

`reference` is plain NumPy, written to be read; `numba` is compiled. `schemes/` calls the stages one after the other and
does not know which it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cuvee.codec import (
    classes_numba,
    rans,
    rans_classes,
    rans_numba,
    symbols,
    symbols_classes,
    symbols_numba,
    transform,
    transform_numba,
)
from cuvee.codec.classes import ClassedPlan
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.rans import U8, U16, Streams
from cuvee.codec.symbols import F32, I32, CodingPlan, Escapes, Quantizer
from cuvee.codec.tables import EntropyTables
from cuvee.codec.transform import I64, Rotation, Section


class Place(Protocol):
    """`cuvee.codec.transform.place`."""

    def __call__(
        self,
        x: torch.Tensor,
        mean: torch.Tensor,
        section: Section,
        layout: KVLayout,
        rotation: Rotation,
        at: slice,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        order: I64 | None = None,
    ) -> None:
        """Write values into the outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Stages:
    """Each stage with the signature and the results of its namesake in rans, symbols or transform.

    Those for tokens that have classes are in rans_classes and symbols_classes.
    """

    name: str
    rans_encode: Callable[[U8, U16, U16, EntropyTables, int], Streams]
    rans_decode: Callable[[Streams, U16, U16, EntropyTables, int, int], U8]
    quantize: Callable[[F32, float, CodingPlan, Quantizer], I32]
    dequantize: Callable[[I32, float, CodingPlan, Quantizer], F32]
    predict: Callable[[I32, CodingPlan, int], I32]
    unpredict: Callable[[I32, CodingPlan, int], I32]
    pack: Callable[[I32, CodingPlan, EntropyTables, int], tuple[U8, Escapes]]
    unpack: Callable[[U8, Escapes, CodingPlan], I32]
    place: Place
    rans_encode_classes: Callable[[U8, U8, ClassedPlan, EntropyTables, int], Streams]
    rans_decode_classes: Callable[[Streams, U8, ClassedPlan, EntropyTables, int], U8]
    to_planes: Callable[[F32, U8, ClassedPlan, Quantizer, EntropyTables], tuple[U8, Escapes]]
    from_planes: Callable[[U8, U8, Escapes, ClassedPlan, Quantizer, int, torch.dtype], torch.Tensor]
    read_classes: Callable[[Streams, EntropyTables, int], U8]


_STAGES = (
    Stages(
        "reference",
        rans.rans_encode,
        rans.rans_decode,
        symbols.quantize,
        symbols.dequantize,
        symbols.predict,
        symbols.unpredict,
        symbols.pack,
        symbols.unpack,
        transform.place,
        rans_classes.rans_encode_classes,
        rans_classes.rans_decode_classes,
        symbols_classes.to_planes,
        symbols_classes.from_planes,
        rans_classes.read_classes,
    ),
    Stages(
        "numba",
        rans_numba.rans_encode,
        rans_numba.rans_decode,
        symbols_numba.quantize,
        symbols_numba.dequantize,
        symbols_numba.predict,
        symbols_numba.unpredict,
        symbols_numba.pack,
        symbols_numba.unpack,
        transform_numba.place,
        classes_numba.rans_encode_classes,
        classes_numba.rans_decode_classes,
        classes_numba.to_planes,
        classes_numba.from_planes,
        classes_numba.read_classes,
    ),
)
_BY_NAME = {stages.name: stages for stages in _STAGES}


def stage_names() -> list[str]:
    """The names that `get_stages` accepts."""
    return list(_BY_NAME)


def get_stages(name: str) -> Stages:
    """The implementation called `name`.

    Raises:
        InputError: there is none.
    """
    if name not in _BY_NAME:
        raise InputError(f"stages {name!r} are not known; choose one of {stage_names()}")
    return _BY_NAME[name]
