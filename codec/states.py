"""States blobs: what the layers of a model hold after some tokens, a named tensor a section; see `FORMAT.md`."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import FormatError, InputError, ProfileMismatchError, allocations
from cuvee.codec.format.container import (
    Contents,
    Kind,
    Piece,
    Scheme,
    contiguous_bytes,
    read_header,
    read_sections,
    write_blob,
)
from cuvee.codec.format.keys import Key, verify_tag
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache

if TYPE_CHECKING:
    from cuvee.codec.codec import Codec

    CodecOf = Callable[[KVLayout], Codec]

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


@dataclass(frozen=True, slots=True)
class States:
    """What the layers of a model hold after some tokens, beside keys and values of tokens.

    Attributes:
        tokens: number of tokens before it, from position 0 on.
        tensors: by name, in order of names.
        dtype: name of the dtype of the cache's keys and values.
    """

    tokens: int
    tensors: Mapping[str, torch.Tensor]
    dtype: str


def encode_states(
    states: States, layout: KVLayout, codec_of: CodecOf, key: Key | None, associated_data: bytes
) -> bytes:
    """Return the blob of states; `layout` is in their dtype."""
    if type(states.tokens) is not int or states.tokens < 1:
        raise InputError(f"tokens: must be an int above 0, got {states.tokens!r}")
    if not states.tensors:
        raise InputError("states: must hold at least one tensor, got none")
    contents = Contents(
        kind=Kind.STATES, dtype=states.dtype, tokens=states.tokens, start=states.tokens, values_per_token=0,
        schemes=(Scheme.LOSSLESS,) * len(states.tensors), layout=layout.fingerprint,
    )  # fmt: skip
    sections = [_write_state(name, tensor, codec_of) for name, tensor in sorted(states.tensors.items())]
    return write_blob(contents, sections, key=key, associated_data=associated_data)


def decode_states(
    blob: bytes | memoryview,
    layout_of: Callable[[str], KVLayout],
    codec_of: CodecOf,
    keys: Sequence[Key],
    associated_data: bytes,
    into: Mapping[str, torch.Tensor],
) -> States:
    """Return the states of a blob; `layout_of` gives the model's layout in a dtype, `into` memory by name."""
    blob = contiguous_bytes(blob)
    header = read_header(blob)
    if header.kind is not Kind.STATES:
        raise FormatError(f"blob: must hold states, got a {header.kind.name.lower()}: use decode")
    if header.layout != layout_of(header.dtype).fingerprint:
        raise ProfileMismatchError("blob: must hold states of the profile's model, got those of another model")
    verify_tag(blob, header, keys, associated_data)
    sections = read_sections(blob, header, range(len(header.section_bytes)))
    pairs = [_read_state(section, codec_of, into) for section in sections]
    for (before, _), (after, _) in pairwise(pairs):
        if after <= before:
            raise FormatError(f"states: must be in order of their names, got {after} after {before}")
    return States(header.tokens, dict(pairs), header.dtype)


def _plane_shape(values: int) -> tuple[int, int] | None:
    """Return rows and channels of each half of a coded tensor with this number of values; None if it cannot be coded.

    Channels are a power of two: as many as rows, or fewer.
    """
    half, channels = values // 2, 1
    while channels < _MAX_CHANNELS and half % (2 * channels) == 0 and 4 * channels * channels <= half:
        channels *= 2
    return None if values % 2 or channels < 8 else (half // channels, channels)


def _write_state(name: str, tensor: torch.Tensor, codec_of: CodecOf) -> list[Piece]:
    """Return the pieces of the section of a tensor on any device: its values coded, or as they are."""
    coded = name.encode(errors="surrogatepass")  # a lone surrogate is refused below, like all that is not ASCII
    if not 0 < len(coded) <= MAX_NAME or not _plain(coded):
        raise InputError(f"states: must have names of 1 … {MAX_NAME} printable ASCII characters, got {name!r}")
    shape = tuple(tensor.shape)
    if tensor.dtype not in STATE_DTYPES or tensor.is_meta or tensor.layout != torch.strided:
        raise InputError(f"states: must hold plain tensors of values, got {name} of {tensor.dtype} on {tensor.device}")
    if len(shape) > MAX_DIMENSIONS or _claimed(shape, tensor.dtype) > _MAX_BYTES:
        raise InputError(
            f"states: must have at most {MAX_DIMENSIONS} dimensions and less than 2 GiB each, got {name} {list(shape)}"
        )
    host = tensor.detach().cpu().contiguous()
    values: Piece | None = _coded(codec_of, host)
    kind = STATE_DTYPES.index(tensor.dtype) | (0 if values is None else _CODED)
    if values is None:
        values = host.reshape(-1).view(torch.uint8).numpy().data
    return [_HEAD.pack(len(coded), kind, len(shape)), coded, struct.pack(f"<{len(shape)}I", *shape), values]


def _read_state(section: memoryview, codec_of: CodecOf, into: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Return the name and the tensor, on the CPU, of a section."""
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
        if dtype not in CODED_DTYPES or _plane_shape(count) is None or count * dtype.itemsize > MAX_RATIO * len(values):
            raise FormatError(f"state {name}: must not be coded as {dtype} {list(shape)} in {len(values)} bytes")
        return name, _decoded(codec_of, values, count, dtype, into.get(name)).reshape(shape)
    if _claimed(shape, dtype) > _MAX_BYTES or math.prod(shape) * dtype.itemsize != len(values):
        raise FormatError(f"state {name}: must have the bytes of its shape {list(shape)}, got {len(values)}")
    if dtype == torch.bool and values.nbytes and max(values) > 1:
        raise FormatError(f"state {name}: must hold 0 and 1 as bool values")
    if not len(values):
        return name, torch.empty(shape, dtype=dtype)
    return name, torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)


def _claimed(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return bytes, as if no dimension were empty: strides of an empty tensor must not overflow either."""
    return math.prod(max(size, 1) for size in shape) * dtype.itemsize


def _plain(name: bytes) -> bool:
    return all(0x20 < each < 0x7F for each in name)


def _coded(codec_of: CodecOf, tensor: torch.Tensor) -> bytes | None:
    """Return a lossless blob whose keys and values are the halves of a tensor; None if it is not worth it."""
    shape = _plane_shape(tensor.numel())
    if shape is None or tensor.dtype not in CODED_DTYPES:
        return None
    layout = _plane_layout(shape[1], tensor.dtype)
    first, second = tensor.reshape(2, shape[0], 1, shape[1])
    blob = codec_of(layout).encode(KVChunk([first], [second], layout))
    return blob if len(blob) < tensor.nbytes <= MAX_RATIO * len(blob) else None


def _decoded(
    codec_of: CodecOf, blob: memoryview, count: int, dtype: torch.dtype, into: torch.Tensor | None
) -> torch.Tensor:
    """Invert `_coded`, into that memory if it fits."""
    rows, channels = _plane_shape(count) or (0, 0)
    layout = _plane_layout(channels, dtype)
    codec = codec_of(layout)
    opened = codec.open(blob)
    header = opened.header
    if (header.tokens, header.start, header.dtype) != (rows, 0, layout.dtype):
        raise FormatError(
            f"state: must be coded in {rows} rows of {layout.dtype}, got {header.tokens} from {header.start} on in "
            f"{header.dtype}"
        )
    if into is None or (into.dtype, into.numel()) != (dtype, count):
        with allocations(f"decoding {count} values"):
            into = torch.empty(count, dtype=dtype)
    halves = into.view(2, rows, 1, channels)
    cache = PagedCache.dense(layout, [halves[0]], [halves[1]])
    codec.decode_paged([opened], cache, [torch.arange(rows)]).check()
    return halves


@cache
def _plane_layout(channels: int, dtype: torch.dtype) -> KVLayout:
    name = str(dtype).removeprefix("torch.")
    return KVLayout("state", (LayerLayout(1, channels, channels, None),), name, max_positions=None)
