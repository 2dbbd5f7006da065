"""The dtypes of caches, by name, and their bits per value."""

import torch

from cuvee.codec.errors import InputError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def value_bits(dtype: str | None = None) -> int:
    """Return the bits per value of an uncompressed cache, which every ratio counts against.

    Args:
        dtype: the cache's dtype; None: unknown, which counts as 16 bits. The dtype of a profile does not matter: a
            profile learned in float32, as on a CPU, also serves bfloat16 caches.

    Raises:
        InputError: no cache has the dtype.
    """
    if dtype is None:
        return 16
    if dtype not in TORCH_DTYPES:
        raise InputError(f"dtype: must be one of {', '.join(TORCH_DTYPES)}, got {dtype!r}")
    return 8 * TORCH_DTYPES[dtype].itemsize
