"""`cuvee bench cpu`: speed and memory of every stage alone, of whole encodes and decodes, and how both scale.

    stages      one core, one 256-token chunk: transform, quantize and pack, rANS, container
    coders      rANS on one core beside constriction's AnsCoder and a vectorized decoder in torch: the same symbols,
                the same quantized model
    whole       Codec.encode and Codec.decode, with one thread and with all
    scaling     over tokens and over layers
    memory      the peak of a fresh process above what it held before, over the size of the raw chunk

Nothing is timed before it is proved right. Times are medians, with the 20th and 80th percentiles; throughput counts
the uncompressed bfloat16 cache, and 1 GB is 10**9 bytes.
"""

from __future__ import annotations

import os
import time
from typing import Any

from rich.console import Console

from cuvee.eval.bench.cpu.cases import BACKEND, CPU_SHAPES, LARGE, SMALL, cut_layers, fit_profile
from cuvee.eval.bench.cpu.coders import compare_coders, import_constriction
from cuvee.eval.bench.cpu.memory import MEMORY_TOKENS, measure_memory
from cuvee.eval.bench.cpu.stages import measure_stages
from cuvee.eval.bench.cpu.whole import measure_whole
from cuvee.eval.machine import hardware, torch_threads
from cuvee.eval.progress import timed_lines
from cuvee.eval.timing import Effort

__all__ = ["RUNS", "RUN_SECONDS", "run_cpu_bench"]

RUN_SECONDS = 0.25  # a call is repeated for this long …
RUNS = (5, 40)  # … but at least and at most this often


def run_cpu_bench(quick: bool = False, progress: Console | None = None) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        quick: measure fewer cases, and repeat them less.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON.

    Raises:
        InputError: constriction is not installed.
        CuveeError: something did not come back as it went in, so nothing is reported.
    """
    import_constriction()  # if it is missing, say so at once
    effort = Effort(0.05, 3, 10) if quick else Effort(RUN_SECONDS, *RUNS)
    began, say = time.perf_counter(), timed_lines(progress)
    cases: list[tuple[str, str]] = [(SMALL, "layer"), (LARGE, "head")]
    if not quick:
        cases.insert(1, (SMALL, "all"))
    profiles = {}
    for shape, group in cases:
        say(f"a profile for {shape}, group {group}")
        with torch_threads(1):
            profiles[shape, group] = fit_profile(CPU_SHAPES[shape].layout(), group)
    report: dict[str, Any] = {"quick": quick, "hardware": hardware(), "backend": BACKEND}

    say("entropy coders")
    report["coders"] = compare_coders(effort, 2048 if quick else 16384)
    report["stages"], report["whole"] = [], []
    for (shape, group), profile in profiles.items():
        say(f"stages: {shape}, group {group}")
        with torch_threads(1):
            report["stages"].append({"shape": shape, "group": group, **measure_stages(effort, profile, 256)})
        for tokens in (64, 256) if quick else (64, 256, 1024):
            say(f"whole: {shape}, group {group}, {tokens} tokens")
            for threads in sorted({1, os.cpu_count() or 1}):
                entry = {"shape": shape, "group": group, **measure_whole(effort, profile, tokens, threads)}
                report["whole"].append(entry)
    say("scaling")
    small = profiles[SMALL, "layer"]
    lengths = (16, 256, 2048) if quick else (16, 64, 256, 1024, 4096, 16384)
    report["scaling"] = {
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
    say("memory")
    tokens = 512 if quick else MEMORY_TOKENS
    report["memory"] = [
        {"shape": shape, "group": group, **measure_memory(profile, tokens)}
        for (shape, group), profile in profiles.items()
        if not quick or shape == LARGE
    ]
    report["seconds"] = time.perf_counter() - began
    return report
