"""The dtypes of caches, by name, and their bits per value."""

import torch

from cuvee.codec.errors import InputError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def saturated(x: torch.Tensor, dtype: torch.dtype, which: torch.Tensor | None = None) -> torch.Tensor:
    """Convert values to `dtype`; those beyond its range become the largest that it holds, instead of infinite.

    `which`, bool, says where to do so; by default everywhere.
    """
    limit = torch.finfo(dtype).max
    within = x.float().clamp(-limit, limit)  # bfloat16 would round the limit of float16 up
    return (within if which is None else torch.where(which, within, x)).to(dtype)


def value_bits(dtype: str | None = None) -> int:
    """Return the bits per value of an uncompressed cache, which every ratio counts against; 16 if its dtype is unknown.

    The dtype of a profile does not matter: one learned in float32, as on a CPU, also serves bfloat16 caches.

    Raises:
        InputError: no cache has the dtype.
    """
    if dtype is None:
        return 16
    if dtype not in TORCH_DTYPES:
        raise InputError(f"dtype: must be one of {', '.join(TORCH_DTYPES)}, got {dtype!r}")
    return 8 * TORCH_DTYPES[dtype].itemsize
