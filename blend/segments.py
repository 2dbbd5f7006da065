"""The pieces of a blended prompt (`Segment`), and the prompt as selectors see it (`Prompt`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Segment:
    """A run of a prompt's tokens, with their cached KV or as text to compute.

    A segment begins where the previous one ends. Segments may come in any order and may be repeated.

        >>> question = Segment([17, 4, 25])  # text
        >>> question.tokens, question.chunk
        (tensor([17,  4, 25]), None)

    Args:
        tokens: token ids, at least one: a list, an array or an integer tensor `[T]`.
        chunk: the tokens' cache: a blob, a `KVChunk`, or None for text. It may have been computed at any position. A
            chunk computed without a prefix starts at position 0, and only such a chunk is exact at the beginning of a
            prompt.
        associated_data: the bytes that a blob is bound to (`Codec.encode`); `ChunkCache.segment` fills it in.

    Raises:
        InputError: there are no tokens, they are not a row of integers, or a `KVChunk` has a different number of
            tokens. `Blender.blend` checks blobs.
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
            integers = array.dtype.kind in "iu"
            ids = torch.from_numpy(array.astype(np.int64)) if integers else torch.empty(0, dtype=torch.float32)
        if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise InputError(f"tokens: must be a row of at least one integer, the segment's token ids, got {got}")
        given: object = chunk
        if not isinstance(given, bytes | KVChunk | None):
            raise InputError(f"chunk: must be a blob, a KVChunk or None for text, got {type(given).__name__}")
        if isinstance(chunk, KVChunk) and chunk.tokens != len(ids):
            raise InputError(f"chunk: must hold {len(ids)} tokens like the segment, got {chunk.tokens}")
        object.__setattr__(self, "tokens", ids.long())
        object.__setattr__(self, "chunk", chunk)
        object.__setattr__(self, "associated_data", associated_data)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as a selector sees it. All tensors are on the CPU; positions count from the prompt's first token.

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
        >>> Boundary(cost=1 / 3).select(prompt)  # the second chunk's beginning; the first chunk is exact
        tensor([3, 4])

    Attributes:
        tokens: token ids, int64 `[T]`.
        segment: index of each token's segment, int64 `[T]`.
        offset: index of each token in its segment, int64 `[T]`.
        cached: whether the token came with a chunk, bool `[T]`.
        leading: whether its cached KV is exact, because its chunk comes first in this prompt and did when it was
            computed; bool `[T]`.
        layers: number of layers of the model.
        attend: `attend(queries, layers)` runs the last `queries` tokens of the prompt's text over the cached chunks and
            returns their attention `[T]` to each token, summed over heads, queries and `layers`. Its cost is added to
            the record.
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
        """The number of tokens that came with a chunk."""
        return int(self.cached.sum())

    @property
    def suffix(self) -> torch.Tensor:
        """The tokens of text after the last chunk, or of all text if a chunk ends the prompt; bool `[T]`."""
        text = ~self.cached
        # If a chunk ends the prompt, its last token counts as text, but it is no query.
        if bool(self.cached[self.segment == self.segment[-1]].any()):
            return text
        return text & (torch.cumsum(self.cached.flip(0), 0).flip(0) == 0)

    def best(self, score: torch.Tensor, count: int) -> torch.Tensor:
        """Return the positions, rising, of the `count` cached tokens with the highest scores; leading tokens come last.

        Args:
            score: float `[T]`. Among equal scores, earlier tokens come first.
            count: number of tokens; fewer are returned if there are fewer.
        """
        positions = self.cached.nonzero()[:, 0]
        order = torch.argsort(score[positions], descending=True, stable=True)
        order = order[torch.argsort(self.leading[positions][order].long(), stable=True)]
        return positions[order[: max(count, 0)]].sort().values
