"""Encode and decode the states at the end of a cache: see `Codec.encode_states`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import FormatError, InputError, ProfileMismatchError
from cuvee.codec.format.container import (
    Contents,
    Kind,
    Scheme,
    contiguous_bytes,
    read_header,
    read_sections,
    verify_tag,
    write_blob,
)
from cuvee.codec.format.keys import Key
from cuvee.codec.format.states import CODED_DTYPES, MAX_RATIO, check_order, plane_shape, read_state, write_state
from cuvee.codec.layout import KVLayout, LayerLayout

if TYPE_CHECKING:
    from cuvee.codec.codec import Codec

    CodecOf = Callable[[KVLayout], Codec]


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
    code = partial(_coded, codec_of)
    sections = [write_state(name, tensor, code) for name, tensor in sorted(states.tensors.items())]
    return write_blob(contents, sections, key=key, associated_data=associated_data)


def decode_states(
    blob: bytes | memoryview,
    layout_of: Callable[[str], KVLayout],
    codec_of: CodecOf,
    keys: Sequence[Key],
    associated_data: bytes,
) -> States:
    """Return the states of a blob; `layout_of` gives the model's layout in a dtype."""
    blob = contiguous_bytes(blob)
    header = read_header(blob)
    if header.kind is not Kind.STATES:
        raise FormatError(f"blob: must hold states, got a {header.kind.name.lower()}: use decode")
    if header.layout != layout_of(header.dtype).fingerprint:
        raise ProfileMismatchError("blob: must hold states of the profile's model, got those of another model")
    verify_tag(blob, header, keys, associated_data)
    decode = partial(_decoded, codec_of)
    named = [read_state(section, decode) for section in read_sections(blob, header, range(len(header.section_bytes)))]
    check_order([name for name, _ in named])
    return States(header.tokens, dict(named), header.dtype)


def _coded(codec_of: CodecOf, tensor: torch.Tensor) -> bytes | None:
    """Return a lossless blob whose keys and values are the halves of a tensor; None if it is not worth it."""
    shape = plane_shape(tensor.numel())
    if shape is None or tensor.dtype not in CODED_DTYPES:
        return None
    layout = _plane_layout(shape[1], tensor.dtype)
    first, second = tensor.reshape(2, shape[0], 1, shape[1])
    blob = codec_of(layout).encode(KVChunk([first], [second], layout))
    return blob if len(blob) < tensor.nbytes <= MAX_RATIO * len(blob) else None


def _decoded(codec_of: CodecOf, blob: memoryview, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Invert `_coded`."""
    rows, channels = plane_shape(count) or (0, 0)
    layout = _plane_layout(channels, dtype)
    codec = codec_of(layout)
    opened = codec.open(blob)
    header = opened.header
    if (header.tokens, header.start, header.dtype) != (rows, 0, layout.dtype):
        raise FormatError(
            f"state: must be coded in {rows} rows of {layout.dtype}, got {header.tokens} from {header.start} on in "
            f"{header.dtype}"
        )
    chunk = codec.decode(opened, max_tokens=None)
    return torch.stack([chunk.keys[0], chunk.values[0]])


def _plane_layout(channels: int, dtype: torch.dtype) -> KVLayout:
    name = str(dtype).removeprefix("torch.")
    return KVLayout("state", (LayerLayout(1, channels, channels, None),), name, max_positions=None)
