"""`Codec`: chunks to blobs and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from cuvee.codec.backends import Backend, get_backend
from cuvee.codec.coefficients import MAX_TOKENS_PER_STREAM
from cuvee.codec.container import Header, Scheme, check_key, read_header, read_section, verify_tag, write_blob
from cuvee.codec.errors import FormatError, InputError, ProfileMismatch
from cuvee.codec.layout import KVChunk, KVLayout
from cuvee.codec.profile import ID_BYTES, LOSSLESS, Profile
from cuvee.codec.schemes import SectionScheme, Target
from cuvee.codec.schemes.generic import GenericScheme
from cuvee.codec.schemes.lossless import LosslessScheme
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.transform import Rotation, tile_tokens

T = TypeVar("T")

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
        backend: `"auto"` (by the tensors' device), `"numba"` or `"reference"`.
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
        self._backend_name = backend
        self._key = check_key(key)
        scheme = Scheme.LOSSLESS if self.lossless else (Scheme.TRANSFORM if profile.learned else Scheme.GENERIC)
        self._own = scheme
        self._layouts: dict[str, KVLayout] = {}
        self._schemes: dict[tuple[Scheme, int, str], SectionScheme] = {}
        self._scheme(scheme, self.step, get_backend(backend))  # a step out of the plan's reach fails here, not later

    def encode(self, chunk: KVChunk) -> bytes:
        """Compress a chunk into one blob.

        Raises:
            ProfileMismatch: the chunk's layout is not the profile's.
            InputError: values that a lossy quality cannot code (NaN, infinite).
        """
        self.profile.check_layout(chunk.layout)
        scheme = self._scheme(self._own, self.step, get_backend(self._backend_name, chunk.device.type))
        unrotation = Rotation(chunk.layout, chunk.start, chunk.tokens, chunk.device, inverse=True)
        jobs = [partial(scheme.encode, chunk, index, unrotation) for index in range(len(scheme.sections))]
        sections = self._run(jobs, self._workers(chunk.tokens, chunk.layout))
        profile = bytes(ID_BYTES) if self.lossless else self.profile.id
        return write_blob(
            self._own, chunk.layout.dtype, chunk.tokens, chunk.start, self.step, chunk.layout.values_per_token,
            chunk.layout.fingerprint, profile, sections, self._key,
        )  # fmt: skip

    def decode(self, blob: bytes, start: int | None = None, *, tokens: tuple[int, int] | None = None) -> KVChunk:
        """Restore a chunk. Any blob of this codec's profile will do, whatever quality it was encoded at.

        Args:
            blob: what `encode` made.
            start: position of the first restored token; None leaves it where it was.
            tokens: restore only the tokens `first <= t < end` of the chunk.

        Raises:
            FormatError, VersionError, CorruptError: bytes that are not a whole, undamaged blob.
            ProfileMismatch: a blob of another profile or model.
            InputError: a target position the model does not have, or a run outside the chunk.
        """
        header, layout = self._open(blob)
        first, end = tokens or (0, header.tokens)
        if not 0 <= first < end <= header.tokens:
            raise InputError(f"tokens=({first}, {end}) must lie within the {header.tokens} tokens of the blob")
        kept = header.start + first
        target = self._decode(blob, header, layout, range(layout.num_layers), slice(first, end), kept, start)
        return KVChunk(target.keys, target.values, layout, target.start)

    def decode_layers(
        self, blob: bytes, first_layer: int, end_layer: int, start: int | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Restore only the layers `first_layer <= l < end_layer`, reading only their sections: layer-wise restoring.

        Returns:
            keys and values, one `[T, H, D]` tensor a layer.

        Raises:
            as `decode`; InputError for layers the model does not have.
        """
        header, layout = self._open(blob)
        if not 0 <= first_layer < end_layer <= layout.num_layers:
            raise InputError(f"layers {first_layer} … {end_layer - 1} must lie within the model's {layout.num_layers}")
        layers = range(first_layer, end_layer)
        target = self._decode(blob, header, layout, layers, slice(0, header.tokens), header.start, start)
        return target.keys[first_layer:end_layer], target.values[first_layer:end_layer]

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
        if type(start) is not int or start < 0:
            raise InputError(f"start={start!r} must be a position, an int >= 0")
        if layout.max_positions is not None and start + count > layout.max_positions:
            raise InputError(
                f"start={start} puts {count} tokens past the {layout.max_positions} positions of the model"
            )
        if start != kept and not layout.relocatable:
            raise InputError(f"{layout.model_type} has no RoPE: its cache cannot move from position {kept} to {start}")
        step = self.profile.check_step(header.step) if header.scheme is not Scheme.LOSSLESS else 0
        scheme = self._scheme(header.scheme, step, get_backend(self._backend_name))
        expected = sum(section.values for section in scheme.sections)
        if len(header.section_bytes) != len(scheme.sections) or header.values_per_token != expected:
            raise FormatError(f"the blob has {len(header.section_bytes)} sections, expected {len(scheme.sections)}")
        # A stream costs at least six bytes and holds at most so many tokens: this bounds what is allocated below.
        if min(header.section_bytes) * MAX_TOKENS_PER_STREAM < 6 * header.tokens:
            raise FormatError(f"{min(header.section_bytes)} bytes cannot hold {header.tokens} tokens")
        chosen = [
            i for i, s in enumerate(scheme.sections) if s.first_layer < layers.stop and layers.start < s.end_layer
        ]
        covered = range(scheme.sections[chosen[0]].first_layer, scheme.sections[chosen[-1]].end_layer)
        keys, values = [], []
        for index, layer in enumerate(layout.layers):
            rows = count if index in covered else 0
            keys.append(torch.empty(rows, layer.kv_heads, layer.head_dim, dtype=layout.torch_dtype))
            values.append(torch.empty(rows, layer.kv_heads, layer.value_dim, dtype=layout.torch_dtype))
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
            elif (scheme is Scheme.TRANSFORM) != bool(self.profile.learned):
                raise FormatError(f"a {scheme.name.lower()} blob does not belong to a {self.profile.source} profile")
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
