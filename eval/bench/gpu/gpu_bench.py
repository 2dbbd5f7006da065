"""Speed on a GPU: bytes to a paged bfloat16 cache and back, every stage, and what the machine could do at best.

    ceilings    device copy, bfloat16 matrix product, copy from pinned memory, in the same run
    codec       for each model shape, group and number of chunks: encode and decode as a caller sees them (from an
                idle device, with checksums, copies and the final check), the stages inside by events of the device,
                and how long those would take if they only moved their bytes and did their products
    restore     decode against copying the uncompressed cache from pinned memory
    incumbent   a CacheGen-style decoder (`eval/baselines/cachegen.py`) on the same chunks
    synthesis   the inverse transform in every configuration of its kernel
    rans        the entropy decoder alone, at several table resolutions
    compile     what Triton compiled, and how long that took

Nothing is timed before it is proved right. A small cache goes through GPU and CPU in both directions; every full-size
cache is compared with what it was made from, and so is what the timed runs leave behind. Profiles and caches are
synthetic (`cases.py`). Times are medians, with the 20th and 80th percentiles. If a working set would fit in the L2
cache, several take turns. 1 GB is 10**9 bytes.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import asdict
from typing import Any

import torch
import triton
from rich.console import Console

from cuvee.codec.errors import InputError
from cuvee.eval.bench.gpu.cases import GPU_FULL, GPU_QUICK, GpuScope, Pages, make_case
from cuvee.eval.bench.gpu.ceilings import Link, measure_ceilings
from cuvee.eval.bench.gpu.clock import Clock, compilations
from cuvee.eval.bench.gpu.codec import measure_case
from cuvee.eval.bench.gpu.incumbent import measure_incumbent
from cuvee.eval.bench.gpu.proofs import prove_codec
from cuvee.eval.bench.gpu.rans import measure_rans
from cuvee.eval.bench.gpu.synthesis import measure_synthesis
from cuvee.eval.machine import hardware
from cuvee.eval.progress import timed_lines

__all__ = ["describe_machine", "need_gpu", "run_gpu_bench"]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the environment that figures depend on, with the GPU."""
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
    return {**hardware(), "device": device.type, "triton": triton.__version__, **gpu}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def need_gpu() -> torch.device:
    """Return the current GPU.

    Raises:
        InputError: torch sees none.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "device: must be a GPU that torch sees, got none; run this where `nvidia-smi` lists one, with a build of "
            f"torch for CUDA (this is {torch.__version__}), or measure the CPU: cuvee bench cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def run_gpu_bench(
    quick: bool = False,
    progress: Console | None = None,
    *,
    scope: GpuScope | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        quick: measure fewer cases, and repeat them less.
        progress: where to list what is being measured; None for nowhere.
        scope: what to measure; default: `GPU_QUICK` or `GPU_FULL`.
        device: where to measure; default: the GPU. On the CPU the kernels run in Triton's interpreter, if that is on,
            which only shows that the benchmark works.

    Returns:
        The report, as a dict for JSON.

    Raises:
        InputError: there is no GPU.
        CuveeError: something did not come back as it went in, so nothing is reported.
    """
    device = device or need_gpu()
    scope = scope or (GPU_QUICK if quick else GPU_FULL)
    with compilations() as compiled:
        report = _measure(quick, progress, scope, device)
    kernels = sorted((entry for entry in compiled if not entry["cached"]), key=lambda entry: -entry["seconds"])
    seconds = sum(entry["seconds"] for entry in kernels)
    report["compile"] = {"seconds": seconds, "cached": len(compiled) - len(kernels), "kernels": kernels}
    return report


def _measure(quick: bool, progress: Console | None, scope: GpuScope, device: torch.device) -> dict[str, Any]:
    began, say = time.perf_counter(), timed_lines(progress)
    clock = Clock(device, scope.effort)
    report: dict[str, Any] = {"quick": quick, "hardware": describe_machine(device), "scope": asdict(scope)}
    l2 = report["hardware"].get("l2_bytes", 0)
    proofs = report["proofs"] = []
    for (heads, size), shape in {(s.heads, s.size): s for s in scope.shapes.values()}.items():
        for group in scope.groups:
            say(f"proof: {heads} x {size}, group {group}")
            proofs.append({"heads": heads, "size": size, "group": group, **prove_codec(shape, group, scope, device)})
    say("ceilings")
    ceilings = report["ceilings"] = measure_ceilings(clock, scope)
    say("entropy decoder alone")
    report["rans"] = measure_rans(clock, scope)
    for part in ("link", "incumbent", "codec", "synthesis", "skipped"):
        report[part] = []

    def late() -> bool:
        return time.perf_counter() - began > scope.limit

    for name, shape in scope.shapes.items():
        layout = shape.layout()
        pages = Pages(layout, max(scope.chunks), scope.tokens, scope.block_tokens, device)
        each = scope.tokens * layout.bytes_per_token
        link = Link(clock, max(scope.chunks) * each)
        raw = {count: link.measure(count * each) for count in scope.chunks}
        for count, timing in raw.items():
            entry = {"shape": name, "chunks": count, "raw_bytes": count * each}
            report["link"].append({**entry, "gb_per_s": timing.per_second(count * each / 1e9)})
        for group in scope.groups:
            if late():
                report["skipped"].append({"shape": name, "group": group})
                continue
            say(f"{name}, group {group}: profile")
            case = make_case(name, group, scope, device)
            if group == scope.groups[0]:
                say(f"{name}: CacheGen-style decoder")
                one = case.chunks[0]
                report["incumbent"].append(measure_incumbent(clock, name, one, scope, pages, link, raw, l2))
            say(f"{name}, group {group}")
            theirs = {run["chunks"]: run["seconds"]["whole"]["median"] for run in report["incumbent"][-1]["runs"]}
            report["codec"].append(measure_case(clock, case, scope, pages, link, raw, theirs, ceilings, l2))
            if name == next(iter(scope.shapes)) and group in scope.synthesis_groups:
                say(f"{name}, group {group}: configurations of the inverse transform")
                report["synthesis"] += measure_synthesis(clock, case, scope, pages, l2, late)
        del pages, link
    report["seconds"] = time.perf_counter() - began
    return report
