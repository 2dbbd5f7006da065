"""The sections of a states blob: one named tensor each, as it is or coded. `FORMAT.md` specifies them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from cuvee.codec.errors import FormatError, InputError

MAX_NAME = 255
MAX_DIMENSIONS = 8
# A dtype's place is its code.
STATE_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
CODED_DTYPES = STATE_DTYPES[:3]
_MAX_BYTES = (1 << 31) - 1
_CODED = 0x80  # added to the dtype
MAX_RATIO = 256  # of a coded tensor: no small section may claim much memory
_MAX_CHANNELS = 256
_HEAD = struct.Struct("<BBB")  # length of the name, dtype, number of dimensions


def plane_shape(values: int) -> tuple[int, int] | None:
    """Return rows and channels of each half of a coded tensor of so many values; None if it cannot be coded.

    Channels are a power of two: as many as rows, or fewer.
    """
    half, channels = values // 2, 1
    while channels < _MAX_CHANNELS and half % (2 * channels) == 0 and 4 * channels * channels <= half:
        channels *= 2
    return None if values % 2 or channels < 8 else (half // channels, channels)


def write_state(name: str, tensor: torch.Tensor, code: Callable[[torch.Tensor], bytes | None]) -> bytes:
    """Return the section of a tensor on any device; `code` returns its coded values, or None to keep them as they are.

    Raises:
        InputError: a name, dtype, size or device that no section can have.
    """
    coded = name.encode(errors="replace")
    if not 0 < len(coded) <= MAX_NAME or not _plain(coded):
        raise InputError(f"states: must have names of 1 … {MAX_NAME} printable ASCII characters, got {name!r}")
    shape = tuple(tensor.shape)
    if tensor.dtype not in STATE_DTYPES or tensor.is_meta or tensor.layout != torch.strided:
        raise InputError(f"states: must hold plain tensors of values, got {name} of {tensor.dtype} on {tensor.device}")
    if len(shape) > MAX_DIMENSIONS or _claimed(shape, tensor.dtype) > _MAX_BYTES:
        raise InputError(
            f"states: must have at most {MAX_DIMENSIONS} dimensions and less than 2 GiB each, got {name} {list(shape)}"
        )
    own = tensor.detach().cpu().contiguous()
    values = code(own)
    kind = STATE_DTYPES.index(tensor.dtype) | (0 if values is None else _CODED)
    if values is None:
        values = own.reshape(-1).view(torch.uint8).numpy().tobytes()
    return b"".join((_HEAD.pack(len(coded), kind, len(shape)), coded, struct.pack(f"<{len(shape)}I", *shape), values))


def read_state(
    section: memoryview, decode: Callable[[memoryview, int, torch.dtype], torch.Tensor]
) -> tuple[str, torch.Tensor]:
    """Return the name and the tensor, on the CPU, of a section; `decode` inverts `code` for a number of values.

    Raises:
        FormatError: the bytes break a rule.
    """
    if len(section) < _HEAD.size:
        raise FormatError("state: ends within its head")
    length, kind, dimensions = _HEAD.unpack_from(section)
    code = kind & ~_CODED
    if not length or code >= len(STATE_DTYPES) or dimensions > MAX_DIMENSIONS:
        raise FormatError(f"state: has a head out of range: {length}, {code}, {dimensions}")
    begins = _HEAD.size + length + 4 * dimensions
    if len(section) < begins:
        raise FormatError("state: ends within its name or shape")
    coded = bytes(section[_HEAD.size : _HEAD.size + length])
    if not _plain(coded):
        raise FormatError("state: must have a name of printable ASCII characters")
    name, dtype = coded.decode("ascii"), STATE_DTYPES[code]
    shape = struct.unpack_from(f"<{dimensions}I", section, _HEAD.size + length)
    values = section[begins:]
    if kind & _CODED:
        count = math.prod(shape)
        if dtype not in CODED_DTYPES or plane_shape(count) is None or count * dtype.itemsize > MAX_RATIO * len(values):
            raise FormatError(f"state {name}: must not be coded as {dtype} {list(shape)} in {len(values)} bytes")
        return name, decode(values, count, dtype).reshape(shape)
    if _claimed(shape, dtype) > _MAX_BYTES or math.prod(shape) * dtype.itemsize != len(values):
        raise FormatError(f"state {name}: must have the bytes of its shape {list(shape)}, got {len(values)}")
    if dtype == torch.bool and values.nbytes and max(values) > 1:
        raise FormatError(f"state {name}: must hold 0 and 1 as bool values")
    if not len(values):
        return name, torch.empty(shape, dtype=dtype)
    return name, torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)


def check_order(names: Sequence[str]) -> None:
    """Raise FormatError unless the names of a blob rise, so that none is there twice."""
    for before, after in pairwise(names):
        if after <= before:
            raise FormatError(f"states: must be in order of their names, got {after} after {before}")


def _claimed(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return bytes, as if no dimension were empty: strides of an empty tensor must not overflow either."""
    return math.prod(max(size, 1) for size in shape) * dtype.itemsize


def _plain(name: bytes) -> bool:
    return all(0x20 < each < 0x7F for each in name)
