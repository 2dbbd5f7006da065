"""One side of `turns.py`, run with the source of the cuvee that it measures: so it uses only what other commits have.

The first argument is what is asked, as JSON: `models`, `profiles`, `tokens` and `threads`, lists all. The first line of
the output describes the cases: `{"cases": [{"cache": …, "profile": …, "tokens": …, "threads": …, "bits_per_value": …,
"bytes": …}, …]}`. Each line of the input is a turn, and is answered with `[[seconds of encode, seconds of decode], …]`.
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


def cases(asked: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Codec, KVChunk]]:
    """Yield what is measured: a description, a codec and a chunk."""
    for name, chunk, profiles in caches(asked):
        for threads in asked["threads"]:
            options: dict[str, Any] = {"backend": "numba", "threads": threads}
            codecs = {"lossless": Codec.without_profile(chunk.layout, "lossless", **options)}
            codecs["generic"] = Codec.without_profile(chunk.layout, "balanced", **options)
            codecs |= {of: Codec(profile, "balanced", **options) for of, profile in profiles.items()}
            for of, codec in codecs.items():
                for tokens in asked["tokens"]:
                    case = {"cache": name, "profile": of, "tokens": tokens, "threads": threads}
                    yield case, codec, chunk.slice(0, tokens)


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
    work: list[tuple[Callable[[], object], Callable[[], object]]] = []
    described = []
    for case, codec, chunk in cases(asked):
        blob = codec.encode(chunk)
        check(codec, chunk, blob)
        out = [torch.empty_like(unit) for unit in chunk.keys], [torch.empty_like(unit) for unit in chunk.values]
        work.append((partial(codec.encode, chunk), partial(codec.decode, blob, out=out)))
        values = chunk.tokens * chunk.layout.values_per_token
        described.append({**case, "bits_per_value": 8 * len(blob) / values, "bytes": chunk.nbytes})
    print(json.dumps({"cases": described}), file=answers)
    for _ in sys.stdin:
        print(json.dumps([[fastest(call) for call in calls] for calls in work]), file=answers)


if __name__ == "__main__":
    main()
