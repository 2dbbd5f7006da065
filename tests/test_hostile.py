"""A decoder and bytes that were made to hurt it: an error of ours or a chunk of the right shape, and nothing else."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash

from cuvee.codec.backends import backend_names
from cuvee.codec.codec import Codec
from cuvee.codec.container import read_header
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError, ProfileError, ProfileMismatch
from cuvee.codec.layout import KVChunk, KVLayout, LayerLayout, Rope
from cuvee.codec.profile import Profile
from cuvee.codec.symbols import Prediction

ROPE = Rope((1.0, 0.1, 0.01, 0.001))
LAYOUT = KVLayout("tiny", (LayerLayout(1, 8, 8, ROPE), LayerLayout(2, 8, 8, ROPE)), "bfloat16", 4096)
TOKENS, START = 20, 3
SCHEMES = ("lossless", "generic", "transform")
# The interpreter of the device backend computes with NumPy, which warns where damaged numbers overflow.
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")])
BACKENDS = [*backend_names(), TRITON]
HEADER = 72
OFFSETS = {"version": 4, "scheme": 5, "dtype": 6, "tokens": 8, "start": 12, "values": 16, "step": 20, "count": 24}


def correlated_chunk(seed: int, tokens: int, start: int, layout: KVLayout = LAYOUT, outlier: float = 0.0) -> KVChunk:
    """Channels that go together and tokens that resemble the one before; the same mixing for every seed."""
    noise, fixed = (torch.Generator().manual_seed(s) for s in (seed, 999))
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer in layout.layers:
        for out in (keys, values):
            width = layer.kv_heads * 8
            mixing = torch.randn(width, width, generator=fixed) * torch.logspace(0.5, -2, width)[:, None]
            x = torch.randn(tokens, width, generator=noise)
            for t in range(1, tokens):
                x[t] = 0.9 * x[t - 1] + 0.44 * x[t]
            x = x @ mixing
            x[tokens // 2, 1] += outlier
            out.append(x.unflatten(1, (layer.kv_heads, 8)).to(layout.torch_dtype))
    return KVChunk(keys, values, layout, start)


@cache
def learned() -> Profile:
    """With prediction, so that damage can spread from token to token."""
    profile = Profile.fit(LAYOUT, [correlated_chunk(seed, 64, 7 * seed) for seed in range(7)], "layer")
    sections = []
    for section in profile.learned:
        rho = section.rho + (200 if section.prediction is Prediction.NONE else 0)
        sections.append(replace(section, prediction=Prediction.LAG1, rho=rho.astype("int16")))
    return Profile(LAYOUT, "layer", "fitted", profile.family, tuple(sections))


@cache
def codec_of(scheme: str, backend: str = "auto") -> Codec:
    if scheme == "lossless":
        return Codec(Profile.generic(LAYOUT), "lossless", backend=backend, threads=1)
    return Codec(learned() if scheme == "transform" else Profile.generic(LAYOUT), step=0.02, backend=backend, threads=1)


@cache
def blob_of(scheme: str) -> bytes:
    """With escapes where the scheme has them: token 10 is an outlier."""
    return codec_of(scheme).encode(correlated_chunk(50, TOKENS, START, outlier=0.0 if scheme == "lossless" else 300.0))


def reseal(blob: bytes, sections: list[bytes] | None = None, **fields: int) -> bytes:
    """The blob with other header fields or sections, and with checksums and lengths made right again."""
    header = read_header(blob)
    at = [header.section_offset(i) for i in range(len(header.section_bytes) + 1)]
    parts = [blob[a:b] for a, b in pairwise(at)] if sections is None else sections
    head = bytearray(blob[:HEADER])
    for name, value in fields.items():
        width = 4 if name in ("tokens", "start", "values", "step", "count") else 1
        head[OFFSETS[name] : OFFSETS[name] + width] = (value & 0xFFFFFFFF).to_bytes(width, "little")
    head[64:72] = (HEADER + 12 * len(parts) + 8 + sum(map(len, parts))).to_bytes(8, "little")
    for part in parts:
        head += struct.pack("<IQ", len(part), xxhash.xxh3_64_intdigest(part))
    return bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head))) + b"".join(parts)


def sections_of(blob: bytes) -> list[bytes]:
    header = read_header(blob)
    starts = [header.section_offset(i) for i in range(len(header.section_bytes))]
    return [blob[a : a + n] for a, n in zip(starts, header.section_bytes, strict=True)]


def coded_offset(scheme: str, section: bytes) -> int:
    """Where the coded part of section 0 begins."""
    if scheme == "transform":
        return 0
    if scheme == "generic":
        return 2 * (2 + 3 * 8) + -(2 * (2 + 3 * 8)) % 4
    head, stored = lossless_head(section)
    at = head + -head % 4 + stored
    return at + -at % 4


def lossless_head(section: bytes) -> tuple[int, int]:
    """Bytes of the modes, references and tables of section 0, and of its stored planes."""
    at = stored = 0
    for _ in range(4):
        mode = section[at]
        at += 1
        if mode:
            at += 8
            at += 2 + 3 * int.from_bytes(section[at : at + 2], "little")
        else:
            stored += 8 * TOKENS
    return at, stored


def decode(scheme: str, blob: bytes, backend: str = "auto") -> KVChunk:
    """On the CPU, but where `triton` has a GPU."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    return codec_of(scheme, backend).decode(blob, device=device)


def attempt(scheme: str, blob: bytes, backend: str = "auto", tokens: int = TOKENS) -> bool:
    """Decode; True if that gave a chunk. Anything but a chunk of the right shape or an error of ours fails the test."""
    try:
        chunk = decode(scheme, blob, backend)
    except CuveeError:
        return False
    for layer, keys, values in zip(LAYOUT.layers, chunk.keys, chunk.values, strict=True):
        assert keys.shape == values.shape == (tokens, layer.kv_heads, 8)
    return True


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# --- the material is what it should be


def test_the_blobs_exercise_what_they_should(scheme: str) -> None:
    blob = blob_of(scheme)
    assert attempt(scheme, blob)
    assert reseal(blob) == blob
    for index, section in enumerate(sections_of(blob)):
        if index == 0:
            words, escapes, log2, *_ = struct.unpack_from("<IIBBH", section, coded_offset(scheme, section))
            assert words and log2 <= 7 and (escapes > 0) == (scheme != "lossless")
    if scheme != "lossless":
        assert codec_of(scheme).decode(blob).keys[0].float().abs().max() > 100, "the outlier is there"


# --- accidents: checksums find them


def test_every_truncation_is_refused(scheme: str) -> None:
    blob = blob_of(scheme)
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            codec_of(scheme).decode(blob[:length])


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_changed_byte_is_refused(scheme: str, flip: int) -> None:
    blob = blob_of(scheme)
    for at in range(len(blob)):
        changed = bytearray(blob)
        changed[at] ^= flip
        with pytest.raises(FormatError):
            codec_of(scheme).decode(bytes(changed))


def test_random_bytes_are_refused(scheme: str) -> None:
    source = random.Random(0)
    blob = blob_of(scheme)
    for length in [*range(0, 300, 7), 5000]:
        for junk in (
            source.randbytes(length),
            blob[:5] + source.randbytes(length),
            blob[:72] + source.randbytes(length),
        ):
            with pytest.raises(FormatError):
                codec_of(scheme).decode(junk)


# --- attacks: whoever changes a byte can make the checksums right


def resealed_flips(blob: bytes) -> Iterator[bytes]:
    sections = sections_of(blob)
    for index, section in enumerate(sections):
        for at in range(len(section)):
            for flip in (0x01, 0x80, 0xFF):
                changed = bytearray(section)
                changed[at] ^= flip
                yield reseal(blob, [*sections[:index], bytes(changed), *sections[index + 1 :]])


def test_every_byte_of_the_sections_changed_with_right_checksums(scheme: str) -> None:
    decoded = [attempt(scheme, forged) for forged in resealed_flips(blob_of(scheme))]
    # Many must be found out by the entropy coder's own checks even so.
    assert decoded.count(False) > len(decoded) // 10
    assert not all(decoded) and any(decoded)


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_sections_cut_or_grown_with_right_checksums(scheme: str, backend: str) -> None:
    blob = blob_of(scheme)
    sections = sections_of(blob)
    for length in range(len(sections[0])):
        with pytest.raises(FormatError):
            decode(scheme, reseal(blob, [sections[0][:length], *sections[1:]]), backend)
    for tail in (b"\0", bytes(4), b"\xff" * 64):
        with pytest.raises(FormatError):
            decode(scheme, reseal(blob, [sections[0] + tail, *sections[1:]]), backend)


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_sections_of_random_bytes_with_right_checksums(scheme: str, backend: str) -> None:
    source = random.Random(1)
    blob = blob_of(scheme)
    for length in (*range(1, 200, 3), 1000):
        attempt(scheme, reseal(blob, [source.randbytes(length), sections_of(blob)[1]]), backend)
        attempt(scheme, reseal(blob, [bytes(length), sections_of(blob)[1]]), backend)


def test_header_fields_changed_with_right_checksums(scheme: str) -> None:
    blob = blob_of(scheme)
    for at in range(4, HEADER):
        for flip in (0x01, 0x40, 0x80, 0xFF):
            changed = bytearray(blob)
            changed[at] ^= flip
            end = read_header(blob).header_bytes - 8
            changed[end : end + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(changed[:end])))
            tokens = int.from_bytes(changed[8:12], "little")
            attempt(scheme, bytes(changed), tokens=tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_agrees_about_forged_sections(scheme: str, backend: str) -> None:
    every = 1741 if backend == "triton" else 67  # its interpreter takes a second or two a blob
    for number, forged in enumerate(resealed_flips(blob_of(scheme))):
        if number % every == 0:
            assert attempt(scheme, forged, backend) == attempt(scheme, forged, "numba")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1, 0, 1])
@pytest.mark.parametrize("lossy", ["generic", "transform"])
def test_escapes_of_any_value_decode(lossy: str, value: int, backend: str) -> None:
    blob = blob_of(lossy)
    section = bytearray(sections_of(blob)[0])
    escapes = struct.unpack_from("<I", section, coded_offset(lossy, bytes(section)) + 4)[0]
    for index in range(escapes):
        struct.pack_into("<i", section, len(section) - 4 * (index + 1), value)
    assert attempt(lossy, reseal(blob, [bytes(section), sections_of(blob)[1]]), backend)


@pytest.mark.parametrize("scale", [-(2**15), -16384, 16383, 2**15 - 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_generic_scales_of_any_value_are_refused_or_decode(scale: int, backend: str) -> None:
    blob = blob_of("generic")
    section = bytearray(sections_of(blob)[0])
    struct.pack_into("<h", section, 0, scale)
    attempt("generic", reseal(blob, [bytes(section), sections_of(blob)[1]]), backend)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FFF, 0xFFC1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_generic_means_that_are_no_numbers_are_refused_or_decode(bits: int, backend: str) -> None:
    blob = blob_of("generic")
    section = bytearray(sections_of(blob)[0])
    for channel in range(8):
        struct.pack_into("<H", section, 2 + 2 * channel, bits)
    attempt("generic", reseal(blob, [bytes(section), sections_of(blob)[1]]), backend)


@pytest.mark.parametrize("code", [57, 100, 254])
@pytest.mark.parametrize("backend", BACKENDS)
def test_generic_scale_codes_beyond_the_widest_are_refused(code: int, backend: str) -> None:
    blob = blob_of("generic")
    section = bytearray(sections_of(blob)[0])
    section[2 + 2 * 8] = code
    with pytest.raises(FormatError, match="scale code"):
        decode("generic", reseal(blob, [bytes(section), sections_of(blob)[1]]), backend)


@pytest.mark.parametrize(
    ("offset", "fmt", "value"),
    [
        pytest.param(0, "<I", 2**32 - 1, id="words"),
        pytest.param(4, "<I", 2**32 - 1, id="escapes"),
        pytest.param(0, "<Q", 2**64 - 1, id="words and escapes"),
        pytest.param(8, "<B", 63, id="tokens a stream"),
        pytest.param(8, "<B", 8, id="tokens a stream, one too far"),
        pytest.param(9, "<B", 1, id="reserved byte"),
        pytest.param(10, "<H", 1, id="reserved word"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_counts_that_overflow_are_refused(scheme: str, offset: int, fmt: str, value: int, backend: str) -> None:
    blob = blob_of(scheme)
    section = bytearray(sections_of(blob)[0])
    struct.pack_into(fmt, section, coded_offset(scheme, bytes(section)) + offset, value)
    with pytest.raises(FormatError):
        decode(scheme, reseal(blob, [bytes(section), sections_of(blob)[1]]), backend)


@pytest.mark.parametrize("tokens", [0, 1, TOKENS - 1, TOKENS + 1, 128, 1 << 20, 1 << 24, (1 << 24) + 1, 2**32 - 1])
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_other_numbers_of_tokens_are_refused(scheme: str, tokens: int, backend: str) -> None:
    with pytest.raises((FormatError, InputError)):
        decode(scheme, reseal(blob_of(scheme), tokens=tokens), backend)


@pytest.mark.parametrize("count", [0, 1, 3, 2**16, 2**32 - 1])
def test_other_numbers_of_sections_are_refused(scheme: str, count: int) -> None:
    with pytest.raises(FormatError):
        codec_of(scheme).decode(reseal(blob_of(scheme), count=count))
    sections = sections_of(blob_of(scheme))
    with pytest.raises(FormatError):
        codec_of(scheme).decode(reseal(blob_of(scheme), (sections * 3)[: min(count, 5) or 3], count=min(count, 5) or 3))


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_swapped_sections_are_refused(scheme: str, backend: str) -> None:
    with pytest.raises(FormatError):
        decode(scheme, reseal(blob_of(scheme), sections_of(blob_of(scheme))[::-1]), backend)


@pytest.mark.parametrize("values", [1, 95, 97, 2**32 - 1])
def test_other_numbers_of_values_are_refused(scheme: str, values: int) -> None:
    with pytest.raises(FormatError):
        codec_of(scheme).decode(reseal(blob_of(scheme), values=values))


@pytest.mark.parametrize("start", [4096 - TOKENS + 1, 4096, 2**32 - 1])
def test_positions_beyond_the_model_are_refused(scheme: str, start: int) -> None:
    assert attempt(scheme, reseal(blob_of(scheme), start=4096 - TOKENS))
    with pytest.raises(InputError):
        codec_of(scheme).decode(reseal(blob_of(scheme), start=start))


@pytest.mark.parametrize("step", [-(2**31), -513, 513, 2**31 - 1])
@pytest.mark.parametrize("lossy", ["generic", "transform"])
def test_steps_out_of_range_are_refused(lossy: str, step: int) -> None:
    with pytest.raises((FormatError, ProfileError)):
        codec_of(lossy).decode(reseal(blob_of(lossy), step=step))


@pytest.mark.parametrize("lossy", ["generic", "transform"])
def test_any_other_step_is_refused_or_decodes(lossy: str) -> None:
    for step in range(-512, 513, 31):
        attempt(lossy, reseal(blob_of(lossy), step=step))


# --- tables of the lossless scheme


def lossless_table(change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]]) -> bytes:
    """The lossless blob with another table for its first coded plane."""
    blob = blob_of("lossless")
    section = sections_of(blob)[0]
    at = 0
    while not section[at]:
        at += 1
    at += 1 + 8
    count = int.from_bytes(section[at : at + 2], "little")
    head_end = at + 2 + 3 * count
    pairs = [struct.unpack_from("<BH", section, at + 2 + 3 * i) for i in range(count)]
    changed = change([(symbol, freq) for symbol, freq in pairs])
    table = struct.pack("<H", len(changed)) + b"".join(struct.pack("<BH", *pair) for pair in changed)
    old_head, _ = lossless_head(section)
    head = section[:at] + table + section[head_end:old_head]
    return reseal(blob, [head + bytes(-len(head) % 4) + section[old_head + -old_head % 4 :], sections_of(blob)[1]])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: [], id="empty"),
        pytest.param(lambda t: t[::-1], id="falling"),
        pytest.param(lambda t: [t[0], *t], id="twice"),
        pytest.param(lambda t: [(t[0][0], 0), *t[1:]], id="no frequency"),
        pytest.param(lambda t: [(t[0][0], t[0][1] + 1), *t[1:]], id="sum too large"),
        pytest.param(lambda t: [(7, 4096)], id="certain"),
        pytest.param(lambda t: [(s, 0xFFFF) for s, _ in t], id="huge"),
        pytest.param(lambda t: t * 1000, id="many"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_lossless_tables_that_break_a_rule_are_refused(
    change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]], backend: str
) -> None:
    assert lossless_table(lambda t: t) == blob_of("lossless")
    with pytest.raises(FormatError):
        decode("lossless", lossless_table(change), backend)


# --- blobs of others


def test_blobs_of_another_profile_are_refused() -> None:
    other = Profile.fit(LAYOUT, [correlated_chunk(seed, 64, 0) for seed in range(30, 37)], "layer")
    with pytest.raises(ProfileMismatch, match="profile"):
        Codec(other, step=0.02).decode(blob_of("transform"))
    for scheme in ("generic", "transform"):
        with pytest.raises(ProfileMismatch):
            codec_of("transform" if scheme == "generic" else "generic").decode(blob_of(scheme))


def test_blobs_of_another_model_are_refused(scheme: str) -> None:
    for layout in (
        replace(LAYOUT, layers=LAYOUT.layers[::-1]),
        replace(LAYOUT, model_type="other"),
        replace(LAYOUT, layers=(LAYOUT.layers[0], LayerLayout(2, 8, 8, Rope((1.0, 0.2, 0.01, 0.001))))),
    ):
        with pytest.raises(ProfileMismatch, match="model"):
            Codec(Profile.generic(layout), "lossless").decode(blob_of(scheme))


@pytest.mark.parametrize(
    ("scheme", "other"),
    [("lossless", 1), ("lossless", 2), ("transform", 0), ("transform", 2), ("generic", 0), ("generic", 1)],
)
def test_another_scheme_in_the_header_is_refused(scheme: str, other: int) -> None:
    with pytest.raises((FormatError, ProfileMismatch)):
        codec_of(scheme).decode(reseal(blob_of(scheme), scheme=other))


@pytest.mark.parametrize("dtype", [1, 2])
def test_another_dtype_in_the_header_is_another_model(scheme: str, dtype: int) -> None:
    with pytest.raises(ProfileMismatch):
        codec_of(scheme).decode(reseal(blob_of(scheme), dtype=dtype))


def test_one_codec_reads_the_dtype_from_the_blob(scheme: str) -> None:
    for dtype in ("float16", "float32"):
        chunk = correlated_chunk(51, TOKENS, START, replace(LAYOUT, dtype=dtype))
        back = codec_of(scheme).decode(codec_of(scheme).encode(chunk))
        assert back.layout.dtype == dtype and back.keys[1].dtype == chunk.keys[1].dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_reads_the_blob(scheme: str, backend: str) -> None:
    want, got = codec_of(scheme, "reference").decode(blob_of(scheme)), decode(scheme, blob_of(scheme), backend)
    # Only the device backend sums in another order: a last bit of bfloat16, at the size of the largest value.
    rounding = 2.0**-6 if backend == "triton" and scheme != "lossless" else 0.0
    for a, b in zip([*want.keys, *want.values], [*got.keys, *got.values], strict=True):
        assert (a.float() - b.cpu().float()).abs().max() <= rounding * a.float().abs().max()


def test_an_error_in_one_thread_is_raised(scheme: str) -> None:
    blob = bytearray(blob_of(scheme))
    blob[-1] ^= 1
    profile = learned() if scheme == "transform" else Profile.generic(LAYOUT)
    with pytest.raises(CorruptError, match="section 1"):
        Codec(profile, "lossless", threads=2).decode(bytes(blob))


# --- memory

# Decodes the blobs whose paths it is given with no more than 96 MiB left to allocate. What is counted is address
# space, so that no allocator (NumPy's, torch's, a compiled kernel's) goes around it.
LIMITED = """
import resource, sys
from pathlib import Path
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.profile import Profile
good, *forged = (Path(p).read_bytes() for p in sys.argv[2:])
profile = Profile.load(sys.argv[1])
codec = Codec(profile, step=0.02, threads=1)
codec.decode(good)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
try:
    bytearray(128 << 20)
except MemoryError:
    print("limited")
for blob in forged:
    try:
        codec.decode(blob)
        print("decoded")
    except CuveeError as error:
        print(type(error).__name__)
"""


@dataclass(frozen=True)
class Bomb:
    """Header and section fields that ask for a lot."""

    tokens: int
    section: bytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_bounded_by_the_length_of_the_blob(tmp_path: Path) -> None:
    # No limit on positions here: the number of tokens is all that could stop it.
    layout = replace(LAYOUT, max_positions=None)
    fitted = learned()
    profile = Profile(layout, fitted.group, fitted.source, fitted.family, fitted.learned)
    codec = Codec(profile, step=0.02, threads=1)
    good = codec.encode(correlated_chunk(50, TOKENS, START, layout, outlier=300.0))
    sections = sections_of(good)
    forged = [reseal(good, tokens=tokens) for tokens in (1 << 24, 1 << 23, 1 << 20, 1 << 16)]
    for offset, fmt in ((0, "<I"), (4, "<I"), (0, "<Q"), (8, "<B")):
        section = bytearray(sections[0])
        struct.pack_into(fmt, section, offset, (1 << 8 * struct.calcsize(fmt)) - 1)
        forged.append(reseal(good, [bytes(section), sections[1]]))
        forged.append(reseal(good, [bytes(section), sections[1]], tokens=1 << 24))
    # All the tokens that sections of this length can promise, and not one stream of them.
    forged.append(reseal(good, [bytes(2048)] * 2, tokens=2048 * 128))
    forged.append(reseal(good, count=1 << 16))
    profile.save(tmp_path / "profile.safetensors")
    paths = []
    for number, blob in enumerate([good, *forged]):
        paths.append(tmp_path / f"{number}.bin")
        paths[-1].write_bytes(blob)
    command = [sys.executable, "-W", "error", "-c", LIMITED, str(tmp_path / "profile.safetensors"), *map(str, paths)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    limited, *outcomes = result.stdout.split()
    assert limited == "limited" and len(outcomes) == len(forged)
    assert set(outcomes) <= {"FormatError", "CorruptError"}, outcomes
