"""Match the rows of a batched cache with lists of blobs: padding, order and bound data.

A list of blobs is row-major: all chunks of row 0 in order, then those of row 1, and so on. The first chunk of each row
starts at position 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from cuvee.codec.coding.decoding import check_tokens
from cuvee.codec.errors import InputError
from cuvee.codec.format.container import read_header
from cuvee.codec.support.arrays import I64
from cuvee.codec.support.once import Once
from cuvee.codec.token_ids import NO_TOKEN

_once = Once(logging.getLogger(__name__))


class CacheRows:
    """Places the blobs of a list, in order, and refuses a list that does not make whole rows.

    Args:
        width: columns per row, if there is no mask.
        attention_mask: `[B, T]` of a left-padded batch, or None.
        max_tokens: limit of the columns of all rows.
        late: whether rows may begin after position 0, because windows of all layers have dropped the tokens before.

    Attributes:
        width: columns per row.
        paddings: padded columns of each row begun so far.
    """

    def __init__(
        self,
        width: int,
        attention_mask: torch.Tensor | None,
        max_tokens: int | None,
        late: bool = False,
    ) -> None:
        self._late = late
        self._max_tokens = max_tokens
        self._masked: list[int] | None = None
        self.width = width
        if attention_mask is not None:
            _check_mask(attention_mask)
            rows, self.width = attention_mask.shape
            self._masked = row_paddings(attention_mask, rows, self.width)
        self.paddings: list[int] = []
        self._position = 0  # tokens of the last row placed so far
        self._missing = 0  # tokens of the last row still to come

    @property
    def count(self) -> int:
        """The number of rows begun so far."""
        return len(self.paddings)

    def take(self, index: int, start: int, tokens: int) -> tuple[int, int]:
        """Return row and first column of the next blob, number `index`."""
        if (start == 0 or self._late) and not self._missing:
            if self._masked is not None and self.count == len(self._masked):
                raise InputError(
                    f"attention_mask: must have one row for each row of blobs, got {self.count} rows, but "
                    f"blobs[{index}] starts another"
                )
            check_tokens((self.count + 1) * self.width, self._max_tokens)
            self.paddings.append(0 if self._masked is None else self._masked[self.count])
            # A late row may lack its first tokens; whether its windows are complete is checked elsewhere.
            self._position = start if self._late else 0
            self._missing = self.width - self.paddings[-1] - self._position
        if not self.count or start != self._position or tokens > self._missing:
            row, length = max(self.count - 1, 0), self._position + self._missing if self.count else self.width
            raise InputError(
                f"blobs[{index}]: must continue row {row} at token {self._position} of {length}, got tokens {start} to "
                f"{start + tokens}; {self._remedy()}"
            )
        self._position += tokens
        self._missing -= tokens
        return self.count - 1, self.paddings[-1] + start

    def _remedy(self) -> str:
        order = "give all blobs in the order of encode_cache, each once"
        if self._masked is None:
            return f"{order}, and for rows of different lengths its attention_mask"
        return f"{order}, and its attention_mask (cached tokens only)"

    def finish(self) -> None:
        """Refuse a list that ends too early: rows are missing, or the last tokens of a row."""
        if self._missing:
            raise InputError(
                f"blobs: must hold {self._position + self._missing} tokens of row {self.count - 1}, got "
                f"{self._position}: the last blobs are missing, or the attention_mask is not that of encode_cache"
            )
        if self._masked is not None and self.count != len(self._masked):
            raise InputError(
                f"attention_mask: must have one row for each row of blobs, {self.count}, got {len(self._masked)}: "
                "whole rows of blobs are missing, or the mask is not that of encode_cache"
            )


def bound_rows(associated_data: Sequence[bytes] | None, rows: int) -> list[bytes]:
    """Return the bytes that the blobs of each row are bound to."""
    if associated_data is None:
        return [b""] * rows
    given: object = associated_data
    if isinstance(given, bytes) or len(associated_data) != rows:
        got = "bytes" if isinstance(given, bytes) else f"{len(associated_data)} entries"
        raise InputError(f"associated_data: must be a list with one entry per row, {rows} in all, got {got}")
    return list(associated_data)


def bound_blobs(associated_data: Sequence[bytes] | None, blobs: Sequence[bytes]) -> list[bytes]:
    """Return the bytes that each blob is bound to: the entry of its row."""
    if associated_data is None:
        return [b""] * len(blobs)
    # A forged start is found out later: the tag covers it and does not verify.
    starts = [read_header(blob).start for blob in blobs]
    begun = list(accumulate(int(index == 0 or start <= starts[index - 1]) for index, start in enumerate(starts)))
    rows = bound_rows(associated_data, begun[-1])
    return [rows[max(count, 1) - 1] if rows else b"" for count in begun]


def row_paddings(attention_mask: torch.Tensor | None, rows: int, width: int) -> list[int]:
    """Return the number of padded columns at the left of each row."""
    if attention_mask is None:
        return [0] * rows
    _check_mask(attention_mask)
    if tuple(attention_mask.shape) != (rows, width):
        raise InputError(
            f"attention_mask: must have shape [B, T] = [{rows}, {width}] (cached tokens only), "
            f"got {list(attention_mask.shape)}"
        )
    real = attention_mask != 0
    paddings: list[int] = (width - real.sum(dim=1)).tolist()
    for row, padding in enumerate(paddings):
        if padding == width or not bool(real[row, padding:].all()):
            raise InputError(
                f"attention_mask: must be zeros, then at least one 1 in each row (left padding), but row {row} is not; "
                "pad on the left (tokenizer.padding_side = 'left'), or compute the cache of each row by itself"
            )
    return paddings


def _check_mask(attention_mask: object) -> None:
    if not isinstance(attention_mask, torch.Tensor):
        raise InputError(f"attention_mask: must be a tensor [B, T], got {type(attention_mask).__name__}")
    if attention_mask.ndim != 2:
        raise InputError(f"attention_mask: must have shape [B, T], got {list(attention_mask.shape)}")


def warn_of_padding(ids: I64) -> None:
    """Warn if a row of `ids [B, T]`, given without a mask, begins with the same id twice: it may be padding.

    Only the tokenizer knows which id pads. Rows of one id alone, and tokens without an id, are no sign of it.
    """
    alike = (ids[:, 0] == ids[:, min(1, ids.shape[1] - 1)]) & (ids[:, 0] != NO_TOKEN) & (ids != ids[:, :1]).any(1)
    for id in np.unique(ids[alike, 0]).tolist():
        _once(
            id, "a row of input_ids begins with a run of the id %d: if that pads a left-padded batch, the padding is "
            "stored as tokens. Pass attention_mask=, [B, T] of the cached tokens", id,
        )  # fmt: skip


def check_unpadded(keys: torch.Tensor) -> None:
    """Refuse rows that begin with padding, given the rotated keys `[B, H, T, D]` of the first layer.

    `generate` gives all padding of a row one position, so two padded columns have the same key in the first layer. Two
    tokens at different positions have different keys. Padding of a single column is not detected.
    """
    first, second, last = keys[:, :, 0], keys[:, :, min(1, keys.shape[2] - 1)], keys[:, :, -1]
    padded = (first == second).flatten(1).all(1) & (first != last).flatten(1).any(1)
    if keys.shape[2] > 1 and bool(padded.any()):
        row = int(padded.nonzero()[0, 0])
        raise InputError(
            f"attention_mask: must be given for a left-padded batch, and row {row} begins with padding: pass the mask "
            "of the cached tokens, [B, T]"
        )
