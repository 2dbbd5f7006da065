"""The document of a report on blending: Markdown and plots, like those of `cuvee report`.

    blend.json -> sections of texts, tables, figures -> blend.md + plots/*.png, *.svg

Parts that a report lacks (decoded chunks, wall time, costs that were not measured) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.codec.support.files import write_atomically
from cuvee.eval.blend_report.blend_plots import BLEND_PLOTS, SHOWN_COST, find_entry
from cuvee.eval.blend_report.selectors import ALONE, DEFAULT, EXACT, KINDS_OF_CHUNKS, NOTHING
from cuvee.eval.documents import (
    SMALL_MODEL,
    Entry,
    ReportBlock,
    ReportData,
    ReportSection,
    ReportTable,
    markdown_document,
    provenance,
)
from cuvee.eval.formatting import format_bits, format_interval, format_number, format_percent, with_error
from cuvee.eval.plots import write_plots
from cuvee.eval.report.report_plots import machine_name

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["blend_markdown", "blend_sections", "print_blend_summary", "write_blend_report"]


def write_blend_report(report: ReportData, folder: Path) -> None:
    """Write `blend.md` and `plots/*` of a report, each file completely or not at all.

    Args:
        report: the dict in `blend.json`.
        folder: where to write them; it is made if need be.

    Raises:
        ImportError: matplotlib is not installed (`pip install 'cuvee[eval]'`).
    """
    written = write_plots(BLEND_PLOTS, report, folder / "plots")
    figures = {name: f"plots/{files[0]}" for name, files in written.items()}
    write_atomically(folder / "blend.md", blend_markdown(report, figures).encode())


def blend_markdown(report: ReportData, figures: Mapping[str, str]) -> str:
    """Write the report as GitHub-flavored Markdown.

    Args:
        report: the dict in `blend.json`.
        figures: the file of each plot, relative to the document. Plots without a file are left out.
    """
    return markdown_document(_title(report), _preface(report), blend_sections(report), figures)


def print_blend_summary(report: ReportData, console: Console) -> None:
    """Print selectors at equal cost, and wall time."""
    from rich.text import Text

    console.print(Text(_title(report), style="bold"))
    for section in (_equal_cost(report), _wall_time(report)):
        for table in (block for block in section.blocks if isinstance(block, ReportTable)):
            console.print(table.for_terminal(section.title))


def blend_sections(report: ReportData) -> list[ReportSection]:
    """Return all sections of a report, in order, without empty ones."""
    shares = [_shares(report, made) for made in report["constructions"]]
    made = [_equal_cost(report), *shares, _codec(report), _wall_time(report), _provenance(report), _limits(report)]
    return [section for section in made if section.blocks]


def _title(report: ReportData) -> str:
    return f"What blending cached chunks costs {report['model']['name']}"


def _preface(report: ReportData) -> list[str]:
    lines = [] if report["complete"] else ["This run is not complete."]
    lines.append(
        f"Measured {str(report['environment']['date']).partition('T')[0]} on {machine_name(report)}, with cuvee "
        f"{report['environment']['cuvee']}. Prompts are put together from chunks whose cache was computed elsewhere; a "
        f"part of their tokens is computed again. Predictions are compared with those after a full prefill of the same "
        f"tokens. Share recovered: one minus KL over the KL of the floor, which is chunks computed alone, stored "
        f"exactly, nothing recomputed. Cost: token-layers recomputed, over those of all cached tokens, what a selector "
        f"spends on its choice included."
    )
    return lines


def _equal_cost(report: ReportData) -> ReportSection:
    rows: list[list[str]] = []
    strong: set[int] = set()
    for entry in report["comparison"]:
        ratios = {(a["rival"], a["chunks"]): a for a in entry["against"]}
        cells = [_against(ratios.get((rival, entry["chunks"])), entry) for rival in ("hkvd", "boundary")]
        other = entry["chunks"] != ALONE
        cells += [_against(ratios.get((rival, ALONE)), entry) if other else "" for rival in ("hkvd", "boundary")]
        if entry["best"]:
            strong.add(len(rows))
        rows.append(
            [
                entry["construction"],
                format_percent(entry["cost"]),
                entry["chunks"],
                entry["label"] + (" (best)" if entry["best"] else ""),
                _share(entry),
                *cells,
            ]
        )
    if not rows:
        return ReportSection("equal-cost", "Selectors at equal cost", [])
    columns = [
        "prompts ", "cost", "chunks ", "selector ", "share recovered", "over HKVD ", "over boundary ",
        "over HKVD, chunks alone ", "over boundary, chunks alone ",
    ]  # fmt: skip
    note = (
        "Exact chunks. ± one standard error over prompts. Ratios are of shares recovered, in brackets 95 % of the "
        "bootstrap over prompts; HKVD is taken with or without gradual filtering, whichever recovers more. The best "
        "selector was chosen on these prompts, which flatters it; “query x boundary” is the default."
    )
    return ReportSection(
        "equal-cost",
        "Selectors at equal cost",
        [ReportTable(columns, rows, note=note, strong=frozenset(strong)), *_figures("share_cost")],
    )


def _against(ratio: Entry | None, of: Entry) -> str:
    if ratio is None:
        return ""
    if (ratio["selector"], ratio["chunks"]) == (of["selector"], of["chunks"]):
        return "itself"
    if ratio["share"] is None:
        return "not measured" if ratio["reason"] == "was not measured" else "not to be had"
    return "it recovers nothing" if ratio["ratio"] is None else format_interval(ratio)


def _shares(report: ReportData, made: Entry) -> ReportSection:
    blocks: list[ReportTable | ReportBlock] = [
        ReportBlock("text", _sentence(made["about"]) + f" {len(made['prompts'])} prompts.")
    ]
    for chunks, described in KINDS_OF_CHUNKS.items():
        rows = _rows(made, chunks, _share)
        if rows:
            blocks.append(
                ReportTable(rows[0], rows[1:], f"Share recovered, exact chunks {described}", _left_out(made, chunks))
            )
    blocks += _kinds(made)
    blocks += _scores(made)
    blocks += _answers(made)
    floor = find_entry(made, EXACT, ALONE, NOTHING, None)
    if floor is not None:
        blocks.append(
            ReportBlock(
                "text",
                f"Floor: KL {with_error(floor['kl'], floor['kl_stderr'])} nats per token, ΔNLL "
                f"{with_error(floor['delta_nll'], floor['delta_nll_stderr'], signed=True)}, top-1 kept "
                f"{with_error(floor['top1'], floor['top1_stderr'], percent=True)}.",
            )
        )
    return ReportSection(f"shares-{made['name']}", f"Prompts of the kind “{made['name']}”", blocks)


def _rows(made: Entry, chunks: str, cell: Callable[[Entry], str]) -> list[list[str]]:
    """The headings, and then for exact chunks a row for each selector with a column for each cost."""
    entries = [e for e in made["entries"] if e["kv"] == EXACT and e["chunks"] == chunks]
    costs = sorted({e["cost"] for e in entries if e["cost"] is not None})
    rows = [["selector ", "0 %", *map(format_percent, costs)]]
    for key, label in {e["selector"]: e["label"] for e in entries}.items():
        found = {e["cost"]: e for e in entries if e["selector"] == key}
        rows.append([label, *("" if c not in found else _or_dash(found[c], cell) for c in (None, *costs))])
    return rows if len(rows) > 1 else []


def _or_dash(entry: Entry, cell: Callable[[Entry], str]) -> str:
    return "\N{EM DASH}" if entry["reason"] is not None else cell(entry)


def _left_out(made: Entry, chunks: str) -> str:
    """Explain the dashes in cells."""
    reasons: dict[str, list[str]] = {}
    for entry in made["entries"]:
        if entry["reason"] is not None and entry["kv"] == EXACT and entry["chunks"] == chunks:
            reasons.setdefault(str(entry["reason"]), []).append(f"{entry['label']} at {format_percent(entry['cost'])}")
    return " ".join(f"Not to be had: {', '.join(labels)} ({reason})." for reason, labels in reasons.items())


def _kinds(made: Entry) -> list[ReportTable]:
    """The shares for each kind of prompt, by kind of chunks."""
    shown = [
        e
        for e in made["entries"]
        if e["kv"] == EXACT and e["reason"] is None and e["cost"] in (None, SHOWN_COST) and e["parts"]
    ]
    if not shown:
        return []
    kinds = list(shown[0]["parts"])
    rows = [
        [e["label"], e["chunks"], format_percent(e["cost"] or 0), *(_share(e["parts"][kind]) for kind in kinds)]
        for e in shown
    ]
    counts = [f"{kind} ({shown[0]['parts'][kind]['prompts']})" for kind in kinds]
    return [ReportTable(["selector ", "chunks ", "cost", *counts], rows, "Kinds of prompts apart")]


def _scores(made: Entry) -> list[ReportTable]:
    full = made["full"]
    if full is None:
        return []
    rows = [["full prefill", "", "100 %", with_error(full["accuracy"], full["accuracy_stderr"], percent=True), ""]]
    rows += [
        [
            e["label"],
            e["chunks"],
            format_percent(e["cost"] or 0),
            with_error(e["accuracy"], e["accuracy_stderr"], percent=True),
            with_error(e["difference"], e["difference_stderr"], signed=True, percent=True),
        ]
        for e in made["entries"]
        if e["kv"] == EXACT and e["reason"] is None and e["cost"] in (None, SHOWN_COST)
    ]
    note = "± one standard error over documents; differences to the full prefill are paired."
    return [ReportTable(["selector ", "chunks ", "cost", "accuracy", "difference"], rows, "Right choices", note)]


def _answers(made: Entry) -> list[ReportTable]:
    full = made["answers"]
    if full is None:
        return []
    rows = [["full prefill", "", "", "100 %", with_error(full["nll"], full["nll_stderr"]), "", "100 %"]]
    rows += [
        [
            e["label"],
            e["kv"],
            e["chunks"],
            format_percent(e["cost"] or 0),
            f"{full['nll'] + e['answer_loss']:.3f}",
            with_error(e["answer_loss"], e["answer_loss_stderr"], signed=True),
            "" if e["answer_share"] is None else with_error(e["answer_share"], e["answer_share_stderr"], percent=True),
        ]
        for e in made["entries"]
        if e["reason"] is None
    ]
    note = (
        "NLL of the right answer, in nats per word. Recovered: the share of its loss at the floor. ± one "
        "standard error over prompts; differences to the full prefill are paired."
    )
    columns = ["selector ", "KV ", "chunks ", "cost", "NLL", "difference", "recovered"]
    return [ReportTable(columns, rows, "The answer", note)]


def _codec(report: ReportData) -> ReportSection:
    if not report["codec_cost"]:
        return ReportSection("codec", "Decoded chunks", [])
    coded = {(m["name"], c["kv"], c["chunks"]): c for m in report["constructions"] for c in m["coded"]}
    by_name = {m["name"]: m for m in report["constructions"]}
    rows: list[list[str]] = []
    strong: set[int] = set()
    for cost in report["codec_cost"]:
        entry = find_entry(by_name[cost["construction"]], cost["kv"], cost["chunks"], cost["selector"], cost["cost"])
        if cost["kv"] == "balanced" and cost["selector"] == DEFAULT:
            strong.add(len(rows))
        rows.append(
            [
                cost["construction"],
                cost["kv"],
                cost["chunks"],
                format_bits(coded[cost["construction"], cost["kv"], cost["chunks"]]["bits_per_value"]),
                cost["label"],
                format_percent(cost["cost"] or 0),
                _share(entry) if entry else "",
                with_error(cost["points"], cost["points_stderr"]),
            ]
        )
    columns = [
        "prompts ",
        "quality ",
        "chunks ",
        "bits per value",
        "selector ",
        "cost",
        "share recovered",
        "points lost",
    ]
    note = (
        "Points lost: the share recovered with exact chunks less that with decoded ones, in hundredths of the floor's "
        "KL, paired by prompt, ± one standard error. The share may lie below zero: the floor is of exact chunks."
    )
    table = ReportTable(columns, rows, note=note, strong=frozenset(strong))
    return ReportSection("codec", "Decoded chunks", [*_figures("share_source"), table])


def _wall_time(report: ReportData) -> ReportSection:
    wall = report["wall_time"]
    if wall is None:
        return ReportSection("wall-time", "Wall time against full prefill", [])
    lengths = wall["lengths"]
    rows = [
        ["full prefill, seconds", "", *(format_number(length["full"]["median"]) for length in lengths)],
        ["decode the blobs", "", *(_quantiles(length["decode"]["ratio"]) for length in lengths)],
    ]
    for index, blend in enumerate(lengths[0]["blends"]):
        ratios = [_quantiles(length["blends"][index]["ratio"]) for length in lengths]
        rows.append([blend["label"], format_percent(blend["cost"]), *ratios])
    columns = ["what ", "cost", *(f"{length['tokens']:,} tokens" for length in lengths)]
    model = wall["model"]
    note = (
        f"Time over that of the full prefill in the same round: median, in brackets the 20th and 80th percentile, of "
        f"{min(length['rounds'] for length in lengths)} rounds or more. A Llama with random weights, "
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, {model['dtype']}, on "
        f"{_threads(wall['threads'])}; chunks of {wall['chunk_tokens']} tokens, {wall['suffix']} tokens of text. "
        f"Blends start from chunks in memory; decoding their blobs ({wall['decoded']}) comes on top."
    )
    return ReportSection(
        "wall-time", "Wall time against full prefill", [ReportTable(columns, rows, note=note), *_figures("wall_time")]
    )


def _threads(count: int) -> str:
    """Write the number of threads."""
    return "one thread" if count == 1 else f"{count} threads"


def _provenance(report: ReportData) -> ReportSection:
    configuration, profile = report["configuration"], report["profile"]
    facts = {
        "contexts averaged over": f"{report['text']['contexts']} of {configuration['context_tokens']} tokens",
        "profile": None if profile is None else f"group {profile['group']}, {profile['source']}, {profile['id']}",
        "seed": configuration["seed"],
        "time taken": f"{report['seconds']:.0f} s",
        **{f"SHA-256 of the tokens, {made['name']}": made["tokens_sha256"] for made in report["constructions"]},
    }
    return provenance(report, facts)


def _limits(report: ReportData) -> ReportSection:
    says = [
        "Standard errors are over prompts of the same few texts, which share words and topics: what another text "
        "would give may lie further away than they say.",
        "In “reread” the text whose predictions are scored is there when tokens are selected, and in half of the "
        "prompts it repeats a span of the chunks word for word; the table of kinds shows the others. In “ahead”, "
        "“passages” and files nothing that is scored is known when tokens are selected.",
    ]
    if report["model"]["parameters"] < SMALL_MODEL:
        says.append(
            f"{report['model']['name']} has {report['model']['layers']} layers. A check layer costs it a larger share "
            f"of the token-layers than it costs a deep model, so at low cost HKVD is worse here, or cannot be had."
        )
    if report["wall_time"] is not None:
        says.append(
            "Wall time is of a small random model on a CPU, where a layer call costs more beside the work in it than "
            "on a large model."
        )
    return ReportSection("limits", "What the figures do not say", [ReportBlock("list", items=tuple(says))])


def _share(entry: Entry) -> str:
    if entry["share"] is None:
        return ""
    return with_error(entry["share"], entry["share_stderr"], percent=True)


def _quantiles(ratio: Entry) -> str:
    return f"{ratio['median']:.3f} ({ratio['p20']:.3f} to {ratio['p80']:.3f})"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _figures(name: str) -> list[ReportBlock]:
    return [ReportBlock("figure", BLEND_PLOTS[name][1], name)]
