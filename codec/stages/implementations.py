"""The stages that code a section on the CPU, in two implementations that give the same bytes.

`reference` is plain NumPy, written to be read; `numba` is compiled. The schemes call the stages in order, and work with
either implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.coding_plan import CodingPlan, Escapes, Quantizer
from cuvee.codec.entropy.streams import Streams
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ClassedPlan
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.profiles.class_predictor import PredictClasses
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.sections import Section
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.stages.compiled import byte_planes as compiled_byte_planes
from cuvee.codec.stages.compiled import class_predictor as compiled_class_predictor
from cuvee.codec.stages.compiled import product as compiled_product
from cuvee.codec.stages.compiled import rans as compiled_rans
from cuvee.codec.stages.compiled import rans_by_class as compiled_rans_by_class
from cuvee.codec.stages.compiled import sections as compiled_sections
from cuvee.codec.stages.compiled import symbols as compiled_symbols
from cuvee.codec.stages.compiled import symbols_by_class as compiled_symbols_by_class
from cuvee.codec.stages.compiled import token_order as compiled_token_order
from cuvee.codec.stages.compiled import transform as compiled_transform
from cuvee.codec.stages.products import Products
from cuvee.codec.stages.reference import (
    byte_planes,
    class_predictor,
    product,
    rans,
    rans_by_class,
    sections,
    symbols,
    symbols_by_class,
    token_order,
    transform,
)
from cuvee.codec.stages.reference.byte_planes import BytePlane
from cuvee.codec.stages.reference.rans_by_class import ClassedPlanes
from cuvee.codec.stages.reference.sections import Coefficients
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.arrays import F32, I32, I64, U8, U16


class Place(Protocol):
    """`cuvee.codec.stages.reference.transform.place`."""

    def __call__(
        self,
        x: torch.Tensor,
        mean: torch.Tensor,
        section: Section,
        layout: KVLayout,
        rotation: Rotation,
        at: slice,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        order: I64 | None = None,
        predictions: Predictions | None = None,
    ) -> None:
        """Write values into the outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Stages:
    """One implementation of all stages. Each stage has the signature and the results of its reference.

    The references are in `stages/reference`: rans, symbols, transform and product; class_predictor, token_order,
    rans_by_class and symbols_by_class for tokens with classes; sections to decode whole sections; byte_planes for
    lossless. An index is only valid for the stages and in the thread that made it, until that thread makes the next.
    """

    name: str
    rans_encode: Callable[[U8, U16, EntropyTables, int], Streams]
    rans_decode: Callable[[Streams, U16, EntropyTables, int, int], U8]
    quantize: Callable[[F32, float, CodingPlan, Quantizer], I32]
    pack: Callable[[I32, CodingPlan, EntropyTables], tuple[U8, Escapes]]
    gather_centered: Callable[[KVChunk, Section, Rotation, slice, torch.Tensor, Predictions | None], torch.Tensor]
    place: Place
    move_keys: Callable[[torch.Tensor, LayerLayout, Rotation, Rotation, slice, Rows], None]
    analyze: Callable[
        [SectionBasis, torch.Tensor, tuple[int, ...], torch.Tensor | None, int, torch.dtype], torch.Tensor
    ]
    prepare_inverse: Callable[[Sequence[torch.Tensor], int, Products, Sequence[F32]], Any]
    synthesize: Callable[[torch.Tensor, Any, Iterable[tuple[slice, Sequence[int]]], torch.Tensor], torch.Tensor]
    predict_classes: PredictClasses
    arrange: Callable[[U8, torch.Tensor, torch.Tensor | None, int], tuple[U8, torch.Tensor, torch.Tensor]]
    encode_classed: Callable[[Sequence[ClassedPlanes], EntropyTables], list[tuple[Streams, Streams]]]
    to_planes: Callable[[F32, U8, ClassedPlan, Quantizer, EntropyTables], tuple[U8, Escapes]]
    index_sections: Callable[[StepCoding, Sequence[tuple[int, memoryview]], int], Any]
    decode_sections: Callable[[Any, slice, torch.dtype], list[Coefficients]]
    split_unit: Callable[[torch.Tensor], list[BytePlane]]
    index_layers: Callable[[Sequence[memoryview], Sequence[LayerLayout], torch.dtype, int], Any]
    decode_layers: Callable[[Any, slice, slice, Sequence[Rows | None], Sequence[Rows | None], int], None]


_STAGES = (
    Stages(
        "reference",
        rans.rans_encode,
        rans.rans_decode,
        symbols.quantize,
        symbols.pack,
        transform.gather_centered,
        transform.place,
        transform.move_keys,
        SectionBasis.coefficients,
        product.prepare_inverse,
        product.synthesize,
        class_predictor.predict_classes,
        token_order.arrange,
        rans_by_class.encode_classed,
        symbols_by_class.to_planes,
        sections.index_sections,
        sections.decode_sections,
        byte_planes.split_unit,
        byte_planes.index_layers,
        byte_planes.decode_layers,
    ),
    Stages(
        "numba",
        compiled_rans.rans_encode,
        compiled_rans.rans_decode,
        compiled_symbols.quantize,
        compiled_symbols.pack,
        compiled_transform.gather_centered,
        compiled_transform.place,
        compiled_transform.move_keys,
        SectionBasis.coefficients,
        compiled_product.prepare_inverse,
        compiled_product.synthesize,
        compiled_class_predictor.predict_classes,
        compiled_token_order.arrange,
        compiled_rans_by_class.encode_classed,
        compiled_symbols_by_class.to_planes,
        compiled_sections.index_sections,
        compiled_sections.decode_sections,
        compiled_byte_planes.split_unit,
        compiled_byte_planes.index_layers,
        compiled_byte_planes.decode_layers,
    ),
)
_BY_NAME = {stages.name: stages for stages in _STAGES}


def stage_names() -> list[str]:
    """Return the names that `get_stages` accepts."""
    return list(_BY_NAME)


def get_stages(name: str) -> Stages:
    """Return the implementation called `name`.

    Raises:
        InputError: there is no such implementation.
    """
    if name not in _BY_NAME:
        raise InputError(f"name: must be one of {stage_names()}, got {name!r}")
    return _BY_NAME[name]
