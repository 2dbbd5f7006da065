"""The dtypes that a cache may have, by name, and what a ratio counts against."""

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
        dtype: of the cache; None: not known, which counts as 16 bits. The dtype that a profile was learned in does not
            tell: one learned in float32, as on a CPU, serves bfloat16 caches all the same.

    Raises:
        InputError: no dtype that a cache may have.
    """
    if dtype is None:
        return 16
    if dtype not in TORCH_DTYPES:
        raise InputError(f"dtype: must be one of {', '.join(TORCH_DTYPES)}, got {dtype!r}")
    return 8 * TORCH_DTYPES[dtype].itemsize
