"""A decoder and bytes that were made to hurt it: an error of ours or a chunk of the right shape, and nothing else."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.codec.damaged import (
    SCHEMES,
    blob_of,
    classes_of_blob,
    coded_offset,
    corpus,
    lossless_table,
    part_of,
    with_parts,
)
from tests.codec.damaged import with_classes as with_rewritten_classes
from tests.codec.forging import (
    LAYOUT,
    START,
    TOKENS,
    WEIGHTS,
    codec_of,
    correlated_chunk,
    learned,
    reseal,
    sections_of,
)

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import MAX_DECODED_TOKENS, Codec
from cuvee.codec.errors import (
    CuveeError,
    FormatError,
    InputError,
    OutOfMemoryError,
)
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile

ROOT = Path(__file__).parents[2]
TRITON = pytest.param("triton", marks=pytest.mark.gpu)
DAMAGED = corpus()
LOW_STATES = {"lossless: class state", "classes: no class state", "classes: class state"}
CASES: list[Any] = [(name, "numba") for name in DAMAGED]
CASES += [pytest.param(n, "triton", marks=TRITON.marks) for n, own in DAMAGED.items() if not own.in_header]


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


def test_the_blobs_exercise_what_they_should(scheme: str) -> None:
    blob = blob_of(scheme)
    assert attempt(scheme, blob)
    assert reseal(blob) == blob
    for index, section in enumerate(sections_of(blob)):
        if index == 0:
            words, escapes, log2 = struct.unpack_from("<IIB", section, coded_offset(scheme, section))
            assert words and log2 <= 7 and (escapes > 0) == (scheme != "lossless")
    if scheme != "lossless":
        assert codec_of(scheme).decode(blob).keys[0].float().abs().max() > 100, "the outlier is there"


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_every_changed_byte_is_refused(scheme: str, flip: int) -> None:
    blob = blob_of(scheme)
    for at in range(len(blob)):
        changed = bytearray(blob)
        changed[at] ^= flip
        with pytest.raises(FormatError):
            codec_of(scheme).decode(bytes(changed))


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


def cut_sections(blob: bytes) -> Iterator[bytes]:
    first, *others = sections_of(blob)
    for length in range(len(first)):
        yield reseal(blob, [first[:length], *others])


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_sections_cut_with_right_checksums(scheme: str, backend: str) -> None:
    for cut in cut_sections(blob_of(scheme)):
        with pytest.raises(FormatError):
            decode(scheme, cut, backend)


@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_every_backend_agrees_about_forged_sections(scheme: str, backend: str) -> None:
    every = 1741 if backend == "triton" else 41  # the emulator and the reference take their time
    for number, forged in enumerate(resealed_flips(blob_of(scheme))):
        if number % every == 0:
            assert attempt(scheme, forged, backend) == attempt(scheme, forged, "numba")


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_every_broken_rule_is_refused_alike(name: str, backend: str) -> None:
    damage = DAMAGED[name]
    blob = damage.forge()
    assert blob != blob_of(damage.scheme)
    with pytest.raises(damage.error) as caught:
        decode(damage.scheme, blob, backend)
    if backend != "triton":  # which finds the rule in another order
        with pytest.raises(damage.error, match=f"^{re.escape(str(caught.value))}$"):
            decode(damage.scheme, blob, "reference")
    elif name in LOW_STATES:  # where decoding fails too, later: it must not begin
        assert "in a state below its lower bound" in str(caught.value)


def test_the_corpus_is_made_of_blobs_as_they_are() -> None:
    classes = classes_of_blob()
    assert with_parts() == with_rewritten_classes(classes) == blob_of("classes")
    assert classes[-1] == 0 and len(set(classes.tolist())) > 5 and len(part_of().classes.words) >= 3
    assert lossless_table(lambda t: t) == blob_of("lossless")
    assert learned().learned[0].classed_plan(learned().min_step_index).finest > 0
    assert set(DAMAGED) >= LOW_STATES
    assert {own.scheme for own in DAMAGED.values()} == set(SCHEMES) and len(DAMAGED) > 90
    for scheme in SCHEMES:
        assert attempt(scheme, reseal(blob_of(scheme), None, None, start=4096 - TOKENS)), "the last positions"


# Decodes blobs that end where their page does; the page behind them may not be read.
GUARDED = """
import ctypes, mmap, sys
from tests.codec.damaged import SCHEMES, blob_of
from tests.codec.test_hostile import DAMAGED, attempt, cut_sections, resealed_flips
forged = [(damage.scheme, damage.forge()) for damage in DAMAGED.values()]
for scheme in SCHEMES:
    blob = blob_of(scheme)
    forged += [(scheme, each) for each in (blob, *resealed_flips(blob), *cut_sections(blob))]
guard = mmap.PAGESIZE * (1 + max(len(blob) for _, blob in forged) // mmap.PAGESIZE)
memory = mmap.mmap(-1, guard + mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + guard
if sys.platform == "linux":
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
for scheme, blob in forged:
    at = memoryview(memory)[guard - len(blob) : guard]
    at[:] = blob
    attempt(scheme, at, "numba")
print("within")
"""


@pytest.mark.slow
def test_nothing_beyond_an_array_or_a_blob_is_touched() -> None:
    """The damaged bytes again, where Numba checks every index: nobody catches its IndexError. Who reads on dies."""
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        # Its code is other code under the same name: it must never be taken for that of everybody else.
        "NUMBA_CACHE_DIR": str(ROOT / ".numba_cache" / "boundscheck"),
    }
    command = [sys.executable, "-c", GUARDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "within\n"), done.stderr[-2000:]


# Decodes the blobs whose paths it is given with no more than 96 MiB left to allocate. What is counted is address
# space, so that no allocator (NumPy's, torch's, a compiled kernel's) goes around it.
LIMITED = """
import resource, sys
from pathlib import Path
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.profiles.profile import Profile
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
    # The same with a class for each, in a stream of its own that has no words.
    many = struct.pack("<IIB3xII", 0, 0, 7, 0, 1 << 16) + struct.pack("<I", 1 << 16) * 340 + bytes(2 * 340)
    forged.append(reseal(good, [many] * 2, tokens=340 * 128))
    classes = Codec(with_classes(codec.profile, WEIGHTS, START, keep_id=True), step=0.02)
    classed = classes.encode(correlated_chunk(50, TOKENS, START, layout, outlier=300.0))
    parts = sections_of(classed)
    for tokens in (1 << 24, 1 << 20):
        forged.append(reseal(classed, tokens=tokens))
    for count in (2**32 - 1, 1 << 26):
        section = bytearray(parts[0])
        struct.pack_into("<I", section, 12, count)
        forged.append(reseal(classed, [bytes(section), parts[1]]))
        forged.append(reseal(classed, [bytes(section), parts[1]], tokens=1 << 24))
    forged.append(reseal(good, count=1 << 16))
    profile.save(tmp_path / "profile.safetensors")
    paths = []
    for number, blob in enumerate([good, *forged]):
        paths.append(tmp_path / f"{number}.bin")
        paths[-1].write_bytes(blob)
    command = [sys.executable, "-W", "error", "-c", LIMITED, str(tmp_path / "profile.safetensors"), *map(str, paths)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    limited, *outcomes = result.stdout.split()
    assert limited == "limited" and len(outcomes) == len(forged)
    assert set(outcomes) <= {"FormatError", "CorruptError"}, outcomes


SMALL = KVLayout("small", (LayerLayout(1, 4, 4, None),), "bfloat16", None)


@cache
def bomb() -> bytes:
    """Zeros compress to next to nothing: a whole, undamaged blob."""
    tokens = MAX_DECODED_TOKENS + 1
    zeros = torch.zeros(1, tokens, 1, 4, dtype=torch.bfloat16)
    return Codec(Profile.unlearned(SMALL), "lossless").encode(KVChunk(list(zeros), list(zeros), SMALL))


def test_a_small_blob_that_claims_a_huge_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, blob = Codec(Profile.unlearned(SMALL), "lossless"), bomb()
    assert len(blob) < 32_000
    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "empty", lambda *_: pytest.fail("something was allocated"))
        limits: list[dict[str, Any]] = [{}, {"max_tokens": MAX_DECODED_TOKENS}, {"max_tokens": 1}]
        for limit in limits:
            with pytest.raises(InputError, match=r"^max_tokens: must be at least 131073 to restore"):
                codec.decode(blob, **limit)
        with pytest.raises(InputError, match=r"^max_tokens: must be at least 5 to restore these tokens, got 4"):
            codec.decode(blob, tokens=range(10, 15), max_tokens=4)
        wrongs: tuple[Any, ...] = (0, -1, 1.5, True, "7")
        for wrong in wrongs:
            with pytest.raises(InputError, match=r"^max_tokens: must be at least 1, or None"):
                codec.decode(blob, max_tokens=wrong)
    for enough in (None, MAX_DECODED_TOKENS + 1):
        assert codec.decode(blob, max_tokens=enough).tokens == MAX_DECODED_TOKENS + 1
    assert codec.decode(blob, tokens=range(10, 15)).tokens == 5, "what is restored counts"


HUGE = 1 << 52  # more bytes than any machine can address


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(HUGE, dtype=torch.uint8),
        lambda: torch.empty((1 << 40, 1 << 40), dtype=torch.uint8),
        lambda: np.empty(HUGE, np.uint8),
    ],
    ids=["torch", "torch-overflow", "numpy"],
)
def test_memory_that_is_not_there_is_our_error(allocate: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    codec, blob = codec_of("lossless"), blob_of("lossless")
    chunk = codec.decode(blob)
    pages = PagedCache.dense(LAYOUT, chunk.keys, chunk.values)
    other = PagedCache.dense(LAYOUT, [k.float() for k in chunk.keys], [v.float() for v in chunk.values])
    assert other.dtype != chunk.keys[0].dtype
    monkeypatch.setattr("cuvee.codec.cpu.backend.cache_rows", lambda *_: allocate())
    monkeypatch.setattr(PagedCache, "empty", lambda *_: allocate())
    for call in (
        lambda: codec.decode(blob),
        lambda: codec.decode_paged([blob], pages, [torch.arange(TOKENS)]),
        lambda: codec.decode_paged([blob], other, [torch.arange(TOKENS)]),
    ):
        with pytest.raises(OutOfMemoryError, match=f"decoding {TOKENS} tokens: not enough memory: "):
            call()
    assert issubclass(OutOfMemoryError, CuveeError) and issubclass(OutOfMemoryError, MemoryError)
