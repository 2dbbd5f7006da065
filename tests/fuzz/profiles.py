"""The target for profiles: safetensors files whose hashes are right and whose contents are invalid."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from tests.codec.forging import learned
from tests.codec.vectors import FOLDER as GOLDEN
from tests.fuzz.blobs import SMALL, agree, small_profile
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding, scratch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.profile_file import arrays_of, metadata_of, profile_arguments, sealed
from cuvee.codec.profiles.quality import PRESETS

MOST_VALUES = 4096  # per token; profiles of larger models are loaded but not used
_TOKENS = 6
_DTYPES = {"float32": "F32", "uint16": "U16", "int16": "I16", "int32": "I32", "float64": "F64", "uint8": "U8"}
_DTYPES |= {"int64": "I64", "bool": "BOOL", "float16": "F16", "int8": "I8", "uint32": "U32"}
Arrays = dict[str, npt.NDArray[Any]]


@cache
def parts() -> tuple[tuple[dict[str, Any], Arrays], ...]:
    measured = Profile.load(GOLDEN / "profile.safetensors")
    profiles = (measured, learned(), small_profile(), Profile.unlearned(SMALL))
    return tuple(({**metadata_of(p), "id": p.id.hex()}, arrays_of(p)) for p in profiles)


GROUPS = (
    "", "layer", "all", "layers:2", "layers:0", "heads:1", "heads:2", "unit", "head", "x" * 300, "\0", "\ud800", "1",
)  # fmt: skip
ODD_TEXTS = ("[" * 10**5, '{"a":' * 999 + "1" + "}" * 999, "9" * 5000, "[NaN]", "[1e999]", "")


def file_of(data: dict[str, Any], arrays: Arrays, **metadata: str) -> bytes:
    """Make a safetensors file. Its own writer is not used because it refuses many files that a reader may get."""
    header: dict[str, Any] = {"__metadata__": {"cuvee": sealed(data), **metadata}}
    body = b""
    for name, array in sorted(arrays.items()):
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def named_by_content(data: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the metadata with the id of the contents, if they make a profile."""
    with suppress(Exception):
        profile = Profile(**profile_arguments(json.loads(json.dumps(data)), arrays))
        return {**data, "id": profile.id.hex()}
    return data


def odd_value(dice: Dice, depth: int = 0) -> Any:
    kind = dice.number(0, 9)
    if kind == 0:
        return None
    if kind == 1:
        return dice.chance(0.5)
    if kind <= 4:
        return dice.pick((0, 1, -1, 2, 3, 255, 4096, 1 << 16, 1 << 24, 1 << 31, -(1 << 63), 1 << 64, 10**400))
    if kind == 5:
        return dice.pick((0.0, -0.0, 0.5, 1e-320, 1e308, -1e30, 1.0))
    if kind == 6:
        return dice.pick(GROUPS)
    if kind == 7 and depth < 3:
        return [odd_value(dice, depth + 1) for _ in range(dice.number(0, 4))]
    if kind == 8 and depth < 3:
        return {dice.pick(("kinds", "layers", "x", "", "step")): odd_value(dice, depth + 1)}
    return [[]] * dice.small(2000)


def odd_json(dice: Dice, data: Any) -> Any:
    if isinstance(data, dict) and data and dice.chance(0.9):
        key = dice.pick(sorted(data))
        kind = dice.number(0, 9)
        if kind == 0:
            return {name: value for name, value in data.items() if name != key}
        if kind == 1:
            return {**data, dice.pick(("extra", "Kinds", "", key + " ")): odd_value(dice)}
        return {**data, key: odd_json(dice, data[key])}
    if isinstance(data, list) and data and dice.chance(0.8):
        at = dice.number(0, len(data) - 1)
        kind = dice.number(0, 5)
        if kind == 0:
            return data[:at] + data[at + 1 :]
        if kind == 1:
            return data + [data[at]] * dice.small(40)
        return [*data[:at], odd_json(dice, data[at]), *data[at + 1 :]]
    if type(data) is int and dice.chance(0.6):
        return data + dice.pick((-1, 1, 2, -2, 64, -64, 1000))
    return odd_value(dice)


def odd_array(dice: Dice, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    kind = dice.number(0, 11)
    if kind == 0:
        return array.astype(dice.pick(sorted(_DTYPES)), casting="unsafe")
    if kind == 1:
        return array[: dice.number(0, len(array))] if array.ndim else array[None]
    if kind == 2:
        return np.concatenate([array, array[-1:]]) if array.ndim and len(array) else array[None]
    if kind == 3:
        return dice.pick((array[None], array.ravel(), array.T, array.reshape(-1, 1), array[..., None]))
    if kind == 4:
        return np.zeros(dice.pick(((0,), (), (0, 0), (1,), (3, 0), (0, 40))), array.dtype)
    out = array.copy()
    if not out.size:
        return out
    flat = out.reshape(-1)
    count = dice.pick((1, 1, 2, dice.small(flat.size), flat.size))
    where = dice.rng.choice(flat.size, min(count, flat.size), replace=False)
    if out.dtype.kind == "f":
        odd = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -3.4e38, 1e-45, 1e30, 2.0, -2.0, 1.0)
        flat[where] = dice.pick(odd) if dice.chance(0.8) else flat[where] * dice.pick((-1, 1e20, 1e-20, 3))
    elif out.dtype.kind in "iu":
        info = np.iinfo(out.dtype)
        if dice.chance(0.5):
            flat[where] = dice.pick((info.min, info.max, 0, 1, info.max // 2))
        elif dice.chance(0.6) and flat.size > 1:
            # Keep the sum, because tables must sum to a constant.
            with np.errstate(over="ignore"):
                a, b = dice.number(0, flat.size - 1), dice.number(0, flat.size - 1)
                moved = dice.pick((1, 2, int(flat[a]) - 1, int(flat[a])))
                flat[a], flat[b] = (
                    np.array([int(flat[a]) - moved, int(flat[b]) + moved], np.int64).astype(out.dtype).tolist()
                )
        else:
            flat[:] = np.sort(flat)[:: dice.pick((1, -1))]
    return out


class ProfileTarget:
    """Loading a profile, and using it if it loads."""

    name = "profile"
    weight = 3.0

    def __init__(self) -> None:
        self._path = scratch() / "profile.safetensors"

    def warm_up(self) -> None:
        for data, arrays in parts():
            if self.check(file_of(data, arrays)) != "loaded":
                raise Finding("a good profile does not load")

    def memory(self, data: bytes) -> int:
        """Allow a layout of 2^16 layers or 2^24 values per token, which takes few bytes, and the size of the arrays."""
        return (160 << 20) + 64 * len(data)

    def make(self, dice: Dice) -> bytes:
        data, arrays = dice.pick(parts())
        arrays = dict(arrays)
        kind = dice.number(0, 9)
        for _ in range(dice.small(3)):
            name = dice.pick(sorted(arrays))
            if kind <= 4:
                arrays[name] = odd_array(dice, arrays[name])
            elif kind <= 7:
                data = odd_json(dice, data)
                if not isinstance(data, dict):
                    data = {"format": data}
            elif dice.chance(0.3):
                arrays[dice.pick((name + "x", "section.99.mean", "section.0.predictor.components"))] = arrays[name]
            elif dice.chance(0.5):
                arrays[name] = arrays[dice.pick(sorted(arrays))]
            else:
                del arrays[name]
        try:
            whole = file_of(named_by_content(data, arrays) if dice.chance(0.9) else data, arrays)
        except (ValueError, KeyError, OverflowError, UnicodeEncodeError):  # JSON or safetensors cannot represent it
            whole = file_of(*parts()[0])
        if kind == 7 and dice.chance(0.2):
            return file_of(*parts()[0], cuvee=dice.pick(ODD_TEXTS))
        if kind == 9:
            return dice.damaged(whole, [file_of(*part) for part in parts()[2:]])
        if kind == 8 and dice.chance(0.5):
            length = struct.unpack_from("<Q", whole)[0]
            head = dice.damaged(whole[8 : 8 + length])
            return struct.pack("<Q", len(head)) + head + whole[8 + length :]
        return whole

    def check(self, data: bytes) -> str:
        """Load, inspect, encode, decode and save: each must give a `CuveeError` or the right result."""
        self._path.write_bytes(data)
        try:
            profile = Profile.load(self._path)
        except CuveeError as error:
            return type(error).__name__
        for preset in PRESETS[1:]:
            with suppress(CuveeError):
                if type(profile.resolve(preset)) is not int:
                    raise Finding(f"{preset} resolves to no step")
        if profile.layout.values_per_token > MOST_VALUES or profile.layout.num_layers > 64:
            return "loaded, too large to try"
        profile.save(self._path)
        if Profile.load(self._path).id != profile.id:
            raise Finding("a saved profile has another id")
        draw = xxhash.xxh3_64_intdigest(data)
        self._code(profile, profile.min_step_index if draw % 2 else 0, draw)
        return "loaded"

    def _code(self, profile: Profile, step: int, draw: int) -> None:
        layout = profile.layout
        if layout.max_positions is not None and layout.max_positions < _TOKENS:
            return
        noise = torch.Generator().manual_seed(draw % (1 << 31))
        tensors = [
            [
                torch.randn(_TOKENS, layer.kv_heads, size, generator=noise).to(layout.torch_dtype)
                for layer, size in sizes
            ]
            for sizes in (
                [(layer, layer.head_dim) for layer in layout.layers],
                [(layer, layer.value_dim) for layer in layout.layers],
            )
        ]
        chunk = KVChunk(tensors[0], tensors[1], layout)
        try:
            codec = Codec(profile, step=2.0 ** (step / 64), threads=1)
            blob = codec.encode(chunk)
            back = codec.decode(blob)
        except CuveeError:
            return
        if back.tokens != _TOKENS or [k.shape for k in back.keys] != [k.shape for k in chunk.keys]:
            raise Finding("a profile made a chunk of another shape")
        if draw % 20 == 0:
            other = Codec(profile, step=2.0 ** (step / 64), threads=1, backend="reference").decode(blob)
            if not agree(profile, other, back):
                raise Finding("reference and numba decode other values with a profile")
