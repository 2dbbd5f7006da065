"""`Codec`: chunks to blobs and back."""

from __future__ import annotations

import logging
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
from cuvee.codec.chunk import KVChunk
from cuvee.codec.coefficients import MAX_TOKENS_PER_STREAM
from cuvee.codec.container import Header, Scheme, read_header, read_section, verify_tag, write_blob
from cuvee.codec.errors import CorruptError, FormatError, InputError, ProfileMismatch, allocations
from cuvee.codec.importance import importance_offsets
from cuvee.codec.keys import make_keys
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.profile import ID_BYTES, LOSSLESS, Profile
from cuvee.codec.schemes import SectionScheme, Target
from cuvee.codec.schemes.generic import GenericScheme
from cuvee.codec.schemes.lossless import LosslessScheme
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.transform import Rotation, tile_tokens

T = TypeVar("T")

_log = logging.getLogger(__name__)

# A blob of a hundred kilobytes may claim 2^24 tokens, gigabytes of cache. As long as the contexts of most models.
MAX_DECODED_TOKENS = 1 << 17
LAST_POSITION = (1 << 32) - 1  # that a blob can name
MAX_SCHEMES = 8  # kept: the codec's own, and those of the blobs decoded last
PARALLEL_VALUES = 1 << 20  # in a smaller chunk the threads take longer to start than to help


class Codec:
    """Compresses chunks with one profile at one quality. Immutable and safe to share between threads.

    Args:
        profile: what was learned for the model, or `Profile.generic(layout)`.
        quality: `"lossless"`, `"high"`, `"balanced"` (the default) or `"small"`; or instead exactly one of
        kl: nats per token that the model's predictions may move, read off the profile's curve: what it promises for
            the worst kind of text it was measured on. Below the least it reaches, the codec is lossless;
        bits: bits per value, all bytes counted;
        ratio: uncompressed over compressed size;
        step: the quantizer step itself, in the profile's units.
        kind: with kl= or a preset: the kind of text (`profile.curves`) whose curve decides, instead of the worst.
        backend: `"auto"` (by the tensors' device), `"numba"` or `"reference"` on the CPU, `"triton"` on a GPU.
        threads: sections coded at the same time, in chunks of a million values or more. Default: the number of CPUs.
        key: 16 to 64 secret bytes; blobs then carry an authentication tag, and only blobs with a valid one decode. Or
            several secrets: blobs get a tag of the first, and are accepted with a tag of any. `associated=` binds a
            blob to where it belongs. Such a codec refuses to be pickled: the bytes would hold the secret.

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
        kind: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        key: bytes | Sequence[bytes] | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise InputError(f"threads={threads} must be at least 1")
        if (quality, kl, bits, ratio, step) == (None,) * 5:
            quality = "balanced"
        others = [kl, bits, ratio, step]
        self.profile = profile
        self.lossless = quality == LOSSLESS and others == [None] * 4
        least = profile.least_kl(kind) if kl is not None and others.count(None) == 3 and quality is None else None
        if kl is not None and least is not None and 0 < kl < least:
            _log.info("kl=%.3g is below %.3g, the least that the profile's curve reaches: lossless instead", kl, least)
            self.lossless = True
        if self.lossless:
            self.step = 0
        else:
            self.step = profile.resolve(quality, kl=kl, bits=bits, ratio=ratio, step=step, kind=kind)
        self.threads = threads or os.cpu_count() or 1
        self._backend_name = check_backend(backend)
        self._keys = make_keys(key)
        scheme = Scheme.LOSSLESS if self.lossless else (Scheme.TRANSFORM if profile.learned else Scheme.GENERIC)
        self._own = scheme
        self._layouts: dict[str, KVLayout] = {}
        self._schemes: dict[tuple[Scheme, int, str], SectionScheme] = {}
        self._scheme(scheme, self.step, get_backend("auto"))  # a step out of the plan's reach fails here, not later

    @property
    def key_ids(self) -> tuple[bytes, ...]:
        """8 bytes that name each key and do not tell it, the one that writes first; empty without `key=`."""
        return tuple(key.id for key in self._keys)

    def encode(self, chunk: KVChunk, *, importance: object = None, associated: bytes = b"") -> bytes:
        """Compress a chunk into one blob, on the device where the chunk is.

        Args:
            chunk: what to compress.
            importance: how much a squared error on each token counts, `[T]` non-negative numbers of which only the
                ratios matter: attention received, say. Takes the place of the profile's own prediction. Default: the
                profile says. A lossless codec needs none.
            associated: with a key, what the blob is bound to, such as the name under which a store keeps it: the blob
                does not hold it, and decodes only where the same bytes are given.

        Raises:
            ProfileMismatch: the chunk's layout is not the profile's.
            InputError: values that a lossy quality cannot code (NaN, infinite); importance of another length,
                negative, or not finite, or with a profile that is not learned; `associated` without a key.
        """
        self.profile.check_layout(chunk.layout)
        self._check_associated(associated)
        offsets = self._offsets(importance, chunk.tokens)
        device_backend = get_device_backend(self._backend_name, chunk.device.type)
        if device_backend is not None:
            cache = PagedCache.dense(chunk.layout, chunk.keys, chunk.values)
            slots = torch.arange(chunk.tokens, device=chunk.device)
            return self._encode_on(device_backend, cache, [slots], [chunk.start], [offsets], [associated])[0]
        scheme = self._scheme(self._own, self.step, get_backend(self._backend_name, chunk.device.type))
        unrotation = Rotation(chunk.layout, chunk.start, chunk.tokens, chunk.device, inverse=True)
        jobs = [partial(scheme.encode, chunk, index, unrotation, offsets) for index in range(len(scheme.sections))]
        sections = self._run(jobs, self._workers(chunk.tokens, chunk.layout))
        return self._blob(chunk.layout, chunk.tokens, chunk.start, sections, associated)

    def _offsets(self, importance: object, tokens: int) -> torch.Tensor | None:
        if importance is None:
            return None
        offsets = importance_offsets(importance, tokens)
        if self._own is Scheme.GENERIC:
            raise InputError("importance needs a learned profile: a generic one quantizes all tokens alike")
        return offsets

    def _blob(self, layout: KVLayout, tokens: int, start: int, sections: Sequence[bytes], associated: bytes) -> bytes:
        profile = bytes(ID_BYTES) if self.lossless else self.profile.id
        return write_blob(
            self._own, layout.dtype, tokens, start, self.step, layout.values_per_token, layout.fingerprint, profile,
            sections, self._keys[0] if self._keys else None, associated,
        )  # fmt: skip

    def _encode_on(
        self,
        backend: DeviceBackend,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        offsets: Sequence[torch.Tensor | None],
        associated: Sequence[bytes],
    ) -> list[bytes]:
        coding = Coding(self.profile, self._own, self.step, cache.layout.dtype)
        chunks = backend.encode(coding, cache, slots, starts, offsets)
        return [
            self._blob(cache.layout, len(at), start, sections, bound)
            for at, start, sections, bound in zip(slots, starts, chunks, associated, strict=True)
        ]

    def decode(
        self,
        blob: bytes,
        start: int | None = None,
        *,
        tokens: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
        associated: bytes = b"",
        max_tokens: int | None = MAX_DECODED_TOKENS,
    ) -> KVChunk:
        """Restore a chunk. Any blob of this codec's profile will do, whatever quality it was encoded at.

        Args:
            blob: what `encode` made.
            start: position of the first restored token; None leaves it where it was.
            tokens: restore only the tokens `first <= t < end` of the chunk.
            device: where the chunk is restored.
            associated: what the blob was bound to when it was encoded.
            max_tokens: refuse to restore more: a small blob may claim a huge cache. Give what you expect where blobs
                come from others: the default, 131072, is 17 GB for a model of 8 B parameters. None: whatever it says.

        Raises:
            FormatError, VersionError, CorruptError: bytes that are not a whole, undamaged blob; with a key, bytes that
                were changed or bound to something else than `associated`.
            KeyMismatch: a tag of another key, a tag and no key, or a key and no tag.
            ProfileMismatch: a blob of another profile or model.
            InputError: a target position the model does not have, or a run outside the chunk; more than `max_tokens`;
                `associated` without a key.
            OutOfMemory: the tensors cannot be allocated.
        """
        header, layout = self._open(blob, associated)
        first, end = tokens or (0, header.tokens)
        if not 0 <= first < end <= header.tokens:
            raise InputError(f"tokens=({first}, {end}) must lie within the {header.tokens} tokens of the blob")
        check_tokens(end - first, max_tokens)
        layers, kept = range(layout.num_layers), header.start + first
        with allocations(f"decoding {end - first} tokens"):
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
        associated: bytes = b"",
        max_tokens: int | None = MAX_DECODED_TOKENS,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Restore only the layers `first_layer <= l < end_layer`, reading only their sections: layer-wise restoring.

        Returns:
            keys and values, one `[T, H, D]` tensor per layer.

        Raises:
            as `decode`; InputError for layers the model does not have.
        """
        header, layout = self._open(blob, associated)
        layers = self._check_layers(range(first_layer, end_layer))
        check_tokens(header.tokens, max_tokens)
        wanted = slice(0, header.tokens)
        with allocations(f"decoding {header.tokens} tokens"):
            keys, values, _ = self._restore(
                blob, header, layout, layers, wanted, header.start, start, torch.device(device)
            )
        return keys[first_layer:end_layer], values[first_layer:end_layer]

    def on_device(self, device: torch.device | str) -> bool:
        """Whether caches on `device` are coded there, many chunks in one go: `encode_paged` and `decode_paged`.

        Raises:
            InputError: the backend asked for cannot run here, or does not serve that device.
        """
        return get_device_backend(self._backend_name, torch.device(device).type) is not None

    def check(self, blob: bytes, *, associated: bytes = b"") -> Header:
        """The header of a blob that this codec decodes. Its sections are not looked at.

        Raises:
            FormatError, VersionError, CorruptError, KeyMismatch, ProfileMismatch: as `decode`.
        """
        return self._open(blob, associated)[0]

    def check_own(self, blob: bytes, tokens: int, start: int, dtype: str) -> Header:
        """The header of a blob, if it says that this very codec wrote it for so many tokens from `start` on.

        `decode` takes any quality of its profile. What came from a store by its key must also be of the quality that
        the key stands for. This looks at the header alone, before the tag is checked: decode afterwards.

        Args:
            blob: what came from a store.
            tokens: that it must hold.
            start: position that the first of them must have.
            dtype: that the tokens must have had.

        Raises:
            CorruptError: it holds other tokens, or was coded by another scheme or at another step.
            FormatError, VersionError, ProfileMismatch: as `decode`.
        """
        header = read_header(blob)
        self._check_header(header)
        found = (header.tokens, header.start, header.dtype, header.scheme, header.step)
        wanted = (tokens, start, dtype, self._own, self.step)
        if found != wanted:
            raise CorruptError(f"the entry holds {_told(*found)}; expected {_told(*wanted)}")
        return header

    def encode_paged(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        *,
        importance: Sequence[object] | None = None,
        associated: Sequence[bytes] | None = None,
    ) -> list[bytes]:
        """Compress chunks straight out of a serving engine's cache, all in one go.

        Args:
            cache: where the tokens lie.
            slots: of each chunk, int64 `[T]` on the cache's device: the slots of its tokens, in order.
            starts: of each chunk, the position of its first token.
            importance: of each chunk, as in `encode`.
            associated: of each chunk, as in `encode`.

        Returns:
            one blob per chunk. They hold values of `cache.layout.dtype`, whatever the cache stores.

        Raises:
            as `encode`; InputError for slots that the cache does not have.
        """
        self.profile.check_layout(cache.layout)
        if len(slots) != len(starts):
            raise InputError(f"slots are given for {len(slots)} chunks, starts for {len(starts)}")
        weights = [None] * len(slots) if importance is None else list(importance)
        if len(weights) != len(slots):
            raise InputError(f"importance is given for {len(weights)} chunks, slots for {len(slots)}")
        bound = self._each_associated(associated, len(slots))
        for at, start in zip(slots, starts, strict=True):
            if not len(cache.check_slots(at)):
                raise InputError("slots name no tokens: a chunk needs at least one")
            self._check_start(start, len(at))
        backend = get_device_backend(self._backend_name, cache.device.type)
        if backend is not None:
            offsets = [self._offsets(own, len(at)) for own, at in zip(weights, slots, strict=True)]
            return self._encode_on(backend, cache, slots, starts, offsets, bound) if slots else []
        return [
            self.encode(cache.read(at, start), importance=own, associated=to)
            for at, start, own, to in zip(slots, starts, weights, bound, strict=True)
        ]

    def decode_paged(
        self,
        blobs: Sequence[bytes],
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int] | None = None,
        layers: range | None = None,
        *,
        associated: Sequence[bytes] | None = None,
    ) -> PendingDecode:
        """Restore chunks straight into a serving engine's cache, all in one go.

        On a device this only starts the work, on its current stream: call `check()` of the result before anything
        is believed that was read from those slots. What lies in them after a failure is not defined.

        Args:
            blobs: what `encode` or `encode_paged` made, of any quality of this profile.
            cache: where the tokens go.
            slots: of each blob, int64 `[T]` on the cache's device; -1 leaves a token out. They are the limit to what
                blobs may hold.
            starts: of each blob, the position that its first token gets; default: where it was.
            layers: restore only these, reading only their sections; default all.
            associated: of each blob, as in `decode`.

        Raises:
            as `decode`, at once for what headers and checksums tell, from `check()` for damaged streams.
        """
        self.profile.check_layout(cache.layout)
        layers = self._check_layers(range(cache.layout.num_layers) if layers is None else layers)
        if len(slots) != len(blobs) or (starts is not None and len(starts) != len(blobs)):
            raise InputError(f"blobs, slots and starts must be of one length; there are {len(blobs)} blobs")
        bound = self._each_associated(associated, len(blobs))
        opened = [self._open(blob, to) for blob, to in zip(blobs, bound, strict=True)]
        for (header, _), at in zip(opened, slots, strict=True):
            cache.check_slots(at, header.tokens)
        backend = get_device_backend(self._backend_name, cache.device.type)
        if backend is None:
            get_backend(self._backend_name, cache.device.type)  # which says what is wrong with the device
        with allocations(f"decoding {sum(header.tokens for header, _ in opened)} tokens"):
            return self._decode_paged(backend, blobs, opened, cache, slots, starts, layers)

    def _decode_paged(
        self,
        backend: DeviceBackend | None,
        blobs: Sequence[bytes],
        opened: Sequence[tuple[Header, KVLayout]],
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int] | None,
        layers: range,
    ) -> PendingDecode:
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

    def _check_associated(self, associated: object) -> None:
        if not isinstance(associated, bytes):
            raise InputError(f"associated must be bytes, got {type(associated).__name__}")
        if associated and not self._keys:
            raise InputError("associated= binds a blob by its tag, which only a Codec with a key= writes")

    def _each_associated(self, associated: Sequence[bytes] | None, count: int) -> Sequence[bytes]:
        if associated is None:
            return [b""] * count
        if len(associated) != count:
            raise InputError(f"associated is given for {len(associated)} chunks, there are {count}")
        return associated

    def _open(self, blob: bytes, associated: bytes) -> tuple[Header, KVLayout]:
        self._check_associated(associated)
        header = read_header(blob)
        verify_tag(blob, header, self._keys, associated)
        return header, self._check_header(header)

    def _check_header(self, header: Header) -> KVLayout:
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
        return layout

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
        # Looked up once: between a test and an access another thread may have evicted it.
        known = self._schemes.get(key)
        if known is not None:
            return known
        if scheme is Scheme.LOSSLESS:
            made: SectionScheme = LosslessScheme(self.profile.layout, backend)
        elif scheme is Scheme.TRANSFORM:
            made = TransformScheme(self.profile, step, backend)
        else:
            made = GenericScheme(self.profile.layout, self.profile.family, step, backend)
        # A scheme holds copies of the bases: blobs of ever other steps must not pile them up. A dict is never changed
        # but replaced: of two threads one may lose what it adds, and makes it again when it is next needed.
        own, *others = [*self._schemes.items(), (key, made)]
        self._schemes = dict([own, *others[-(MAX_SCHEMES - 1) :]])
        return made

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
        with allocations("decoding"):
            for wait in self._waiting:
                wait()


def check_tokens(tokens: int, max_tokens: int | None) -> None:
    """Refuse to restore more tokens than the caller expects.

    Raises:
        InputError: more than `max_tokens`, or a limit that is none.
    """
    if max_tokens is None:
        return
    if type(max_tokens) is not int or max_tokens < 1:
        raise InputError(f"max_tokens={max_tokens!r} must be at least 1, or None for no limit")
    if tokens > max_tokens:
        raise InputError(
            f"{tokens} tokens would be restored, more than max_tokens={max_tokens}: if so many are expected, say so"
        )


def _told(tokens: int, start: int, dtype: str, scheme: Scheme, step: int) -> str:
    return f"{tokens} tokens from {start} on in {dtype}, {scheme.name.lower()}, step index {step}"


def _outputs(
    layout: KVLayout, layers: range, tokens: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Uninitialized `[tokens, H, D]` keys and values of each layer; `[0, H, D]` for those not in `layers`."""
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
