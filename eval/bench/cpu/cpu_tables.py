"""The report of the CPU bench as tables, on a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cuvee.eval.bench.cpu.alternatives import MEMCPY, ZSTD_METHOD
from cuvee.eval.bench.cpu.first_use import FIRST_USE_STEPS
from cuvee.eval.bench.cpu.stage_tables import stage_tables
from cuvee.eval.documents import ReportSection, ReportTable, markdown_document
from cuvee.eval.formatting import format_bits, format_number
from cuvee.eval.machine import machine_line

__all__ = ["cpu_markdown", "print_cpu_report", "print_turns", "turns_markdown"]

_WAYS = ("encode", "decode")

COMPARISON_NOTE = (
    "GB/s of bfloat16, by the number of threads, and how many times as fast the most threads are as the fewest. The "
    "last columns: speed of decoding over that of memcpy and of cuvee at each quality, with the fewest threads, "
    "within rounds. Small caches stay in the CPU's own, which makes memcpy faster than a large one would let it be. "
    "error: of the values, root of squared error over squared values; 0 means bit for bit. It is not what a model "
    "loses: cuvee's transform moves its error to where predictions do not depend on it. All restore into tensors that "
    "exist. In chunks of less than a million values cuvee uses one thread. Where other processes use a core, torch's "
    "threads wait for each other, and the columns of several threads mean little."
)


def print_cpu_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    console.print(_machine(report), style="dim", highlight=False)
    for table in _tables(report):
        for shown in _for_terminal(table):
            console.print(shown)


def cpu_markdown(report: dict[str, Any]) -> str:
    """A report as GitHub-flavored Markdown."""
    sections = [
        ReportSection("", table.title, [ReportTable(table.columns, table.rows, "", table.note, table.strong)])
        for table in _tables(report)
    ]
    return markdown_document("cuvee bench cpu", [_machine(report)], sections, {})


def print_turns(report: dict[str, Any], console: Console) -> None:
    """Print the report of `compare_with` as a table."""
    console.print(_machine(report), style="dim", highlight=False)
    for shown in _for_terminal(_turns(report)):
        console.print(shown)


def turns_markdown(report: dict[str, Any]) -> str:
    """The report of `compare_with` as GitHub-flavored Markdown."""
    table = _turns(report)
    section = ReportSection("", table.title, [ReportTable(table.columns, table.rows, "", table.note)])
    return markdown_document("cuvee bench cpu", [_machine(report)], [section], {})


def _turns(report: Mapping[str, Any]) -> ReportTable:
    rows = []
    for entry in report["cases"]:
        tokens = f"{entry['tokens']} new" if entry["new"] else str(entry["tokens"])
        row = [entry["cache"], entry["profile"], tokens, str(entry["threads"])]
        row.append(" / ".join(dict.fromkeys(format_bits(bits) for bits in entry["bits_per_value"])))
        for way in ("encode", "decode"):
            row.append(" / ".join(f"{side['median']:.3f}" for side in entry[way]["gb_per_s"]))
            ratio = entry[way]["ratio"]
            row.append(f"{ratio['median']:.2f} ({ratio['p20']:.2f}-{ratio['p80']:.2f})")
        rows.append(row)
    return ReportTable(
        ["cache ", "profile ", "tokens", "threads", "bits", "encode", "ratio", "decode", "ratio"],
        rows,
        f"{report['against']} / this cuvee, GB/s of bfloat16",
        "Two processes take turns. Ratios are those within turns: the median, and the 20th and 80th percentiles. "
        "new: the next chunk of a text in each turn, whose tokens the process may meet for the first time.",
    )


def _machine(report: Mapping[str, Any]) -> str:
    machine = report["hardware"]
    return machine_line(machine, *(f"{title} {machine[title.lower()]}" for title in ("Python", "torch", "numba")))


def _for_terminal(table: ReportTable) -> list[Table | Text]:
    """The tables and texts that show a table on a terminal.

    A row that stands out is a heading. It would make the first column too wide, so it begins a table of its own.
    """
    tight = len(table.columns) > 8
    shown: list[Table | Text] = []
    if not table.strong:
        shown.append(table.for_terminal(tight=tight, wrap=False))
    else:
        shown.append(Text(table.title, style="italic"))
        ends = [*sorted(table.strong)[1:], len(table.rows)]
        for start, end in zip(sorted(table.strong), ends, strict=True):
            title, rows = table.rows[start][0], table.rows[start + 1 : end]
            part = ReportTable(table.columns, rows, title)
            shown.append(part.for_terminal(tight=tight, wrap=False) if rows else Text(f"{title}\n"))
    return [*shown, Text(f"{table.note}\n")] if table.note else shown


def _tables(report: Mapping[str, Any]) -> list[ReportTable]:
    """The tables of what was measured, which may be some of the parts."""
    made: dict[str, Callable[[Any], list[ReportTable]]] = {
        "coders": lambda part: [_coders(part)],
        "stages": stage_tables,
        "whole": lambda part: [_whole(part)],
        "scaling": lambda part: [_scaling(part)],
        "comparison": lambda part: [_comparison(part), _lossless(part)],
        "first_use": lambda part: [_first_use(part)],
        "memory": lambda part: [_memory(part)],
    }
    return [table for name, make in made.items() if name in report for table in make(report[name]) if table.rows]


def _coders(coders: Mapping[str, Any]) -> ReportTable:
    speed = {name: f"{value['median']:.0f}" for name, value in coders["msymbols_per_s"].items()}
    bits, ratios = coders["bits_per_symbol"], coders["ratios"]
    theirs = [speed["constriction_encode"], speed["constriction_decode"], f"{bits['constriction']:.3f}"]
    return ReportTable(
        ["coder ", "encode", "decode", "bits/symbol"],
        [
            ["cuvee", speed["encode"], speed["decode"], f"{bits['rans']:.3f}"],
            ["constriction AnsCoder", *theirs],
            ["vectorized torch", "", speed["torch_decode"], ""],
        ],
        "Entropy coder, one core, M symbols/s",
        f"cuvee / constriction: encode {ratios['encode_over_constriction']:.1f}x, decode "
        f"{ratios['decode_over_constriction']:.1f}x; cuvee / torch: decode {ratios['decode_over_torch']:.1f}x",
    )


_WHOLE_COLUMNS = ["cache ", "group", "tokens", "threads", "bits/value", "encode", "decode"]


def _whole(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    rows = [[entry["shape"], entry["group"], *_whole_row(entry)] for entry in entries]
    return ReportTable(_WHOLE_COLUMNS, rows, "Whole codec, GB/s of bfloat16")


def _scaling(scaling: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    rows = []
    for over in (scaling["tokens"], scaling["layers"]):
        for entry in over["points"]:
            shape = f"{entry['layers']} layers of {over['shape']}" if "layers" in entry else over["shape"]
            rows.append([shape, over["group"], *_whole_row(entry)])
    return ReportTable(_WHOLE_COLUMNS, rows, "Whole codec over tokens and over layers, GB/s of bfloat16")


def _whole_row(entry: Mapping[str, Any]) -> list[str]:
    speeds = (f"{entry[name]['median']:.3f}" for name in ("encode_gb_per_s", "decode_gb_per_s"))
    return [str(entry["tokens"]), str(entry["threads"]), f"{entry['bits_per_value']:.2f}", *speeds]


def _comparison(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    measured = [entry for entry in entries if "skipped" not in entry]
    threads = measured[0]["threads"]
    several = ["2/1" if threads == [1, 2] else f"{threads[-1]}/{threads[0]}"] if len(threads) > 1 else []
    columns = ["cache, method ", "bits", "error"]
    for what in ("enc", "dec"):
        columns += [*(f"{what} {count}" for count in threads), *several]
    columns += [f"/{name}" for name in (MEMCPY, "lossless", "balanced")]
    rows: list[list[str]] = []
    strong = set()
    for entry in entries:
        strong.add(len(rows))
        if "skipped" in entry:
            rows.append([f"{entry['cache']}: skipped, {entry['skipped']}", *[""] * (len(columns) - 1)])
            continue
        made = f"profile {next(iter(entry['profiles'].values()))} by {', '.join(entry['profiles'])}"
        made += "" if entry["real"] else ", synthetic cache"
        others = entry["cores_used_by_others"]
        made += "" if others is None else f"; others used {others:.1f} cores"
        rows.append([f"{entry['cache']}, {entry['tokens']} tokens ({made})", *[""] * (len(columns) - 1)])
        rows += [_compared(method, entry["references"], len(columns)) for method in entry["methods"]]
    return ReportTable(columns, rows, "The same bytes otherwise", COMPARISON_NOTE, frozenset(strong))


def _lossless(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
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


def _compared(method: Mapping[str, Any], references: Sequence[str], columns: int) -> list[str]:
    if "skipped" in method:
        return [f"{method['method']}: skipped, {method['skipped']}", *[""] * (columns - 1)]
    row = [method["method"], format_bits(method["bits_per_value"]), format_number(method["relative_error"], 2)]
    for what in ("encode", "decode"):
        row += [_speed(entry[f"{what}_gb_per_s"]["median"]) for entry in method["by_threads"]]
        if method["most_over_fewest_threads"] is not None:
            row.append(f"{method['most_over_fewest_threads'][what]['median']:.2f}")
    return row + [format_number(method["by_threads"][0]["decode_over"][name]["median"], 2) for name in references]


def _speed(gb_per_s: float) -> str:
    return format_number(gb_per_s, 3 if gb_per_s >= 0.1 else 2)


def _first_use(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    rows = [
        [entry["quality"], *(f"{entry['seconds'][step]['median']:.3f}" for step in FIRST_USE_STEPS)]
        for entry in entries
    ]
    columns = ["quality ", "start", "import cuvee", "import codec", "open", "1st decode", "2nd decode", "total"]
    note = (
        "start: until the first line runs. import codec: with torch and Numba. open: profile and codec. 1st decode: "
        "with compiled code from Numba's cache. total: all but the 2nd decode."
    )
    return ReportTable(columns, rows, "First use, seconds from starting Python", note)


def _memory(entries: Sequence[Mapping[str, Any]]) -> ReportTable:
    rows = []
    for entry in entries:
        peaks = (entry["encode_over_raw"], entry["decode_over_raw"])
        shown = ("unknown" if peak is None else f"{peak:.2f}" for peak in peaks)
        rows.append([entry["shape"], entry["group"], str(entry["tokens"]), *shown])
    return ReportTable(["cache ", "group", "tokens", "encode", "decode"], rows, "Peak memory over the raw chunk")
