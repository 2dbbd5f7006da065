"""`cuvee bench pages`: what it costs to move an engine's pages in and out of a store, by page size and arrangement.

The same pages of a real cache lie in memory as SGLang's host pool has them. Methods take turns: a plain copy, zstd over
byte planes, and `PageStore`, with pages that share blobs of 256 tokens and with a blob per page; in one call, and in a
call per blob, as by an engine whose tasks hold one chunk. One thread, RAM behind everything. Nobody tells the store
which tokens the pages hold: it recognizes them, which is part of the time. Nothing is reported unless the pages came
back: exactly, or as the codec restores them.

What recognition finds, and how fast, is measured apart, for chunks of each page size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS, PRESET_KL
from cuvee.codec.profiles.recognition import Recognizer
from cuvee.eval.bench.cpu.caches import model_chunk
from cuvee.eval.bench.pages.page_methods import (
    ARRANGEMENTS,
    CopiedPages,
    HostPages,
    PageMethod,
    StoredPages,
    zstd_pages,
)
from cuvee.eval.machine import hardware, torch_threads
from cuvee.eval.progress import timed_lines
from cuvee.eval.timing import Timing

__all__ = ["COPY", "PAGE_TOKENS", "ZSTD", "run_pages_bench"]

PAGE_TOKENS = (16, 64, 256)
CHUNK_TOKENS = 256  # that share a blob
TOKENS, QUICK_TOKENS = 1024, 512
ROUNDS, QUICK_ROUNDS = 9, 3
COPY, ZSTD = "copy", "zstd -1, byte planes"
_ALONE = ", a blob per page"
_SEPARATE = ", a call per blob"
SEPARATE_QUALITY = "balanced"  # whose pages are also saved in a call per blob


def run_pages_bench(
    model: str,
    profile: Path | None = None,
    page_tokens: Sequence[int] = PAGE_TOKENS,
    quick: bool = False,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: whose cache, by the names `load_model` takes.
        profile: of this model, for lossy qualities; None: lossless alone.
        page_tokens: sizes of pages, each of which divides 256 or is a multiple of it.
        quick: half as many tokens, and fewer turns.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON: `cases`, one per page size and arrangement, each with `methods`; `recognition`,
        one entry per page size, none without a profile.

    Raises:
        InputError: a page size out of range; a profile of another model.
        CuveeError: pages did not come back as they should.
        ImportError, OSError: the model cannot be loaded, or the profile cannot be read.
    """
    tokens = QUICK_TOKENS if quick else TOKENS
    for size in page_tokens:
        if size < 1 or tokens % size:
            raise InputError(f"page_tokens: must divide {tokens}, got {size}")
    say = timed_lines(progress)
    say(f"{model}: its cache")
    with torch_threads(1):
        told = model_chunk(model, tokens)
        chunk = KVChunk(told.keys, told.values, told.layout, told.start)
        given = None if profile is None else Profile.load(profile)
        if given is not None and replace(given.layout, dtype="bfloat16") != chunk.layout:
            raise InputError(f"profile: must be one for {model}, got {profile}, a profile of another model")
        cases = []
        for size in page_tokens:
            for arrangement in ARRANGEMENTS:
                say(f"pages of {size} tokens, {arrangement}")
                cases.append(_case(chunk, size, arrangement, given, QUICK_ROUNDS if quick else ROUNDS))
        say("what is recognized")
        recognition = [] if given is None else [_recognition(given, told, size) for size in page_tokens]
    return {
        "hardware": hardware("zstandard"), "quick": quick, "model": model,
        "profile": None if profile is None else profile.name, "tokens": tokens, "cases": cases,
        "recognition": recognition,
    }  # fmt: skip


def _case(chunk: KVChunk, page_tokens: int, arrangement: str, profile: Profile | None, rounds: int) -> dict[str, Any]:
    host = HostPages(chunk, page_tokens, arrangement)
    methods: dict[str, PageMethod] = {COPY: CopiedPages(host), ZSTD: zstd_pages(host)}
    opened: list[StoredPages] = []
    codecs = [Codec(Profile.unlearned(chunk.layout), LOSSLESS, threads=1)]
    if profile is not None:
        codecs += [Codec(profile, quality, threads=1, dtype="bfloat16") for quality in PRESET_KL]
    expected: dict[str, KVChunk] = {}
    for codec, quality in zip(codecs, (LOSSLESS, *PRESET_KL), strict=False):
        for run_pages in dict.fromkeys((max(CHUNK_TOKENS // page_tokens, 1), 1)):
            name = f"cuvee {quality}" + (_ALONE if run_pages == 1 and page_tokens < CHUNK_TOKENS else "")
            methods[name] = method = StoredPages.open(host, codec, page_tokens, run_pages, chunk.start)
            opened.append(method)
            expected[name] = _restored(codec, chunk, page_tokens * run_pages)
        if quality == SEPARATE_QUALITY:
            run_pages = max(CHUNK_TOKENS // page_tokens, 1)
            name = f"cuvee {quality}{_SEPARATE}"
            methods[name] = method = StoredPages.open(host, codec, page_tokens, run_pages, chunk.start, run_pages)
            opened.append(method)
            expected[name] = _restored(codec, chunk, page_tokens * run_pages, follow=False)
    try:
        return {
            "page_tokens": page_tokens, "arrangement": arrangement, "pages": len(host.pages),
            "methods": _measure(host, chunk, methods, expected, rounds),
        }  # fmt: skip
    finally:
        for each in opened:
            each.pages.close()


def _measure(
    host: HostPages,
    chunk: KVChunk,
    methods: Mapping[str, PageMethod],
    expected: Mapping[str, KVChunk],
    rounds: int,
) -> list[dict[str, Any]]:
    """Time the methods in turns, after a turn that is not counted and in which each must give back its pages."""
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in methods}
    for number in range(-1, rounds):
        for name, method in methods.items() if number % 2 else reversed(list(methods.items())):
            host.cache.write(chunk.keys, chunk.values, host.slots)
            method.clear()
            began = time.perf_counter()
            method.save()
            saved = time.perf_counter()
            host.erase()
            loading = time.perf_counter()
            method.load()
            loaded = time.perf_counter()
            if number < 0:
                _check(name, host.cache.read(host.slots, chunk.start), expected.get(name, chunk))
            else:
                seconds[name][0].append(saved - began)
                seconds[name][1].append(loaded - loading)
    entries = []
    for name, (saving, loading_) in seconds.items():
        entry: dict[str, Any] = {
            "method": name, "bits_per_value": 8 * methods[name].stored_bytes() / (chunk.nbytes / 2),
            "save_mb_per_s": Timing.of(saving).per_second(chunk.nbytes / 1e6),
            "load_mb_per_s": Timing.of(loading_).per_second(chunk.nbytes / 1e6),
        }  # fmt: skip
        for way, own, others in (("save", saving, seconds[ZSTD][0]), ("load", loading_, seconds[ZSTD][1])):
            ratios = [other / mine for other, mine in zip(others, own, strict=True)]
            entry[f"{way}_over_zstd"] = Timing.of(ratios).to_dict()
        entries.append(entry)
    return entries


def _recognition(profile: Profile, chunk: KVChunk, tokens: int) -> dict[str, Any]:
    """Return how many ids and positions are found in chunks of so many tokens, alone, and how fast."""
    recognizer, cache = Recognizer(profile), PagedCache.of_chunk(chunk)
    parts = torch.arange(chunk.tokens).split(tokens)
    recognizer.recognize(cache, parts[0])  # the first call takes longer
    seconds, positions, ids = [], 0, 0
    for part in parts:
        began = time.perf_counter()
        found = recognizer.recognize(cache, part)
        seconds.append(time.perf_counter() - began)
        positions += found.start == chunk.start + int(part[0])
        if found.token_ids is not None and chunk.token_ids is not None:
            ids += int((found.token_ids == chunk.token_ids[part[0] : part[-1] + 1]).sum())
    return {
        "tokens": tokens, "chunks": len(parts), "positions": positions / len(parts), "ids": ids / chunk.tokens,
        "mb_per_s": Timing.of(seconds).per_second(chunk.nbytes / len(parts) / 1e6),
    }  # fmt: skip


def _restored(codec: Codec, chunk: KVChunk, tokens: int, follow: bool = True) -> KVChunk:
    """Return what the codec restores of a chunk in blobs of so many tokens, whose ids it recognizes.

    Args:
        codec: codes the blobs.
        chunk: what is coded.
        tokens: per blob.
        follow: whether each blob is coded as one that others follow.
    """
    restored = []
    for first in range(0, chunk.tokens, tokens):
        part, ids = chunk.slice(first, min(first + tokens, chunk.tokens)), None
        if not follow:
            part = KVChunk(part.keys, part.values, part.layout, part.start)
        if codec.recognizer is not None:
            found = codec.recognizer.recognize(PagedCache.of_chunk(part), torch.arange(part.tokens), part.start)
            ids = found.token_ids
        restored.append(codec.decode(codec.encode(part, tokens=ids)))
    return KVChunk.concat(restored)


def _check(name: str, found: KVChunk, wanted: KVChunk) -> None:
    if not all(map(torch.equal, found.keys + found.values, wanted.keys + wanted.values)):
        raise CuveeError(f"{name}: did not give back its pages")
