"""A report as documents: Markdown for a repository, one HTML file for a mail.

    report.json -> sections of texts, tables, figures --+--> report.md    + plots/*.png
                                                        +--> report.html  (plots inside, no script, nothing loaded)

Both documents are written from the same sections, so that both say the same. What a report does not hold (no tasks, a
single sequence without standard errors, a curve that does not reach a size) is left out or said in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuvee.eval.files import write_atomically
from cuvee.eval.methods import family_label
from cuvee.eval.plots import PLOTS, family_rank, is_learned, layer_entries, machine, write_plots

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Block", "Section", "Table", "escape", "format_bits", "format_interval", "format_number", "html", "markdown",
    "markdown_document", "print_summary", "sections", "with_error", "write_report",
]  # fmt: skip

Report = Mapping[str, Any]
Entry = Mapping[str, Any]

RATIOS = (4, 8, 16, 32)  # sizes a reader may ask for
_TEMPLATE = Path(__file__).with_name("report.html.j2")
_SMALL_MODEL = 500_000_000  # parameters
_MOST_DECIMALS = 7  # beyond these a number is written with an exponent


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of plain text, each document escapes them.

    Attributes:
        columns: headings; those that end in a space hold text and are aligned left, the others numbers.
        rows: cells, as many as columns.
        title: over it, or empty.
        note: under it, or empty.
        strong: rows that stand out.
    """

    columns: list[str]
    rows: list[list[str]]
    title: str = ""
    note: str = ""
    strong: frozenset[int] = frozenset()

    @property
    def kind(self) -> str:
        """For the template."""
        return "table"

    def is_text(self, column: int) -> bool:
        """Whether a column is aligned left."""
        return self.columns[column].endswith(" ")


@dataclass(frozen=True, slots=True)
class Block:
    """Anything but a table: a "text", "code", a "list" with `items`, or a "figure" whose text is its caption."""

    kind: str
    text: str = ""
    name: str = ""  # of the plot
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what follows it."""

    id: str
    title: str
    blocks: list[Table | Block]


def sections(report: Report) -> list[Section]:
    """All that a report says, in order; parts it has nothing for are left out."""
    made = (_headline, _equal_kl, _methods, _tasks, _layers, _speed, _profiles, _curves, _protocol, _limits)
    return [section for section in (make(report) for make in made) if section.blocks]


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md`, `report.html` and `plots/*` of a report, each file whole or not at all.

    Args:
        report: the dict of `report.json`.
        folder: where they go; it is made.

    Raises:
        ImportError: matplotlib or jinja2 is not installed (install `cuvee[eval]`).
    """
    written = write_plots(report, folder / "plots")
    plots = {name: [f"plots/{file}" for file in files] for name, files in written.items()}
    write_atomically(folder / "report.md", markdown(report, plots).encode())
    write_atomically(folder / "report.html", html(report, folder / "plots").encode())


def print_summary(report: Report, console: Console) -> None:
    """Show what you lose, and how much smaller at equal KL, on a terminal."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    console.print(Text(_title(report), style="bold"))
    for section in (_headline(report), _equal_kl(report)):
        for block in section.blocks:
            if isinstance(block, Table):
                grid = Grid(title=section.title, box=box.SIMPLE_HEAD, pad_edge=False)
                for index, column in enumerate(block.columns):
                    grid.add_column(Text(column.strip()), justify="left" if block.is_text(index) else "right")
                for index, row in enumerate(block.rows):
                    grid.add_row(*map(Text, row), style="bold" if index in block.strong else "")
                console.print(grid)
            elif block.kind == "text":
                console.print(Text(block.text))


# The documents -------------------------------------------------------------------------------------------------------


def markdown(report: Report, plots: Mapping[str, Sequence[str]]) -> str:
    """The report as GitHub-flavored Markdown.

    Args:
        report: the dict of `report.json`.
        plots: files of each plot, relative to the document, the PNG first, as `write_plots` gives them.
    """
    first = {name: files[0] for name, files in plots.items()}
    return markdown_document(_title(report), _preface(report), sections(report), first)


def markdown_document(title: str, preface: Sequence[str], body: Sequence[Section], figures: Mapping[str, str]) -> str:
    """GitHub-flavored Markdown.

    Args:
        title: in plain text, like all that follows.
        preface: paragraphs.
        body: the rest.
        figures: file of each plot, relative to the document; plots that are not there are left out.
    """
    parts = [f"# {escape(title)}", *map(escape, preface)]
    for section in body:
        parts.append(f"## {escape(section.title)}")
        for block in section.blocks:
            if isinstance(block, Table):
                parts += _markdown_table(block)
            elif block.kind == "code":
                parts.append(f"```\n{block.text}\n```")
            elif block.kind == "list":
                parts.append("\n".join(f"- {escape(item)}" for item in block.items))
            elif block.kind == "text":
                parts.append(escape(block.text))
            elif block.name in figures:
                parts += [f"![{escape(block.text)}]({figures[block.name]})", escape(block.text)]
    return "\n\n".join(parts) + "\n"


def html(report: Report, plots_folder: Path) -> str:
    """The report as one HTML page that loads nothing: plots are inside as SVG.

    Args:
        report: the dict of `report.json`.
        plots_folder: where `write_plots` put `NAME.svg`; plots that are not there are left out.

    Raises:
        ImportError: jinja2 is not installed (install `cuvee[eval]`).
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2: install cuvee[eval]") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found = {name: plots_folder / f"{name}.svg" for name in PLOTS}
    figures = {
        # Drawn by `write_plots`, which escapes what it was given.
        name: Markup(_inline_svg(path.read_text(encoding="utf-8"), name))
        for name, path in found.items()
        if path.exists()
    }
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(title=_title(report), preface=_preface(report), sections=sections(report), figures=figures)


def _markdown_table(table: Table) -> list[str]:
    lines = [
        "| " + " | ".join(escape(column.strip()) for column in table.columns) + " |",
        "|" + "|".join("---" if table.is_text(i) else "---:" for i in range(len(table.columns))) + "|",
    ]
    for index, row in enumerate(table.rows):
        cells = [escape(cell) for cell in row]
        if index in table.strong:
            cells[0] = f"**{cells[0]}**"
        lines.append("| " + " | ".join(cells) + " |")
    parts = [f"### {escape(table.title)}"] if table.title else []
    return [*parts, "\n".join(lines), *([escape(table.note)] if table.note else [])]


def escape(text: str) -> str:
    """Plain text as inline Markdown, also inside a table."""
    text = " ".join(text.split())
    text = re.sub(r"([\\`*|<>\[\]$~])", r"\\\1", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # inside a word it means nothing
    text = re.sub(r"&(?=#?\w+;)", r"\\&", text)
    return re.sub(r"^(#+|[-+]|\d+[.)])(?=\s)", r"\\\1", text)


def _inline_svg(text: str, name: str) -> str:
    """An SVG file as an element of a page: ids get a prefix, for all plots number theirs alike."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # would hold for the whole page, which has its own
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    return re.sub(r"url\(#", f"url(#{name}-", text)


# The sections --------------------------------------------------------------------------------------------------------


def _title(report: Report) -> str:
    return f"What compressing its KV cache costs {report['model']['name']}"


def _preface(report: Report) -> list[str]:
    lines = []
    if not report["complete"]:
        lines.append("This run is not complete: the same command goes on where it stopped.")
    lines.append(
        f"Measured {_date(report)} on {machine(report)}, with cuvee {report['environment']['cuvee']}. The model's "
        f"predictions after the decoded cache are compared with those after the exact one, for the same tokens. "
        f"Bits a value count everything that is stored for a cache, the profile apart; the cache itself has 16."
    )
    return lines


def _headline(report: Report) -> Section:
    rows: list[list[str]] = []
    sentence = ""
    for ratio in RATIOS:
        for family in _learned_families(report):
            entries = [e for e in report["quality"] if e["family"] == family and e["bits_per_value"] > 0]
            finest = max(e["bits_per_value"] for e in entries)
            bits = min(16 / ratio, finest)
            label = family_label(family)
            kl, loss, same = (_at(entries, bits, field) for field in ("kl", "delta_nll", "top1"))
            if kl is None or loss is None or same is None:
                smallest = _ratio(16 / min(e["bits_per_value"] for e in entries))
                rows.append([f"{ratio}x", "", label, f"not measured beyond {smallest}", "", "", ""])
                continue
            # A small change of the loss is, to first order, the same change of the perplexity.
            growth = loss[1] and math.exp(loss[0]) * loss[1]
            costs = [
                with_error(*kl),
                with_error(*same, percent=True),
                with_error(math.expm1(loss[0]), growth, signed=True, percent=True),
            ]
            rows.append([f"{ratio}x", format_bits(bits), label, *costs, _task_changes(report, family, bits)])
            if ratio == 8 and not sentence:
                sentence = (
                    f"At {_ratio(16 / bits)} ({label}), the KL to the exact cache is {costs[0]} nats per token, "
                    f"{costs[1]} of the most likely next tokens stay what they were, and the perplexity changes by "
                    f"{costs[2]}."
                )
    if not rows:
        return Section("lose", "What you lose", [])
    sentence = sentence or "No curve reaches 8x."
    for entry in report["quality"]:
        if entry["family"] == "destroyed":
            change = with_error(math.expm1(entry["delta_nll"]), None, signed=True, percent=True)
            sentence += (
                f" For scale: with a destroyed cache the KL is {format_number(entry['kl'])} and the perplexity changes "
                f"by {change}."
            )
    columns = ["size", "bits per value", "codec ", "KL", "top-1 kept", "perplexity", "tasks "]
    note = (
        "Interpolated between measured settings, ± one standard error. Where the finest setting measured is already "
        "smaller than the size asked for, the row is of that setting."
    )
    if report["scores"]:
        note += (
            " Tasks: the best scored setting that fits in the size, and the scores it moves by more than one standard "
            "error of the paired difference."
        )
    else:
        columns.pop()
        rows = [row[:-1] for row in rows]
    strong = frozenset(index for index, row in enumerate(rows) if row[0] == "8x")
    table = Table(columns, rows, note=note, strong=strong)
    return Section("lose", "What you lose", [Block("text", sentence), table, _figure("size_kl")])


def _task_changes(report: Report, family: str, bits: float) -> str:
    """What the tasks say of the best scored setting of a family that takes at most `bits` a value."""
    known = {e["key"]: e for e in report["quality"] if e["family"] == family and e["bits_per_value"] <= bits}
    scored = {s["key"] for s in report["scores"]} & set(known)
    if not scored:
        return "no scored setting is this small"
    best = max(scored, key=lambda key: known[key]["bits_per_value"])
    moved = [
        f"{score['task']} {format_number(score['difference'], signed=True)}"
        for score in report["scores"]
        if score["key"] == best and _mark(report, score)
    ]
    setting = f"{known[best]['setting']} ({_ratio(16 / known[best]['bits_per_value'])})"
    return f"{setting}: {', '.join(moved) or 'none beyond one standard error'}"


def _equal_kl(report: Report) -> Section:
    ratios = [r for anchor in report["comparison"] for r in anchor["ratios"]]
    families = sorted({str(r["of"]) for r in ratios}, key=lambda family: family_rank(report, family))
    rows: list[list[str]] = []
    missing: list[str] = []
    for anchor in report["comparison"]:
        name = _name(report, anchor["anchor"])
        sizes = {f["family"]: f["bits_per_value"] for f in anchor["families"]}
        sizes[anchor["anchor"]] = anchor["bits_per_value"]
        missing += [
            f"{family_label(f['family'])}, at the KL of {name}: {f['reason']}"
            for f in anchor["families"]
            if f["bits_per_value"] is None and f.get("reason")
        ]
        for against in dict.fromkeys(str(r["against"]) for r in anchor["ratios"]):
            found = {str(r["of"]): r for r in anchor["ratios"] if r["against"] == against}
            cells = [format_interval(found.get(family)) for family in families]
            rows.append(
                [name, format_number(anchor["kl"]), _name(report, against), format_bits(sizes.get(against)), *cells]
            )
    if not rows:
        return Section("equal-kl", "How much smaller at equal KL", [])
    columns = [
        "at the KL of ",
        "KL",
        "against ",
        "its bits per value",
        *(f"smaller by: {family_label(f)}" for f in families),
    ]
    note = (
        "Sizes are read off the measured curves at the KL of the baseline. In brackets: 95 % of the bootstrap over "
        "sequences."
    )
    blocks: list[Table | Block] = [Table(columns, rows, note=note)]
    if missing:
        blocks.append(Block("list", items=tuple(missing)))
    return Section("equal-kl", "How much smaller at equal KL", blocks)


def _methods(report: Report) -> Section:
    shown = [e for e in report["quality"] if e["kind"] != "curve"]
    if not shown:
        return Section("methods", "Every method", [])
    note = (
        "± one standard error over sequences. ΔNLL: what the decoded cache adds to the negative log-likelihood of the "
        "real next tokens, paired, in nats per token. Top-1: tokens whose most likely successor stays the same. GB/s "
        "of 16-bit cache; none where bits are counted and not made."
    )
    blocks: list[Table | Block] = [_quality_table(report, shown, note)]
    if report["skipped"]:
        blocks.append(
            Table(["left out ", "why "], [[s["key"], s["reason"]] for s in report["skipped"]], title="Left out")
        )
    return Section("methods", "Every method", blocks)


def _curves(report: Report) -> Section:
    shown = [e for e in report["quality"] if e["kind"] == "curve"]
    blocks: list[Table | Block] = [_quality_table(report, shown, "")] if shown else []
    return Section("curves", "The other points of the curves", blocks)


def _quality_table(report: Report, entries: Sequence[Entry], note: str) -> Table:
    columns = [
        "method ", "bits per value", "ratio", "KL", "ΔNLL", "perplexity", "top-1 kept", "encode GB/s", "decode GB/s",
        "what its bits count ",
    ]  # fmt: skip
    rows: list[list[str]] = []
    strong: set[int] = set()
    for e in sorted(entries, key=lambda e: (family_rank(report, e["family"]), e["bits_per_value"])):
        if _is_preset(e):
            strong.add(len(rows))
        # A baseline's dial is not in its label.
        named = not e["setting"] or e["label"].endswith(e["setting"])
        rows.append(
            [
                e["label"] if named else f"{e['label']} @{e['setting']}",
                format_bits(e["bits_per_value"]),
                _ratio(e["ratio"]),
                with_error(e["kl"], e["kl_stderr"]),
                with_error(e["delta_nll"], e["delta_nll_stderr"], signed=True),
                format_number(math.exp(e["nll"]), 4),
                with_error(e["top1"], e["top1_stderr"], percent=True),
                format_number(e["encode_gb_per_s"]),
                format_number(e["decode_gb_per_s"]),
                e["counts"],
            ]
        )
    return Table(columns, rows, note=note, strong=frozenset(strong))


def _tasks(report: Report) -> Section:
    quality = {e["key"]: e for e in report["quality"]}
    blocks: list[Table | Block] = []
    for task in report["tasks"]:
        scores = [s for s in report["scores"] if s["task"] == task["name"]]
        if not scores:
            continue
        scores.sort(key=lambda s: _score_rank(report, quality, s))
        rows = [
            [
                _name(report, s["key"]),
                format_bits(s["bits_per_value"]),
                with_error(s["score"], s["stderr"]),
                "" if s["difference"] is None else with_error(s["difference"], s["difference_stderr"], signed=True),
                _mark(report, s),
            ]
            for s in scores
        ]
        if task["chance"] is not None:
            rows.append(["chance", "", format_number(task["chance"]), "", ""])
        better = "higher" if task["higher_is_better"] else "lower"
        about = [f"{task['docs']} documents, {better} is better", str(task["description"]).strip().rstrip(".")]
        blocks.append(
            Table(
                ["method ", "bits per value", str(task["metric"]), "difference to 16 bits", "beyond one s.e. "],
                rows,
                title=str(task["name"]),
                note=". ".join(text for text in about if text) + ".",
                strong=frozenset(
                    i for i, s in enumerate(scores) if s["key"] in quality and _is_preset(quality[s["key"]])
                ),
            )
        )
    if not blocks:
        return Section("tasks", "Scores of tasks", [])
    text = (
        "± one standard error over documents; differences are paired, document by document, with the cache at 16 "
        "bits. The last column says which differences are larger than their standard error."
    )
    return Section("tasks", "Scores of tasks", [Block("text", text), _figure("size_scores"), *blocks])


def _layers(report: Report) -> Section:
    entries = layer_entries(report)
    if not entries:
        return Section("layers", "Layers", [])
    columns, rows = ["layer"], [[str(i)] for i in range(len(entries[0]["layers"]))]
    for entry in entries:
        if all(layer["bits_per_value"] is not None for layer in entry["layers"]):
            columns.append(f"bits: {entry['label']}")
            for row, layer in zip(rows, entry["layers"], strict=True):
                row.append(format_bits(layer["bits_per_value"]))
    for entry in entries:
        columns.append(f"error of K / V: {entry['label']}")
        for row, layer in zip(rows, entry["layers"], strict=True):
            row.append(f"{format_number(layer['key_error'], 2)} / {format_number(layer['value_error'], 2)}")
    note = (
        "Error: squared error over the variance, keys after RoPE. Bits of a layer without the header of the blob; "
        "none where one basis spans several layers."
    )
    return Section("layers", "Layers", [_figure("layers"), Table(columns, rows, note=note)])


def _speed(report: Report) -> Section:
    if all(e["encode_gb_per_s"] is None for e in report["quality"]):
        return Section("speed", "Speed", [])
    text = f"One pass over all sequences on {machine(report)}; the numbers are in the table of methods."
    return Section("speed", "Speed", [Block("text", text), _figure("throughput")])


def _profiles(report: Report) -> Section:
    rows = [
        [
            name,
            str(p["group"]),
            str(p["source"]),
            f"{p['bytes']:,}",
            format_number(p["bits_per_value_over_1m_tokens"]),
            format_number(p["seconds"]),
            str(p["id"]),
        ]
        for name, p in report["profiles"].items()
    ]
    columns = ["profile ", "group ", "source ", "bytes", "bits per value over 1M tokens", "seconds to learn", "id "]
    note = "A profile is learned once for a model and kept beside it; its bytes are not part of the sizes above."
    return Section("profiles", "Profiles", [Table(columns, rows, note=note)] if rows else [])


def _protocol(report: Report) -> Section:
    model, text, configuration = report["model"], report["text"], report["configuration"]
    facts: list[tuple[str, Any]] = [
        ("model", f"{model['name']} ({model['model_type']}, {model['parameters']:,} parameters, {model['dtype']})"),
        ("model fingerprint", model["fingerprint"]),
        ("cache", f"{model['layers']} layers, {model['values_per_token']:,} values per token"),
        ("cache stored as", configuration.get("cache_dtype")),
        ("sequences", f"{text['sequences']} of {text['length']} tokens, the first {text['prefix']} cached"),
        ("repeats", _repeats(text)),
        ("tokens coded together", configuration.get("chunk_tokens")),
        ("sequences to calibrate on", text["calibration_sequences"]),
        ("SHA-256 of the tokens", text["tokens_sha256"]),
        ("perplexity, exact cache", report["exact"] and format_number(report["exact"]["perplexity"], 4)),
        ("documents a task at most", configuration.get("limit")),
        ("seed", configuration.get("seed")),
        ("time taken", f"{report['seconds']:.0f} s"),
        ("digest of the configuration", report["digest"]),
    ]
    texts = [
        [use, str(source["name"]), f"{source['tokens']:,}", str(source["sha256"])]
        for use, key in (("calibration", "calibration"), ("evaluation", "evaluation"))
        for source in text[key]
    ]
    environment = [[str(name), str(value)] for name, value in report["environment"].items() if value is not None]
    blocks: list[Table | Block] = [Block("code", report["command"])] if report["command"] else []
    blocks.append(Table(["what ", "value "], [[name, str(value)] for name, value in facts if value is not None]))
    if texts:
        blocks.append(Table(["text for ", "name ", "tokens", "SHA-256 "], texts, title="Texts"))
    blocks.append(Table(["what ", "version or kind "], environment, title="Software and hardware"))
    return Section("protocol", "How it was measured", blocks)


def _limits(report: Report) -> Section:
    model, text = report["model"], report["text"]
    says = [
        f"Standard errors and intervals are over {text['sequences']} sequences of the same few texts. Neighboring "
        f"sequences share vocabulary and topic, so what another text would give may lie further away than they say."
        if text["sequences"] > 1
        else "There is a single sequence: nothing here says how far another one would be from it.",
    ]
    if model["parameters"] < _SMALL_MODEL:
        says.append(
            f"{model['name']} has {model['parameters'] / 1e6:.3g} million parameters. What a large model loses at the "
            f"same size is another measurement: run this report on it."
        )
    if text.get("reread"):
        says.append(
            "Half of the sequences repeat a part of their cache, which a model must read to predict them: losses are "
            "larger here than on ordinary text, where it hardly looks back."
        )
    says.append(
        "Baselines are written from their descriptions. Where a table says ideal entropy, or that levels are counted, "
        "no bytes were made: their real sizes are no smaller than that."
    )
    if report["scores"]:
        says.append(
            "Documents of a task share text and templates, so they are fewer independent trials than their number. "
            "With this many comparisons some differ by more than one standard error by chance alone."
        )
    if any(e["encode_gb_per_s"] is not None for e in report["quality"]):
        says.append("Speeds are one pass on this machine, not a benchmark: the command cuvee bench makes one.")
    return Section("limits", "What the figures do not say", [Block("list", items=tuple(says))])


def _repeats(text: Mapping[str, Any]) -> str | None:
    if text.get("reread") is None:
        return None
    return "every second sequence repeats a part of its cache" if text["reread"] else "none: ordinary text"


def _figure(name: str) -> Block:
    return Block("figure", PLOTS[name][1], name)


def _learned_families(report: Report) -> list[str]:
    """Families of the codec with a profile, in order, that have a size."""
    found = {str(e["family"]) for e in report["quality"] if is_learned(e["family"]) and e["bits_per_value"] > 0}
    return sorted(found, key=lambda family: family_rank(report, family))


def _name(report: Report, key: str) -> str:
    """What a method, or a family, is called."""
    labels = [str(e["label"]) for e in report["quality"] if e["key"] == key]
    return labels[0] if labels else family_label(key)


def _family(quality: Mapping[str, Entry], score: Entry) -> str:
    key = str(score["key"])
    return str(quality[key]["family"]) if key in quality else key.partition("@")[0]


def _is_preset(entry: Entry) -> bool:
    return entry["kind"] == "preset" and is_learned(entry["family"])


def _score_rank(report: Report, quality: Mapping[str, Entry], score: Entry) -> tuple[tuple[int, int], float]:
    return family_rank(report, _family(quality, score)), score["bits_per_value"] or 0.0


def _mark(report: Report, score: Entry) -> str:
    """How a score that differs from that at 16 bits by more than a standard error does so, else empty."""
    difference, error = score["difference"], score["difference_stderr"]
    if not difference or error is None or abs(difference) <= error:
        return ""
    higher = next(task["higher_is_better"] for task in report["tasks"] if task["name"] == score["task"])
    return "better" if (difference > 0) == higher else "worse"


def _date(report: Report) -> str:
    return str(report["environment"]["date"]).partition("T")[0]


# Numbers -------------------------------------------------------------------------------------------------------------


def _at(entries: Sequence[Entry], bits: float, field: str) -> tuple[float, float | None] | None:
    """A figure of a family at a size, and its standard error; None outside of what was measured.

    Straight lines between settings over the logarithm of the size; KL as a logarithm, too.
    """
    order = sorted(entries, key=lambda e: float(e["bits_per_value"]))
    for low, high in pairwise([order[0], *order]):  # a single setting is a curve of no length
        x0, x1 = low["bits_per_value"], high["bits_per_value"]
        if x0 <= bits <= x1:
            share = math.log(bits / x0) / math.log(x1 / x0) if x0 < x1 else 1.0
            y0, y1 = float(low[field]), float(high[field])
            e0, e1 = low[f"{field}_stderr"], high[f"{field}_stderr"]
            error = None if e0 is None or e1 is None else float(e0 + share * (e1 - e0))
            straight = y0 + share * (y1 - y0)
            return (y0 * (y1 / y0) ** share if field == "kl" and y0 > 0 and y1 > 0 else straight), error
    return None


def _decimals(value: float, digits: int) -> int:
    """Decimals that show `digits` significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def _format(value: float, decimals: int, signed: bool = False) -> str:
    sign = "+" if signed else ""
    text = f"{value:{sign}.1e}" if decimals > _MOST_DECIMALS else f"{value:{sign},.{decimals}f}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def format_number(value: float | None, digits: int = 3, signed: bool = False) -> str:
    """A number with so many significant digits; empty where there is none."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return _format(value, _decimals(value, digits), signed)


def with_error(value: float, error: float | None, *, signed: bool = False, percent: bool = False) -> str:
    """A number to the second digit of its standard error; a value other than 0 keeps at least one digit."""
    scale, unit = (100.0, " %") if percent else (1.0, "")
    value *= scale
    if error is None:
        return format_number(value, 4 if percent else 3, signed) + unit
    error *= scale
    decimals = _decimals(error, 2) if error else _decimals(value, 3)
    if value and not round(value, decimals):
        decimals = _decimals(value, 1)
    return f"{_format(value, decimals, signed)} ± {_format(error, decimals)}{unit}"


def format_bits(bits: float | None) -> str:
    """Bits a value as a cell; empty for None."""
    if bits is None:
        return ""
    return "0" if bits == 0 else f"{bits:.2f}" if bits >= 0.1 else format_number(bits)


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def format_interval(ratio: Mapping[str, Any] | None) -> str:
    """A ratio and its interval, of which an end may lie beyond what was measured."""
    if ratio is None or ratio["ratio"] is None:
        return "not reached"
    size, low, high = (_ratio(ratio[end]) for end in ("ratio", "low", "high"))
    if low and high:
        return f"{size} ({low} to {high})"
    if low or high:
        return f"{size} (above {low})" if low else f"{size} (below {high})"
    return size
