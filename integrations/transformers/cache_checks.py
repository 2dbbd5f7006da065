"""Refuse the ids and positions of another cache, which a profile would code at a loss that it does not promise.

A few tokens of each chunk, and the last ones of each row, are compared with what the profile knows of them; all of
them, before a chunk is refused. Most of them decide, so fewer than half of a chunk's may be wrong, or of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.profiles.known_layers import Keys, KnownLayers
from cuvee.codec.support.arrays import I64
from cuvee.integrations.transformers.cache_tensors import chunk_spans

SINKS = 4  # leading tokens of a sequence, which are like no others
_Check = Callable[[torch.Tensor, torch.Tensor, I64 | None], bool]
SOME, LEAST = 16, 4  # tokens of a chunk that are looked at, and without which nothing is said


@torch.no_grad()
def check_inputs(
    known: KnownLayers,
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    width: int,
    chunk_tokens: int,
    paddings: Sequence[int],
    ids: I64 | None,
) -> None:
    """Refuse ids or positions that are not those of a cache, given the arguments of `encode_rows`.

    Raises:
        InputError: the first layer's values do not follow from `ids`, or keys are not at the positions of their tokens.
    """
    for row, padding in enumerate(paddings):
        for start, end in _checked_spans(width - padding, chunk_tokens):
            own = None if ids is None else ids[row, padding + start : padding + end]
            _check(known, _Run(tensors, width, row, padding, range(start, end), own))


@torch.no_grad()
def check_chunk(known: KnownLayers, chunk: KVChunk, chunk_tokens: int) -> None:
    """Refuse ids or a first position that are not those of a saved cache, which is encoded in such chunks.

    Raises:
        InputError: as `check_inputs`.
    """
    tensors = [
        (keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        for keys, values in zip(chunk.keys, chunk.values, strict=True)
    ]
    width = chunk.start + chunk.tokens
    for first, end in _checked_spans(chunk.tokens, chunk_tokens):
        own = None if chunk.token_ids is None else chunk.token_ids[first:end]
        _check(known, _Run(tensors, width, 0, 0, range(chunk.start + first, chunk.start + end), own))


def _checked_spans(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Return first and last token (exclusive) of each chunk of a row, and of the row's end.

    What begins late in a chunk, such as a gap or the next of packed rows, shows in the chunk after it; the last chunk
    has none after it.
    """
    return [*chunk_spans(tokens, chunk_tokens), (max(tokens - SOME, 0), tokens)]


def _check(known: KnownLayers, run: _Run) -> None:
    """Refuse the ids or positions of some tokens, as `check_inputs`."""
    if run.ids is not None and not 0 <= run.ids.min() <= run.ids.max() < known.vocabulary:
        run = replace(run, ids=None)  # nothing is predicted from these
    span = f"the tokens {run.tokens.start} to {run.tokens.stop - 1} of row {run.row}"
    if known.values is not None and run.ids is not None and not run.fits(0, 1, known.values.fit):
        raise InputError(
            f"input_ids: must be the ids of the cache's tokens, got others for {span}: pass the ids that the model "
            "read for this cache, neither shifted nor of another row, or none, to a codec with that model's profile"
        )
    keys = known.keys(run.ids is not None)
    if keys is not None and not run.fits(keys.layer, 0, partial(keys.fit, padding=run.padding)):
        off = run.offset(keys)
        found = f"positions {abs(off)} {'later' if off > 0 else 'earlier'}" if off else "other positions"
        raise InputError(
            f"{'attention_mask' if run.padding else 'cache'}: must fit the positions of the cache's keys, which "
            f"count from the first real token of a row, got keys at {found} for {span}: give the forward pass "
            "of a left-padded batch position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), and this its "
            "attention_mask; pass a cache whole, from its first token on, and save its first position as "
            "`start` in a file; quality='lossless' keeps any cache as it is"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """Some tokens of a row, by position, and their ids if all have one."""

    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]
    width: int
    row: int
    padding: int
    tokens: range
    ids: I64 | None

    def fits(self, layer: int, unit: int, check: _Check) -> bool:
        """Return whether some of the tokens pass a check of the keys (unit 0) or values of a layer, or else all do."""
        for count in (SOME, self.tokens.stop):
            some = self._some(layer, unit, count)
            if len(some[1]) < LEAST or check(*some):
                return True
        return False

    def offset(self, keys: Keys) -> int:
        """Return how much later than where they should be some of the keys fit; 0 if they fit nowhere."""
        taken, at, ids = self._some(keys.layer, 0, SOME)
        offset = keys.offset(taken, at, ids)
        return offset if keys.fit(taken, at + offset, ids, 0) else 0

    def _some(self, layer: int, unit: int, count: int) -> tuple[torch.Tensor, torch.Tensor, I64 | None]:
        """Return the keys or values `[t, H, D]` of up to `count` tokens in a layer, their positions and ids."""
        tensor, end = self.tensors[layer][unit], self.tokens.stop
        dropped = self.width - tensor.shape[2]  # a window holds the last columns
        first = max(self.tokens.start, SINKS, dropped - self.padding)
        at = torch.linspace(first, end - 1, max(min(count, end - first), 0), dtype=torch.float64, device="cpu").long()
        taken = tensor[self.row].detach().index_select(1, (at + self.padding - dropped).to(tensor.device))
        return taken.transpose(0, 1).cpu(), at, None if self.ids is None else self.ids[(at - self.tokens.start).numpy()]
