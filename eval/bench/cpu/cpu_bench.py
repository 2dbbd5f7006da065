"""cuvee on a CPU beside what a user would take instead: memcpy, FP8, zstd, lz4 and constriction, on the same bytes.

The caches are those that real models make of a text, and a synthetic one of Llama-3.1-8B's shape. Methods take turns in
rounds, and ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.calibration.corpus import BUNDLED_MODEL
from cuvee.calibration.real_model import REAL_MODEL, smollm2_at_hand
from cuvee.eval.bench.cpu.alternatives import ALTERNATIVES, MEMCPY, ZSTD_METHOD
from cuvee.eval.bench.cpu.caches import BenchCache, real_cache
from cuvee.eval.bench.cpu.cases import CPU_SHAPES, LARGE, fit_profile, make_chunk
from cuvee.eval.bench.cpu.comparison import COMPARED_TOKENS, check_threads, compare
from cuvee.eval.bench.frame import Shown, machine_line, timed_lines
from cuvee.eval.documents import ReportTable
from cuvee.eval.formatting import format_bits, format_number
from cuvee.eval.machine import hardware, torch_threads

__all__ = ["COMPARED_THREADS", "cpu_options", "measure_cpu", "run_cpu_bench", "show_cpu"]

COMPARED_THREADS = (1, 2)
ROUNDS, QUICK_ROUNDS = 15, 5
_PACKAGES = [method.package for method in ALTERNATIVES if method.package]
_WAYS = ("encode", "decode")
_NOTE = (
    "GB/s of bfloat16, by the number of threads, and how many times as fast the most threads are as the fewest. The "
    "last columns: speed of decoding over that of memcpy and of cuvee at each quality, with the fewest threads, "
    "within rounds. Small caches stay in the CPU's own, which makes memcpy faster than a large one would let it be. "
    "error: of the values, root of squared error over squared values; 0 means bit for bit. It is not what a model "
    "loses: cuvee's transform moves its error to where predictions do not depend on it. All restore into tensors that "
    "exist. In chunks of less than a million values cuvee uses one thread. Where other processes use a core, torch's "
    "threads wait for each other, and the columns of several threads mean little."
)


def cpu_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no smollm2")
    parser.add_argument(
        "--model", "-m", action="append", metavar="MODEL", default=[],
        help="compare on the cache of this model; repeatable (default: books-3m, and smollm2 if it is downloaded)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="append", type=Path, metavar="FILE", default=[],
        help="measure a --model with this profile, and learn none; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--threads", action="append", type=int, metavar="N", default=[], help="repeatable (default: 1 and 2)"
    )


def measure_cpu(arguments: argparse.Namespace, progress: Console) -> dict[str, Any]:
    """Run the benchmark with the options of a command line."""
    threads = tuple(sorted(set(arguments.threads or COMPARED_THREADS)))
    return run_cpu_bench(arguments.quick, arguments.model, threads, arguments.profile, progress)


def run_cpu_bench(
    quick: bool = False,
    models: Sequence[str] = (),
    threads: Sequence[int] = COMPARED_THREADS,
    profiles: Sequence[Path] = (),
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        quick: fit profiles to few caches, in fewer rounds, and leave out smollm2 unless it is named.
        models: whose caches to compare on, by the names `load_model` takes. Default: books-3m, and smollm2 if it has
            been downloaded. What is left out is named in the report.
        threads: rising.
        profiles: files with profiles for the models, for which none is learned then.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON.

    Raises:
        InputError: `threads` out of order or range; a model that no profile is for.
        FormatError, VersionError: a file that is not a profile of this version.
        CuveeError: a round trip changed something, so nothing is reported.
        ImportError, OSError: a model that was asked for cannot be loaded, see `load_model`; a profile cannot be read.
    """
    check_threads(threads)
    say, rounds = timed_lines(progress), QUICK_ROUNDS if quick else ROUNDS

    def of_model(model: str) -> BenchCache:
        say(f"{model}: its cache, and profiles")
        with torch_threads(1):
            return real_cache(model, quick, tuple(profiles))

    found = _compare_on_models(models, quick, threads, rounds, say, of_model)
    say(f"{LARGE}: a profile")
    layout = CPU_SHAPES[LARGE].layout()
    with torch_threads(1):
        profile = fit_profile(layout, "head")
    synthetic = BenchCache(LARGE, False, make_chunk(layout, max(COMPARED_TOKENS)), {"head": profile})
    found += _compare(synthetic, threads, rounds, say)
    return {"quick": quick, "hardware": hardware(*_PACKAGES), "comparison": found}


def _compare(
    cached: BenchCache, threads: Sequence[int], rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    out = []
    for tokens in COMPARED_TOKENS:
        say(f"{cached.name}, {tokens} tokens")
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


def show_cpu(report: Mapping[str, Any]) -> Shown:
    """Make the tables of a report: one for each cache and number of tokens, and lossless coding over zstd."""
    machine, entries = report["hardware"], report["comparison"]
    preface = machine_line(machine, *(f"{title} {machine[title.lower()]}" for title in ("Python", "torch", "numba")))
    tables = [_compared(entry) for entry in entries if "skipped" not in entry]
    tables.append(_over_zstd(entries))
    if left := [[entry["cache"], entry["skipped"]] for entry in entries if "skipped" in entry]:
        tables.append(ReportTable(["cache ", "why "], left, "Left out"))
    return Shown("The codec on a CPU", preface, [table for table in tables if table.rows])


def _compared(entry: Mapping[str, Any]) -> ReportTable:
    threads = entry["threads"]
    several = [f"{threads[-1]}/{threads[0]}"] if len(threads) > 1 else []
    columns = ["method ", "bits", "error"]
    for what in ("enc", "dec"):
        columns += [*(f"{what} {count}" for count in threads), *several]
    columns += [f"/{name}" for name in (MEMCPY, "lossless", "balanced")]
    made = f"profile {next(iter(entry['profiles'].values()))} by {', '.join(entry['profiles'])}"
    made += "" if entry["real"] else ", synthetic cache"
    others = entry["cores_used_by_others"]
    made += "" if others is None else f"; others used {others:.1f} cores"
    rows = [_method_row(method, entry["references"], len(columns)) for method in entry["methods"]]
    return ReportTable(columns, rows, f"{entry['cache']}, {entry['tokens']} tokens ({made})", _NOTE)


def _method_row(method: Mapping[str, Any], references: Sequence[str], columns: int) -> list[str]:
    if "skipped" in method:
        return [f"{method['method']}: skipped, {method['skipped']}", *[""] * (columns - 1)]
    row = [method["method"], format_bits(method["bits_per_value"]), format_number(method["relative_error"], 2)]
    for what in _WAYS:
        row += [_speed(entry[f"{what}_gb_per_s"]["median"]) for entry in method["by_threads"]]
        if method["most_over_fewest_threads"] is not None:
            row.append(f"{method['most_over_fewest_threads'][what]['median']:.2f}")
    return row + [format_number(method["by_threads"][0]["decode_over"][name]["median"], 2) for name in references]


def _speed(gb_per_s: float) -> str:
    return format_number(gb_per_s, 3 if gb_per_s >= 0.1 else 2)


def _over_zstd(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    rows = [
        [
            f"{entry['cache']}, {entry['tokens']} tokens",
            str(own["threads"]),
            *(f"{own[what]['median']:.2f} ({own[what]['p20']:.2f}-{own[what]['p80']:.2f})" for what in _WAYS),
            f"{own['bytes']:.3f}",
        ]
        for entry in entries
        for own in entry.get("lossless_over_zstd") or ()
    ]
    note = (
        "How many times as fast lossless coding is, within rounds: the median, and the 20th and 80th percentiles; and "
        "its bytes over those of zstd."
    )
    return ReportTable(["cache ", "threads", *_WAYS, "bytes"], rows, f"cuvee lossless / {ZSTD_METHOD}", note)
