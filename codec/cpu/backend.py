"""The backend of the CPU: threads, tiles and runs of tokens around the schemes, which code one section at a time.

encode   pages --views, or a copy--> chunk --one job per run of sections--> sections
decode   blobs --one job per section and run of tokens--> rows of the cache, or scratch --> pages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt
import torch

from cuvee.codec.backends import Coding, DecodeRequest, EncodeRequest
from cuvee.codec.cpu.pool import Pool
from cuvee.codec.format.container import SectionBytes, read_section
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.profiles.sections import tile_tokens
from cuvee.codec.profiles.setting import Setting
from cuvee.codec.schemes.lossless import LosslessScheme
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import cache_rows, has_rows
from cuvee.codec.stages.stages import Stages, compiled_stages

T = TypeVar("T")

MAX_SCHEMES = 8  # kept: the first one, which is the codec's own, and the last ones used
PARALLEL_VALUES = 1 << 20  # below this, starting threads takes longer than it saves
SHARES = 3  # runs of sections per thread: a slow run delays a third of the thread's work

_Key = tuple[bytes, Setting, bool]


class CpuBackend:
    """Runs the schemes on the CPU.

    At most `threads` sections, or runs of their tokens, are coded at the same time, in chunks of a million values or
    more.
    """

    devices: tuple[str, ...] = ("cpu",)
    batched = False

    def __init__(self, stages: Stages, threads: int) -> None:
        self.name = stages.name
        self._stages = stages
        self._threads = threads
        self._pool = Pool(threads)
        self._schemes: dict[_Key, LosslessScheme | TransformScheme] = {}

    def prepare(self, coding: Coding) -> None:
        """See `Backend.prepare`."""
        self._scheme(coding)

    def encode(self, coding: Coding, requests: Sequence[EncodeRequest]) -> list[list[SectionBytes]]:
        """See `Backend.encode`."""
        scheme = self._scheme(coding)
        out: list[list[SectionBytes]] = []
        for request in requests:
            chunk = request.chunk
            unrotation = Rotation(chunk.start, chunk.tokens, chunk.device, inverse=True)
            workers = self._workers(chunk.tokens, chunk.layout)
            shares = _shares(range(len(scheme.sections)), workers)
            jobs: list[Callable[[], Sequence[tuple[SectionBytes, ...]]]] = [
                partial(scheme.encode, chunk, share, unrotation) for share in shares
            ]
            sections = [parts for coded in self._pool.run(jobs, workers) for parts in coded]
            # A section's base and its refinements come together; a blob holds the sections of one part.
            out.append([part for of_part in zip(*sections, strict=True) for part in of_part])
        return out

    def to_host(self, values: torch.Tensor) -> npt.NDArray[Any]:
        """See `Backend.to_host`."""
        return values.numpy()

    def decode(self, coding: Coding, requests: Sequence[DecodeRequest]) -> Callable[[], None]:
        """See `Backend.decode`. When this returns, all is decoded, and every error has been raised."""
        scheme = self._scheme(coding)
        for whole in requests:
            request = _trimmed(whole)
            layout, layers, cache = request.opened.layout, request.layers, request.cache
            # Values of the cache's dtype are written as they are decoded.
            direct = cache.dtype == layout.torch_dtype and has_rows(cache)
            target = cache if direct else PagedCache.empty(layout, len(request.span), layers, cache.device)
            rows = cache_rows(target, request.slots if direct else None, layers)
            parts = [
                (index, tuple(read_section(blob, header, index) for blob, header in request.opened.parts))
                for index, section in enumerate(scheme.sections)
                if section.first_layer < layers.stop and layers.start < section.end_layer
            ]
            workers = self._workers(len(request.span), layout)
            # Each thread gets a share of the sections. If there are too few, the tokens are cut into runs, too, where
            # tiles end.
            unit = max(tile_tokens(section, layout) for section in scheme.sections)
            shares = _shares(parts, workers)
            jobs = []
            for span in _split(request.span, -(-workers // len(shares)), unit):
                run = request.part(span)
                rotation = Rotation(run.start, len(span), cache.device)
                at = slice(span.start - request.span.start, span.stop - request.span.start)
                keys, values = (
                    unit_rows if len(span) == len(request.span) else [each and each.take(at) for each in unit_rows]
                    for unit_rows in rows
                )
                jobs += [partial(scheme.decode, share, run, keys, values, rotation) for share in shares]
            self._pool.run(jobs, workers)
            if not direct:
                decoded = target.chunk(None, request.start)
                of_layers = slice(layers.start, layers.stop)
                cache.write(decoded.keys[of_layers], decoded.values[of_layers], request.span_slots, layers)
        return lambda: None

    def _scheme(self, coding: Coding) -> LosslessScheme | TransformScheme:
        profile, setting = coding.profile, coding.setting
        key = profile.id, setting, coding.predicted
        # Looked up once: between a test and an access another thread may have evicted it.
        cached = self._schemes.get(key)
        if cached is not None:
            return cached
        if setting.lossless:
            made: LosslessScheme | TransformScheme = LosslessScheme(profile.layout, self._stages)
        else:
            made = TransformScheme(profile, setting, coding.predicted, self._stages)
        # A scheme holds copies of the bases, so schemes of many steps must not pile up. The dict is replaced and never
        # changed: one of two threads may lose its addition, and makes the scheme again when it needs it next.
        first, *others = [*self._schemes.items(), (key, made)]
        self._schemes = dict([first, *others[-(MAX_SCHEMES - 1) :]])
        return made

    def _workers(self, tokens: int, layout: KVLayout) -> int:
        """Return how many threads are worth starting for this many tokens."""
        return self._threads if tokens * layout.values_per_token >= PARALLEL_VALUES else 1


def _trimmed(request: DecodeRequest) -> DecodeRequest:
    """Return the request from the first to the last token that is written; tokens between them are decoded, too.

    A request that writes no token stays whole: the caller wants the blob verified, or the code compiled.
    """
    slots = request.slots
    if slots is None or int(slots.min()) > NOWHERE:  # the usual case, without a list
        return request
    written = torch.nonzero(slots != NOWHERE)
    if not len(written):
        return request
    first = request.span.start
    return request.part(range(first + int(written[0]), first + int(written[-1]) + 1))


def _shares(parts: Sequence[T], workers: int) -> list[Sequence[T]]:
    """Cut the parts into runs, several per thread, so that no thread waits long for the last."""
    if workers == 1:
        return [parts]
    size = max(len(parts) // (SHARES * workers), 1)
    return [parts[at : at + size] for at in range(0, len(parts), size)]


def _split(span: range, parts: int, unit: int) -> list[range]:
    """Cut a run of tokens into at most `parts` runs, at multiples of `unit` tokens."""
    first, end = span.start // unit, -(-span.stop // unit)
    size = -(-(end - first) // parts)
    return [range(max(at * unit, span.start), min((at + size) * unit, span.stop)) for at in range(first, end, size)]


def make_backend(name: str, threads: int) -> CpuBackend:
    """Make the backend. Its stages are imported only now, and may have to be compiled."""
    return CpuBackend(compiled_stages(), threads)
