"""The learned scheme: the profile's bases, tables and steps. A section is nothing but its coded coefficients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cuvee.codec.backends import Backend
from cuvee.codec.coefficients import CoefficientCoder
from cuvee.codec.container import Reader
from cuvee.codec.layout import KVChunk
from cuvee.codec.profile import Profile
from cuvee.codec.schemes import Target, overlap
from cuvee.codec.symbols import F32
from cuvee.codec.transform import Rotation, Section, as_numpy, gather, require_finite, synthesise, tile_tokens, tiles

# Matrix products in hardware.
FAST_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TransformScheme:
    """Codes sections with a learned profile at one step."""

    def __init__(self, profile: Profile, step: int, backend: Backend) -> None:
        self._learned = profile.learned
        self._sections = profile.sections
        self._plans = [section.plan(step) for section in profile.learned]
        self._coder = CoefficientCoder(backend, profile.family, step)
        self._backend = backend
        self._inverses: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(self, chunk: KVChunk, index: int, unrotation: Rotation) -> bytes:
        """See `SectionScheme.encode`."""
        section, basis = self._sections[index], self._learned[index].basis
        ranks, plan = self._plans[index]

        def coefficients() -> Iterator[tuple[slice, F32]]:
            for at in tiles(chunk.tokens, tile_tokens(section, chunk.layout)):
                x = gather(chunk, section, unrotation, at)
                require_finite(x, section)
                yield at, as_numpy(basis.analyse(x, chunk.start, at, ranks))

        return self._coder.encode(coefficients(), plan, chunk.tokens)

    def decode(self, data: memoryview, index: int, target: Target, rotation: Rotation) -> None:
        """See `SectionScheme.decode`."""
        section, basis = self._sections[index], self._learned[index].basis
        _, plan = self._plans[index]
        # A bfloat16 cache is no finer than a bfloat16 product, which CPUs that have one do three times as fast.
        dtype = torch.bfloat16 if target.layout.torch_dtype == torch.bfloat16 and FAST_BFLOAT16 else torch.float32
        inverse = self._inverse(index, dtype)
        tile = tile_tokens(section, target.layout)
        for at, y in self._coder.decode(Reader(data), plan, target.tokens, target.wanted, tile):
            x = synthesise(torch.from_numpy(y).to(dtype), inverse)
            inside, rows = overlap(at, target.wanted)
            mean = basis.means(target.source_start, at)
            mean = mean[inside] if len(mean) > 1 else mean
            self._backend.place(x[inside], mean, section, target.layout, rotation, rows, target.keys, target.values)

    def _inverse(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The inverse maps of a section, cut to the coded components; made once."""
        key = (index, dtype)
        if key not in self._inverses:
            matrices = zip(self._learned[index].basis.inverse, self._plans[index][0], strict=True)
            self._inverses[key] = tuple(matrix[:, :rank].T.to(dtype).contiguous() for matrix, rank in matrices)
        return self._inverses[key]
