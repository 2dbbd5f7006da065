"""A report on blending as a document: Markdown and plots, as those of `cuvee report`.

    blend.json -> sections of texts, tables, figures -> blend.md + plots/*.png, *.svg

Parts that a report has nothing for (no decoded chunks, no wall time, costs that were not measured) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuvee.eval import plots
from cuvee.eval.blending.methods import ALONE, AVERAGED, DEFAULT, EXACT, NOTHING
from cuvee.eval.files import write_atomically
from cuvee.eval.report import render
from cuvee.eval.report.render import Block, Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

__all__ = ["BLEND_PLOTS", "blend_markdown", "blend_sections", "print_blend_summary", "write_blend_report"]

Report = Mapping[str, Any]
Entry = Mapping[str, Any]

_CHUNKS = {ALONE: "each computed alone", AVERAGED: "averaged over contexts"}
_SHOWN_COST = 0.3  # where sources of chunks are compared
_SMALL_MODEL = 500_000_000  # parameters
_DASHES = ("-", (0, (1.5, 1.5)), (0, (5, 2)), "-", (0, (6, 2, 1.5, 2)))  # of costs, in turn
_LOOKS: dict[str, tuple[str, Any, str]] = {  # selector -> color, dashes, marker
    NOTHING: ("#8c8c8c", (0, (1.5, 1.5)), "d"),
    "random": ("#8c8c8c", (0, (5, 2)), "."),
    "boundary": ("#0072b2", "-", "o"),
    "hkvd": ("#d55e00", "-", "s"),
    "hkvd-gradual": ("#d55e00", (0, (4, 2)), "D"),
    "hkvd*boundary": ("#e69f00", (0, (4, 2)), "v"),
    "query": ("#b0568c", "-", "P"),
    "overlap": ("#56b4e9", (0, (4, 2)), "^"),
    "overlap*boundary": ("#009e73", (0, (4, 2)), "x"),
    DEFAULT: ("#009e73", "-", "*"),
}


def write_blend_report(report: Report, folder: Path) -> None:
    """Write `blend.md` and `plots/*` of a report, each file whole or not at all.

    Args:
        report: the dict of `blend.json`.
        folder: where they go; it is made.

    Raises:
        ImportError: matplotlib is not installed (install `cuvee[eval]`).
    """
    found = {}
    for name, (draw, _) in BLEND_PLOTS.items():
        figure = draw(report)
        for suffix in ("png", "svg"):
            path = folder / "plots" / f"{name}.{suffix}"
            if figure is None:
                path.unlink(missing_ok=True)
            else:
                plots.save_figure(figure, path)
                found[name] = f"plots/{name}.png"
    write_atomically(folder / "blend.md", blend_markdown(report, found).encode())


def blend_markdown(report: Report, figures: Mapping[str, str]) -> str:
    """The report as GitHub-flavored Markdown.

    Args:
        report: the dict of `blend.json`.
        figures: file of each plot, relative to the document; plots that are not there are left out.
    """
    return render.markdown_document(_title(report), _preface(report), blend_sections(report), figures)


def print_blend_summary(report: Report, console: Console) -> None:
    """Show selectors at equal cost, and wall time, on a terminal."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    console.print(Text(_title(report), style="bold"))
    for section in (_equal_cost(report), _wall_time(report)):
        for table in (block for block in section.blocks if isinstance(block, Table)):
            grid = Grid(title=section.title, box=box.SIMPLE_HEAD, pad_edge=False)
            for index, column in enumerate(table.columns):
                grid.add_column(Text(column.strip()), justify="left" if table.is_text(index) else "right")
            for index, row in enumerate(table.rows):
                grid.add_row(*map(Text, row), style="bold" if index in table.strong else "")
            console.print(grid)


def blend_sections(report: Report) -> list[Section]:
    """All that a report says, in order; parts it has nothing for are left out."""
    shares = [_shares(report, made) for made in report["constructions"]]
    made = [_equal_cost(report), *shares, _codec(report), _wall_time(report), _protocol(report), _limits(report)]
    return [section for section in made if section.blocks]


# The sections --------------------------------------------------------------------------------------------------------


def _title(report: Report) -> str:
    return f"What blending cached chunks costs {report['model']['name']}"


def _preface(report: Report) -> list[str]:
    lines = [] if report["complete"] else ["This run is not complete."]
    lines.append(
        f"Measured {str(report['environment']['date']).partition('T')[0]} on {plots.machine(report)}, with cuvee "
        f"{report['environment']['cuvee']}. Prompts are put together from chunks whose cache was computed elsewhere; a "
        f"part of their tokens is computed again. Predictions are compared with those after a full prefill of the same "
        f"tokens. Share recovered: one minus KL over the KL of the floor, which is chunks computed alone, stored "
        f"exactly, nothing recomputed. Cost: token-layers recomputed, over those of all cached tokens, what a selector "
        f"spends on its choice included."
    )
    return lines


def _equal_cost(report: Report) -> Section:
    rows: list[list[str]] = []
    strong: set[int] = set()
    for entry in report["comparison"]:
        ratios = {(a["rival"], a["chunks"]): a for a in entry["against"]}
        cells = [_against(ratios.get((rival, entry["chunks"])), entry) for rival in ("hkvd", "boundary")]
        averaged = entry["chunks"] != ALONE
        cells += [_against(ratios.get((rival, ALONE)), entry) if averaged else "" for rival in ("hkvd", "boundary")]
        if entry["best"]:
            strong.add(len(rows))
        rows.append(
            [
                entry["construction"],
                _percent(entry["cost"]),
                entry["chunks"],
                entry["label"] + (" (best)" if entry["best"] else ""),
                _share(entry),
                *cells,
            ]
        )
    if not rows:
        return Section("equal-cost", "Selectors at equal cost", [])
    columns = [
        "prompts ", "cost", "chunks ", "selector ", "share recovered", "over HKVD ", "over boundary ",
        "over HKVD, chunks alone ", "over boundary, chunks alone ",
    ]  # fmt: skip
    note = (
        "Exact chunks. ± one standard error over prompts. Ratios are of shares recovered, in brackets 95 % of the "
        "bootstrap over prompts; HKVD is taken with or without gradual filtering, whichever recovers more. The best "
        "selector was chosen on these prompts, which flatters it; “(overlap + query) x boundary” is the default."
    )
    return Section(
        "equal-cost",
        "Selectors at equal cost",
        [Table(columns, rows, note=note, strong=frozenset(strong)), *_figures("share_cost")],
    )


def _against(ratio: Entry | None, of: Entry) -> str:
    if ratio is None:
        return ""
    if (ratio["selector"], ratio["chunks"]) == (of["selector"], of["chunks"]):
        return "itself"
    if ratio["share"] is None:
        return "not measured" if ratio["reason"] == "was not measured" else "not to be had"
    return "it recovers nothing" if ratio["ratio"] is None else render.format_interval(ratio)


def _shares(report: Report, made: Entry) -> Section:
    blocks: list[Table | Block] = [Block("text", _sentence(made["about"]) + f" {len(made['prompts'])} prompts.")]
    for chunks, described in _CHUNKS.items():
        rows = _rows(made, chunks, _share)
        if rows:
            blocks.append(
                Table(rows[0], rows[1:], f"Share recovered, exact chunks {described}", _left_out(made, chunks))
            )
    blocks += _kinds(made)
    blocks += _scores(made)
    floor = _one(made, EXACT, ALONE, NOTHING, None)
    if floor is not None:
        blocks.append(
            Block(
                "text",
                f"Floor: KL {render.with_error(floor['kl'], floor['kl_stderr'])} nats per token, ΔNLL "
                f"{render.with_error(floor['delta_nll'], floor['delta_nll_stderr'], signed=True)}, top-1 kept "
                f"{render.with_error(floor['top1'], floor['top1_stderr'], percent=True)}.",
            )
        )
    return Section(f"shares-{made['name']}", f"Prompts of the kind “{made['name']}”", blocks)


def _rows(made: Entry, chunks: str, cell: Callable[[Entry], str]) -> list[list[str]]:
    """A heading and a row a selector, a column a cost, of exact chunks."""
    entries = [e for e in made["entries"] if e["kv"] == EXACT and e["chunks"] == chunks]
    costs = sorted({e["cost"] for e in entries if e["cost"] is not None})
    rows = [["selector ", "0 %", *map(_percent, costs)]]
    for key, label in {e["selector"]: e["label"] for e in entries}.items():
        found = {e["cost"]: e for e in entries if e["selector"] == key}
        rows.append([label, *("" if c not in found else _or_dash(found[c], cell) for c in (None, *costs))])
    return rows if len(rows) > 1 else []


def _or_dash(entry: Entry, cell: Callable[[Entry], str]) -> str:
    return "\N{EM DASH}" if entry["reason"] is not None else cell(entry)


def _left_out(made: Entry, chunks: str) -> str:
    """Why some cells hold a dash."""
    reasons: dict[str, list[str]] = {}
    for entry in made["entries"]:
        if entry["reason"] is not None and entry["kv"] == EXACT and entry["chunks"] == chunks:
            reasons.setdefault(str(entry["reason"]), []).append(f"{entry['label']} at {_percent(entry['cost'])}")
    return " ".join(f"Not to be had: {', '.join(labels)} ({reason})." for reason, labels in reasons.items())


def _kinds(made: Entry) -> list[Table]:
    """Shares of each kind of prompt apart, with chunks computed alone and averaged."""
    shown = [
        e
        for e in made["entries"]
        if e["kv"] == EXACT and e["reason"] is None and e["cost"] in (None, _SHOWN_COST) and e["parts"]
    ]
    if not shown:
        return []
    kinds = list(shown[0]["parts"])
    rows = [
        [e["label"], e["chunks"], _percent(e["cost"] or 0), *(_share(e["parts"][kind]) for kind in kinds)]
        for e in shown
    ]
    counts = [f"{kind} ({shown[0]['parts'][kind]['prompts']})" for kind in kinds]
    return [Table(["selector ", "chunks ", "cost", *counts], rows, "Kinds of prompts apart")]


def _scores(made: Entry) -> list[Table]:
    full = made["full"]
    if full is None:
        return []
    rows = [
        ["full prefill", "", "100 %", render.with_error(full["accuracy"], full["accuracy_stderr"], percent=True), ""]
    ]
    rows += [
        [
            e["label"],
            e["chunks"],
            _percent(e["cost"] or 0),
            render.with_error(e["accuracy"], e["accuracy_stderr"], percent=True),
            render.with_error(e["difference"], e["difference_stderr"], signed=True, percent=True),
        ]
        for e in made["entries"]
        if e["kv"] == EXACT and e["reason"] is None and e["cost"] in (None, _SHOWN_COST)
    ]
    note = "± one standard error over documents; differences to the full prefill are paired."
    return [Table(["selector ", "chunks ", "cost", "accuracy", "difference"], rows, "Right choices", note)]


def _codec(report: Report) -> Section:
    if not report["codec_cost"]:
        return Section("codec", "Decoded chunks", [])
    coded = {(m["name"], c["kv"], c["chunks"]): c for m in report["constructions"] for c in m["coded"]}
    by_name = {m["name"]: m for m in report["constructions"]}
    rows: list[list[str]] = []
    strong: set[int] = set()
    for cost in report["codec_cost"]:
        entry = _one(by_name[cost["construction"]], cost["kv"], cost["chunks"], cost["selector"], cost["cost"])
        if cost["kv"] == "balanced" and cost["selector"] == DEFAULT:
            strong.add(len(rows))
        rows.append(
            [
                cost["construction"],
                cost["kv"],
                cost["chunks"],
                render.format_bits(coded[cost["construction"], cost["kv"], cost["chunks"]]["bits_per_value"]),
                cost["label"],
                _percent(cost["cost"] or 0),
                _share(entry) if entry else "",
                render.with_error(cost["points"], cost["points_stderr"]),
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
    table = Table(columns, rows, note=note, strong=frozenset(strong))
    return Section("codec", "Decoded chunks", [*_figures("share_source"), table])


def _wall_time(report: Report) -> Section:
    wall = report["wall_time"]
    if wall is None:
        return Section("wall-time", "Wall time against full prefill", [])
    lengths = wall["lengths"]
    rows = [
        ["full prefill, seconds", "", *(render.format_number(length["full"]["median"]) for length in lengths)],
        ["decode the blobs", "", *(_quantiles(length["decode"]["ratio"]) for length in lengths)],
    ]
    for index, blend in enumerate(lengths[0]["blends"]):
        ratios = [_quantiles(length["blends"][index]["ratio"]) for length in lengths]
        rows.append([blend["label"], _percent(blend["cost"]), *ratios])
    columns = ["what ", "cost", *(f"{length['tokens']:,} tokens" for length in lengths)]
    model = wall["model"]
    note = (
        f"Time over that of the full prefill in the same round: median, in brackets the 20th and 80th percentile, of "
        f"{min(length['rounds'] for length in lengths)} rounds or more. A Llama with random weights, "
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, {model['dtype']}, on "
        f"{_threads(wall['threads'])}; chunks of {wall['chunk_tokens']} tokens, {wall['suffix']} tokens of text. "
        f"Blends start from chunks in memory; decoding their blobs ({wall['decoded']}) comes on top."
    )
    return Section(
        "wall-time", "Wall time against full prefill", [Table(columns, rows, note=note), *_figures("wall_time")]
    )


def _threads(count: int) -> str:
    """How many threads, in words."""
    return "one thread" if count == 1 else f"{count} threads"


def _protocol(report: Report) -> Section:
    model, configuration, profile = report["model"], report["configuration"], report["profile"]
    facts = [
        ("model", f"{model['name']} ({model['model_type']}, {model['parameters']:,} parameters, {model['dtype']})"),
        ("model fingerprint", model["fingerprint"]),
        ("cache", f"{model['layers']} layers, {model['values_per_token']:,} values per token"),
        ("contexts averaged over", f"{report['text']['contexts']} of {configuration['context_tokens']} tokens"),
        ("profile", None if profile is None else f"group {profile['group']}, {profile['source']}, {profile['id']}"),
        ("seed", configuration["seed"]),
        ("time taken", f"{report['seconds']:.0f} s"),
    ]
    for made in report["constructions"]:
        facts.append((f"SHA-256 of the tokens, {made['name']}", made["tokens_sha256"]))
    texts = [
        [use, str(source["name"]), f"{source['tokens']:,}", str(source["sha256"])]
        for use in ("calibration", "evaluation")
        for source in report["text"][use]
    ]
    environment = [[str(name), str(value)] for name, value in report["environment"].items() if value is not None]
    blocks: list[Table | Block] = [Block("code", report["command"])] if report["command"] else []
    blocks.append(Table(["what ", "value "], [[name, str(value)] for name, value in facts if value is not None]))
    blocks.append(Table(["text for ", "name ", "tokens", "SHA-256 "], texts, title="Texts"))
    blocks.append(Table(["what ", "version or kind "], environment, title="Software and hardware"))
    return Section("protocol", "How it was measured", blocks)


def _limits(report: Report) -> Section:
    says = [
        "Standard errors are over prompts of the same few texts, which share words and topics: what another text "
        "would give may lie further away than they say.",
        "In “reread” the text whose predictions are scored is there when tokens are selected, and in half of the "
        "prompts it repeats a span of the chunks word for word; the table of kinds shows the others. In “ahead”, "
        "“passages” and files nothing that is scored is known when tokens are selected.",
    ]
    if report["model"]["parameters"] < _SMALL_MODEL:
        says.append(
            f"{report['model']['name']} has {report['model']['layers']} layers. A check layer costs it a larger share "
            f"of the token-layers than it costs a deep model, so at low cost HKVD is worse here, or cannot be had."
        )
    if report["wall_time"] is not None:
        says.append(
            "Wall time is of a small random model on a CPU, where a layer call costs more beside the work in it than "
            "on a large model."
        )
    return Section("limits", "What the figures do not say", [Block("list", items=tuple(says))])


# Cells ---------------------------------------------------------------------------------------------------------------


def _share(entry: Entry) -> str:
    if entry["share"] is None:
        return ""
    return render.with_error(entry["share"], entry["share_stderr"], percent=True)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _quantiles(ratio: Entry) -> str:
    return f"{ratio['median']:.3f} ({ratio['p20']:.3f} to {ratio['p80']:.3f})"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _one(made: Entry, kv: str, chunks: str, selector: str, cost: float | None) -> Entry | None:
    wanted = (kv, chunks, selector, cost)
    found = [e for e in made["entries"] if (e["kv"], e["chunks"], e["selector"], e["cost"]) == wanted]
    return found[0] if found and found[0]["reason"] is None else None


def _figures(name: str) -> list[Block]:
    return [Block("figure", BLEND_PLOTS[name][1], name)]


# The plots -----------------------------------------------------------------------------------------------------------


def share_cost(report: Report) -> Figure | None:
    """Share recovered against cost by selector, exact chunks: a row a construction, alone left, averaged right."""
    made = [m for m in report["constructions"] if _lines(m, EXACT, ALONE)]
    if not made:
        return None
    with plots.styled():
        figure = plots.new_figure(3.1 * len(made) + 0.9)
        plots.add_heading(figure, "Share of the floor's KL recovered")
        grid = figure.subplots(len(made), 2, squeeze=False, sharey="row", sharex=True)
        handles: dict[str, Any] = {}
        for row, construction in zip(grid, made, strict=True):
            for axes, (chunks, described) in zip(row, _CHUNKS.items(), strict=True):
                axes.set_title(f"{construction['name']}: chunks {described}", fontsize=9.5)
                _draw_lines(axes, _lines(construction, EXACT, chunks), handles)
            row[0].set_ylabel("share recovered, %")
        for axes in grid[-1]:
            axes.set_xlabel("cost, % of token-layers")
        legend = figure.legend(handles.values(), handles, loc="outside lower left", ncols=4, fontsize=8.5)
        legend.set_alignment("left")
        return figure


def share_source(report: Report) -> Figure | None:
    """Share recovered by kind of chunks, exact and decoded, at one cost: a panel a construction."""
    made = [m for m in report["constructions"] if m["coded"]]
    if not made:
        return None
    with plots.styled():
        figure = plots.new_figure(3.1 * len(made) + 0.9)
        plots.add_heading(figure, f"Share recovered with decoded chunks, at {_percent(_SHOWN_COST)} cost")
        handles: dict[str, Any] = {}
        for axes, construction in zip(figure.subplots(len(made), 1, squeeze=False)[:, 0], made, strict=True):
            sources = [EXACT, *dict.fromkeys(c["kv"] for c in construction["coded"])]
            bits = {c["kv"]: c["bits_per_value"] for c in construction["coded"] if c["chunks"] == ALONE}
            offset = -0.25
            for selector in (NOTHING, "boundary", DEFAULT):
                for chunks in _CHUNKS:
                    cost = None if selector == NOTHING else _SHOWN_COST
                    found = [(i, _one(construction, kv, chunks, selector, cost)) for i, kv in enumerate(sources)]
                    points = [(i + offset, e) for i, e in found if e is not None and e["share"] is not None]
                    offset += 0.1
                    if not points:
                        continue
                    color, _, marker = _LOOKS[selector]
                    handles[f"{points[0][1]['label']}, chunks {chunks}"] = axes.errorbar(
                        [x for x, _ in points],
                        [100 * e["share"] for _, e in points],
                        [100 * (e["share_stderr"] or 0) for _, e in points],
                        color=color,
                        marker=marker,
                        markersize=6,
                        markerfacecolor=color if chunks == AVERAGED else "white",
                        linestyle="none",
                        elinewidth=0.9,
                    )
            _share_axis(axes)
            names = [kv if kv == EXACT else f"{kv}\n{bits[kv]:.2f} bits per value" for kv in sources]
            axes.set_xticks(range(len(sources)), names)
            axes.set_title(construction["name"], fontsize=9.5)
            axes.set_ylabel("share recovered, %")
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=3, fontsize=8.5)
        return figure


def wall_time(report: Report) -> Figure | None:
    """Time of a blend over that of a full prefill against the length of the prompt."""
    wall = report["wall_time"]
    if wall is None:
        return None
    with plots.styled():
        figure = plots.new_figure(4.6)
        axes = figure.add_subplot()
        plots.add_title(axes, "Wall time of a blend", "over that of a full prefill in the same round; lower is better")
        tokens = [length["tokens"] for length in wall["lengths"]]
        blends = wall["lengths"][0]["blends"]
        costs = sorted({blend["cost"] for blend in blends})
        for index, blend in enumerate(blends):
            color, _, marker = _LOOKS[blend["selector"]]
            dashes = _DASHES[costs.index(blend["cost"]) % len(_DASHES)]
            label = f"{blend['label']}, {_percent(blend['cost'])}" if blend["cost"] else str(blend["label"])
            ratios = [length["blends"][index]["ratio"] for length in wall["lengths"]]
            _draw_ratios(axes, tokens, ratios, label, color=color, marker=marker, linestyle=dashes)
        decoded = [length["decode"]["ratio"] for length in wall["lengths"]]
        _draw_ratios(axes, tokens, decoded, "decoding the blobs", color="#222222", marker="", linestyle=(0, (4, 2)))
        axes.axhline(1, color="#888888", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{t:,}" for t in tokens])
        axes.minorticks_off()
        axes.set_yscale("log")
        plots.plain_log_ticks(axes)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel("time over full prefill")
        axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5)
        return figure


BLEND_PLOTS: dict[str, tuple[Callable[[Report], Figure | None], str]] = {
    "share_cost": (share_cost, "Share recovered against cost, with one standard error, by selector; exact chunks."),
    "share_source": (
        share_source,
        "Share recovered with exact and with decoded chunks, with one standard error. Filled: averaged over contexts.",
    ),
    "wall_time": (
        wall_time,
        "Time of a blend over that of a full prefill as prompts grow: median, and the 20th and 80th percentile.",
    ),
}
"""The plots of a report by name, in the order in which it shows them, and what they show."""


def _lines(made: Entry, kv: str, chunks: str) -> dict[str, list[Entry]]:
    """What was measured with one kind of chunks, by selector, the cheapest first."""
    found: dict[str, list[Entry]] = {}
    for entry in made["entries"]:
        if (entry["kv"], entry["chunks"]) == (kv, chunks) and entry.get("share") is not None:
            found.setdefault(entry["selector"], []).append(entry)
    return {selector: sorted(entries, key=lambda e: float(e["spent"])) for selector, entries in found.items()}


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[Entry]], handles: dict[str, Any]) -> None:
    for selector, entries in lines.items():
        color, dashes, marker = _LOOKS[selector]
        shown = [*lines[NOTHING], *entries] if selector not in (NOTHING,) and NOTHING in lines else list(entries)
        handles[str(entries[0]["label"])] = axes.errorbar(
            [100 * e["spent"] for e in shown],
            [100 * e["share"] for e in shown],
            [100 * (e["share_stderr"] or 0) for e in shown],
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=5,
            linewidth=2.0 if selector == DEFAULT else 1.2,
            elinewidth=0.7,
            zorder=3 if selector == DEFAULT else 2,
        )
    _share_axis(axes)


def _draw_ratios(axes: Axes, tokens: Sequence[int], ratios: Sequence[Entry], label: str, **look: Any) -> None:
    middle = [r["median"] for r in ratios]
    below = [r["median"] - r["p20"] for r in ratios]
    above = [r["p80"] - r["median"] for r in ratios]
    axes.errorbar(tokens, middle, [below, above], label=label, markersize=5, elinewidth=0.8, linewidth=1.2, **look)


def _share_axis(axes: Axes) -> None:
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.axhline(100, color="#888888", linewidth=0.8)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
