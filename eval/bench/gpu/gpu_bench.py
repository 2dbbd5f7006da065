"""The step `speed`: bytes to a paged bfloat16 cache and back, beside what the machine could do at best.

    ceilings    device copy, casts to FP8, bfloat16 matrix product, copy from pinned memory, noise of the clock
    codec       for each group and number of chunks: encode and decode as a caller sees them (from an idle device, with
                checksums, copies and the final check), the stages inside by events of the device, and the kernels
    restore     decode against copying the uncompressed cache from pinned memory

Nothing is timed before it is proved right: every cache is compared with what it was made from, and so is what the timed
runs leave behind; that the bytes are those of the CPU is what the step `tests` shows. Profiles and caches are synthetic
(`cases.py`). Times are medians, with the 20th and 80th percentiles. If a working set would fit in the L2
cache, several take turns. 1 GB is 10**9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.gpu.cases import GPU_FULL, GPU_REHEARSAL, GpuScope, Pages, make_case
from cuvee.eval.bench.gpu.ceilings import Link, measure_ceilings
from cuvee.eval.bench.gpu.clock import Clock
from cuvee.eval.bench.gpu.codec import measure_case

__all__ = ["measure_speed", "run_step"]


def run_step(device: torch.device, save: Callable[[object], None], folder: Path) -> None:
    """Measure and save.

    Raises:
        CuveeError: something did not come back as it went in. The other groups have been measured.
    """
    report = measure_speed(GPU_FULL if device.type == "cuda" else GPU_REHEARSAL, device, save)
    if report["errors"]:
        raise CuveeError("; ".join(f"{group}: {error}" for group, error in report["errors"].items()))


def measure_speed(scope: GpuScope, device: torch.device, save: Callable[[object], None]) -> dict[str, Any]:
    """Measure group after group, and save the report after each.

    Returns:
        The report, as a dict for JSON. `errors` names the groups in which something did not come back.
    """
    clock = Clock(device, scope.effort)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    report: dict[str, Any] = {"scope": asdict(scope), "codec": [], "errors": {}}
    report["ceilings"] = measure_ceilings(clock, scope)
    save(report)
    pages = Pages(scope.shape.layout(), max(scope.chunks), scope.tokens, scope.block_tokens, device)
    each = scope.tokens * pages.cache.layout.bytes_per_token
    link = Link(clock, max(scope.chunks) * each)
    raw = {count: link.measure(count * each) for count in scope.chunks}
    report["link"] = [
        {"chunks": count, "raw_bytes": count * each, "gb_per_s": timing.per_second(count * each / 1e9)}
        for count, timing in raw.items()
    ]
    for group in scope.groups:
        print(f"group {group}", flush=True)
        try:
            case = make_case(group, scope, device)
            report["codec"].append(measure_case(clock, case, scope, pages, raw, l2))
        except CuveeError as error:
            report["errors"][group] = str(error)
        save(report)
    return report
