"""The learned scheme: the profile's bases, tables and steps. A section holds only its coded coefficients.

tokens x [t, N] --leading coefficients--> classes --sort--> columns --analyze--> y [R, t] --code--> bytes
bytes --decode--> y [R, t] of columns --product, as deep as their class--> x --unsort, place--> tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.residuals import FINER
from cuvee.codec.errors import CorruptError
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.sections import Section, tile_tokens, tiles, tiles_around
from cuvee.codec.profiles.setting import Setting
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.schemes import batches, overlap
from cuvee.codec.schemes.coefficients import PackedSection, encode_sections
from cuvee.codec.stages.columns import Coefficients, class_runs, padded
from cuvee.codec.stages.products import Products, products_for
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows
from cuvee.codec.stages.stages import Stages
from cuvee.codec.stages.transform import Centers
from cuvee.codec.support.arena import Arena
from cuvee.codec.support.arrays import F32, I64, U8

BATCH_VALUES = 1 << 20  # planes of the sections coded in one call: enough streams for the CPU, in its second cache
_arena = Arena()


class TransformScheme:
    """Codes sections with a learned profile at one step, or as a base at this step and its refinement.

    Several threads call it at once, for different sections.
    """

    def __init__(self, profile: Profile, setting: Setting, predicted: bool, stages: Stages) -> None:
        self._profile = profile
        self.sections: tuple[Section, ...] = profile.sections
        learned, family = profile.learned_for(predicted), profile.family
        self._coding = self._last = StepCoding(learned, family, setting.step_index)
        self._refined = setting.refinements > 0
        if self._refined:
            self._last = StepCoding(learned, family, setting.step_index - FINER, residual=True)
        self._stages = stages
        self._inverses: dict[tuple[int, Products], Any] = {}
        self._tiles = [tile_tokens(section, profile.layout) for section in profile.sections]

    def encode(self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation) -> list[tuple[bytes, ...]]:
        """Return for each of the sections `numbers` its bytes: one part, or a base and its refinement.

        The chunk has ids if the profile predicts from them; `unrotation` frees its keys of their positions.
        """
        if self._refined:
            return self._encode_refined(chunk, numbers, unrotation)
        out: list[tuple[bytes, ...]] = []
        for batch in self._batches(numbers, chunk.tokens):
            packed = []
            for index in numbers[batch]:
                packed.append(self._packed(self._coding, index, chunk.tokens))
                for tile in self._columns(chunk, index, unrotation):
                    packed[-1].add(*tile)
            out += [(section,) for section in self._code(packed)]
        return out

    def _encode_refined(self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation) -> list[tuple[bytes, ...]]:
        """Return the base and the refinement of each section.

        The coefficients of a section are kept until its base is coded: 4 bytes for each value.
        """
        out: list[tuple[bytes, ...]] = []
        for batch in self._batches(numbers, chunk.tokens):
            packed, kept = [], []
            for index in numbers[batch]:
                packed.append(self._packed(self._coding, index, chunk.tokens))
                kept.append(
                    [(classes, columns, y.copy()) for classes, columns, y in self._columns(chunk, index, unrotation)]
                )
                for classes, columns, y in kept[-1]:
                    packed[-1].add(classes, columns, self._of_base(index, columns, y))
            bases, packed = self._code(packed), []
            for index, base, pieces in zip(numbers[batch], bases, kept, strict=True):
                # Subtract the decoded base: it goes through the decoder's own stages.
                indexed = self._stages.index_sections(self._coding, [(index, memoryview(base))], chunk.tokens)
                packed.append(self._packed(self._last, index, chunk.tokens))
                for at, (classes, columns, y) in zip(tiles(chunk.tokens, self._tiles[index]), pieces, strict=True):
                    (decoded,) = self._stages.decode_sections(indexed, at, torch.float32)
                    self._subtract(index, columns, y, decoded.y.numpy())
                    packed[-1].add(classes, columns, y)
            out += zip(bases, self._code(packed), strict=True)
        return out

    def _packed(self, coding: StepCoding, index: int, tokens: int) -> PackedSection:
        return PackedSection(coding.sections[index], coding.family, self._stages, tokens)

    def _code(self, packed: Sequence[PackedSection]) -> list[bytes]:
        return encode_sections(packed, self._coding.family, self._stages)

    def _of_base(self, index: int, columns: U8, y: F32) -> F32:
        """Return the rows that the base codes of a tile, given those that the refinement codes."""
        ranks, deeper = (coding.sections[index].class_ranks for coding in (self._coding, self._last))
        if len(deeper[0]) == 1:  # the leading ones
            return y
        out = np.zeros((sum(ranks[columns.min()]), len(columns)), np.float32)
        for run, k in class_runs(columns):
            to = first = 0
            for rank, deep in zip(ranks[k], deeper[k], strict=True):
                out[to : to + rank, run] = y[first : first + rank, run]
                to, first = to + rank, first + deep
        return out

    def _subtract(self, index: int, columns: U8, y: F32, base: F32) -> None:
        """Subtract from a tile's coefficients, in place, those `[blocks, pad, t]` that the base holds."""
        ranks, deeper = (coding.sections[index].class_ranks for coding in (self._coding, self._last))
        for run, k in class_runs(columns):
            first = 0
            for block, (rank, deep) in enumerate(zip(ranks[k], deeper[k], strict=True)):
                y[first : first + rank, run] -= base[block, :rank, run]
                first += deep

    def _centered(self, chunk: KVChunk, index: int, unrotation: Rotation) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the section's values minus their means and predictions, tile by tile."""
        for at in tiles(chunk.tokens, self._tiles[index]):
            centers = self._centers(index, chunk.token_ids, chunk.start, at)
            yield at, self._stages.gather_centered(chunk, self.sections[index], unrotation, at, centers)

    def _centers(self, index: int, token_ids: I64 | None, start: int, at: slice) -> Centers:
        """Return the centers of the tokens `at` in a section.

        `token_ids` are those of a whole chunk that begins at position `start`; without them nothing is predicted.
        """
        means = self._coding.sections[index].learned.basis.leading_means(start, at)
        if token_ids is None:
            return Centers(means)
        return Centers(means, self._profile.predictions[index].of(token_ids[at], start + at.start))

    def _predicted_coefficients(self, index: int, token_ids: I64 | None, start: int, at: slice) -> Predictions | None:
        """Return the predicted coefficients that a section's predictor reads: slow to prepare for a large model."""
        cache = None if token_ids is None else self._profile.predicted_coefficients[index]
        return None if token_ids is None or cache is None else cache.of(token_ids[at], start + at.start)

    def _columns(self, chunk: KVChunk, index: int, unrotation: Rotation) -> Iterator[tuple[U8, U8, F32]]:
        """Yield for each tile the classes of the tokens, the classes of the columns, and the columns' coefficients."""
        coding = self._coding.sections[index]
        finer = coding.finer(chunk.start, chunk.tokens, chunk.following)
        products = products_for(chunk.layout)
        for at, x in self._centered(chunk, index, unrotation):
            predicted = self._predicted_coefficients(index, chunk.token_ids, chunk.start, at)
            classes, leading = coding.classes(x, chunk.start, at, finer, self._stages.predict_classes, predicted)
            class_ranks = self._last.sections[index].class_ranks
            rows = sum(class_ranks[classes.min()])
            columns, ordered, y = self._stages.arrange(classes, x, leading, rows)
            computed = 0 if leading is None else min(len(leading), rows)
            for run, ranks in self._stages.product_runs(columns, class_ranks):
                self._stages.analyze(ordered, coding.learned.basis, run, ranks, products, computed, y)
            yield classes, columns, y.numpy()

    def decode(
        self,
        parts: Sequence[tuple[int, tuple[memoryview, ...]]],
        request: DecodeRequest,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        rotation: Rotation,
    ) -> None:
        """Decode sections, of which `parts` are the numbers and the bytes, into rows of the request's tokens.

        Rows are listed per layer, None for layers that are not decoded. `rotation` turns position-free keys to the
        request's positions.
        """
        opened, span = request.opened, request.span
        layout, tokens = opened.layout, opened.tokens
        products = products_for(layout)
        tile = max(self._tiles)
        for run in self._batches([index for index, _ in parts], min(tile, tokens)):
            batch = parts[run]
            indexed = [
                self._stages.index_sections(coding, [(index, parts_of[part]) for index, parts_of in batch], tokens)
                for part, coding in enumerate((self._coding, self._last)[: 1 + self._refined])
            ]
            for at in tiles_around(span, tile, tokens):
                inside, rows = overlap(at, span)
                wanted = slice(at.start + inside.start, at.start + inside.stop)
                decoded = self._decode(indexed, at, products.coefficients)
                for (index, _), columns in zip(batch, decoded, strict=True):
                    section = self.sections[index]
                    out = _arena.tensor("x", columns.y.shape[2] * section.values, columns.y.dtype)
                    runs = self._product_runs(index, columns)
                    x = self._stages.synthesize(columns.y, self._inverse(index, products), runs, out)
                    centers = self._centers(index, request.token_ids, opened.start, wanted)
                    order = columns.order - inside.start
                    self._stages.scatter(x, centers, section, layout, rotation, rows, keys, values, order)

    def _decode(self, indexed: Sequence[Any], at: slice, dtype: torch.dtype) -> list[Coefficients]:
        """Decode a tile of all parts, and add the coefficients of a base and its refinement."""
        if not self._refined:
            return self._stages.decode_sections(indexed[0], at, dtype)
        bases = [
            (base.order, base.classes, base.y.clone())  # `y` is valid until the next tile
            for base in self._stages.decode_sections(indexed[0], at, torch.float32)
        ]
        out = []
        refinements = self._stages.decode_sections(indexed[1], at, torch.float32)
        for (order, classes, base_y), refinement in zip(bases, refinements, strict=True):
            if not np.array_equal(order, refinement.order) or not np.array_equal(classes, refinement.classes):
                raise CorruptError(
                    "refinement: must have the token classes of its base, got other ones: the bytes are damaged"
                )
            refinement.y[:, : base_y.shape[1]] += base_y
            out.append(Coefficients(order, classes, refinement.y.to(dtype)))
        return out

    def _batches(self, numbers: Sequence[int], columns: int) -> Iterator[slice]:
        """Return runs of sections whose planes fit the cache together; a larger section is its own run."""
        coding = self._last.sections
        return batches([int(coding[index].classed.planes.max()) * columns for index in numbers], BATCH_VALUES)

    def _product_runs(self, index: int, tile: Coefficients) -> Iterator[tuple[slice, Sequence[int]]]:
        """Yield the columns of each product, and how many rows of each block they need."""
        pad, coding = tile.y.shape[1], self._last.sections[index]
        for run, ranks in self._stages.product_runs(tile.classes, coding.class_ranks):
            yield run, [min(padded(rank), pad) for rank in ranks]

    def _inverse(self, index: int, products: Products) -> Any:
        """Return a section's inverse maps as the stage `synthesize` takes them."""
        key = (index, products)
        if key not in self._inverses:
            coding = self._last.sections[index]
            rank = max(coding.class_ranks[coding.classed.finest])
            self._inverses[key] = self._stages.prepare_inverse(
                coding.learned.basis.inverse_maps, rank, products, coding.expected_shares(self._coding.family.tables)
            )
        return self._inverses[key]
