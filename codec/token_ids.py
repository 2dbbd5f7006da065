"""The ids of a chunk's tokens, from which a profile predicts a part of the cache."""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.support.arrays import I64

NO_TOKEN = -1  # in place of the id of a token that has none, such as a part of an image


def as_token_ids(token_ids: object, tokens: int, name: str = "tokens") -> I64:
    """Return ids as int64 `[T]` on the CPU.

    Args:
        token_ids: `[T]` integers on any device: a tensor, an array or a sequence.

    Raises:
        InputError: another shape, no integers, or a negative id other than NO_TOKEN.
    """
    try:
        array = token_ids.detach().cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: must be the ids of {tokens} tokens, got {type(token_ids).__name__}") from error
    if array.dtype.kind not in "iu" or array.shape != (tokens,):
        raise InputError(
            f"{name}: must be {tokens} integers, one id per token, got {array.dtype} of shape {list(array.shape)}"
        )
    ids = array.astype(np.int64)
    wrong = array[(ids < NO_TOKEN) | (ids != array)]  # an unsigned number beyond int64 turns into another one
    if wrong.size:
        raise InputError(
            f"{name}: must be ids of the vocabulary, or {NO_TOKEN} for a token without one, got {wrong[0]}"
        )
    return ids
