"""The stages that code a section on the CPU, in two implementations that give the same bytes.

`reference` is plain NumPy, written to be read: with `codec/FORMAT.md`, it specifies the bitstream. `numba` is compiled,
and its loops release the GIL. Both have the same modules and functions, which are imported when they are first asked
for. The schemes call the stages in order, and work with either.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from cuvee.codec.errors import InputError

if TYPE_CHECKING:
    from cuvee.codec.stages.reference import (
        byte_planes,
        class_predictor,
        product,
        rans,
        sections,
        symbols,
        token_order,
        transform,
    )

    class Stages:
        """All stages. Each is explained where `stages/reference` defines it, and has the same results elsewhere.

        An index is only valid for the stages and in the thread that made it, until that thread makes the next.
        """

        name: str
        gather_centered = staticmethod(transform.gather_centered)
        place = staticmethod(transform.place)
        move_keys = staticmethod(transform.move_keys)
        predict_classes = staticmethod(class_predictor.predict_classes)
        arrange = staticmethod(token_order.arrange)
        analyze = staticmethod(product.analyze)
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

_PACKAGES = {"reference": "cuvee.codec.stages.reference", "numba": "cuvee.codec.stages.compiled"}
STAGES = {
    "byte_planes": ("decode_layers", "index_layers", "split_unit"),
    "class_predictor": ("predict_classes",),
    "product": ("analyze", "prepare_inverse", "product_runs", "synthesize"),
    "rans": ("encode_classes", "rans_encode"),
    "sections": ("decode_sections", "index_sections"),
    "symbols": ("to_planes",),
    "token_order": ("arrange",),
    "transform": ("gather_centered", "move_keys", "place"),
}
"""The stages by the module that defines them, in either implementation."""


def stage_names() -> list[str]:
    """Return the names that `get_stages` accepts."""
    return list(_PACKAGES)


@cache
def get_stages(name: str) -> Stages:
    """Return the implementation of one of `stage_names()`.

    Raises:
        InputError: Numba's compiler is switched off.
    """
    if name == "numba" and import_module("numba").config.DISABLE_JIT:
        raise InputError(
            "NUMBA_DISABLE_JIT: must not be set, because the codec's loops need Numba's compiler: unset it, or take "
            "backend='reference', which is a hundred times slower"
        )
    modules = {module: import_module(f"{_PACKAGES[name]}.{module}") for module in STAGES}
    found = {stage: getattr(modules[module], stage) for module, stages in STAGES.items() for stage in stages}
    return cast("Stages", SimpleNamespace(name=name, **found))
