"""Tables of documents that are made of the committed results: `python -m tests.package.result_tables` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; `TABLES` says how it is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIZES = ROOT / "eval" / "results" / "2026-11-29-smollm2-five-layers"
DOCUMENTS = (ROOT / "README.md", SIZES / "README.md")
OURS, PCA = "cuvee/smollm2", "pca/layers:5"
BASELINES = {
    "fp8-e4m3": "FP8 e4m3",
    "kivi4": "int4, KIVI's grouping",
    "cachegen": "CacheGen as shipped",
    "cachegen-tables-free": "CacheGen, its tables free",
}
KINDS = {
    ("pd_dracula.md", False): "a novel",
    ("pd_dracula.md", True): "the same, re-reading",
    ("python.txt", False): "source code",
    ("python.txt", True): "the same, re-reading",
}
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def renewed(text: str) -> str:
    """Return a document with its tables made anew.

    Raises:
        KeyError: a table of that name is not known.
    """
    return _MARKED.sub(lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3], text)


def _report() -> Any:
    return json.loads((SIZES / "report.json").read_text(encoding="utf-8"))


def _interval(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None or ratio["ratio"] is None:
        return "-"
    return f"**{ratio['ratio']:.1f}x** ({ratio['low']:.1f} to {ratio['high']:.1f})"


def _smaller(anchors: list[Any], anchor: str, against: str) -> Mapping[str, Any] | None:
    """How many times smaller cuvee is than `against`, at the KL of `anchor`."""
    (found,) = (each for each in anchors if each["anchor"] == anchor)
    return next((r for r in found["ratios"] if (r["of"], r["against"]) == (OURS, against)), None)


def equal_kl() -> list[str]:
    anchors = _report()["comparison"]
    lines = ["| baseline | bits per value | KL | cuvee is smaller by |", "|---|---|---|---|"]
    for anchor in anchors:
        size = _interval(_smaller(anchors, anchor["anchor"], anchor["anchor"]))
        lines.append(
            f"| {BASELINES[anchor['anchor']]} | {anchor['bits_per_value']:.2f} | {anchor['kl']:.4f} | {size} |"
        )
    (fp8,) = (each for each in anchors if each["anchor"] == "fp8-e4m3")
    (pca,) = (each["bits_per_value"] for each in fp8["families"] if each["family"] == PCA)
    size = _interval(_smaller(anchors, "fp8-e4m3", PCA))
    return [*lines, f"| PCA transform coding of the same groups | {pca:.2f} | {fp8['kl']:.4f} | {size} |"]


def by_kind() -> list[str]:
    kinds = {(kind["text"], kind["reread"]): kind["comparison"] for kind in _report()["by_kind"]}
    rows = [
        ("FP8 e4m3 (8 bits per value)", "fp8-e4m3", "fp8-e4m3"),
        ("int4, KIVI's grouping (5.00)", "kivi4", "kivi4"),
        ("CacheGen as shipped (5.3)", "cachegen", "cachegen"),
        ("PCA, five layers too, at the KL of FP8", "fp8-e4m3", PCA),
        ("PCA, five layers too, at the KL of int4", "kivi4", PCA),
    ]
    lines = [f"| baseline | {' | '.join(KINDS.values())} |", "|---|---|---|---|---|"]
    for name, anchor, against in rows:
        cells = [_interval(_smaller(kinds[kind], anchor, against)) for kind in KINDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def sizes() -> list[str]:
    found = [each for each in _report()["sizes"] if each["family"] == OURS]
    return [
        f"| KL, nats per token | {' | '.join(format(each['kl'], 'g') for each in found)} |",
        "|---|" + "---|" * len(found),
        f"| bits per value | {' | '.join(format(each['bits_per_value'], '.2f') for each in found)} |",
        f"| times smaller than 16 bits | {' | '.join(format(16 / each['bits_per_value'], '.1f') for each in found)} |",
    ]


TABLES: dict[str, Callable[[], list[str]]] = {"equal-kl": equal_kl, "by-kind": by_kind, "sizes": sizes}


def main() -> None:
    for path in DOCUMENTS:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
