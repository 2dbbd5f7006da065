"""One side of `turns.py`, run with the source of the cuvee that it measures: so it uses only what other commits have.

The first argument is what is asked, as JSON: `models`, `profiles`, `tokens` and `threads`, lists, and the number of
`turns`. The first line of the output describes the cases: `{"cases": [{"cache": …, "profile": …, "tokens": …,
"threads": …, "new": …, "bits_per_value": …, "bytes": …}, …]}`. Each line of the input is a turn, and is answered with
`[[seconds of encode, seconds of decode], …]`.

A case with the same chunk in all turns shows what the codec can do. Traffic is also made of what a process has not met
before: tokens whose predictions it must compute, shapes for which a library compiles kernels. So with a profile from a
file there is a case with the next chunk of a text in each turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.cpu.cases import CPU_SHAPES, LARGE, fit_profile, make_chunk

SECONDS, LEAST = 0.1, 3  # a call is repeated for so long, and at least so often, and its fastest run counts
MOST_ERROR = 0.5  # relative; of a lossy quality


def caches(asked: dict[str, Any]) -> Iterator[tuple[str, KVChunk, dict[str, Profile]]]:
    """Yield each cache: its name, a chunk, and the profiles that serve it, by name."""
    largest = max(asked["tokens"])
    chunk = make_chunk(CPU_SHAPES[LARGE].layout(), largest)
    yield LARGE, chunk, {"head": fit_profile(chunk.layout, "head")}
    for model in asked["models"]:
        from cuvee.eval.bench.cpu.caches import real_cache  # needs transformers, which takes seconds to import

        cache = real_cache(model, True)
        profiles = {f"fitted by {group}": profile for group, profile in cache.profiles.items()}
        for path in asked["profiles"]:
            profile = Profile.load(Path(path))
            if replace(profile.layout, dtype=cache.chunk.layout.dtype) == cache.chunk.layout:
                profiles[Path(path).stem] = profile
        yield model, cache.chunk, profiles


class SameChunk:
    """Codes one chunk, again and again."""

    def __init__(self, codec: Codec, chunk: KVChunk) -> None:
        self.blob = codec.encode(chunk)
        check(codec, chunk, self.blob)
        out = [torch.empty_like(unit) for unit in chunk.keys], [torch.empty_like(unit) for unit in chunk.values]
        self._calls = partial(codec.encode, chunk), partial(codec.decode, self.blob, out=out)

    def __call__(self) -> list[float]:
        """Return the seconds of the fastest encode and the fastest decode of several."""
        return [fastest(call) for call in self._calls]


class NewChunks:
    """Codes the next chunk of a text each time.

    Args:
        make_codec: makes a codec that has met no tokens. What one encodes, another one decodes.
        chunks: the first is coded without being measured.
    """

    def __init__(self, make_codec: Callable[[], Codec], chunks: Iterator[KVChunk]) -> None:
        self._encoder, self._decoder, self._chunks = make_codec(), make_codec(), chunks
        first = next(chunks)
        self.blob = self._encoder.encode(first)
        check(self._decoder, first, self.blob)

    def __call__(self) -> list[float]:
        """Return the seconds of an encode and of a decode."""
        chunk = next(self._chunks)
        began = time.perf_counter()
        blob = self._encoder.encode(chunk)
        encoded = time.perf_counter()
        self._decoder.decode(blob)
        return [encoded - began, time.perf_counter() - encoded]


def cases(asked: dict[str, Any]) -> Iterator[tuple[dict[str, Any], KVChunk, SameChunk | NewChunks]]:
    """Yield what is measured: a description, a chunk, and what codes it and its like."""
    for name, chunk, profiles in caches(asked):
        for threads in asked["threads"]:
            options: dict[str, Any] = {"backend": "numba", "threads": threads}
            codecs = {"lossless": Codec.without_profile(chunk.layout, **options)}
            codecs |= {of: Codec(profile, "balanced", **options) for of, profile in profiles.items()}
            for of, codec in codecs.items():
                for tokens in asked["tokens"]:
                    case = {"cache": name, "profile": of, "tokens": tokens, "threads": threads, "new": False}
                    own = chunk.slice(0, tokens)
                    yield case, own, SameChunk(codec, own)
    for model in asked["models"]:
        yield from cases_of_text(asked, model)


def cases_of_text(asked: dict[str, Any], model: str) -> Iterator[tuple[dict[str, Any], KVChunk, NewChunks]]:
    """Yield the cases with new chunks: for each profile from a file, chunks of the most tokens."""
    from cuvee.eval.bench.cpu.caches import model_chunk

    tokens = max(asked["tokens"])
    text = model_chunk(model, tokens * (asked["turns"] + 1)) if asked["profiles"] else None
    for path in map(Path, asked["profiles"]):
        if text is None or replace(Profile.load(path).layout, dtype=text.layout.dtype) != text.layout:
            continue
        for threads in asked["threads"]:
            chunks = (text.slice(first, first + tokens) for first in range(0, text.tokens, tokens))

            def make_codec(path: Path = path, threads: int = threads) -> Codec:
                return Codec(Profile.load(path), "balanced", backend="numba", threads=threads)

            case = {"cache": model, "profile": path.stem, "tokens": tokens, "threads": threads, "new": True}
            yield case, text.slice(0, tokens), NewChunks(make_codec, chunks)


def check(codec: Codec, chunk: KVChunk, blob: bytes) -> None:
    """Refuse to time a codec that does not restore its input."""
    back = codec.decode(blob, chunk.start)
    for mine, own in zip(back.keys + back.values, chunk.keys + chunk.values, strict=True):
        if codec.lossless and not torch.equal(mine, own):
            raise SystemExit("a lossless codec did not restore its input")
        error = float((mine.float() - own.float()).norm() / own.float().norm())
        if not error < MOST_ERROR:
            raise SystemExit(f"a codec restored its input with a relative error of {error:.2f}")


def fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several runs."""
    runs: list[float] = []
    while len(runs) < LEAST or sum(runs) < SECONDS:
        began = time.perf_counter()
        call()
        runs.append(time.perf_counter() - began)
    return min(runs)


def main() -> None:
    """Measure until the input ends."""
    # Whatever a library prints must not come between the lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):  # one core may be a third slower than the next: both sides get the same
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-max(asked["threads"]) :])
    work: list[SameChunk | NewChunks] = []
    described = []
    for case, chunk, coding in cases(asked):
        work.append(coding)
        values = chunk.tokens * chunk.layout.values_per_token
        described.append({**case, "bits_per_value": 8 * len(coding.blob) / values, "bytes": chunk.nbytes})
    print(json.dumps({"cases": described}), file=answers)
    for _ in sys.stdin:
        print(json.dumps([measure() for measure in work]), file=answers)


if __name__ == "__main__":
    main()
