"""The stages of the CPU bench beside the core's limits, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cuvee.eval.bench.cpu.limits import CYCLES
from cuvee.eval.bench.cpu.stage_work import BYTES
from cuvee.eval.bench.cpu.stages import CONTAINER, REST, STAGE_FUNCTIONS
from cuvee.eval.documents import ReportTable
from cuvee.eval.formatting import format_number

__all__ = ["stage_tables"]

NOTE = (
    "In turns on one core, medians of the thread's own time, which leaves out what other processes take of the core. "
    "symbols: what the entropy coder codes, in cycles for each; its limit is the coder alone, on full streams of one "
    "table in the cache. In parentheses: the two gathers per sixteen symbols that the decoder cannot do without. "
    "GFLOP: operations of matrix products, as executed, of those without skipping zeros; their limit is torch.mm of "
    "1,024 x 1,024 in the same dtype. MB: of the arrays that a stage reads and writes, each once; its limit is a copy "
    "of as many bytes as one call touches, from the cache that holds them. A stage that computes cannot reach the "
    "speed of a copy. read sections: its symbols are the classes of tokens. container: header and checksums. rest: "
    "the time of the call that nothing above accounts for: Python, and what it calls in between."
)
_COLUMNS = ["stage ", "µs", "work", "reached", "limit", "share"]


def stage_tables(entries: Sequence[Mapping[str, Any]]) -> list[ReportTable]:
    """Make a table for each case of `measure_stages`; a note explains the last one."""
    tables = list(map(_table, entries))
    return [*tables[:-1], *(replace(table, note=NOTE) for table in tables[-1:])]


def _table(entry: Mapping[str, Any]) -> ReportTable:
    rows: list[list[str]] = []
    strong = set()
    for way in ("encode", "decode"):
        own = entry[way]
        strong.add(len(rows))
        speed = entry["raw_bytes"] / own["whole"] / 1e9
        rows.append([f"{way}: {1e6 * own['whole']:,.0f} µs, {speed:.3f} GB/s", *[""] * (len(_COLUMNS) - 1)])
        for name in (*STAGE_FUNCTIONS, CONTAINER, REST):
            if name not in own["seconds"]:
                continue
            shown = [name, f"{1e6 * own['seconds'][name]:,.0f}"]
            for work in own["work"].get(name) or [None]:
                rows.append([*shown, *(["", "", "", ""] if work is None else _work(work))])
                shown = ["", ""]
    title = (
        f"Stages and limits: {entry['cache']}, {entry['profile']}, {entry['tokens']} tokens, "
        f"{entry['bits_per_value']:.2f} bits, one core at {entry['limits_per_second'][CYCLES] / 1e9:.2f} GHz"
    )
    return ReportTable(_COLUMNS, rows, title, strong=frozenset(strong))


def _work(work: Mapping[str, Any]) -> list[str]:
    unit, amount = work["unit"], work["amount"]
    if "cycles" in work:
        reached = f"{work['cycles']:.1f} cycles"
        limit = f"{work['limit_cycles']:.1f}"
        if "gather_cycles" in work:
            limit += f" ({work['gather_cycles']:.1f})"
        return [f"{format_number(amount / 1e6)} M symbols", reached, limit, _share(work)]
    if unit == BYTES:
        name, scale = "MB", 1e6
    else:
        name, scale = "GFLOP", 1e9
    done = format_number(amount / scale)
    if work.get("dense", amount) > amount:
        done += f" of {format_number(work['dense'] / scale)}"
    reached, limit = (format_number(work[key] / 1e9) for key in ("per_second", "limit_per_second"))
    return [f"{done} {name}", f"{reached} {'GB' if unit == BYTES else name}/s", limit, _share(work)]


def _share(work: Mapping[str, Any]) -> str:
    return f"{work['share']:.0%}"
