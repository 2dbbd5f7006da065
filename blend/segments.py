"""What a blended prompt is made of: `Segment`s, and the `Prompt` that selectors look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Segment:
    """A run of a prompt's tokens, with their cached KV or as text to be computed.

    A segment stands where the segments before it end: in any order, as often as wanted, next to any other.

    Args:
        tokens: token ids, at least one: a list, an array or an integer tensor `[T]`.
        chunk: their cache: a blob, a `KVChunk`, or None for text. It may come from any position. One that was computed
            with nothing before it starts at position 0; only such a one is exact at the beginning of a prompt.
        associated: what a blob was bound to (`Codec.encode`); `ChunkCache.segment` fills it in.

    Raises:
        InputError: no tokens, something else than a row of integers, or a chunk of another number of tokens. What a
            blob holds is looked at by `Blender.blend`.
    """

    tokens: torch.Tensor
    chunk: bytes | KVChunk | None = field(repr=False)
    associated: bytes = field(repr=False)

    def __init__(
        self, tokens: Sequence[int] | torch.Tensor, chunk: bytes | KVChunk | None = None, *, associated: bytes = b""
    ) -> None:
        if isinstance(tokens, torch.Tensor):
            ids = tokens.detach().cpu()
        else:
            try:
                array = np.asarray(tokens)
            except ValueError:  # rows of unequal length
                array = np.empty(0)
            ids = torch.from_numpy(array.astype(np.int64)) if array.dtype.kind in "iu" else torch.empty(0)
        if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InputError("tokens: must be a row of at least one integer, the token ids of the segment")
        given: object = chunk
        if not isinstance(given, bytes | KVChunk | None):
            raise InputError(f"chunk: must be a blob, a KVChunk or None for text, got {type(given).__name__}")
        if isinstance(chunk, KVChunk) and chunk.tokens != len(ids):
            raise InputError(f"chunk: holds {chunk.tokens} tokens, the segment has {len(ids)}")
        object.__setattr__(self, "tokens", ids.long())
        object.__setattr__(self, "chunk", chunk)
        object.__setattr__(self, "associated", associated)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a selector knows of a prompt. T tokens on the CPU; positions are those of the prompt.

    Attributes:
        tokens: int64 `[T]`.
        segment: int64 `[T]`, index of the segment a token belongs to.
        offset: int64 `[T]`, its place in that segment.
        cached: bool `[T]`: it came with a chunk.
        leading: bool `[T]`: its cached KV is exact, because nothing stands before its chunk, here or where it was made.
        layers: of the model.
        attend: `attend(queries, layers)` runs the last `queries` tokens of the prompt's text over the chunks as they
            are cached, and returns the attention `[T]` that they pay to each token, summed over heads, queries and
            `layers`. Its cost is added to the record.
    """

    tokens: torch.Tensor
    segment: torch.Tensor
    offset: torch.Tensor
    cached: torch.Tensor
    leading: torch.Tensor
    layers: int
    attend: Callable[[int, Sequence[int]], torch.Tensor] = field(repr=False)

    @property
    def cached_tokens(self) -> int:
        """How many tokens came with a chunk."""
        return int(self.cached.sum())

    @property
    def suffix(self) -> torch.Tensor:
        """Of type bool, `[T]`: the text after the last chunk; all text where a chunk ends the prompt."""
        text = ~self.cached
        # A chunk that ends the prompt leaves its last token as text; it asks for nothing.
        if bool(self.cached[self.segment == self.segment[-1]].any()):
            return text
        return text & (torch.cumsum(self.cached.flip(0), 0).flip(0) == 0)

    def best(self, score: torch.Tensor, count: int, among: torch.Tensor | None = None) -> torch.Tensor:
        """Positions of the `count` cached tokens with the highest score `[T]`, in order; leading ones only at last.

        Args:
            score: float `[T]`; of equal ones the first token comes first.
            count: how many; at most all there are.
            among: int64, positions to choose from; default: all cached ones.
        """
        positions = self.cached.nonzero()[:, 0] if among is None else among
        order = torch.argsort(score[positions], descending=True, stable=True)
        order = order[torch.argsort(self.leading[positions][order].long(), stable=True)]
        return positions[order[: max(count, 0)]].sort().values
