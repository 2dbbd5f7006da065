"""The stages that code a section on the CPU: loops that Numba compiles, which release the GIL.

The schemes call them in order, through a record: tests put stages in plain NumPy in their place, which with
`codec/FORMAT.md` specify the bitstream (`tests/codec/reference`). Modules are imported when stages are first asked for,
because Numba takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from cuvee.codec.errors import InputError

if TYPE_CHECKING:
    from cuvee.codec.stages.compiled import (
        byte_planes,
        class_predictor,
        integer_product,
        product,
        rans,
        sections,
        symbols,
        token_order,
        transform,
    )

    class Stages:
        """All stages. An index is only valid for the stages and in the thread that made it, until that thread makes the
        next.
        """

        name: str
        gather_centered = staticmethod(transform.gather_centered)
        scatter = staticmethod(transform.scatter)
        move_keys = staticmethod(transform.move_keys)
        predict_classes = staticmethod(class_predictor.predict_classes)
        arrange = staticmethod(token_order.arrange)
        analyze = staticmethod(integer_product.analyze)
        product_runs = staticmethod(product.product_runs)
        prepare_inverse = staticmethod(product.prepare_inverse)
        synthesize = staticmethod(product.synthesize)
        to_planes = staticmethod(symbols.to_planes)
        rans_encode = staticmethod(rans.rans_encode)
        encode_classes = staticmethod(rans.encode_classes)
        index_sections = staticmethod(sections.index_sections)
        decode_sections = staticmethod(sections.decode_sections)
        split_unit = staticmethod(byte_planes.split_unit)
        index_layers = staticmethod(byte_planes.index_layers)
        decode_layers = staticmethod(byte_planes.decode_layers)

else:
    Stages = SimpleNamespace

STAGES = {
    "byte_planes": ("decode_layers", "index_layers", "split_unit"),
    "class_predictor": ("predict_classes",),
    "integer_product": ("analyze",),
    "product": ("prepare_inverse", "product_runs", "synthesize"),
    "rans": ("encode_classes", "rans_encode"),
    "sections": ("decode_sections", "index_sections"),
    "symbols": ("to_planes",),
    "token_order": ("arrange",),
    "transform": ("gather_centered", "move_keys", "scatter"),
}
"""The stages by the module that defines them."""


def gather_stages(name: str, modules: Mapping[str, str]) -> Stages:
    """Return the stages that these modules define: their full names by those of `STAGES`."""
    by_name = {stage: getattr(import_module(modules[key]), stage) for key, stages in STAGES.items() for stage in stages}
    return cast("Stages", SimpleNamespace(name=name, **by_name))


@cache
def compiled_stages() -> Stages:
    """Return the compiled stages.

    Raises:
        InputError: Numba's compiler is switched off.
    """
    if import_module("numba").config.DISABLE_JIT:
        raise InputError(
            "NUMBA_DISABLE_JIT: must not be set, because the codec's loops need Numba's compiler: unset it"
        )
    return gather_stages("numba", {module: f"cuvee.codec.stages.compiled.{module}" for module in STAGES})
