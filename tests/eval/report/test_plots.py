"""The plots of a report: they show what the report says, and leave matplotlib as they found it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.eval.report.world import draw, entry, write_plot

pytest.importorskip("matplotlib")


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def xs(line: Any) -> list[float]:
    return [float(x) for x in line.get_xdata()]


def ys(line: Any) -> list[float]:
    return [float(y) for y in line.get_ydata()]


def series(axes: Any) -> dict[str, Any]:
    """Error bars of axes by label, or by place where they have none."""
    return {c.get_label() or str(i): c for i, c in enumerate(axes.containers)}


def test_the_plot_is_written_as_svg(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plots" / "size_kl.svg"
    report["model"]["name"] = name = r"<b> & $\frac{1}{0}$ _x_"
    assert write_plot(report, path) and [file.name for file in path.parent.iterdir()] == ["size_kl.svg"]
    first = path.read_bytes()
    root = ElementTree.fromstring(first)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert all(v.startswith("#") for e in root.iter() for k, v in e.items() if k.endswith("href"))
    assert not any(e.tag.endswith(("script", "image", "metadata")) for e in root.iter())
    assert write_plot(report, path) and path.read_bytes() == first
    assert any(name in (element.text or "") for element in root.iter())
    assert not write_plot({**report, "quality": [], "comparison": []}, path) and not path.exists()


def test_matplotlib_stays_as_it_was(report: dict[str, Any], tmp_path: Path) -> None:
    import matplotlib as mpl
    from matplotlib import _pylab_helpers

    with mpl.rc_context({"font.size": 7.0, "svg.fonttype": "path"}):
        before, managed = dict(mpl.rcParams), list(_pylab_helpers.Gcf.figs)
        write_plot(report, tmp_path / "plot.svg")
        assert dict(mpl.rcParams) == before and list(_pylab_helpers.Gcf.figs) == managed


def test_size_and_kl_are_those_of_the_report(report: dict[str, Any]) -> None:
    report["quality"].append(entry("exact", 32.0, 0.0))  # has no place on a logarithmic axis
    report["comparison"][0]["families"][2]["bits_per_value"] = 0.9  # PCA's, left of cuvee's curve
    figure = draw(report)
    assert figure is not None
    axes = figure.axes[0]
    shown = series(axes)
    for family, label in (
        ("cuvee/layer", "cuvee, a basis per layer"),
        ("cuvee/all", "cuvee, one basis for all layers"),
    ):
        members = sorted((e for e in report["quality"] if e["family"] == family), key=lambda e: e["bits_per_value"])
        line, _, bars = shown[label]
        assert xs(line) == [e["bits_per_value"] for e in members]
        assert ys(line) == [e["kl"] for e in members]
        spans = [segment[:, 1] for segment in bars[0].get_segments()]
        assert [float(high - low) / 2 for low, high in spans] == pytest.approx([e["kl_stderr"] for e in members])
    points = {
        (float(c[0].get_xdata()[0]), float(c[0].get_ydata()[0])) for c in axes.containers if len(c[0].get_xdata()) == 1
    }
    assert points == {(16.0, 2e-5), (8.0, 5e-3), (5.0, 1.7e-2), (6.0, 4.8e-2)}
    assert "destroyed cache: 0.800" in texts(axes)
    assert texts(axes).count("balanced") == 2 and texts(axes).count("2^0") == 0
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert len(set(named)) == len(named) == len(axes.containers) and "KIVI int4" in named
    anchors = [line for line in axes.lines if ys(line) == [0.0047, 0.0047]]
    assert [xs(line) for line in anchors] == [[1.27, 8.0]]  # to cuvee's curve, not to the others
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_bars_end_above_zero(report: dict[str, Any]) -> None:
    report["quality"] = [entry("kivi4", 5.0, 0.01, kl_stderr=0.5), entry("int8", 4.0, 0.02, kl_stderr=None)]
    figure = draw({**report, "comparison": []})
    assert figure is not None
    wide, none = (container[2][0].get_segments()[0][:, 1] for container in figure.axes[0].containers)
    assert 0 < wide[0] < 0.01 and none[0] == none[1] == 0.02


def test_without_matplotlib_the_remedy_is_named(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'cuvee\[eval\]'"):
        draw(report)
