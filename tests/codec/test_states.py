"""Blobs of states: named tensors at the end of a cache, byte by byte as `FORMAT.md` has them, and hostile ones."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pytest
import torch
import xxhash

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, FormatError, InputError, KeyMismatchError, ProfileMismatchError
from cuvee.codec.format.container import inspect, read_header
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.states import STATE_DTYPES, States

LAYOUT = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 2, "bfloat16", max_positions=None)
CODEC = Codec.without_profile(LAYOUT)
KEY = bytes(range(16))


def section(name: bytes, dtype: int, shape: Sequence[int], values: bytes) -> bytes:
    """Written here a second time, from FORMAT.md."""
    return struct.pack("<BBB", len(name), dtype, len(shape)) + name + struct.pack(f"<{len(shape)}I", *shape) + values


def blob_of(*sections: bytes, **changes: int) -> bytes:
    """A sealed blob of kind 2 whose header may lie."""
    field = {"kind": 2, "dtype": 0, "tokens": 9, "start": 9, "values": 0, "step": 0, "scheme": 1, **changes}
    total = 88 + 13 * len(sections) + 8 + sum(map(len, sections))
    head = struct.pack(
        "<4sBBBBIIIiII16s16s16sQ", b"cuve", 4, field["kind"], field["dtype"], 0, field["tokens"], field["start"],
        field["values"], field["step"], len(sections), 0, LAYOUT.fingerprint, bytes(16), bytes(16), total,
    )  # fmt: skip
    for own in sections:
        head += struct.pack("<IBQ", len(own), field["scheme"], xxhash.xxh3_64_intdigest(own))
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + b"".join(sections)


ONE = section(b"a", 2, [2], struct.pack("<2f", 1.0, -2.0))
TWO = section(b"b.0:number", 4, [], struct.pack("<q", -3))


def test_the_bytes_are_those_of_the_specification() -> None:
    tensors = {"b.0:number": torch.tensor(-3), "a": torch.tensor([1.0, -2.0])}
    blob = CODEC.encode_states(States(9, tensors, "bfloat16"))
    assert blob == blob_of(ONE, TWO)
    back = CODEC.decode_states(blob)
    assert (back.tokens, back.dtype, list(back.tensors)) == (9, "bfloat16", ["a", "b.0:number"])


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 7), (2, 3), (1, 1, 1, 1, 1, 1, 1, 2)], ids=str)
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    kept = tensor.clone()
    (back,) = CODEC.decode_states(CODEC.encode_states(States(1, {"x": tensor}, "bfloat16"))).tensors.values()
    assert back.dtype == dtype and back.shape == kept.shape
    if count:
        assert torch.equal(back.reshape(-1).view(torch.uint8), kept.reshape(-1).view(torch.uint8))


def test_views_that_are_not_contiguous() -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).transpose(0, 2)
    (back,) = CODEC.decode_states(CODEC.encode_states(States(1, {"x": tensor}, "bfloat16"))).tensors.values()
    assert torch.equal(back, tensor)


SHARED = torch.rand(64).exp()  # scales of channels, as real states have them


@pytest.mark.parametrize(
    ("dtype", "most", "shape"),
    [(torch.bfloat16, 0.75, (2, 8, 16, 64)), (torch.float16, 0.97, (1, 40, 64)), (torch.float32, 0.9, (1, 3, 64, 64)),
     (torch.bfloat16, 0.75, (4098,))],
)  # fmt: skip
def test_values_are_coded_where_that_is_smaller(dtype: torch.dtype, most: float, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * (SHARED if shape[-1] == 64 else 1)).to(dtype)
    tensor.view(-1)[5] = torch.nan
    blob = CODEC.encode_states(States(1, {"x": tensor}, "bfloat16"))
    (back,) = CODEC.decode_states(blob).tensors.values()
    assert back.dtype == dtype and back.shape == shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert len(blob) < (most if shape != (4098,) else 1.05) * tensor.nbytes + 400


def coded(values: torch.Tensor, channels: int) -> bytes:
    """The blob inside a section, from FORMAT.md."""
    own = KVLayout("state", (LayerLayout(1, channels, channels, None),), "float32", max_positions=None)
    first, second = values.reshape(2, -1, 1, channels)
    return Codec.without_profile(own).encode(KVChunk([first], [second], own))


def test_the_bytes_of_coded_values_are_those_of_the_specification() -> None:
    values = torch.randn(1, 512) / 1024  # halves of 256 values, of which 16 are a row
    blob = CODEC.encode_states(States(9, {"a": values}, "bfloat16"))
    assert blob == blob_of(section(b"a", 2 + 128, [1, 512], coded(values, 16)))


def test_coded_values_go_into_memory_that_fits() -> None:
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(1)).bfloat16().view(2, 2048)
    blob = CODEC.encode_states(States(9, {"a": tensor, "b": torch.tensor(-3)}, "bfloat16"))
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    back = CODEC.decode_states(blob, into={"a": memory, "b": torch.tensor(0)}).tensors
    assert back["a"].data_ptr() == memory.data_ptr() and torch.equal(back["a"], tensor) and back["b"] == -3
    for other in (torch.zeros(4096, dtype=torch.float16), torch.zeros(4094, dtype=torch.bfloat16)):
        assert torch.equal(CODEC.decode_states(blob, into={"a": other}).tensors["a"], tensor) and not other.any()


def test_hostile_coded_values() -> None:
    values = torch.randn(512)
    inner = coded(values, 16)
    assert torch.equal(CODEC.decode_states(blob_of(section(b"a", 130, [512], inner))).tensors["a"], values)
    zeros = coded(torch.zeros(1 << 20), 256)
    for bad in (
        section(b"a", 128, [512], inner),  # another dtype
        section(b"a", 132, [512], inner),  # one that is not coded
        section(b"a", 130, [511], inner),
        section(b"a", 130, [256], inner),
        section(b"a", 130, [1024], inner),
        section(b"a", 130, [0], inner),
        section(b"a", 130, [1 << 20], zeros),  # more than 256 times the blob
        section(b"a", 130, [1 << 16, 1 << 15], inner),
        section(b"a", 130, [512], b""),
        section(b"a", 130, [512], inner[:-1]),
        section(b"a", 130, [512], inner + b"\0"),
        section(b"a", 130, [512], coded(values, 32)),
        section(b"a", 130, [512], blob_of(ONE)),
    ):
        with pytest.raises((FormatError, ProfileMismatchError), match=r"^(state|header|blob|total)"):
            CODEC.decode_states(blob_of(bad))


def test_inspect_tells_of_states() -> None:
    info = inspect(blob_of(ONE, TWO))
    assert (info.kind, info.scheme, info.tokens, info.start, info.values_per_token) == ("states", "lossless", 9, 9, 0)
    assert info.raw_bytes == len(ONE + TWO) and info.ratio < 1 and info.bits_per_value > 16


HOSTILE = {
    "an end within the head": ONE[:2],
    "an end within the name": section(b"abc", 2, [], b"")[:5],
    "an end within the shape": section(b"a", 2, [1], b"")[:-1],
    "no name": section(b"", 2, [], bytes(4)),
    "a name longer than the section": struct.pack("<BBB", 255, 2, 0) + b"a" * 40,
    "a name with a space": section(b"a b", 2, [], bytes(4)),
    "a name with a line end": section(b"a\n", 2, [], bytes(4)),
    "a name that is not ASCII": section("ä".encode(), 2, [], bytes(4)),
    "an unknown dtype": section(b"a", len(STATE_DTYPES), [], bytes(4)),
    "dtype 255": section(b"a", 255, [], bytes(4)),
    "nine dimensions": section(b"a", 2, [1] * 9, bytes(4)),
    "255 dimensions": struct.pack("<BBB", 1, 2, 255) + b"a" + bytes(4 * 255),
    "a shape that claims more": section(b"a", 2, [3], bytes(8)),
    "a shape that claims less": section(b"a", 2, [1], bytes(8)),
    "trailing bytes": ONE + b"\0",
    "a shape that overflows 32 bits": section(b"a", 2, [1 << 16, 1 << 16], b""),
    "a shape that overflows 64 bits to nothing": section(b"a", 2, [1 << 31, 1 << 31, 4], b""),
    "an empty shape whose strides overflow": section(b"a", 2, [0, *[(1 << 32) - 1] * 7], b""),
    "an empty shape of 2 GiB": section(b"a", 8, [0, 1 << 31], b""),
    "a bool that is 2": section(b"a", 9, [2], b"\0\2"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sections_are_refused_though_checksums_match(name: str) -> None:
    with pytest.raises(FormatError, match=r"^state") as caught:
        CODEC.decode_states(blob_of(HOSTILE[name]))
    assert not isinstance(caught.value, CorruptError)


LYING: dict[str, dict[str, int]] = {
    "values": {"values": 1},
    "start elsewhere": {"start": 8},
    "start 0": {"start": 0},
    "no tokens": {"tokens": 0, "start": 0},
    "a step": {"step": 1},
    "transform": {"scheme": 2},
    "scheme 0": {"scheme": 0},
    "scheme 3": {"scheme": 3},
    "kind 3": {"kind": 3},
    "a chunk without values": {"kind": 0},
}


@pytest.mark.parametrize("name", LYING)
def test_headers_that_lie_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"^header") as caught:
        read_header(blob_of(ONE, TWO, **LYING[name]))
    assert not isinstance(caught.value, CorruptError)


def test_damage_is_found() -> None:
    blob = blob_of(ONE, TWO)
    for at in range(len(blob)):
        changed = bytearray(blob)
        changed[at] ^= 0x40
        with pytest.raises(FormatError):
            CODEC.decode_states(bytes(changed))
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            CODEC.decode_states(blob[:length])


def test_states_belong_to_a_model_and_to_what_they_are_bound_to() -> None:
    other = Codec.without_profile(KVLayout("other", LAYOUT.layers, "bfloat16", None))
    with pytest.raises(ProfileMismatchError, match="of another model"):
        other.decode_states(blob_of(ONE))
    keyed = Codec.without_profile(LAYOUT, key=KEY)
    blob = keyed.encode_states(States(9, {"a": torch.ones(2)}, "bfloat16"), associated_data=b"here")
    assert keyed.decode_states(blob, associated_data=b"here").tokens == 9
    with pytest.raises(CorruptError, match="tag"):
        keyed.decode_states(blob, associated_data=b"there")
    for codec, own in ((CODEC, blob), (keyed, blob_of(ONE))):
        with pytest.raises(KeyMismatchError):
            codec.decode_states(own)


CHUNK = KVChunk(torch.zeros(2, 5, 2, 8).bfloat16(), torch.zeros(2, 5, 2, 8).bfloat16(), LAYOUT)
# What a blob cannot hold.
UNHELD: list[tuple[int, dict[str, torch.Tensor], str]] = [
    (0, {"a": torch.ones(1)}, "^tokens: must be an int above 0"),
    (1, {}, "^states: must hold at least one"),
    (1, {"": torch.ones(1)}, "^states: must have names"),
    (1, {"a" * 256: torch.ones(1)}, "^states: must have names"),
    (1, {"ä": torch.ones(1)}, "^states: must have names"),
    (1, {"a": torch.ones(1, dtype=torch.complex64)}, "^states: must hold plain tensors"),
    (1, {"a": torch.ones(1, device="meta")}, "^states: must hold plain tensors"),
    (1, {"a": torch.ones([1] * 9)}, "^states: must have at most 8 dimensions"),
    (1, {"a": torch.zeros(0, 1 << 31, dtype=torch.uint8)}, "^states: must have at most 8 dimensions"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (lambda tokens=tokens, own=own: CODEC.encode_states(States(tokens, own, "bfloat16")), InputError, message)
            for tokens, own, message in UNHELD
        ),
        (lambda: CODEC.decode_states(blob_of(TWO, ONE)), FormatError, "in order of their names"),
        (lambda: CODEC.decode_states(blob_of(ONE, ONE)), FormatError, "in order of their names"),
        (lambda: inspect(blob_of(b"")), FormatError, "^header: must list states, got an empty section"),
        (lambda: CODEC.decode_states(CODEC.encode(CHUNK)), FormatError, "must hold states, got a chunk"),
        (lambda: CODEC.decode(blob_of(ONE)), FormatError, "holds the states at the end of a cache, and no chunk"),
        (lambda: CODEC.decode_states(blob_of(ONE), associated_data=b"here"), InputError, "without a key"),
    ],
)
def test_what_is_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
