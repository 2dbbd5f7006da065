"""The learned scheme: the profile's bases, tables and steps. A section is nothing but its coded coefficients.

tokens x [t, N] --leading coefficients--> classes --sort--> columns --analyze--> y [R, t] --code--> bytes
bytes --decode--> y [R, t] of columns --product, as deep as their class--> x --unsort, place--> tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cuvee.codec.arena import Arena
from cuvee.codec.chunk import KVChunk
from cuvee.codec.classes import coding_order
from cuvee.codec.coefficients import CoefficientCoder
from cuvee.codec.profile import Profile
from cuvee.codec.schemes import Target, overlap
from cuvee.codec.section_coding import StepCoding
from cuvee.codec.sections import Coefficients, padded
from cuvee.codec.stages import Stages
from cuvee.codec.symbols import F32, U8
from cuvee.codec.symbols_classes import class_runs
from cuvee.codec.transform import (
    Rotation,
    Section,
    as_numpy,
    require_finite,
    tile_tokens,
    tiles,
)

# Matrix products in hardware.
FAST_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

# Columns multiplied together, as deep as the finest of them. Without matrix instructions a product takes as long as it
# has operations, and short runs have fewer; with them a call costs as much as what it saves.
PRODUCT_COLUMNS = 64

BATCH_VALUES = 1 << 20  # planes of sections that are decoded together: enough streams for the CPU, in its second cache
_arena = Arena()


class TransformScheme:
    """Codes sections with a learned profile at one step."""

    def __init__(self, profile: Profile, step: int, stages: Stages) -> None:
        self._sections = profile.sections
        self._coding = StepCoding(profile.learned, profile.family, step)
        self._coder = CoefficientCoder(stages, profile.family, step)
        self._stages = stages
        self._inverses: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self._tiles = [tile_tokens(section, profile.layout) for section in profile.sections]

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(self, chunk: KVChunk, index: int, unrotation: Rotation, offsets: torch.Tensor | None = None) -> bytes:
        """See `SectionScheme.encode`."""
        section, coding = self._sections[index], self._coding.sections[index]
        basis = coding.learned.basis

        def values() -> Iterator[tuple[slice, torch.Tensor]]:
            for at in tiles(chunk.tokens, self._tiles[index]):
                x = self._stages.gather_centered(chunk, section, unrotation, at, basis.leading_means(chunk.start, at))
                require_finite(x, section)
                yield at, x

        if offsets is None and coding.learned.predictor is None:
            pieces = ((at, as_numpy(self._stages.analyze(basis, x, coding.ranks, None))) for at, x in values())
            return self._coder.encode(pieces, coding.plan, chunk.tokens)

        def columns() -> Iterator[tuple[U8, U8, F32]]:
            for at, x in values():
                classes = coding.classes(x, chunk.start, at, offsets)
                order = coding_order(classes)
                own = classes[order]
                ordered = x[torch.from_numpy(order)]
                y = torch.zeros(int(coding.classed.rows[own].max()), len(own))
                for run, k in _product_runs(own, len(coding.ranks)):
                    ranks = coding.class_ranks[k]
                    self._stages.analyze(basis, ordered[run], ranks, y[: sum(ranks), run])
                yield classes, own, as_numpy(y)

        return self._coder.encode_classes(columns(), chunk.tokens, coding.classed, coding.class_table)

    def decode(self, parts: Sequence[tuple[int, memoryview]], target: Target, rotation: Rotation) -> None:
        """See `SectionScheme.decode`."""
        # A bfloat16 cache is no finer than a bfloat16 product, which CPUs that have one do three times as fast.
        dtype = torch.bfloat16 if target.layout.torch_dtype == torch.bfloat16 and FAST_BFLOAT16 else torch.float32
        # Whole tiles, always cut at the same places, because the last bits of a matrix product depend on its shape. A
        # run of tokens must come out exactly as it does in the whole.
        tile = max(self._tiles)
        for start in range(target.wanted.start - target.wanted.start % tile, target.wanted.stop, tile):
            at = slice(start, min(start + tile, target.tokens))
            for batch in self._batches(parts, at.stop - at.start):
                decoded = self._stages.decode_sections(self._coding, batch, target.tokens, at, dtype)
                for (index, _), tile_of in zip(batch, decoded, strict=True):
                    self._place(self._values(index, tile_of), at, index, tile_of, target, rotation)

    def _batches(
        self, parts: Sequence[tuple[int, memoryview]], columns: int
    ) -> Iterator[Sequence[tuple[int, memoryview]]]:
        """Sections whose planes fit the cache together, or one."""
        first = size = 0
        for i, (index, _) in enumerate(parts):
            own = int(self._coding.sections[index].classed.planes.max()) * columns
            if size and size + own > BATCH_VALUES:
                yield parts[first:i]
                first, size = i, 0
            size += own
        yield parts[first:]

    def _values(self, index: int, tile: Coefficients) -> torch.Tensor:
        """The values of the tile's columns without their means: `[t, N]`, or `[B, t, N / B]` for B blocks alike."""
        out = _arena.tensor("x", tile.y.shape[2] * self._sections[index].values, tile.y.dtype)
        return self._stages.synthesize(tile.y, self._inverse(index, tile.y.dtype), self._product_runs(index, tile), out)

    def _product_runs(self, index: int, tile: Coefficients) -> Iterator[tuple[slice, Sequence[int]]]:
        """The columns that are multiplied together, and how many rows of each block they need."""
        pad, width = tile.y.shape[1:]
        coding = self._coding.sections[index]
        if tile.classes is None:
            yield slice(0, width), [min(padded(rank), pad) for rank in coding.ranks]
            return
        for run, k in _product_runs(tile.classes, len(coding.ranks)):
            yield run, [min(padded(rank), pad) for rank in coding.class_ranks[k]]

    def _place(
        self, x: torch.Tensor, at: slice, index: int, tile: Coefficients, target: Target, rotation: Rotation
    ) -> None:
        """Write the wanted ones of the tokens `at`; `x` holds the values of the tile's columns without their means."""
        inside, rows = overlap(at, target.wanted)
        wanted = slice(at.start + inside.start, at.start + inside.stop)
        mean = self._coding.sections[index].learned.basis.leading_means(target.source_start, wanted)
        self._stages.place(
            x, mean, self._sections[index], target.layout, rotation, rows, target.keys, target.values,
            tile.order - inside.start,
        )  # fmt: skip

    def _inverse(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The inverse maps of a section, transposed and padded: `[B, pad, values]` for each run of B blocks alike."""
        key = (index, dtype)
        if key not in self._inverses:
            coding = self._coding.sections[index]
            finest = coding.class_ranks[coding.classed.finest]
            pad = padded(max(*finest, *coding.ranks))
            runs: list[list[torch.Tensor]] = []
            for matrix in coding.learned.basis.inverse:
                rank = min(matrix.shape[1], pad)
                turned = torch.zeros(pad, matrix.shape[0], dtype=dtype)
                turned[:rank] = matrix[:, :rank].T
                if not runs or runs[-1][0].shape != turned.shape:
                    runs.append([])
                runs[-1].append(turned)
            self._inverses[key] = tuple(torch.stack(run) for run in runs)
        return self._inverses[key]


def _product_runs(classes: U8, blocks: int) -> Iterator[tuple[slice, int]]:
    """Runs of columns that share a product, and the class whose components it takes.

    With several blocks, components of another class are other ones, and a run has one class.
    """
    if blocks > 1:
        yield from class_runs(classes)
        return
    for start in range(0, len(classes), PRODUCT_COLUMNS):
        # Columns are sorted within windows, which hold whole runs: the first is the finest.
        yield slice(start, min(start + PRODUCT_COLUMNS, len(classes))), int(classes[start])
