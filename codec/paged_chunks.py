"""Chunks that lie in the pages of a serving engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cuvee.codec.chunk import check_following
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.support.arrays import I64
from cuvee.codec.token_ids import as_token_ids


@dataclass(frozen=True, slots=True)
class PagedChunk:
    """A chunk that lies in pages; see `PagedChunks`."""

    cache: PagedCache
    slots: torch.Tensor
    start: int
    token_ids: I64 | None
    following: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """Chunks that lie in the pages of a serving engine, to be encoded in one call.

    Args:
        cache: holds the tokens.
        slots: for each chunk, int64 `[T]` on the cache's device: the slots of its tokens, in order.
        starts: for each chunk, the position of its first token.
        tokens: for each chunk, the ids of its tokens as in `Codec.encode`, or None; default: no chunk has ids.
        following: for each chunk, the number of tokens after it, as in `KVChunk`; default: 0.

    Raises:
        InputError: another number of starts, ids or following tokens than of slots; slots that are not int64 or empty;
            positions that the model does not have.

    Example:
        >>> import torch
        >>> from cuvee import KVLayout, LayerLayout, PagedCache, PagedChunks
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),), "float32", max_positions=None)
        >>> pages = PagedCache(layout, [torch.zeros(4, 16, 2, 8)], [torch.zeros(4, 16, 2, 8)])
        >>> [own.tokens for own in PagedChunks(pages, slots=[torch.arange(16, 48), torch.arange(3)], starts=[0, 100])]
        [32, 3]
    """

    cache: PagedCache
    slots: Sequence[torch.Tensor]
    starts: Sequence[int]
    tokens: Sequence[object] | None = None
    following: Sequence[int] | None = None

    def __post_init__(self) -> None:
        count = len(self.slots)
        for name in ("starts", "tokens", "following"):
            per_chunk = getattr(self, name)
            if per_chunk is not None and len(per_chunk) != count:
                raise InputError(f"{name}: must be one for each of the {count} chunks in slots, got {len(per_chunk)}")
        for at, start in zip(self.slots, self.starts, strict=True):
            if not len(self.cache.check_slots(at)):
                raise InputError("slots: must name at least one token per chunk, got none")
            self.layout.check_positions(start, len(at))
        for each in self.following or ():
            check_following(each)

    @property
    def layout(self) -> KVLayout:
        """Of the chunks."""
        return self.cache.layout

    @property
    def device(self) -> torch.device:
        """Of the pages."""
        return self.cache.device

    def __iter__(self) -> Iterator[PagedChunk]:
        count = len(self.slots)
        ids = [None] * count if self.tokens is None else self.tokens
        following = [0] * count if self.following is None else self.following
        for at, start, raw_ids, after in zip(self.slots, self.starts, ids, following, strict=True):
            checked = None if raw_ids is None else as_token_ids(raw_ids, len(at))
            yield PagedChunk(self.cache, at, start, checked, after)

    def __len__(self) -> int:
        return len(self.slots)
