"""`cuvee bench refinements`: what a base and refinements cost beside blobs of one quality, in bytes, KL and time.

A held-out text is read, its caches are encoded in parts, and each prefix of the parts is decoded: its KL against the
exact cache, and all of its bytes. Blobs of one quality are coded at three steps around the one that should have the
same error, and their size at exactly the same KL is interpolated. Decoding is timed in turns, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.data.bundled import EVALUATION_TEXTS
from cuvee.codec.data.corpus import load_model, read_corpus, spread_sequences
from cuvee.codec.entropy.family import OCTAVE, step_value
from cuvee.codec.entropy.nested import MAX_REFINEMENTS
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.divergence import compare, stderr
from cuvee.codec.models.forward import frozen, prefill, score
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.machine import hardware, torch_threads
from cuvee.eval.progress import timed_lines
from cuvee.eval.timing import Timing

__all__ = ["run_refinements_bench"]

LENGTH, CACHED = 512, 384
CHUNK_TOKENS = 256
SEQUENCES, QUICK_SEQUENCES = 16, 2
ROUNDS, QUICK_ROUNDS = 15, 3
BESIDE = (-12, 0, 12)  # steps of blobs of one quality, beside the one of the same error
Coder = Callable[[KVChunk], tuple[KVChunk, int]]


def run_refinements_bench(
    model: str,
    profile: Path,
    quality: str = "high",
    quick: bool = False,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: whose caches, by the names `load_model` takes.
        profile: of this model.
        quality: of all parts together.
        quick: fewer sequences and turns.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON: `prefixes`, one per number of parts, with the KL, bits per value, those of blobs
        of one quality at the same KL, and the time of decoding over theirs; `encode_over_single`, likewise for the time
        of encoding all parts.

    Raises:
        InputError: a profile of another model; a quality that has no parts.
        ImportError, OSError: the model cannot be loaded, or the profile cannot be read.
    """
    say = timed_lines(progress)
    say(f"{model}: its caches")
    lm = load_model(model)
    given = Profile.load(profile)
    layout = KVLayout.of(lm)
    if replace(given.layout, dtype=layout.dtype) != layout:
        raise InputError(f"profile: must be one for {model}, got {profile}, a profile of another model")
    nested = Codec(given, quality, threads=1, refinements=MAX_REFINEMENTS)
    singles = [
        [_single(given, nested.step_index - OCTAVE * known + int(given.nested.offsets[known]) + at) for at in BESIDE]
        for known in range(MAX_REFINEMENTS + 1)
    ]
    corpora = [read_corpus(text, model) for text in EVALUATION_TEXTS]
    text = spread_sequences(corpora, LENGTH, QUICK_SEQUENCES if quick else SEQUENCES)
    coders: list[Coder] = [_in_parts(nested, known) for known in range(MAX_REFINEMENTS + 1)]
    coders += [_whole(codec) for own in singles for codec in own]
    with torch_threads(1):
        kl, bits, chunk = _measure(lm, layout, text, coders, say)
        say("decoding in turns")
        rounds = QUICK_ROUNDS if quick else ROUNDS
        prefixes = []
        for known in range(MAX_REFINEMENTS + 1):
            first = len(singles) + known * len(BESIDE)
            around = slice(first, first + len(BESIDE))
            own_kl = float(np.mean(kl[known]))
            beside = [(float(np.mean(values)), size) for values, size in zip(kl[around], bits[around], strict=True)]
            prefixes.append(
                {
                    "parts": known + 1,
                    "step_index": nested.step_index - OCTAVE * known,
                    "kl": own_kl,
                    "kl_stderr": stderr(kl[known]),
                    "bits_per_value": bits[known],
                    "single_bits_per_value": _at_kl(beside, own_kl),
                    "singles": [{"kl": each, "bits_per_value": size} for each, size in beside],
                    "decode_over_single": _decoding(nested, singles[known][1], chunk, known, rounds).to_dict(),
                }
            )
        say("encoding in turns")
        encoding = _encoding(nested, singles[-1][1], chunk, rounds).to_dict()
    return {
        "hardware": hardware(), "quick": quick, "model": model, "profile": profile.name, "quality": quality,
        "sequences": len(text), "prefixes": prefixes, "encode_over_single": encoding,
    }  # fmt: skip


def _single(profile: Profile, step_index: int) -> Codec:
    return Codec(profile, step=step_value(step_index), threads=1)


def _pieces(chunk: KVChunk) -> list[KVChunk]:
    return [chunk.slice(at, min(at + CHUNK_TOKENS, chunk.tokens)) for at in range(0, chunk.tokens, CHUNK_TOKENS)]


def _in_parts(codec: Codec, known: int) -> Coder:
    def coded(chunk: KVChunk) -> tuple[KVChunk, int]:
        back, size = [], 0
        for piece in _pieces(chunk):
            parts = codec.encode_parts(piece)[: 1 + known]
            back.append(codec.decode(parts[0], refinements=parts[1:]))
            size += sum(map(len, parts))
        return KVChunk.concat(back), size

    return coded


def _whole(codec: Codec) -> Coder:
    def coded(chunk: KVChunk) -> tuple[KVChunk, int]:
        blobs = [codec.encode(piece) for piece in _pieces(chunk)]
        return KVChunk.concat([codec.decode(blob) for blob in blobs]), sum(map(len, blobs))

    return coded


def _measure(
    lm: Any, layout: KVLayout, text: torch.Tensor, coders: Sequence[Coder], say: Callable[[str], None]
) -> tuple[list[list[float]], list[float], KVChunk]:
    """Return for each coder the KL of each sequence, and its bits per value; and one of the chunks."""
    kl: list[list[float]] = [[] for _ in coders]
    sizes, values = [0] * len(coders), 0
    with frozen(lm), torch.no_grad():
        for number, row in enumerate(text):
            say(f"sequence {number + 1} of {len(text)}")
            (chunk,), rest = prefill(lm, row[None, :CACHED], layout), row[None, CACHED:]
            exact = score(lm, [chunk], rest)
            values += chunk.tokens * layout.values_per_token
            for own, coder in enumerate(coders):
                back, size = coder(chunk)
                found, _, _ = compare(exact, score(lm, [back], rest), rest[:, 1:])
                kl[own] += found
                sizes[own] += size
    return kl, [8 * size / values for size in sizes], chunk


def _at_kl(points: Sequence[tuple[float, float]], kl: float) -> float:
    """Return the bits per value at a KL, read off a line through points of KL and bits, both logarithmic."""
    x, y = np.log([point[0] for point in points]), np.log([point[1] for point in points])
    slope, at_zero = np.polyfit(x, y, 1)
    return float(np.exp(at_zero + slope * np.log(kl)))


def _ratio(first: Callable[[], object], second: Callable[[], object], rounds: int) -> Timing:
    """Time two calls in turns, after one of each that is not counted, and return how much longer the first takes."""
    ratios = []
    for number in range(-1, rounds):
        seconds = []
        for call in (first, second):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        if number >= 0:
            ratios.append(seconds[0] / seconds[1])
    return Timing.of(ratios)


def _decoding(nested: Codec, single: Codec, chunk: KVChunk, known: int, rounds: int) -> Timing:
    parts = nested.encode_parts(chunk)
    opened, other = nested.open(parts[0], refinements=parts[1 : 1 + known]), single.open(single.encode(chunk))
    return _ratio(lambda: nested.decode(opened), lambda: single.decode(other), rounds)


def _encoding(nested: Codec, single: Codec, chunk: KVChunk, rounds: int) -> Timing:
    return _ratio(lambda: nested.encode_parts(chunk), lambda: single.encode(chunk), rounds)
