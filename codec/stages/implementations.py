"""The stages that code a section on the CPU, in two implementations that give the same bytes.

`reference` is plain NumPy, written to be read; `numba` is compiled. Each is a package whose functions are the stages,
and is imported when it is first asked for. The schemes call the stages in order, and work with either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch

    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.entropy.coding_plan import Quantizer
    from cuvee.codec.entropy.tables import EntropyTables
    from cuvee.codec.entropy.token_classes import ClassedPlan, SectionPlanes
    from cuvee.codec.format.streams import Escapes, Streams
    from cuvee.codec.layout import KVLayout, LayerLayout
    from cuvee.codec.profiles.class_predictor import Predictor
    from cuvee.codec.profiles.sections import Section
    from cuvee.codec.profiles.step_coding import StepCoding
    from cuvee.codec.profiles.token_prediction import Predictions
    from cuvee.codec.stages import compiled, reference
    from cuvee.codec.stages.products import Products
    from cuvee.codec.stages.reference.byte_planes import BytePlane
    from cuvee.codec.stages.reference.sections import Coefficients
    from cuvee.codec.stages.rotation import Rotation
    from cuvee.codec.stages.rows import Rows
    from cuvee.codec.support.arrays import F32, I64, U8

_PACKAGES = {"reference": "cuvee.codec.stages.reference", "numba": "cuvee.codec.stages.compiled"}


class Stages(Protocol):
    """All stages. Each is explained where `stages/reference` defines it, and has the same results elsewhere.

    An index is only valid for the stages and in the thread that made it, until that thread makes the next.
    """

    @property
    def name(self) -> str:
        """What `get_stages` calls this implementation."""
        ...

    def gather_centered(
        self,
        chunk: KVChunk,
        section: Section,
        rotation: Rotation,
        at: slice,
        mean: torch.Tensor,
        predictions: Predictions | None = None,
    ) -> torch.Tensor: ...

    def place(
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
    ) -> None: ...

    def move_keys(
        self,
        stored: torch.Tensor,
        layer: LayerLayout,
        unrotation: Rotation,
        rotation: Rotation,
        at: slice,
        rows: Rows,
    ) -> None: ...

    def predict_classes(
        self,
        predictor: Predictor,
        y: torch.Tensor,
        predictions: Predictions | None,
        start: int,
        first: int,
        finer: torch.Tensor,
        finest: int,
    ) -> U8: ...

    def arrange(
        self, classes: U8, x: torch.Tensor, leading: torch.Tensor | None, rows: int
    ) -> tuple[U8, torch.Tensor, torch.Tensor]: ...

    def product_runs(
        self, columns: U8, class_ranks: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[slice, tuple[int, ...]]]: ...

    def prepare_inverse(
        self, matrices: Sequence[torch.Tensor], rank: int, products: Products, shares: Sequence[F32]
    ) -> Any: ...

    def synthesize(
        self, y: torch.Tensor, inverse: Any, runs: Iterable[tuple[slice, Sequence[int]]], out: torch.Tensor
    ) -> torch.Tensor: ...

    def to_planes(
        self, y: F32, columns: U8, plan: ClassedPlan, quantizer: Quantizer, tables: EntropyTables
    ) -> tuple[U8, Escapes]: ...

    def rans_encode(self, sections: Sequence[SectionPlanes], tables: EntropyTables) -> list[Streams]: ...

    def encode_classes(self, classes: U8, table: EntropyTables) -> Streams: ...

    def index_sections(self, coding: StepCoding, parts: Sequence[tuple[int, memoryview]], tokens: int) -> Any: ...

    def decode_sections(self, index: Any, at: slice, dtype: torch.dtype) -> list[Coefficients]: ...

    def split_unit(self, unit: torch.Tensor) -> list[BytePlane]: ...

    def index_layers(
        self, sections: Sequence[memoryview], layers: Sequence[LayerLayout], dtype: torch.dtype, tokens: int
    ) -> Any: ...

    def decode_layers(
        self,
        index: Any,
        which: slice,
        at: slice,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        first_row: int,
    ) -> None: ...


if TYPE_CHECKING:
    _CHECKED: tuple[Stages, ...] = (reference, compiled)


def stage_names() -> list[str]:
    """Return the names that `get_stages` accepts."""
    return list(_PACKAGES)


def get_stages(name: str) -> Stages:
    """Return the implementation of one of `stage_names()`."""
    return cast(Stages, import_module(_PACKAGES[name]))
