"""The learned scheme: the profile's bases, tables and steps. A section is nothing but its coded coefficients.

tokens x [t, N] --leading coefficients--> classes --sort--> columns --analyze--> y [R, t] --code--> bytes
bytes --decode--> y [R, t] of columns --product, as deep as their class--> x --unsort, place--> tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.classes import ClassedPlan, class_table, coding_order
from cuvee.codec.coefficients import CoefficientCoder
from cuvee.codec.container import Reader
from cuvee.codec.errors import ProfileError
from cuvee.codec.importance import choose_classes
from cuvee.codec.profile import Profile
from cuvee.codec.schemes import Target, overlap
from cuvee.codec.section_profile import SectionProfile
from cuvee.codec.stages import Stages
from cuvee.codec.symbols import F32, U8
from cuvee.codec.symbols_classes import class_runs
from cuvee.codec.tables import EntropyTables
from cuvee.codec.transform import (
    I64,
    LeadingComponents,
    Rotation,
    Section,
    as_numpy,
    gather,
    require_finite,
    synthesize,
    tile_tokens,
    tiles,
)

# Matrix products in hardware.
FAST_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

# Columns multiplied together, as deep as the finest of them. Without matrix instructions a product takes as long as it
# has operations, and short runs have fewer; with them a call costs as much as what it saves.
PRODUCT_COLUMNS = {torch.float32: 64, torch.bfloat16: 256}


class SectionCoding:
    """What coding one section at one step takes, whatever the backend.

    Args:
        learned: of the section.
        step: step index of the blob.

    Attributes:
        learned: as given.
        ranks, plan: of tokens without classes.
    """

    def __init__(self, learned: SectionProfile, step: int) -> None:
        self.learned = learned
        self.ranks, self.plan = learned.plan(step)
        self._step = step

    @cached_property
    def classed(self) -> ClassedPlan:
        """How tokens of each class are coded: without prediction, which takes them in their own order."""
        return self.learned.classed_plan(self._step)

    @cached_property
    def class_ranks(self) -> tuple[tuple[int, ...], ...]:
        """`[16]`, of each class the components of each block; those of classes that are not served are none."""
        none = (0,) * len(self.ranks)
        return tuple(
            none if plan is None else self.learned.class_ranks(self._step, k)
            for k, plan in enumerate(self.classed.plans)
        )

    @cached_property
    def class_table(self) -> EntropyTables:
        """The table that codes the classes."""
        return class_table(self.learned.class_freq)

    def product_runs(self, classes: U8, dtype: torch.dtype) -> Iterator[tuple[slice, int]]:
        """Runs of columns that share a product, and the class whose components it takes.

        With several blocks, components of another class are other ones, and a run has one class.
        """
        if len(self.ranks) > 1:
            yield from class_runs(classes)
            return
        for start in range(0, len(classes), PRODUCT_COLUMNS[dtype]):
            # Columns are sorted within windows, which hold whole runs: the first is the finest.
            yield slice(start, min(start + PRODUCT_COLUMNS[dtype], len(classes))), int(classes[start])

    @cached_property
    def _leading(self) -> LeadingComponents | None:
        predictor = self.learned.predictor
        return None if predictor is None else self.learned.basis.leading(predictor.components)

    def classes(self, x: torch.Tensor, start: int, at: slice, offsets: torch.Tensor | None) -> U8:
        """The classes of the tokens `at` of a chunk that begins at position `start`.

        Args:
            x: `[t, N]` float32, less the means.
            start: position of the chunk's first token.
            at: the tokens.
            offsets: octaves `[T]` of all tokens that the caller asks for; None: as the predictor says.
        """
        if offsets is not None:
            return choose_classes(offsets[at], self.classed.finest)
        if self.learned.predictor is None or self._leading is None:
            raise ProfileError("a section without a predictor cannot tell its tokens' classes")
        return choose_classes(self.learned.predictor.offsets(self._leading(x), start, at.start), self.classed.finest)


class TransformScheme:
    """Codes sections with a learned profile at one step."""

    def __init__(self, profile: Profile, step: int, stages: Stages) -> None:
        self._sections = profile.sections
        self._codings = [SectionCoding(section, step) for section in profile.learned]
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
        section, coding = self._sections[index], self._codings[index]
        basis = coding.learned.basis

        def values() -> Iterator[tuple[slice, torch.Tensor]]:
            for at in tiles(chunk.tokens, self._tiles[index]):
                x = gather(chunk, section, unrotation, at)
                require_finite(x, section)
                yield at, x - basis.means(chunk.start, at)

        if offsets is None and coding.learned.predictor is None:
            pieces = ((at, as_numpy(basis.coefficients(x, coding.ranks))) for at, x in values())
            return self._coder.encode(pieces, coding.plan, chunk.tokens)

        def columns() -> Iterator[tuple[U8, U8, F32]]:
            for at, x in values():
                classes = coding.classes(x, chunk.start, at, offsets)
                order = coding_order(classes)
                own = classes[order]
                ordered = x[torch.from_numpy(order)]
                y = torch.zeros(int(coding.classed.rows[own].max()), len(own))
                for run, k in coding.product_runs(own, torch.float32):
                    ranks = coding.class_ranks[k]
                    basis.coefficients(ordered[run], ranks, out=y[: sum(ranks), run])
                yield classes, own, as_numpy(y)

        return self._coder.encode_classes(columns(), chunk.tokens, coding.classed, coding.class_table)

    def decode(self, data: memoryview, index: int, target: Target, rotation: Rotation) -> None:
        """See `SectionScheme.decode`."""
        section, coding = self._sections[index], self._codings[index]
        # A bfloat16 cache is no finer than a bfloat16 product, which CPUs that have one do three times as fast.
        dtype = torch.bfloat16 if target.layout.torch_dtype == torch.bfloat16 and FAST_BFLOAT16 else torch.float32
        inverse = self._inverse(index, dtype)
        tile = self._tiles[index]
        part = self._coder.read(Reader(data), coding.plan, target.tokens, coding.classed)
        if part.classes is None:
            for at, y in self._coder.decode(part, coding.plan, target.tokens, target.wanted, tile):
                x = synthesize(torch.from_numpy(y).to(dtype), inverse, coding.ranks)
                self._place(x, at, section, coding, target, rotation)
            return
        for done in self._coder.decode_classes(
            part, coding.classed, coding.class_table, target.tokens, target.wanted, tile, dtype
        ):
            columns = torch.empty(len(done.classes), section.values, dtype=dtype)
            for run, k in coding.product_runs(done.classes, dtype):
                ranks = coding.class_ranks[k]
                synthesize(done.y[: sum(ranks), run], inverse, ranks, out=columns[run])
            self._place(columns, done.at, section, coding, target, rotation, done.order)

    def _place(
        self,
        x: torch.Tensor,
        at: slice,
        section: Section,
        coding: SectionCoding,
        target: Target,
        rotation: Rotation,
        order: I64 | None = None,
    ) -> None:
        """Write the wanted ones of the tokens `at`, `[t, N]` without their means; `order`: the token of each row."""
        inside, rows = overlap(at, target.wanted)
        wanted = slice(at.start + inside.start, at.start + inside.stop)
        mean = coding.learned.basis.leading_means(target.source_start, wanted)
        if order is not None and len(x) != rows.stop - rows.start:
            x, order = x[torch.from_numpy(np.argsort(order)[inside])], None
        elif order is None:
            x = x[inside]
        self._stages.place(x, mean, section, target.layout, rotation, rows, target.keys, target.values, order)

    def _inverse(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The inverse maps of a section, transposed; made once."""
        key = (index, dtype)
        if key not in self._inverses:
            coding = self._codings[index]
            finest = coding.class_ranks[coding.classed.finest]
            matrices = zip(coding.learned.basis.inverse, map(max, finest, coding.ranks), strict=True)
            self._inverses[key] = tuple(matrix[:, :rank].T.to(dtype).contiguous() for matrix, rank in matrices)
        return self._inverses[key]
