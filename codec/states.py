"""Encode and decode the states at the end of a cache: see `Codec.encode_states`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

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
from cuvee.codec.format.states import check_order, read_state, write_state
from cuvee.codec.layout import KVLayout


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


def encode_states(states: States, layout: KVLayout, key: Key | None, associated_data: bytes) -> bytes:
    """Return the blob of states; `layout` is in their dtype."""
    if type(states.tokens) is not int or states.tokens < 1:
        raise InputError(f"tokens: must be an int above 0, got {states.tokens!r}")
    if not states.tensors:
        raise InputError("states: must hold at least one tensor, got none")
    contents = Contents(
        kind=Kind.STATES, dtype=states.dtype, tokens=states.tokens, start=states.tokens, values_per_token=0,
        schemes=(Scheme.LOSSLESS,) * len(states.tensors), layout=layout.fingerprint,
    )  # fmt: skip
    sections = [write_state(name, tensor) for name, tensor in sorted(states.tensors.items())]
    return write_blob(contents, sections, key=key, associated_data=associated_data)


def decode_states(
    blob: bytes | memoryview, layout_of: Callable[[str], KVLayout], keys: Sequence[Key], associated_data: bytes
) -> States:
    """Return the states of a blob; `layout_of` gives the model's layout in a dtype."""
    blob = contiguous_bytes(blob)
    header = read_header(blob)
    if header.kind is not Kind.STATES:
        raise FormatError(f"blob: must hold states, got a {header.kind.name.lower()}: use decode")
    if header.layout != layout_of(header.dtype).fingerprint:
        raise ProfileMismatchError("blob: must hold states of the profile's model, got those of another model")
    verify_tag(blob, header, keys, associated_data)
    named = [read_state(section) for section in read_sections(blob, header, range(len(header.section_bytes)))]
    check_order([name for name, _ in named])
    return States(header.tokens, dict(named), header.dtype)
