"""The registry of backends: who runs the stages. Every backend produces and reads the same bytes.

There are two kinds. A `Backend` serves the CPU: a set of functions with the signatures of the reference (`rans.py`,
`symbols.py`, `place`), which `schemes/` calls one after the other. A `DeviceBackend` takes over where the data lie on
a device and many chunks and layers have to go through one launch: it codes whole chunks, from and into a
`PagedCache`. Either registers itself under a name and for the device types it serves; nothing else in the codec knows
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    from cuvee.codec.container import Header, Scheme
    from cuvee.codec.paged import PagedCache
    from cuvee.codec.profile import Profile


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
class Backend:
    """The stages, each with the signature and the results of its namesake in rans, symbols or transform.

    Those for tokens that have classes are in rans_classes and symbols_classes.
    """

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
    rans_encode_classes: Callable[[U8, U8, ClassedPlan, EntropyTables, int], Streams]
    rans_decode_classes: Callable[[Streams, U8, ClassedPlan, EntropyTables, int], U8]
    to_planes: Callable[[F32, U8, ClassedPlan, Quantizer, EntropyTables], tuple[U8, Escapes]]
    from_planes: Callable[[U8, U8, Escapes, ClassedPlan, Quantizer, int, torch.dtype], torch.Tensor]
    read_classes: Callable[[Streams, EntropyTables, int], U8]


@dataclass(frozen=True, slots=True)
class Coding:
    """How the sections of a blob are coded.

    Attributes:
        profile: whose bases and tables; for lossless its layout alone matters.
        scheme: lossless, transform or generic.
        step: step index, 0 for lossless.
        dtype: of the values: the blob's.
    """

    profile: Profile
    scheme: Scheme
    step: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CodedChunk:
    """A blob to be decoded into a cache: its header is verified, its sections are not yet.

    Attributes:
        blob: all of its bytes.
        header: what `read_header` returned.
        slots: int64 `[tokens]` on the cache's device, -1 for tokens that are not to be written.
        start: position that its first token gets.
        number: of the blob in its call, for messages.
    """

    blob: bytes | memoryview
    header: Header
    slots: torch.Tensor
    start: int
    number: int = 0


class DeviceBackend(Protocol):
    """Codes whole chunks where they lie. Works on the device's current stream."""

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """Device types it serves."""
        ...

    def encode(
        self,
        coding: Coding,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        offsets: Sequence[torch.Tensor | None],
    ) -> list[list[bytes]]:
        """The sections of each chunk: chunk i is the tokens at `slots[i]`, the first at position `starts[i]`.

        `offsets[i]` are octaves `[T]` by which its tokens' steps shall be coarser (on the CPU), None where the profile
        is to say.

        Raises:
            InputError: values that the scheme cannot code, or a slot beyond the cache.
        """
        ...

    def decode(
        self, coding: Coding, chunks: Sequence[CodedChunk], cache: PagedCache, layers: range
    ) -> Callable[[], None]:
        """Start writing the chunks into the cache; returns a function that waits and raises what went wrong.

        Raises:
            FormatError, CorruptError: at once, if a section's checksum or its lengths are wrong; from the returned
                function, if the streams are.
        """
        ...


_BACKENDS: dict[str, Backend] = {}
_DEVICE_BACKENDS: dict[str, DeviceBackend] = {}

# Registered by modules that are imported when a device asks for them: the codec does not depend on them.
_MODULES = {"triton": "cuvee.kernels.backend"}
_OF_DEVICE = {"cuda": "triton"}


def register(backend: Backend) -> None:
    """Make a backend known; the last one registered for a device type is what `"auto"` takes there."""
    _BACKENDS[backend.name] = backend


def register_device(backend: DeviceBackend) -> None:
    """Make a device backend known."""
    _DEVICE_BACKENDS[backend.name] = backend


def backend_names() -> list[str]:
    """The names that `get_backend` accepts, besides `"auto"`."""
    return list(_BACKENDS)


def check_backend(name: str) -> str:
    """`name`, if it is `"auto"` or a backend of either kind; else raises InputError."""
    known = ["auto", *_BACKENDS, *_MODULES]
    if name not in known:
        raise InputError(f"backend={name!r} is not known; choose one of {known}")
    return name


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


def get_device_backend(name: str, device_type: str) -> DeviceBackend | None:
    """The device backend for tensors on `device_type`; None where a `Backend` is to serve them.

    Raises:
        InputError: the backend cannot run here, or does not serve that device.
    """
    if name == "auto":
        name = _OF_DEVICE.get(device_type, "")
    if name not in _MODULES:
        return None
    try:
        import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        raise InputError(f"backend {name!r} needs the package {error.name!r}, which is not installed") from error
    backend = _DEVICE_BACKENDS[name]
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
        rans_classes.rans_encode_classes,
        rans_classes.rans_decode_classes,
        symbols_classes.to_planes,
        symbols_classes.from_planes,
        rans_classes.read_classes,
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
        classes_numba.rans_encode_classes,
        classes_numba.rans_decode_classes,
        classes_numba.to_planes,
        classes_numba.from_planes,
        classes_numba.read_classes,
    )
)
