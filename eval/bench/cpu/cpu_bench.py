"""`cuvee bench cpu`: measure speed and memory of every stage, of whole encodes and decodes, their scaling, and
alternatives on the same bytes.

    stages      one core, one 256-token chunk: the time and the work of each stage beside the limits of that core
    coders      rANS on one core beside constriction's AnsCoder and a vectorized decoder in torch: the same symbols,
                the same quantized model
    whole       Codec.encode and Codec.decode, with one thread and with all
    scaling     over tokens and over layers
    comparison  the codec beside memcpy, FP8, zstd, lz4 and constriction, in rounds: on the caches of real models, and
                on a synthetic one of Llama-3.1-8B's shape
    first_use   a fresh interpreter until its first decoded chunk
    memory      the rise of a fresh process's peak, over the size of the raw chunk

Nothing is timed before it is proved right. Times are medians, with the 20th and 80th percentiles; throughput counts
the uncompressed bfloat16 cache, and 1 GB is 10**9 bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.codec.data.corpus import BUNDLED_MODEL
from cuvee.codec.data.real_model import REAL_MODEL, smollm2_at_hand
from cuvee.codec.errors import InputError
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.cpu.alternatives import ALTERNATIVES
from cuvee.eval.bench.cpu.caches import BenchCache, real_cache
from cuvee.eval.bench.cpu.cases import BACKEND, CPU_SHAPES, LARGE, SMALL, cut_layers, fit_profile, make_chunk
from cuvee.eval.bench.cpu.coders import compare_coders, import_constriction
from cuvee.eval.bench.cpu.comparison import COMPARED_TOKENS, check_threads, compare
from cuvee.eval.bench.cpu.first_use import measure_first_use
from cuvee.eval.bench.cpu.memory import MEMORY_TOKENS, measure_memory
from cuvee.eval.bench.cpu.stages import measure_stages
from cuvee.eval.bench.cpu.whole import measure_whole
from cuvee.eval.machine import hardware, torch_threads
from cuvee.eval.progress import timed_lines
from cuvee.eval.timing import Effort

__all__ = ["COMPARED_THREADS", "PARTS", "ROUNDS", "RUNS", "RUN_SECONDS", "run_cpu_bench"]

RUN_SECONDS = 0.25  # a call is repeated for this long …
RUNS = (5, 40)  # … but at least and at most this often
PARTS = ("coders", "stages", "whole", "scaling", "comparison", "first_use", "memory")
STAGE_TOKENS = 256
COMPARED_THREADS = (1, 2)
ROUNDS, QUICK_ROUNDS = 15, 5  # of the comparison
_COMPARED_PACKAGES = [method.package for method in ALTERNATIVES if method.package]
FIRST_USES, QUICK_FIRST_USES = 5, 2  # processes


def run_cpu_bench(
    quick: bool = False,
    models: Sequence[str] = (),
    threads: Sequence[int] = COMPARED_THREADS,
    parts: Sequence[str] = (),
    profiles: Sequence[Path] = (),
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        quick: measure fewer cases, and repeat them less.
        models: whose caches to compare on, and to time stages on, by the names `load_model` takes. Default: compare on
            books-3m, and on smollm2 if it has been downloaded, but not with `quick`, and time stages on synthetic
            caches. What is left out is named in the report.
        threads: of the comparison, rising.
        parts: what to measure, among `PARTS`. Default: everything.
        profiles: files with profiles for the models, for which none is learned then.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON, with a key for each part.

    Raises:
        InputError: constriction is not installed; `threads` out of order or range; a part that does not exist; a model
            that no profile is for.
        FormatError, VersionError: a file that is not a profile of this version.
        CuveeError: a round trip changed something, so nothing is reported.
        ImportError, OSError: a model that was asked for cannot be loaded, see `load_model`; a profile cannot be read.
    """
    for part in parts:
        if part not in PARTS:
            raise InputError(f"parts: must be among {', '.join(PARTS)}, got {part!r}")
    wanted = tuple(parts) or PARTS
    if "coders" in wanted:
        import_constriction()  # fail now if it is missing
    check_threads(threads)
    effort = Effort(0.05, 3, 10) if quick else Effort(RUN_SECONDS, *RUNS)
    began, say = time.perf_counter(), timed_lines(progress)
    cases: list[tuple[str, str]] = [(SMALL, "layer"), (LARGE, "head")]
    if not quick:
        cases.insert(1, (SMALL, "all"))

    @cache
    def fitted(shape: str, group: str) -> Profile:
        say(f"a profile for {shape}, group {group}")
        with torch_threads(1):
            return fit_profile(CPU_SHAPES[shape].layout(), group)

    @cache
    def of_model(model: str) -> BenchCache:
        say(f"{model}: its cache, and profiles")
        with torch_threads(1):
            return real_cache(model, quick, tuple(profiles))

    report: dict[str, Any] = {"quick": quick, "hardware": hardware(*_COMPARED_PACKAGES), "backend": BACKEND}
    if "coders" in wanted:
        say("entropy coders")
        report["coders"] = compare_coders(effort, 2048 if quick else 16384)
    if "stages" in wanted:
        chosen = [of_model(model) for model in models] or [
            BenchCache(
                shape, False, make_chunk(CPU_SHAPES[shape].layout(), STAGE_TOKENS), {group: fitted(shape, group)}
            )
            for shape, group in cases
        ]
        report["stages"] = _stages(effort, chosen, say)
    if "whole" in wanted:
        report["whole"] = []
        for shape, group in cases:
            for tokens in (64, 256) if quick else (64, 256, 1024):
                profile = fitted(shape, group)
                say(f"whole: {shape}, group {group}, {tokens} tokens")
                for count in sorted({1, os.cpu_count() or 1}):
                    entry = {"shape": shape, "group": group, **measure_whole(effort, profile, tokens, count)}
                    report["whole"].append(entry)
    if "scaling" in wanted:
        say("scaling")
        report["scaling"] = _scaling(effort, fitted(SMALL, "layer"), quick)
    if "comparison" in wanted:
        rounds = QUICK_ROUNDS if quick else ROUNDS
        report["comparison"] = _compare_on_models(models, quick, threads, rounds, say, of_model)
        large = make_chunk(CPU_SHAPES[LARGE].layout(), max(COMPARED_TOKENS))
        synthetic = BenchCache(LARGE, False, large, {"head": fitted(LARGE, "head")})
        report["comparison"] += _compare(synthetic, threads, rounds, say)
    if "first_use" in wanted:
        small = fitted(SMALL, "layer")
        say("first use")
        report["first_use"] = measure_first_use(small, 256, QUICK_FIRST_USES if quick else FIRST_USES)
    if "memory" in wanted:
        say("memory")
        tokens = 512 if quick else MEMORY_TOKENS
        report["memory"] = [
            {"shape": shape, "group": group, **measure_memory(fitted(shape, group), tokens)}
            for shape, group in cases
            if not quick or shape == LARGE
        ]
    report["seconds"] = time.perf_counter() - began
    return report


def _stages(effort: Effort, caches: Sequence[BenchCache], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time the stages on each cache: with its profiles, and of a model, or of the last shape, without one."""
    out = []
    for cached in caches:
        chunk = cached.chunk.slice(0, STAGE_TOKENS)
        work = [(name, profile, "balanced") for name, profile in cached.profiles.items()]
        if cached.real or cached is caches[-1]:
            work.append(("lossless", Profile.unlearned(chunk.layout), "lossless"))
        for name, profile, quality in work:
            say(f"stages: {cached.name}, {name}")
            out.append({"cache": cached.name, "profile": name, **measure_stages(effort, profile, quality, chunk)})
    return out


def _scaling(effort: Effort, small: Profile, quick: bool) -> dict[str, Any]:
    lengths = (16, 256, 2048) if quick else (16, 64, 256, 1024, 4096, 16384)
    return {
        "tokens": {
            "shape": SMALL,
            "group": "layer",
            "points": [measure_whole(effort, small, tokens, 1) for tokens in lengths],
        },
        "layers": {
            "shape": f"{CPU_SHAPES[SMALL].heads} x {CPU_SHAPES[SMALL].size}",
            "group": "layer",
            "points": [
                {"layers": layers, **measure_whole(effort, cut_layers(small, layers), 256, 1)}
                for layers in ((1, 6) if quick else (1, 2, 4, 6))
            ],
        },
    }


def _compare(
    cached: BenchCache, threads: Sequence[int], rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    out = []
    for tokens in COMPARED_TOKENS:
        say(f"comparison: {cached.name}, {tokens} tokens")
        out.append(compare(cached, tokens, threads, rounds))
    return out


def _compare_on_models(
    models: Sequence[str],
    quick: bool,
    threads: Sequence[int],
    rounds: int,
    say: Callable[[str], None],
    of_model: Callable[[str], BenchCache],
) -> list[dict[str, Any]]:
    """Compare on each model's cache. A default model that is not downloaded is reported as skipped."""
    out: list[dict[str, Any]] = []
    for model in models or (BUNDLED_MODEL, REAL_MODEL):
        why = None
        if not models and model == REAL_MODEL:
            if quick:
                why = f"left out by --quick; --model {REAL_MODEL} measures it"
            elif not smollm2_at_hand():
                why = f"not downloaded; --model {REAL_MODEL} does that"
        if why is None:
            try:
                cached = of_model(model)
            except ImportError as error:
                if models:
                    raise
                why = str(error)
        if why is not None:
            out.append({"cache": model, "skipped": why})
            continue
        out += _compare(cached, threads, rounds, say)
    return out
