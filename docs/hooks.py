"""MkDocs hooks: include files of the repository in pages, rewrite links between both, list the commands.

A line `<!-- include: blend/README.md -->` in a page is replaced by that file, so that the text exists once, beside the
code that it describes. The file's first heading is dropped, because the page has one; the other headings are nested
below the page's current heading. Then, in every page,

- a link to a file that a page includes leads to that page, and so does the file's name in backticks;
- a link to any other file of the repository becomes the file's name, because the site holds no sources;
- a picture of the repository is copied to the site.

A line `<!-- commands -->` is replaced by the help of every `cuvee` command, `<!-- metrics -->` by the table of the vLLM
connector's metrics, and `<!-- reasons -->` by that of the reasons why it loaded nothing of a request.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
COMMANDS = "<!-- commands -->"
METRICS = "<!-- metrics -->"
REASONS = "<!-- reasons -->"
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_NAME = re.compile(r"(?<!\[)`([\w./-]+\.md)`(?!\])")
_CODE = re.compile(r"(`+[^`]+`+)")


def shown_files(docs: Path) -> dict[str, str]:
    """Return the page that includes each file of the repository, both as POSIX paths."""
    pages = {}
    for page in sorted(docs.rglob("*.md")):
        for name in INCLUDE.findall(page.read_text(encoding="utf-8")):
            pages[name] = page.relative_to(docs).as_posix()
    return pages


def on_page_markdown(markdown: str, /, *, page: Any, config: Any, files: Any) -> str:
    """Expand includes, links and the list of commands before Markdown is parsed."""
    docs = Path(config.docs_dir)
    shown = shown_files(docs)

    def included(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        if not path.is_file():
            raise PluginError(f"{page.file.src_uri}: include: must name a file of the repository, got {match[1]}")
        text = re.sub(r"\A# .*\n", "", path.read_text(encoding="utf-8"))
        before = re.findall(r"^(#+) ", markdown[: match.start()], re.MULTILINE)
        text = _below(text, len(before[-1]) - 1 if before else 0)
        return _linked(text, posixpath.dirname(match[1]), page.file.src_uri, shown, files, config)

    markdown = _linked(
        markdown, f"docs/{posixpath.dirname(page.file.src_uri)}", page.file.src_uri, shown, files, config
    )
    markdown = INCLUDE.sub(included, markdown)
    for mark, made in ((COMMANDS, commands), (METRICS, metrics), (REASONS, reasons)):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def _linked(text: str, folder: str, page: str, shown: dict[str, str], files: Any, config: Any) -> str:
    """Rewrite the links of `text`, which are relative to a folder of the repository, for a page of the site."""

    def to_page(name: str) -> str:
        return posixpath.relpath(shown[name], posixpath.dirname(page) or ".")

    def link(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        name = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / name).exists():
            raise PluginError(f"{page}: {target}: must be in the repository, got {name}")
        if name.startswith("docs/"):
            other = posixpath.relpath(name.removeprefix("docs/"), posixpath.dirname(page) or ".")
            return f"{picture}[{label}]({other}{mark}{anchor})"
        if name in shown:
            return f"[{label}]({to_page(name)}{mark}{anchor})"
        if picture:
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
            return f"![{label}]({posixpath.relpath(name, posixpath.dirname(page) or '.')})"
        return label if name.endswith(label.strip("`")) else f"{label} (`{name}`)"

    def named(match: re.Match[str]) -> str:
        return f"[`{match[1]}`]({to_page(match[1])})" if shown.get(match[1], page) != page else match[0]

    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_NAME.sub(named, _LINK.sub(link, text[at : fence.start()])), fence[0]]
        at = fence.end()
    return "".join([*parts, _NAME.sub(named, _LINK.sub(link, text[at:]))])


def _below(text: str, levels: int) -> str:
    """Nest the headings of `text` this many levels deeper; keep `a[i][j]`, which is an index and not a link."""
    parts, at = [], 0
    for fence in [*_FENCE.finditer(text), None]:
        plain = text[at : fence.start() if fence else len(text)]
        plain = re.sub(r"^(#+ )", "#" * levels + r"\1", plain, flags=re.MULTILINE)
        pieces = _CODE.split(plain)
        pieces[::2] = [piece.replace("][", "]\\[") for piece in pieces[::2]]
        parts += ["".join(pieces), fence[0] if fence else ""]
        at = fence.end() if fence else at
    return "".join(parts)


def commands() -> str:
    """Return Markdown that describes every command and its options."""
    import typer

    from cuvee.cli import app

    root = typer.main.get_command(app)
    return "\n".join(_command(root, "cuvee"))


def metrics() -> str:
    """Return a Markdown table of the vLLM connector's metrics."""
    from cuvee.integrations.vllm.metric_table import METRICS

    labels = {each.name: ", ".join(filter(None, (each.label, each.second))) for each in METRICS.values()}
    rows = [
        f"| `{each.name}` | {each.kind} | {labels[each.name]} | {_cell(_text(each.help))} |"
        for each in METRICS.values()
    ]
    return "\n".join(["| name | kind | label | meaning |", "|---|---|---|---|", *rows])


def reasons() -> str:
    """Return a Markdown table of what an answer's `reason` means."""
    from cuvee.integrations.vllm.scheduler.explaining import REASONS as MEANINGS

    rows = [f"| `{name}` | {re.sub(r' ?{adapter}', '', text)} |" for name, text in MEANINGS.items()]
    shown = "\n".join(rows).replace("{missing}", "N").replace("{refused}", "see `uncached`").replace("{cause}", ": why")
    return f"| reason | meaning |\n|---|---|\n{shown}"


def _command(command: Any, name: str) -> list[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    lines = [f"## `{name}`" if " " in name else "", "", _text(command.help or ""), ""]
    pieces = " ".join(command.collect_usage_pieces(context))
    if not hasattr(command, "commands"):
        lines += ["```", f"{name} {pieces}", "```", ""]
    options = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [record for record in options if record is not None]
    if rows and not hasattr(command, "commands"):
        lines += ["| | |", "|---|---|"]
        lines += [f"| `{_cell(option)}` | {_cell(_text(about))} |" for option, about in rows]
        lines.append("")
    for sub in sorted(getattr(command, "commands", {})):
        lines += _command(command.commands[sub], f"{name} {sub}")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")  # a bar in code would end the cell of a Markdown table


def _text(text: str) -> str:
    """Escape help text, so that Markdown does not read emphasis, links or HTML into it."""
    return re.sub(r"([*_\[\]<>])", r"\\\1", text)
