"""`Codec`: chunks to blobs and back."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from cuvee.codec.backends import (
    Backend,
    CodedChunk,
    Coding,
    DeviceBackend,
    check_backend,
    get_backend,
    get_device_backend,
)
from cuvee.codec.coefficients import MAX_TOKENS_PER_STREAM
from cuvee.codec.container import Header, Scheme, check_key, read_header, read_section, verify_tag, write_blob
from cuvee.codec.errors import FormatError, InputError, ProfileMismatch
from cuvee.codec.layout import KVChunk, KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.profile import ID_BYTES, LOSSLESS, Profile
from cuvee.codec.schemes import SectionScheme, Target
from cuvee.codec.schemes.generic import GenericScheme
from cuvee.codec.schemes.lossless import LosslessScheme
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.transform import Rotation, tile_tokens

T = TypeVar("T")

LAST_POSITION = (1 << 32) - 1  # that a blob can name
MAX_SCHEMES = 8  # kept: the codec's own, and those of the blobs decoded last
PARALLEL_VALUES = 1 << 20  # in a smaller chunk the threads take longer to start than to help


class Codec:
    """Compresses chunks with one profile at one quality. Immutable and safe to share between threads.

    Args:
        profile: what was learned for the model, or `Profile.generic(layout)`.
        quality: `"lossless"`, `"high"`, `"balanced"` (the default) or `"small"`; or instead exactly one of
        kl: nats a token that the model's predictions may move, read off the profile's curve;
        bits: bits a value, all bytes counted;
        ratio: uncompressed over compressed size;
        step: the quantiser step itself, in the profile's units.
        backend: `"auto"` (by the tensors' device), `"numba"` or `"reference"` on the CPU, `"triton"` on a GPU.
        threads: sections coded at the same time, in chunks of a million values or more. Default: the number of CPUs.
        key: 16 to 64 secret bytes; blobs then carry an authentication tag, and only blobs with a valid one decode.

    Raises:
        InputError: an argument out of range, or several qualities at once.
        ProfileError: the profile's curve does not reach the quality asked for.
    """

    def __init__(
        self,
        profile: Profile,
        quality: str | None = None,
        *,
        kl: float | None = None,
        bits: float | None = None,
        ratio: float | None = None,
        step: float | None = None,
        backend: str = "auto",
        threads: int | None = None,
        key: bytes | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise InputError(f"threads={threads} must be at least 1")
        if (quality, kl, bits, ratio, step) == (None,) * 5:
            quality = "balanced"
        others = [kl, bits, ratio, step]
        self.profile = profile
        self.lossless = quality == LOSSLESS and others == [None] * 4
        self.step = 0 if self.lossless else profile.resolve(quality, kl=kl, bits=bits, ratio=ratio, step=step)
        self.threads = threads or os.cpu_count() or 1
        self._backend_name = check_backend(backend)
        self._key = check_key(key)
        scheme = Scheme.LOSSLESS if self.lossless else (Scheme.TRANSFORM if profile.learned else Scheme.GENERIC)
        self._own = scheme
        self._layouts: dict[str, KVLayout] = {}
        self._schemes: dict[tuple[Scheme, int, str], SectionScheme] = {}
        self._scheme(scheme, self.step, get_backend("auto"))  # a step out of the plan's reach fails here, not later

    def encode(self, chunk: KVChunk) -> bytes:
        """Compress a chunk into one blob, on the device where the chunk is.

        Raises:
            ProfileMismatch: the chunk's layout is not the profile's.
            InputError: values that a lossy quality cannot code (NaN, infinite).
        """
        self.profile.check_layout(chunk.layout)
        device_backend = get_device_backend(self._backend_name, chunk.device.type)
        if device_backend is not None:
            cache = PagedCache.dense(chunk.layout, chunk.keys, chunk.values)
            slots = torch.arange(chunk.tokens, device=chunk.device)
            return self._encode_on(device_backend, cache, [slots], [chunk.start])[0]
        scheme = self._scheme(self._own, self.step, get_backend(self._backend_name, chunk.device.type))
        unrotation = Rotation(chunk.layout, chunk.start, chunk.tokens, chunk.device, inverse=True)
        jobs = [partial(scheme.encode, chunk, index, unrotation) for index in range(len(scheme.sections))]
        sections = self._run(jobs, self._workers(chunk.tokens, chunk.layout))
        return self._blob(chunk.layout, chunk.tokens, chunk.start, sections)

    def _blob(self, layout: KVLayout, tokens: int, start: int, sections: Sequence[bytes]) -> bytes:
        profile = bytes(ID_BYTES) if self.lossless else self.profile.id
        return write_blob(
            self._own, layout.dtype, tokens, start, self.step, layout.values_per_token, layout.fingerprint, profile,
            sections, self._key,
        )  # fmt: skip

    def _encode_on(
        self, backend: DeviceBackend, cache: PagedCache, slots: Sequence[torch.Tensor], starts: Sequence[int]
    ) -> list[bytes]:
        coding = Coding(self.profile, self._own, self.step, cache.layout.dtype)
        chunks = backend.encode(coding, cache, slots, starts)
        return [
            self._blob(cache.layout, len(at), start, sections)
            for at, start, sections in zip(slots, starts, chunks, strict=True)
        ]

    def decode(
        self,
        blob: bytes,
        start: int | None = None,
        *,
        tokens: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> KVChunk:
        """Restore a chunk. Any blob of this codec's profile will do, whatever quality it was encoded at.

        Args:
            blob: what `encode` made.
            start: position of the first restored token; None leaves it where it was.
            tokens: restore only the tokens `first <= t < end` of the chunk.
            device: where the chunk is restored.

        Raises:
            FormatError, VersionError, CorruptError: bytes that are not a whole, undamaged blob.
            ProfileMismatch: a blob of another profile or model.
            InputError: a target position the model does not have, or a run outside the chunk.
        """
        header, layout = self._open(blob)
        first, end = tokens or (0, header.tokens)
        if not 0 <= first < end <= header.tokens:
            raise InputError(f"tokens=({first}, {end}) must lie within the {header.tokens} tokens of the blob")
        layers, kept = range(layout.num_layers), header.start + first
        keys, values, start = self._restore(
            blob, header, layout, layers, slice(first, end), kept, start, torch.device(device)
        )
        return KVChunk(keys, values, layout, start)

    def decode_layers(
        self,
        blob: bytes,
        first_layer: int,
        end_layer: int,
        start: int | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Restore only the layers `first_layer <= l < end_layer`, reading only their sections: layer-wise restoring.

        Returns:
            keys and values, one `[T, H, D]` tensor a layer.

        Raises:
            as `decode`; InputError for layers the model does not have.
        """
        header, layout = self._open(blob)
        layers = self._check_layers(range(first_layer, end_layer))
        wanted = slice(0, header.tokens)
        keys, values, _ = self._restore(blob, header, layout, layers, wanted, header.start, start, torch.device(device))
        return keys[first_layer:end_layer], values[first_layer:end_layer]

    def on_device(self, device: torch.device | str) -> bool:
        """Whether caches on `device` are coded there, many chunks in one go: `encode_paged` and `decode_paged`.

        Raises:
            InputError: the backend asked for cannot run here, or does not serve that device.
        """
        return get_device_backend(self._backend_name, torch.device(device).type) is not None

    def check(self, blob: bytes) -> Header:
        """The header of a blob that this codec decodes. Its sections are not looked at.

        Raises:
            FormatError, VersionError, CorruptError, ProfileMismatch: as `decode`.
        """
        return self._open(blob)[0]

    def encode_paged(self, cache: PagedCache, slots: Sequence[torch.Tensor], starts: Sequence[int]) -> list[bytes]:
        """Compress chunks straight out of a serving engine's cache, all in one go.

        Args:
            cache: where the tokens lie.
            slots: of each chunk, int64 `[T]` on the cache's device: the slots of its tokens, in order.
            starts: of each chunk, the position of its first token.

        Returns:
            one blob a chunk. They hold values of `cache.layout.dtype`, whatever the cache stores.

        Raises:
            as `encode`; InputError for slots that the cache does not have.
        """
        self.profile.check_layout(cache.layout)
        if len(slots) != len(starts):
            raise InputError(f"slots are given for {len(slots)} chunks, starts for {len(starts)}")
        for at, start in zip(slots, starts, strict=True):
            if not len(cache.check_slots(at)):
                raise InputError("slots name no tokens: a chunk needs at least one")
            self._check_start(start, len(at))
        backend = get_device_backend(self._backend_name, cache.device.type)
        if backend is not None:
            return self._encode_on(backend, cache, slots, starts) if slots else []
        return [self.encode(cache.read(at, start)) for at, start in zip(slots, starts, strict=True)]

    def decode_paged(
        self,
        blobs: Sequence[bytes],
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int] | None = None,
        layers: range | None = None,
    ) -> PendingDecode:
        """Restore chunks straight into a serving engine's cache, all in one go.

        On a device this only starts the work, on its current stream: call `check()` of the result before anything
        is believed that was read from those slots. What lies in them after a failure is not defined.

        Args:
            blobs: what `encode` or `encode_paged` made, of any quality of this profile.
            cache: where the tokens go.
            slots: of each blob, int64 `[T]` on the cache's device; -1 leaves a token out.
            starts: of each blob, the position that its first token gets; default: where it was.
            layers: restore only these, reading only their sections; default all.

        Raises:
            as `decode`, at once for what headers and checksums tell, from `check()` for damaged streams.
        """
        self.profile.check_layout(cache.layout)
        layers = self._check_layers(range(cache.layout.num_layers) if layers is None else layers)
        if len(slots) != len(blobs) or (starts is not None and len(starts) != len(blobs)):
            raise InputError(f"blobs, slots and starts must be of one length; there are {len(blobs)} blobs")
        opened = [self._open(blob) for blob in blobs]
        for (header, _), at in zip(opened, slots, strict=True):
            cache.check_slots(at, header.tokens)
        backend = get_device_backend(self._backend_name, cache.device.type)
        if backend is None:
            get_backend(self._backend_name, cache.device.type)  # which says what is wrong with the device
        work: dict[Coding, list[CodedChunk]] = defaultdict(list)
        for i, (blob, (header, layout)) in enumerate(zip(blobs, opened, strict=True)):
            start = header.start if starts is None else starts[i]
            if backend is None:
                whole = slice(0, header.tokens)
                target = self._decode(blob, header, layout, layers, whole, header.start, start)
                cache.write(
                    target.keys[layers.start : layers.stop], target.values[layers.start : layers.stop], slots[i], layers
                )
            else:
                self._check_move(layout, header.start, start, header.tokens)
                work[self._coding(header)].append(CodedChunk(blob, header, slots[i], start, i))
        if backend is None:
            return PendingDecode(())
        return PendingDecode(tuple(backend.decode(coding, chunks, cache, layers) for coding, chunks in work.items()))

    def _restore(
        self,
        blob: bytes,
        header: Header,
        layout: KVLayout,
        layers: range,
        wanted: slice,
        kept: int,
        start: int | None,
        device: torch.device,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        """Keys, values (per layer; empty outside `layers`) and the position of the first of them."""
        backend = get_device_backend(self._backend_name, device.type)
        if backend is None:
            get_backend(self._backend_name, device.type)  # which says what is wrong with the device
            target = self._decode(blob, header, layout, layers, wanted, kept, start)
            return target.keys, target.values, target.start
        start = kept if start is None else start
        count = wanted.stop - wanted.start
        self._check_move(layout, kept, start, count)
        keys, values = _outputs(layout, layers, count, device)
        slots = torch.full((header.tokens,), NOWHERE, dtype=torch.int64, device=device)
        slots[wanted] = torch.arange(count, device=device)
        cache = PagedCache.dense(layout, keys, values)
        # The whole chunk moves with its wanted tokens: its first one may come to lie before position 0.
        chunk = CodedChunk(blob, header, slots, start - wanted.start)
        backend.decode(self._coding(header), [chunk], cache, layers)()
        return keys, values, start

    def _coding(self, header: Header) -> Coding:
        if header.scheme is Scheme.LOSSLESS:
            return Coding(self.profile, header.scheme, 0, header.dtype)
        if (header.scheme is Scheme.TRANSFORM) != bool(self.profile.learned):
            raise FormatError(f"a {header.scheme.name.lower()} blob does not belong to a {self.profile.source} profile")
        return Coding(self.profile, header.scheme, self.profile.check_step(header.step), header.dtype)

    def _check_layers(self, layers: range) -> range:
        count = self.profile.layout.num_layers
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
            raise InputError(f"layers {layers.start} … {layers.stop - 1} must lie within the model's {count}")
        return layers

    def _check_start(self, start: object, tokens: int) -> int:
        if type(start) is not int or not 0 <= start <= LAST_POSITION - tokens:
            raise InputError(f"start={start!r} must be a position, an int >= 0 and below 2**32 - {tokens}")
        limit = self.profile.layout.max_positions
        if limit is not None and start + tokens > limit:
            raise InputError(f"start={start} puts {tokens} tokens past the {limit} positions of the model")
        return start

    def _check_move(self, layout: KVLayout, kept: int, start: int, tokens: int) -> None:
        if self._check_start(start, tokens) != kept and not layout.relocatable:
            raise InputError(f"{layout.model_type} has no RoPE: its cache cannot move from position {kept} to {start}")

    def _open(self, blob: bytes) -> tuple[Header, KVLayout]:
        header = read_header(blob)
        verify_tag(blob, header, self._key)
        layout = self._layout(header.dtype)
        if header.layout != layout.fingerprint:
            raise ProfileMismatch("the blob holds the cache of another model than the profile's")
        if header.scheme is not Scheme.LOSSLESS and header.profile != self.profile.id:
            raise ProfileMismatch(
                f"the blob was encoded with profile {header.profile.hex()}, this codec has {self.profile.id.hex()}"
            )
        sections = len(self.profile.sections) if header.scheme is Scheme.TRANSFORM else layout.num_layers
        if len(header.section_bytes) != sections or header.values_per_token != layout.values_per_token:
            raise FormatError(f"the blob has {len(header.section_bytes)} sections, expected {sections}")
        # A stream costs at least six bytes and holds at most so many tokens: this bounds what is allocated for it.
        if min(header.section_bytes) * MAX_TOKENS_PER_STREAM < 6 * header.tokens:
            raise FormatError(f"{min(header.section_bytes)} bytes cannot hold {header.tokens} tokens")
        return header, layout

    def _layout(self, dtype: str) -> KVLayout:
        if dtype not in self._layouts:
            self._layouts[dtype] = replace(self.profile.layout, dtype=dtype)
        return self._layouts[dtype]

    def _decode(
        self, blob: bytes, header: Header, layout: KVLayout, layers: range, wanted: slice, kept: int, start: int | None
    ) -> Target:
        start = kept if start is None else start
        count = wanted.stop - wanted.start
        self._check_move(layout, kept, start, count)
        coding = self._coding(header)
        scheme = self._scheme(header.scheme, coding.step, get_backend(self._backend_name))
        chosen = [
            i for i, s in enumerate(scheme.sections) if s.first_layer < layers.stop and layers.start < s.end_layer
        ]
        covered = range(scheme.sections[chosen[0]].first_layer, scheme.sections[chosen[-1]].end_layer)
        keys, values = _outputs(layout, covered, count, torch.device("cpu"))
        target = Target(layout, keys, values, wanted, header.tokens, header.start, start)
        views = {index: read_section(blob, header, index) for index in chosen}
        # Too few sections for the threads: cut the tokens into runs as well, where tiles end.
        unit = max(tile_tokens(scheme.sections[index], layout) for index in chosen)
        workers = self._workers(count, layout)
        parts = _split(wanted, -(-workers // len(chosen)), unit)
        jobs = []
        for part in parts:
            run = _part_of(target, part)
            rotation = Rotation(layout, run.start, part.stop - part.start, torch.device("cpu"))
            jobs += [partial(scheme.decode, views[index], index, run, rotation) for index in chosen]
        self._run(jobs, workers)
        return target

    def _scheme(self, scheme: Scheme, step: int, backend: Backend) -> SectionScheme:
        key = (scheme, step, backend.name)
        if key not in self._schemes:
            if scheme is Scheme.LOSSLESS:
                made: SectionScheme = LosslessScheme(self.profile.layout, backend)
            elif scheme is Scheme.TRANSFORM:
                made = TransformScheme(self.profile, step, backend)
            else:
                made = GenericScheme(self.profile.layout, self.profile.family, step, backend)
            # A scheme holds copies of the bases: blobs of ever other steps must not pile them up.
            excess = max(len(self._schemes) + 1 - MAX_SCHEMES, 0)
            for old in list(self._schemes)[1 : 1 + excess]:
                self._schemes.pop(old, None)
            self._schemes[key] = made
            return made
        return self._schemes[key]

    def _workers(self, tokens: int, layout: KVLayout) -> int:
        """Threads worth starting for so many tokens."""
        return self.threads if tokens * layout.values_per_token >= PARALLEL_VALUES else 1

    @staticmethod
    def _run(jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
        """Run the jobs on so many threads; the first error ends the rest."""
        if workers == 1 or len(jobs) == 1:
            return [_without_gradients(job) for job in jobs]
        # One thread for each product: torch would start as many more from every worker. Its setting is the worker's
        # own, but also becomes the default of threads to come; the caller's call puts that back.
        try:
            with ThreadPoolExecutor(min(workers, len(jobs)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(_without_gradients, jobs))
        finally:
            torch.set_num_threads(torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class PendingDecode:
    """Decoding that was started. `check` waits for it; until then nobody knows whether the streams were whole."""

    _waiting: tuple[Callable[[], None], ...]

    def check(self) -> None:
        """Wait for the device.

        Raises:
            CorruptError: a stream was damaged.
            InputError: a slot that the cache does not have.
        """
        for wait in self._waiting:
            wait()


def _outputs(
    layout: KVLayout, layers: range, tokens: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Uninitialised `[tokens, H, D]` keys and values of each layer; `[0, H, D]` for those not in `layers`."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for index, layer in enumerate(layout.layers):
        rows = tokens if index in layers else 0
        for tensors, size in ((keys, layer.head_dim), (values, layer.value_dim)):
            tensors.append(torch.empty(rows, layer.kv_heads, size, dtype=layout.torch_dtype, device=device))
    return keys, values


def _without_gradients(job: Callable[[], T]) -> T:
    with torch.no_grad():  # a thread's own setting
        return job()


def _split(wanted: slice, parts: int, unit: int) -> list[slice]:
    """Cut a run of tokens into at most `parts`, at multiples of `unit` tokens."""
    first, end = wanted.start // unit, -(-wanted.stop // unit)
    size = -(-(end - first) // parts)
    return [slice(max(at * unit, wanted.start), min((at + size) * unit, wanted.stop)) for at in range(first, end, size)]


def _part_of(target: Target, part: slice) -> Target:
    """The target of the tokens `part` alone: views of the outputs."""
    rows = slice(part.start - target.wanted.start, part.stop - target.wanted.start)
    return replace(
        target,
        keys=[tensor[rows] for tensor in target.keys],
        values=[tensor[rows] for tensor in target.values],
        wanted=part,
        start=target.start + rows.start,
    )
