"""The registry of backends: who codes chunks. Every backend writes and reads the same bytes.

A `Backend` codes whole chunks where they lie. There is one for the CPU (`cpu.py`, with the stages of `stages.py`),
and one for GPUs (`cuvee.kernels.backend`). Each registers itself when its module is first asked for; nothing else in
the codec knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch

from cuvee.codec.errors import InputError

if TYPE_CHECKING:
    from cuvee.codec.format.container import Header, Scheme
    from cuvee.codec.paged import PagedCache
    from cuvee.codec.profiles.profile import Profile


@dataclass(frozen=True, slots=True)
class Coding:
    """How the sections of a blob are coded.

    Attributes:
        profile: whose bases and tables; for lossless its layout alone matters.
        scheme: lossless, transform or generic.
        step_index: 0 for lossless.
        dtype: of the values: the blob's.
    """

    profile: Profile
    scheme: Scheme
    step_index: int
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


class Backend(Protocol):
    """Codes whole chunks where they lie: from and into a `PagedCache`, of which a dense cache is one.

    One on a device works on the device's current stream.
    """

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """Device types it serves."""
        ...

    @property
    def batched(self) -> bool:
        """Whether many chunks in one call are faster than one after the other."""
        ...

    def prepare(self, coding: Coding) -> None:
        """Make ready what coding takes, so that what the profile or the step cannot do fails here and not later.

        Raises:
            ProfileError: a step that the profile's plan does not reach.
        """
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


_MAKERS: dict[str, Callable[[int], Backend]] = {}

# Imported when first asked for: the codec depends on none of them.
_MODULES = {
    "reference": "cuvee.codec.cpu.backend",
    "numba": "cuvee.codec.cpu.backend",
    "triton": "cuvee.kernels.backend",
}
_OF_DEVICE = {"cpu": "numba", "cuda": "triton"}


def register(name: str, make: Callable[[int], Backend]) -> None:
    """Make a backend known under `name`.

    Args:
        name: one of those in this registry, or a new one.
        make: called with the number of threads that it may use.
    """
    _MAKERS[name] = make


def check_backend(name: str) -> str:
    """`name`, if it is `"auto"` or a backend; else raises InputError."""
    known = ["auto", *dict.fromkeys([*_MODULES, *_MAKERS])]
    if name not in known:
        raise InputError(f"backend={name!r} is not known; choose one of {known}")
    return name


def has_backend(name: str, device_type: str) -> bool:
    """Whether `get_backend` has one for tensors on `device_type`; if not, a copy of them on the CPU can be coded.

    A backend for a device that was asked for by name counts everywhere: where it cannot run, `get_backend` says why.
    """
    if check_backend(name) == "auto":
        return device_type in _OF_DEVICE
    return device_type == "cpu" or _MODULES.get(name) != _MODULES["numba"]


def get_backend(name: str, device_type: str = "cpu", threads: int = 1) -> Backend:
    """The backend called `name`, or with `"auto"` the one for tensors on `device_type`.

    Args:
        name: as in `Codec(backend=)`.
        device_type: where the tensors are: `"cpu"`, `"cuda"`.
        threads: of the host, that it may use.

    Raises:
        InputError: no such backend; it cannot run here; or it does not serve that device.
    """
    if check_backend(name) == "auto":
        if device_type not in _OF_DEVICE:
            raise InputError(f"no backend for tensors on {device_type!r}; move them to the CPU first")
        name = _OF_DEVICE[device_type]
    if name not in _MAKERS:
        try:
            import_module(_MODULES[name])
        except ModuleNotFoundError as error:
            raise InputError(f"backend {name!r} needs the package {error.name!r}, which is not installed") from error
    backend = _MAKERS[name](threads)
    if device_type not in backend.devices:
        raise InputError(f"backend {name!r} serves {backend.devices}, not tensors on {device_type!r}")
    return backend
