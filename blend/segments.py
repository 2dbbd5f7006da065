"""The pieces of a blended prompt (`Segment`), and what selectors know of the whole (`Prompt`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Segment:
    """A run of a prompt's tokens: with their cached KV, or as text to be computed.

    A segment begins where the one before it ends. Segments may come in any order, and as often as you like.

        >>> question = Segment([17, 4, 25])  # text
        >>> question.tokens, question.chunk
        (tensor([17,  4, 25]), None)

    Args:
        tokens: token ids, at least one: a list, an array or an integer tensor `[T]`.
        chunk: their cache: a blob, a `KVChunk`, or None for text. It may have been computed at any position. One that
            was computed with nothing before it starts at position 0. Only such a chunk is exact at the beginning of a
            prompt.
        associated_data: what a blob is bound to (`Codec.encode`); `ChunkCache.segment` fills it in.

    Raises:
        InputError: there are no tokens, they are not a row of integers, or the chunk has another number of tokens.
            `Blender.blend` checks what a blob holds.
    """

    tokens: torch.Tensor
    chunk: bytes | KVChunk | None = field(repr=False)
    associated_data: bytes = field(repr=False)

    def __init__(
        self,
        tokens: Sequence[int] | torch.Tensor,
        chunk: bytes | KVChunk | None = None,
        *,
        associated_data: bytes = b"",
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
        object.__setattr__(self, "associated_data", associated_data)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a selector knows of a prompt. All tensors are on the CPU; positions are those of the prompt.

        >>> from cuvee.blend import Boundary
        >>> prompt = Prompt(  # two chunks of three tokens, then a question of two
        ...     tokens=torch.tensor([5, 6, 7, 5, 8, 9, 5, 8]),
        ...     segment=torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]),
        ...     offset=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]),
        ...     cached=torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]).bool(),
        ...     leading=torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]).bool(),
        ...     layers=6,
        ...     attend=lambda queries, layers: torch.ones(8),
        ... )
        >>> Boundary(ratio=1 / 3).begin(prompt).tokens(0)  # where the second chunk begins; the first one is exact
        tensor([3, 4])

    Attributes:
        tokens: token ids, int64 `[T]`.
        segment: index of the segment that each token belongs to, int64 `[T]`.
        offset: the token's place in that segment, int64 `[T]`.
        cached: whether the token came with a chunk, bool `[T]`.
        leading: whether its cached KV is exact, because nothing stands before its chunk, here or where it was made;
            bool `[T]`.
        layers: number of layers of the model.
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
        """The text after the last chunk, or all text if a chunk ends the prompt; bool `[T]`."""
        text = ~self.cached
        # A chunk that ends the prompt leaves its last token as text. That token asks for nothing.
        if bool(self.cached[self.segment == self.segment[-1]].any()):
            return text
        return text & (torch.cumsum(self.cached.flip(0), 0).flip(0) == 0)

    def best(self, score: torch.Tensor, count: int, among: torch.Tensor | None = None) -> torch.Tensor:
        """Positions of the `count` cached tokens with the highest scores, rising. Leading tokens are taken last.

        Args:
            score: float `[T]`. Of tokens with equal scores, the first one goes first.
            count: how many; at most all there are.
            among: positions to choose from, int64; default: all cached tokens.
        """
        positions = self.cached.nonzero()[:, 0] if among is None else among
        order = torch.argsort(score[positions], descending=True, stable=True)
        order = order[torch.argsort(self.leading[positions][order].long(), stable=True)]
        return positions[order[: max(count, 0)]].sort().values
