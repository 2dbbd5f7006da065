"""The registry of backends: who runs the stages. Every backend produces and reads the same bytes.

A backend is a set of functions with the signatures of the reference (`rans.py`, `symbols.py`, `place`). A faster one
registers itself under a name and for the device types it serves; nothing else in the codec knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cuvee.codec import rans, rans_numba, symbols, symbols_numba, transform, transform_numba
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.rans import U8, U16, Streams
from cuvee.codec.symbols import F32, I32, CodingPlan, Escapes, Quantizer
from cuvee.codec.tables import EntropyTables
from cuvee.codec.transform import Rotation, Section

Place = Callable[
    [torch.Tensor, torch.Tensor, Section, KVLayout, Rotation, slice, list[torch.Tensor], list[torch.Tensor]], None
]


@dataclass(frozen=True, slots=True)
class Backend:
    """The stages, each with the signature and the results of its namesake in rans, symbols or transform."""

    name: str
    devices: tuple[str, ...]
    rans_encode: Callable[[U8, U16, U16, EntropyTables, int], Streams]
    rans_decode: Callable[[Streams, U16, U16, EntropyTables, int, int], U8]
    quantize: Callable[[F32, float, CodingPlan, Quantizer], I32]
    dequantize: Callable[[I32, float, CodingPlan, Quantizer], F32]
    predict: Callable[[I32, CodingPlan, int], I32]
    unpredict: Callable[[I32, CodingPlan, int], I32]
    pack: Callable[[I32, CodingPlan, EntropyTables, int], tuple[U8, Escapes]]
    unpack: Callable[[U8, Escapes, CodingPlan], I32]
    place: Place


_BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Make a backend known; the last one registered for a device type is what `"auto"` takes there."""
    _BACKENDS[backend.name] = backend


def backend_names() -> list[str]:
    """The names that `get_backend` accepts, besides `"auto"`."""
    return list(_BACKENDS)


def get_backend(name: str, device_type: str = "cpu") -> Backend:
    """The backend called `name`, or with `"auto"` the one for tensors on `device_type`.

    Raises:
        InputError: no such backend, or none for that device.
    """
    if name == "auto":
        for backend in reversed(_BACKENDS.values()):
            if device_type in backend.devices:
                return backend
        raise InputError(f"no backend for tensors on {device_type!r}; move them to the CPU first")
    if name not in _BACKENDS:
        raise InputError(f"backend={name!r} is not known; choose 'auto' or one of {backend_names()}")
    backend = _BACKENDS[name]
    if device_type not in backend.devices:
        raise InputError(f"backend {name!r} serves {backend.devices}, not tensors on {device_type!r}")
    return backend


register(
    Backend(
        "reference",
        ("cpu",),
        rans.rans_encode,
        rans.rans_decode,
        symbols.quantize,
        symbols.dequantize,
        symbols.predict,
        symbols.unpredict,
        symbols.pack,
        symbols.unpack,
        transform.place,
    )
)
register(
    Backend(
        "numba",
        ("cpu",),
        rans_numba.rans_encode,
        rans_numba.rans_decode,
        symbols_numba.quantize,
        symbols_numba.dequantize,
        symbols_numba.predict,
        symbols_numba.unpredict,
        symbols_numba.pack,
        symbols_numba.unpack,
        transform_numba.place,
    )
)
