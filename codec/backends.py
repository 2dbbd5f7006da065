"""The backends, which code chunks. Every backend writes and reads the same bytes.

    Codec --requests--> Backend --> sections (encode), or tokens in a cache (decode)

A `Backend` codes whole chunks where they lie. One serves the CPU (`codec/cpu/backend.py`, with the stages of
`codec/stages`), and one serves GPUs (`cuvee.kernels.backend`). Their modules are imported on
request: nothing else in the codec depends on a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import CuveeError, InputError, allocations
from cuvee.codec.format.container import SectionBytes
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.paged_chunks import PagedChunk
from cuvee.codec.support.arrays import I64

if TYPE_CHECKING:
    from cuvee.codec.coding.open_blob import OpenBlob
    from cuvee.codec.profiles.profile import Profile
    from cuvee.codec.profiles.setting import Setting


@dataclass(frozen=True, slots=True)
class Coding:
    """How the sections of a blob are coded.

    Attributes:
        profile: gives bases and tables; lossless coding uses its layout alone.
        setting: scheme, step, and whether a refinement follows.
        dtype: the blob's, of the values.
        predicted: whether the blob holds token ids, from which a part of the cache is predicted.
    """

    profile: Profile
    setting: Setting
    dtype: str
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """A chunk to encode. The codec has validated it; whether the cache has all slots, the backend checks.

    Attributes:
        token_ids: `[T]`; None if nothing is predicted from them.
    """

    source: KVChunk | PagedChunk
    token_ids: I64 | None = None

    @property
    def chunk(self) -> KVChunk:
        """The tokens as a chunk: the source itself, or views of pages, or copies."""
        source = self.source
        if isinstance(source, KVChunk):
            return source.with_token_ids(self.token_ids)
        return source.cache.chunk(source.slots, source.start, self.token_ids, source.following)

    @property
    def cache(self) -> PagedCache:
        """The pages that hold the tokens; a chunk is one page."""
        return PagedCache.of_chunk(self.source) if isinstance(self.source, KVChunk) else self.source.cache

    @property
    def slots(self) -> torch.Tensor:
        """Where the tokens lie in `cache`: int64 `[T]` on its device."""
        if isinstance(self.source, KVChunk):
            return torch.arange(self.source.tokens, device=self.source.device)
        return self.source.slots


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Tokens of a blob to decode, and where they go. The blob's header is verified, its sections are not yet.

    Attributes:
        opened: the blob, and its refinement if that is decoded with it.
        span: the tokens of the blob to decode.
        slots: int64 `[len(span)]` on the cache's device, -1 for tokens that are not written; None for the rows of a
            dense cache, in order.
        start: position that the first token of `span` gets.
        number: of the blob in its call, for messages.
        token_ids: of all tokens of the blob, `[T]`; None if it holds none.
    """

    opened: OpenBlob
    span: range
    layers: range
    cache: PagedCache
    slots: torch.Tensor | None
    start: int
    number: int = 0
    token_ids: I64 | None = None

    def part(self, span: range) -> DecodeRequest:
        """Return the request for some of the tokens only; `span` lies within this one's."""
        first = span.start - self.span.start
        slots = self.span_slots[first : first + len(span)]
        return replace(self, span=span, slots=slots, start=self.start + first)

    @property
    def span_slots(self) -> torch.Tensor:
        """`slots`, spelled out for a dense cache."""
        return torch.arange(len(self.span), device=self.cache.device) if self.slots is None else self.slots

    @property
    def every_slot(self) -> torch.Tensor:
        """Slots of all tokens of the blob, int64 on the cache's device: -1 for tokens outside `span`."""
        if len(self.span) == self.opened.tokens:
            return self.span_slots
        slots = torch.full((self.opened.tokens,), NOWHERE, dtype=torch.int64, device=self.cache.device)
        slots[self.span.start : self.span.stop] = self.span_slots
        return slots

    @property
    def blob_start(self) -> int:
        """Position of the blob's first token, decoded or not, beside those of `span`; it may be below zero."""
        return self.start - self.span.start


@dataclass(frozen=True, slots=True)
class PendingDecode:
    """Decoding that was started. `check` waits for it, and tells whether the streams were whole.

    Any thread may call `check`, on any stream. When it returns or raises, nothing more is written to the cache.
    """

    _waiting: tuple[Callable[[], None], ...]

    def check(self) -> None:
        """Wait for the device.

        Raises:
            CorruptError: a stream was damaged.
            InputError: a slot that the cache does not have.
        """
        problem: CuveeError | None = None
        with allocations("decoding"):
            for wait in self._waiting:
                try:
                    wait()
                except CuveeError as error:  # later work still writes to the cache: wait for all
                    problem = problem or error
        if problem is not None:
            raise problem


class Backend(Protocol):
    """Codes whole chunks where they lie: from and into a `PagedCache`, which may be dense.

    A backend of a device works on the device's current stream.
    """

    name: str
    devices: tuple[str, ...]  # device types it serves
    batched: bool  # whether many chunks in one call are faster than one call per chunk

    def prepare(self, coding: Coding) -> None:
        """Build what the coding needs, so that a profile or step that cannot be used fails here and not later.

        Raises:
            ProfileError: a step that the profile's plan does not reach.
        """
        ...

    def encode(self, coding: Coding, requests: Sequence[EncodeRequest]) -> Sequence[Sequence[SectionBytes]]:
        """Return the sections of each chunk: those of the base first, then those of its refinement.

        All requests have one cache.

        Raises:
            InputError: values that the scheme cannot code, or a slot beyond the cache.
        """
        ...

    def to_host(self, values: torch.Tensor) -> npt.NDArray[Any]:
        """Return a tensor of integers on the host; wait for it."""
        ...

    def decode(self, coding: Coding, requests: Sequence[DecodeRequest]) -> Callable[[], None]:
        """Start decoding into the cache; return a function that waits and raises the first error.

        All requests have one cache and the same layers.

        Raises:
            FormatError, CorruptError: at once if a section's checksum or its lengths are wrong; from the returned
                function if the streams are.
        """
        ...


MODULES = {"numba": ("cuvee.codec.cpu.backend", "cpu"), "triton": ("cuvee.kernels.backend", "cuda")}
"""The module of each backend, and the type of device that it serves.

Modules are imported on request: the codec depends on none of them. Each has a function `make_backend(name, threads)`.
"""
_OF_DEVICE = {device: name for name, (_, device) in MODULES.items()}


class Backends:
    """The backends of one codec, one for each type of device, made when they are needed.

    Raises:
        InputError: no backend has the name.
    """

    def __init__(self, name: str, threads: int) -> None:
        names = ["auto", *MODULES]
        if name not in names:
            raise InputError(f"backend: must be one of {names}, got {name!r}")
        self.name, self._threads = name, threads
        self._instances: dict[str, Backend] = {}

    def __getstate__(self) -> dict[str, object]:
        """Leave out the backends, which are made anew."""
        return self.__dict__ | {"_instances": {}}

    def serve(self, device_type: str) -> bool:
        """Return whether `of` has a backend for tensors on `device_type`. If not, a copy on the CPU can be coded.

        A backend of a device that was requested by name counts on every device: `of` explains why it cannot run.
        """
        if self.name == "auto":
            return device_type in _OF_DEVICE
        return device_type == "cpu" or MODULES[self.name][1] != "cpu"

    def of(self, device_type: str) -> Backend:
        """Return the backend for tensors on `device_type`.

        Raises:
            InputError: there is none, or it cannot run here.
        """
        if device_type not in self._instances:
            self._instances[device_type] = self._make(self.name, device_type)
        return self._instances[device_type]

    def prepare(self, coding: Coding) -> None:
        """Build what a coding needs on the host, so that a step beyond the profile's plan fails here and not later."""
        of_host = self.name != "auto" and MODULES[self.name][1] == "cpu"
        host = self._make(self.name if of_host else "auto", "cpu")
        host.prepare(coding)
        if self.name in ("auto", host.name):
            self._instances["cpu"] = host

    def _make(self, name: str, device_type: str) -> Backend:
        if name == "auto":
            if device_type not in _OF_DEVICE:
                raise InputError(
                    f"device: must be one of {list(_OF_DEVICE)}, got {device_type!r}: move the tensors to the CPU first"
                )
            name = _OF_DEVICE[device_type]
        try:
            module = import_module(MODULES[name][0])
        except ModuleNotFoundError as error:
            raise InputError(
                f"backend: must be installed, got {name!r}, which needs the package {error.name!r}"
            ) from error
        backend: Backend = module.make_backend(name, self._threads)
        if device_type not in backend.devices:
            raise InputError(f"backend: must serve {device_type!r}, got {name!r}, which serves {list(backend.devices)}")
        return backend
