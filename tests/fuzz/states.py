"""The target for blobs of states: sealed sections that lie, and what a cache makes of those that can be read."""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from tests.codec.forging import reseal, sections_of
from tests.every_model import build
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.format.container import inspect
from cuvee.codec.states import States
from cuvee.integrations.transformers.caches import decode_cache, encode_cache

_HEAD = 3  # length of the name, dtype, dimensions


@cache
def _good() -> tuple[Codec, Any, list[bytes], tuple[bytes, ...]]:
    """A hybrid's codec and configuration, its chunks, and good blobs of states; the second holds coded values."""
    model, ids, cache = build("qwen3_next")
    codec = Codec.without_profile(model)
    *chunks, last = encode_cache(codec, cache, ids)
    tensors = {**codec.decode_states(last).tensors, "a": torch.randn(64, 64), "b": torch.zeros(2, 8, 64).bfloat16()}
    return codec, model.config, chunks, (last, codec.encode_states(States(ids.shape[1], tensors, "float32")))


def _is_whole(section: bytes | bytearray) -> bool:
    return len(section) >= _HEAD and len(section) >= _HEAD + section[0] + 4 * section[2]


def _check_in_place(codec: Codec, data: bytes, states: States) -> None:
    """Decode into given memory, beyond which nothing may be written: the same values."""
    room = {
        name: torch.full((tensor.nbytes + 128,), 0xA5, dtype=torch.uint8) for name, tensor in states.tensors.items()
    }
    into = {name: room[name][64:-64].view(tensor.dtype) for name, tensor in states.tensors.items()}
    for name, tensor in codec.decode_states(data, into=into).tensors.items():
        around = room[name][:64], room[name][-64:]
        same = torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (tensor, states.tensors[name])))
        if not same or any(bool((each != 0xA5).any()) for each in around):
            raise Finding(f"{name} is decoded into given memory in another way")


class StatesTarget:
    """Decoding states, and rebuilding a cache of them."""

    name = "states"
    weight = 2.0

    def warm_up(self) -> None:
        if [self.check(blob) for blob in _good()[3]] != ["restored", "ProfileMismatchError"]:
            raise Finding("the good blobs of states do not decode as they should")

    def memory(self, data: bytes) -> int:
        """Allow the largest ratio of coded values, with working copies."""
        return (24 << 20) + 1024 * len(data)

    def make(self, dice: Dice) -> bytes:
        blob = dice.pick(_good()[3])
        sections = sections_of(blob)
        for _ in range(dice.small(3)):
            at = dice.number(0, len(sections) - 1)
            own = bytearray(sections[at])
            kind = dice.number(0, 6)
            if kind == 0 or not _is_whole(own):  # an earlier change may have cut it
                own = bytearray(dice.damaged(bytes(own), sections))
            elif kind == 1:  # one of the numbers of its head
                where = dice.number(0, _HEAD - 1)
                own[where] = dice.odd(1, own[where])
            elif kind == 2 and own[2]:  # a dimension
                where = _HEAD + own[0] + 4 * dice.number(0, own[2] - 1)
                value = struct.unpack_from("<I", own, where)[0]
                struct.pack_into("<I", own, where, dice.odd(4, value))
            elif kind == 3:  # the values of another
                other = dice.pick([each for each in sections if _is_whole(each)])
                own = own[: _HEAD + own[0]] + bytearray(other[_HEAD + other[0] :])
                own[1:_HEAD] = other[1:_HEAD]
            elif kind == 4 and own[2]:  # the same values in another shape
                shape = struct.unpack_from(f"<{own[2]}I", own, _HEAD + own[0])
                own[_HEAD + own[0] : _HEAD + own[0] + 4 * own[2]] = struct.pack(f"<{own[2]}I", *shape[::-1])
            elif kind == 5:
                own[1] ^= 0x80  # coded or not
            elif len(sections) > 1:
                del sections[at]
                continue
            sections[at] = bytes(own)
        return reseal(blob, sections, count=len(sections))

    def check(self, data: bytes) -> str:
        """Decode, and rebuild a cache, which must be whole."""
        codec, config, chunks, _ = _good()
        with suppress(CuveeError):
            inspect(data)
        try:
            states = codec.decode_states(data)
            _check_in_place(codec, data, states)
            back: Any = decode_cache(codec, [*chunks, data], config)
        except CuveeError as error:
            return type(error).__name__
        for name, tensor in states.tensors.items():
            if name.count(".") == 2 and ":" not in name:
                layer, attribute, index = name.split(".")
                if not torch.equal(getattr(back.layers[int(layer)], attribute)[int(index)], tensor):
                    raise Finding(f"{name} is not what the blob holds")
        return "restored"
