"""The stages that code a section on the CPU, in two implementations that give the same bytes.

`reference` is plain NumPy, written to be read; `numba` is compiled. Each is a package whose functions are the stages,
and is imported when it is first asked for. The schemes call the stages in order, and work with either.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from cuvee.codec.stages import reference

    class Stages:
        """All stages. Each is explained where `stages/reference` defines it, and has the same results elsewhere.

        An index is only valid for the stages and in the thread that made it, until that thread makes the next.
        """

        name: str
        gather_centered = staticmethod(reference.gather_centered)
        place = staticmethod(reference.place)
        move_keys = staticmethod(reference.move_keys)
        predict_classes = staticmethod(reference.predict_classes)
        arrange = staticmethod(reference.arrange)
        analyze = staticmethod(reference.analyze)
        product_runs = staticmethod(reference.product_runs)
        prepare_inverse = staticmethod(reference.prepare_inverse)
        synthesize = staticmethod(reference.synthesize)
        to_planes = staticmethod(reference.to_planes)
        rans_encode = staticmethod(reference.rans_encode)
        encode_classes = staticmethod(reference.encode_classes)
        index_sections = staticmethod(reference.index_sections)
        decode_sections = staticmethod(reference.decode_sections)
        split_unit = staticmethod(reference.split_unit)
        index_layers = staticmethod(reference.index_layers)
        decode_layers = staticmethod(reference.decode_layers)

else:
    Stages = ModuleType

_PACKAGES = {"reference": "cuvee.codec.stages.reference", "numba": "cuvee.codec.stages.compiled"}


def stage_names() -> list[str]:
    """Return the names that `get_stages` accepts."""
    return list(_PACKAGES)


def get_stages(name: str) -> Stages:
    """Return the implementation of one of `stage_names()`."""
    return cast("Stages", import_module(_PACKAGES[name]))
