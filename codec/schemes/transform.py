"""The learned scheme: the profile's bases, tables and steps. A section is nothing but its coded coefficients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cuvee.codec.backends import Backend
from cuvee.codec.coefficients import TILE, CoefficientCoder
from cuvee.codec.container import Reader
from cuvee.codec.layout import KVChunk
from cuvee.codec.profile import Profile
from cuvee.codec.schemes import Target
from cuvee.codec.symbols import F32
from cuvee.codec.transform import Rotation, Section, as_numpy, gather, scatter


def tiles(tokens: int) -> Iterator[slice]:
    """Runs of TILE tokens."""
    for start in range(0, tokens, TILE):
        yield slice(start, min(start + TILE, tokens))


class TransformScheme:
    """Codes sections with a learned profile at one step."""

    def __init__(self, profile: Profile, step: int, backend: Backend) -> None:
        self._learned = profile.learned
        self._sections = profile.sections
        self._plans = [section.plan(step) for section in profile.learned]
        self._coder = CoefficientCoder(backend, profile.family, step)

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(self, chunk: KVChunk, index: int, unrotation: Rotation) -> bytes:
        """See `SectionScheme.encode`."""
        section, basis = self._sections[index], self._learned[index].basis
        ranks, plan = self._plans[index]

        def coefficients() -> Iterator[tuple[slice, F32]]:
            for at in tiles(chunk.tokens):
                x = gather(chunk, section, unrotation, at)
                yield at, as_numpy(basis.analyse(x, chunk.start, at, ranks))

        return self._coder.encode(coefficients(), plan, chunk.tokens)

    def decode(self, data: memoryview, index: int, target: Target, rotation: Rotation) -> None:
        """See `SectionScheme.decode`."""
        section, basis = self._sections[index], self._learned[index].basis
        ranks, plan = self._plans[index]
        for at, columns, y in self._coder.decode(Reader(data), plan, target.tokens, target.wanted):
            x = basis.synthesise(torch.from_numpy(y)[:, columns], target.source_start, at, ranks)
            rows = slice(at.start - target.wanted.start, at.stop - target.wanted.start)
            scatter(x, section, target.layout, rotation, rows, target.keys, target.values)
