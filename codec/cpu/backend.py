"""The backend of the CPU: threads, tiles and runs of tokens around the schemes, which code one section at a time.

encode   pages --views, or a copy--> chunk --one job per run of sections--> sections
decode   blobs --one job per section and run of tokens--> rows of the cache, or scratch --> pages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from cuvee.codec.backends import CodedChunk, Coding, register
from cuvee.codec.cpu.pool import Pool
from cuvee.codec.format.container import Scheme, read_section
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.profiles.sections import tile_tokens
from cuvee.codec.schemes import SectionScheme, Target
from cuvee.codec.schemes.generic import GenericScheme
from cuvee.codec.schemes.lossless import LosslessScheme
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.stages.implementations import Stages, get_stages, stage_names
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import dense_rows, paged_rows

T = TypeVar("T")

MAX_SCHEMES = 8  # kept: the first one, which is its codec's own, and those used last
PARALLEL_VALUES = 1 << 20  # in a smaller chunk handing out the work takes longer than it saves
SHARES = 3  # runs of sections that each thread takes: one that is late delays a third of its work

_Key = tuple[bytes, Scheme, int]


class CpuBackend:
    """Runs the schemes on the CPU.

    Args:
        stages: what they are made of.
        threads: sections, or runs of their tokens, that are coded at the same time in chunks of a million values or
            more.
    """

    devices = ("cpu",)
    batched = False

    def __init__(self, stages: Stages, threads: int) -> None:
        self.name = stages.name
        self._stages = stages
        self._threads = threads
        self._pool = Pool(threads)
        self._schemes: dict[_Key, SectionScheme] = {}

    def prepare(self, coding: Coding) -> None:
        """See `Backend.prepare`."""
        self._scheme(coding)

    def encode(
        self,
        coding: Coding,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        offsets: Sequence[torch.Tensor | None],
    ) -> list[list[bytes]]:
        """See `Backend.encode`."""
        scheme = self._scheme(coding)
        out: list[list[bytes]] = []
        for at, start, own in zip(slots, starts, offsets, strict=True):
            chunk = cache.chunk(at, start)
            unrotation = Rotation(chunk.layout, chunk.start, chunk.tokens, chunk.device, inverse=True)
            workers = self._workers(chunk.tokens, chunk.layout)
            shares = _shares(range(len(scheme.sections)), workers)
            jobs = [partial(scheme.encode, chunk, share, unrotation, own) for share in shares]
            out.append([section for coded in self._pool.run(jobs, workers) for section in coded])
        return out

    def decode(
        self, coding: Coding, chunks: Sequence[CodedChunk], cache: PagedCache, layers: range
    ) -> Callable[[], None]:
        """See `Backend.decode`. All is done, and everything that can be wrong has been raised, when this returns."""
        scheme = self._scheme(coding)
        layout = replace(coding.profile.layout, dtype=coding.dtype)
        chosen = [
            i for i, s in enumerate(scheme.sections) if s.first_layer < layers.stop and layers.start < s.end_layer
        ]
        # Rows that are written as they are decoded, of the dtype that was coded.
        direct = cache.dtype == layout.torch_dtype
        for chunk in chunks:
            wanted = _wanted(chunk.slots)
            slots = chunk.slots[wanted]
            rows = paged_rows(cache, slots, layers) if direct else None
            keys, values = _scratch(layout, len(slots), layers) if rows is None else ([], [])
            own_keys, own_values = (
                (list(map(dense_rows, keys)), list(map(dense_rows, values))) if rows is None else rows
            )
            start = chunk.start + wanted.start
            target = Target(layout, own_keys, own_values, wanted, chunk.header.tokens, chunk.header.start, start)
            self._decode(scheme, chosen, chunk, target)
            if rows is None:
                of_layers = slice(layers.start, layers.stop)
                cache.write(keys[of_layers], values[of_layers], slots, layers)
        return lambda: None

    def _decode(self, scheme: SectionScheme, chosen: list[int], chunk: CodedChunk, target: Target) -> None:
        layout, wanted = target.layout, target.wanted
        parts = [(index, read_section(chunk.blob, chunk.header, index)) for index in chosen]
        workers = self._workers(wanted.stop - wanted.start, layout)
        # A share of the sections for each thread; if there are too few, the tokens are cut into runs as well, where
        # tiles end.
        unit = max(tile_tokens(section, layout) for section in scheme.sections)
        shares = _shares(parts, workers)
        jobs = []
        for part in _split(wanted, -(-workers // len(shares)), unit):
            run = _part_of(target, part)
            rotation = Rotation(layout, run.start, part.stop - part.start, torch.device("cpu"))
            jobs += [partial(scheme.decode, share, run, rotation) for share in shares]
        self._pool.run(jobs, workers)

    def _scheme(self, coding: Coding) -> SectionScheme:
        key = (coding.profile.id, coding.scheme, coding.step_index)
        # Looked up once: between a test and an access another thread may have evicted it.
        known = self._schemes.get(key)
        if known is not None:
            return known
        profile = coding.profile
        if coding.scheme is Scheme.LOSSLESS:
            made: SectionScheme = LosslessScheme(profile.layout, self._stages)
        elif coding.scheme is Scheme.TRANSFORM:
            made = TransformScheme(profile, coding.step_index, self._stages)
        else:
            made = GenericScheme(profile.layout, profile.family, coding.step_index, self._stages)
        # A scheme holds copies of the bases: blobs of many different steps must not pile them up. The dict is never
        # changed but replaced: of two threads one may lose what it adds, and makes it again when it is next needed.
        own, *others = [*self._schemes.items(), (key, made)]
        self._schemes = dict([own, *others[-(MAX_SCHEMES - 1) :]])
        return made

    def _workers(self, tokens: int, layout: KVLayout) -> int:
        """Return how many threads are worth starting for this many tokens."""
        return self._threads if tokens * layout.values_per_token >= PARALLEL_VALUES else 1


def _wanted(slots: torch.Tensor) -> slice:
    """The tokens from the first to the last that is to be written; those left out between them are decoded, too.

    All of them if none is to be written: whoever asks for that wants to know whether the blob is sound, or to have the
    code compiled.
    """
    if int(slots.min()) > NOWHERE:  # the usual case, without a list
        return slice(0, len(slots))
    somewhere = torch.nonzero(slots != NOWHERE)
    return slice(int(somewhere[0]), int(somewhere[-1]) + 1) if len(somewhere) else slice(0, len(slots))


def _scratch(layout: KVLayout, tokens: int, layers: range) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors `[T, H, D]` per layer for tokens that cannot be written where they go; empty for other layers."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for index, layer in enumerate(layout.layers):
        for tensors, size in ((keys, layer.head_dim), (values, layer.value_dim)):
            tensors.append(
                torch.empty(tokens if index in layers else 0, layer.kv_heads, size, dtype=layout.torch_dtype)
            )
    return keys, values


def _shares(parts: Sequence[T], workers: int) -> list[Sequence[T]]:
    """The parts in runs that threads take in turn: several for each, so that none waits long for the last."""
    if workers == 1:
        return [parts]
    size = max(len(parts) // (SHARES * workers), 1)
    return [parts[at : at + size] for at in range(0, len(parts), size)]


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
        keys=[own if own is None else own.take(rows) for own in target.keys],
        values=[own if own is None else own.take(rows) for own in target.values],
        wanted=part,
        start=target.start + rows.start,
    )


for _name in stage_names():
    register(_name, partial(CpuBackend, get_stages(_name)))
