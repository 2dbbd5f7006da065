"""The codec on one core of a CPU beside what a user would take instead: memcpy, FP8 and zstd, on the same bytes.

    a model's cache, or a synthetic one of Llama-3.1-8B's shape --> every method, in rounds --> GB/s, bits, error

| method | what is stored |
|---|---|
| memcpy | the unchanged cache: no other method can be faster |
| FP8 e4m3 | one byte a value, and a scale for each head of each unit, its largest magnitude over 448 |
| zstd | the values' high bytes, then their low bytes, compressed as one buffer |

All methods restore into tensors that exist, so none pays for new memory. Every round times all methods, forwards and
backwards in turn, and ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

import cuvee
from cuvee.calibration.bundled import CALIBRATION_TEXTS
from cuvee.calibration.corpus import BUNDLED_MODEL, load_config, load_model, read_corpus, spread_sequences
from cuvee.calibration.sequences import LENGTH, PREFIX, reread
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.rope import rotate
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.eval.bench.frame import Shown, machine_line, run_bench, say
from cuvee.eval.bench.shapes import llama_layout
from cuvee.eval.bench.timing import rates, spread
from cuvee.eval.documents import ReportTable
from cuvee.eval.formatting import format_bits, format_number
from cuvee.eval.machine import hardware, torch_threads
from cuvee.eval.runs import need_packages

__all__ = ["BenchCache", "FlatCache", "compare", "methods_of", "show_cpu"]

SYNTHETIC = "llama-3.1-8b, 4 of 32 layers"
TOKENS = (64, 256)
ROUNDS, QUICK_ROUNDS = 15, 5
READ = "orchard"
LEARNED = 20  # sequences to calibrate on
SKIPPED = 256  # tokens before the ones that are coded: the first of a text are unlike all others
MEMCPY, ZSTD, LOSSLESS = "memcpy", "zstd -1, byte planes", "cuvee lossless"
FP8_LARGEST = 448.0  # of e4m3: beyond it the cast makes NaN
LEAST_SAMPLE = 2e-3  # seconds: a shorter call is repeated within a round, so that the clock and the caches are steady
MOST_ERROR = 0.5  # a lossy method with a larger relative error did not restore the cache
_WAYS = ("encode", "decode")
_NOTE = (
    "GB/s of bfloat16; the last columns are the speed of decoding over that of memcpy and of zstd, within rounds. "
    "error: of the values, root of squared error over squared values; 0 means bit for bit. It is not what a model "
    "loses: cuvee's transform moves its error to where predictions do not depend on it."
)

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
K = TypeVar("K", bound=Hashable)


# Caches ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BenchCache:
    """A cache of at least 256 tokens in bfloat16, by name, and a profile for it."""

    name: str
    chunk: KVChunk
    profile: Profile


def real_cache(model: str, file: Path | None = None) -> BenchCache:
    """Let a model read a text, and learn a profile from others, or load it from a file.

    Raises:
        ProfileMismatchError: the profile is another model's.
        see `load_model` and `Profile.load`.
    """
    layout = KVLayout.from_config(load_config(model).get_text_config(decoder=True), torch.bfloat16)
    if file is not None:
        profile = Profile.load(file)
        profile.check_layout(layout)
    lm = load_model(model, "float32")
    with torch.no_grad():
        chunk = prefill(lm, spread_sequences([read_corpus(READ, model)], LENGTH, 1), layout)[0].slice(SKIPPED, LENGTH)
    if file is not None:
        return BenchCache(model, chunk, profile)
    learning = spread_sequences([read_corpus(name, model) for name in CALIBRATION_TEXTS], LENGTH, LEARNED)
    return BenchCache(model, chunk, cuvee.calibrate(lm, reread(learning), "layer", prefix=PREFIX, progress=False))


def synthetic_cache() -> BenchCache:
    """A cache without a model, with a falling spectrum and layers that share directions, and a profile fitted to it."""
    layout = llama_layout(4, 8, 128, 5e5)
    profile = cuvee.fit(layout, (make_chunk(layout, 512, 1000 + seed) for seed in range(6)), "head")
    return BenchCache(SYNTHETIC, make_chunk(layout, max(TOKENS)), profile)


def make_chunk(layout: KVLayout, tokens: int, seed: int = 0) -> KVChunk:
    """A cache of correlated noise: all layers see the same few hidden directions, and each unit's spectrum falls."""
    noise = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 64, generator=noise) * torch.arange(1, 65).pow(-0.5)
    out: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
    for index, layer in enumerate(layout.layers):
        for kind, rope, size in (("keys", layer.rope, layer.head_dim), ("values", None, layer.value_dim)):
            fixed = torch.Generator().manual_seed(2 * index + (kind == "keys"))
            own = torch.randn(tokens, layer.kv_heads, size, generator=noise) * torch.arange(1, size + 1).pow(-0.8)
            mixed = own @ (torch.randn(size, size, generator=fixed) / size**0.5)
            shared = (hidden @ torch.randn(64, layer.kv_heads * size, generator=fixed)).view_as(mixed)
            out[kind].append(rotate(mixed + 0.2 * shared, rope, torch.arange(tokens)).to(layout.torch_dtype))
    return KVChunk(out["keys"], out["values"], layout)


class FlatCache:
    """A cache in bfloat16 whose layers lie in one tensor, `values`, keys before values; `chunk` has views of it."""

    def __init__(self, layout: KVLayout, tokens: int, start: int = 0) -> None:
        if layout.dtype != "bfloat16":
            raise InputError(f"layout: the alternatives are compared in bfloat16, got {layout.dtype}")
        self.values = torch.empty(tokens * layout.values_per_token, dtype=torch.bfloat16)
        shapes = [(tokens, one.kv_heads, size) for one in layout.layers for size in (one.head_dim, one.value_dim)]
        self.units = [
            unit.view(shape)
            for unit, shape in zip(self.values.split([math.prod(shape) for shape in shapes]), shapes, strict=True)
        ]
        self.chunk = KVChunk(self.units[::2], self.units[1::2], layout, start)

    @classmethod
    def copy_of(cls, chunk: KVChunk) -> FlatCache:
        """A copy of a chunk."""
        cache = cls(chunk.layout, chunk.tokens, chunk.start)
        for own, other in zip(cache.chunk.keys + cache.chunk.values, chunk.keys + chunk.values, strict=True):
            own.copy_(other)
        return cache

    def words(self) -> U16:
        """The bits of all values, in the memory of the cache."""
        words: U16 = self.values.view(torch.int16).numpy().view(np.uint16)
        return words


# Methods --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """A method at work on one cache: `encode` keeps what is stored, `decode` restores it into the target."""

    exact: bool
    encode: Callable[[], object]
    decode: Callable[[], object]
    stored_bytes: Callable[[], int]


def methods_of(source: FlatCache, target: FlatCache, profile: Profile) -> dict[str, Method]:
    """Return all methods by name."""
    found = {
        MEMCPY: _memcpy(source, target),
        "FP8 e4m3": _float8(source, target),
        ZSTD: _byte_planes(source, target),
        LOSSLESS: _ours(profile, "lossless", source, target),
    }
    if profile.learned:
        found[f"cuvee balanced, {profile.group}"] = _ours(profile, "balanced", source, target)
    return found


def _memcpy(source: FlatCache, target: FlatCache) -> Method:
    stored = torch.empty_like(source.values)
    return Method(
        True, lambda: stored.copy_(source.values), lambda: target.values.copy_(stored), lambda: stored.nbytes
    )  # fmt: skip


def _float8(source: FlatCache, target: FlatCache) -> Method:
    """Torch's cast to float8_e4m3fn and back."""
    stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def encode() -> None:
        stored.clear()
        for unit in source.units:
            scale = (unit.abs().amax((0, 2), keepdim=True) / FP8_LARGEST).clamp_min_(1e-30)
            # Rounding the scale to bfloat16 can make it smaller, and then a value passes the largest.
            stored.append(((unit / scale).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn), scale))

    def decode() -> None:
        for (codes, scale), unit in zip(stored, target.units, strict=True):
            torch.mul(codes.to(torch.bfloat16), scale, out=unit)

    return Method(False, encode, decode, lambda: sum(codes.nbytes + scale.nbytes for codes, scale in stored))


@compiled
def merge_bytes(planes: U8, words: U16) -> None:
    """Put words together from their high and low bytes. Compiled: NumPy takes four times as long."""
    n = len(words)
    for i in range(n):
        words[i] = (np.uint16(planes[i]) << np.uint16(8)) | np.uint16(planes[n + i])


def _byte_planes(source: FlatCache, target: FlatCache) -> Method:
    """Zstd at level 1 (smaller and faster here than the default) over byte planes."""
    import zstandard

    given, restored, stored = source.words(), target.words(), [b""]
    planes = np.empty(2 * len(given), np.uint8)
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode() -> None:
        planes[: len(given)] = given >> 8
        planes[len(given) :] = given  # the cast keeps the low byte
        stored[0] = compressor.compress(planes.data)

    def decode() -> None:
        merge_bytes(np.frombuffer(decompressor.decompress(stored[0]), np.uint8), restored)

    return Method(True, encode, decode, lambda: len(stored[0]))


def _ours(profile: Profile, quality: str, source: FlatCache, target: FlatCache) -> Method:
    codec = Codec(profile, quality, backend="numba", threads=1)
    stored = [b""]
    # Into memory that is there, as the alternatives do: new memory costs time of its own.
    cache, slots = PagedCache.of_chunk(target.chunk), [torch.arange(target.chunk.tokens)]

    def encode() -> None:
        stored[0] = codec.encode(source.chunk)

    def decode() -> None:
        codec.decode_paged(stored, cache, slots).check()

    return Method(quality == "lossless", encode, decode, lambda: len(stored[0]))


# Measuring ------------------------------------------------------------------------------------------------------------


def compare(cache: BenchCache, tokens: int, rounds: int) -> dict[str, Any]:
    """Time every method on the first tokens of a cache.

    Raises:
        CuveeError: an exact method did not return its input, or another method returned something too different.
    """
    chunk = cache.chunk.slice(0, tokens)
    source, target = FlatCache.copy_of(chunk), FlatCache(chunk.layout, tokens, chunk.start)
    methods = methods_of(source, target, cache.profile)
    errors = {name: _proved(name, method, source, target) for name, method in methods.items()}
    calls = {(name, way): getattr(method, way) for name, method in methods.items() for way in _WAYS}
    times = run_rounds(calls, rounds)
    entries = []
    for name, method in methods.items():
        bits = 8 * method.stored_bytes() / len(source.values)
        entry: dict[str, Any] = {"method": name, "bits_per_value": bits, "error": errors[name], "decode_over": {}}
        for way in _WAYS:
            entry[f"{way}_gb_per_s"] = rates(times[name, way], source.values.nbytes / 1e9)
        for other in (MEMCPY, ZSTD):
            pairs = zip(times[other, "decode"], times[name, "decode"], strict=True)
            entry["decode_over"][other] = spread([theirs / ours for theirs, ours in pairs])
        entries.append(entry)
    return {"cache": cache.name, "tokens": tokens, "methods": entries}


def _proved(name: str, method: Method, source: FlatCache, target: FlatCache) -> float:
    """Return the relative error of what comes back; 0 where every bit does."""
    target.values.fill_(math.nan)
    method.encode()
    method.decode()
    if torch.equal(source.values.view(torch.int16), target.values.view(torch.int16)):
        return 0.0
    exact = source.values.float()
    relative = float((exact - target.values.float()).norm() / exact.norm())
    if method.exact or not relative < MOST_ERROR:
        raise CuveeError(f"{name} did not return its input: a relative error of {relative:.3g}")
    return relative


def run_rounds(calls: Mapping[K, Callable[[], object]], rounds: int) -> dict[K, list[float]]:
    """Seconds of each call, one sample a round; every second round goes through them backwards.

    What disturbs the machine for longer than a round then disturbs all of them alike. A call is repeated within its
    sample until that takes LEAST_SAMPLE seconds.
    """
    repeats = {}
    for key, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        repeats[key] = max(1, math.ceil(LEAST_SAMPLE / max(time.perf_counter() - began, 1e-7)))
    times: dict[K, list[float]] = {key: [] for key in calls}
    for number in range(rounds):
        for key in list(calls)[:: 1 if number % 2 == 0 else -1]:
            began = time.perf_counter()
            for _ in range(repeats[key]):
                calls[key]()
            times[key].append((time.perf_counter() - began) / repeats[key])
    return times


def show_cpu(report: Mapping[str, Any]) -> Shown:
    """Make a table for each cache and number of tokens."""
    machine = report["hardware"]
    line = machine_line(machine, *(f"{title} {machine[title.lower()]}" for title in ("Python", "torch", "numba")))
    columns = ["method ", "bits", "error", *_WAYS, f"/{MEMCPY}", "/zstd"]
    tables: list[ReportTable] = []
    for entry in report["comparison"]:
        rows = [
            [
                one["method"], format_bits(one["bits_per_value"]), format_number(one["error"], 2),
                *(format_number(one[f"{way}_gb_per_s"]["median"], 3) for way in _WAYS),
                *(format_number(one["decode_over"][name]["median"], 2) for name in (MEMCPY, ZSTD)),
            ]
            for one in entry["methods"]
        ]  # fmt: skip
        title = f"{entry['cache']}, {entry['tokens']} tokens, one core"
        tables.append(ReportTable(columns, rows, title, "" if tables else _NOTE))
    return Shown(line, tables)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--model", "-m", default=BUNDLED_MODEL, help="on this model's cache (default: books-3m)")
    parser.add_argument("--profile", type=Path, help="of the model: learn none")


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure on the model's cache and on the synthetic one."""
    rounds = QUICK_ROUNDS if given.quick else ROUNDS
    need_packages("this benchmark", "zstandard")
    found = []
    with torch_threads(1):
        for name in (given.model, SYNTHETIC):
            say(f"{name}: its cache, and a profile")
            cache = synthetic_cache() if name == SYNTHETIC else real_cache(name, given.profile)
            for tokens in TOKENS:
                say(f"{name}, {tokens} tokens")
                found.append(compare(cache, tokens, rounds))
    return {"rounds": rounds, "hardware": hardware("zstandard"), "comparison": found}


if __name__ == "__main__":
    about = "Compare speeds and sizes on one core of this CPU, in five minutes (--quick: one)."
    sys.exit(run_bench("cpu", about, _options, _measure, show_cpu))
