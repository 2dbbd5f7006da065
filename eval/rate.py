"""Size at equal quality on one model: what profiles need for a KL, and for each baseline's own KL.

    python -m cuvee.eval.rate MODEL PROFILE… --text NAME=FILE… [--sequences 6] [--length 512] [--cached 384] [--reread]
        [--kl 0.005…] [--no-curve] [--json OUT] [--plots FOLDER]

It cuts sequences out of each text and stores the cache of their first three quarters in chunks of 256 tokens, with each
profile at several steps and with each baseline. The rest of each sequence is scored after that cache (`QualityBench`).
Sizes at a KL are read off in (log bits, log KL), and all bytes of a blob count. With `--kl` it also shows what
`Codec(profile, kl=…)` gives, next to what was asked for. The report (`cuvee report`) measures more, but takes hours
where this takes minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.family import OCTAVE, step_value
from cuvee.codec.files import write_json
from cuvee.codec.learning.progress import tracked
from cuvee.codec.profile import Profile
from cuvee.eval.corpus import load_model, read_corpus, spread_sequences
from cuvee.eval.machine import hardware
from cuvee.eval.methods import BASELINES, baseline
from cuvee.eval.plots import Series, add_title, bar_length, draw_size_kl, new_figure, save_figure, styled
from cuvee.eval.protocol import reread
from cuvee.eval.quality import CodecMethod, Quality, QualityBench
from cuvee.eval.stats import bits_at_kl

__all__ = ["TARGET_KLS", "bits_at", "main", "measure_rates", "plot_rates"]

TARGET_KLS = (0.0034, 0.0088, 0.02)
STEPS = tuple(range(-3 * OCTAVE, 3 * OCTAVE // 2 + 1, OCTAVE // 2))
COMPARED_BASELINES = ("fp8-e4m3", "int8", "kivi4", "kivi3", "kivi2", "cachegen")


def bits_at(curve: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Bits per value at a KL, as `bits_at_kl`; None if the curve does not pass it, or has fewer than two points.

    Args:
        curve: (bits per value, KL) of each point.
        kl: nats per token.

    Example:
        >>> round(bits_at([(4.0, 0.001), (1.0, 0.004)], 0.002), 6)
        2.0
    """
    if len(curve) < 2:
        return None
    bits, divergences = zip(*curve, strict=True)
    return bits_at_kl(bits, divergences, kl)


def measure_rates(
    bench: QualityBench,
    profiles: dict[str, Profile],
    rivals: Sequence[str] = COMPARED_BASELINES,
    promises: Sequence[float] = (),
    steps: Sequence[int] = STEPS,
) -> dict[str, Any]:
    """Measure curves of profiles and points of baselines, and compare them. The result is a dict for JSON.

    Args:
        bench: the model and the sequences.
        profiles: by name.
        rivals: baselines, as keys of `cuvee.eval.methods.BASELINES`.
        promises: KLs to ask a codec for.
        steps: of the curves, in 1/64 octaves.

    Returns:
        `exact`: the perplexity after the exact cache. `profiles`: by name the points, the bits at each KL of
        `TARGET_KLS`, and what each promise gave. `rivals`: by name the point, and for each profile its bits at that KL
        and how many times smaller that is; None if its curve does not reach.
    """
    out: dict[str, Any] = {"exact": {"perplexity": math.exp(bench.exact_nll)}, "profiles": {}, "rivals": {}}
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, profile in profiles.items():
        points = [
            bench.run(f"step 2^{step / OCTAVE:g}", CodecMethod(Codec(profile, step=step_value(step))))
            for step in tracked(steps, name, progress=bool(steps))
        ]
        curves[name] = [(point.bits_per_value, point.kl) for point in points]
        out["profiles"][name] = {
            "group": profile.group,
            "points": [_figures(point) for point in points],
            "bits_at": {f"{kl:g}": bits_at(curves[name], kl) for kl in TARGET_KLS},
            "promises": {
                f"{kl:g}": _figures(bench.run(f"kl={kl:g}", CodecMethod(Codec(profile, kl=kl)))) for kl in promises
            },
        }
    for key in tracked(rivals, "baselines", progress=True):
        point = bench.run(key, baseline(key))
        against = {name: bits_at(curve, point.kl) for name, curve in curves.items()}
        out["rivals"][key] = {
            **_figures(point),
            "bits_at_its_kl": against,
            "times_smaller": {name: bits and point.bits_per_value / bits for name, bits in against.items()},
        }
    return out


def _figures(quality: Quality) -> dict[str, float | str | None]:
    kl = quality.per_sequence.kl
    return {
        "name": quality.name,
        "bits_per_value": quality.bits_per_value,
        "kl": quality.kl,
        "kl_stderr": quality.kl_stderr,
        "kl_worst": max(kl),
        "perplexity": math.exp(quality.nll),
        "top1": quality.top1,
    }


def plot_rates(result: dict[str, Any], path: Path, title: str) -> None:
    """Write size against KL as an SVG or a PNG.

    Args:
        result: of `measure_rates`.
        path: file to write; its folder is made.
        title: over the plot.

    Raises:
        ImportError: matplotlib is not installed (install `cuvee[plot]`).
    """
    curves = []
    for name, profile in result["profiles"].items():
        points = sorted(profile["points"], key=lambda point: float(point["bits_per_value"]))
        family = f"cuvee/{'all' if name == next(iter(result['profiles'])) else 'layer'}"
        curves.append(_series(f"cuvee, group {profile['group']}", family, points))
    rivals = [_series(name, name, [point]) for name, point in result["rivals"].items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with styled():
        figure = new_figure(5.2)
        axes = figure.add_subplot()
        add_title(axes, title, "lower and further left is better")
        draw_size_kl(figure, axes, [curve for curve in curves if curve.x], rivals, [], None)
    save_figure(figure, path)


def _series(label: str, family: str, points: Sequence[dict[str, Any]]) -> Series:
    return Series(
        label,
        family,
        [point["bits_per_value"] for point in points],
        [point["kl"] for point in points],
        [bar_length(point["kl"], point["kl_stderr"]) for point in points],
        ["" for _ in points],
    )


def _table(title: str, result: dict[str, Any]) -> str:
    def number(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    def times_or_not(value: float | None) -> str:
        return "beyond the curve" if value is None else f"{value:.1f}x"

    names = list(result["profiles"])
    lines = [f"## {title}", "", f"Perplexity after the exact cache: {result['exact']['perplexity']:.3f}", ""]
    profiles = result["profiles"]
    promises = [(name, kl, got) for name in names for kl, got in profiles[name]["promises"].items()]
    if promises:
        columns = ("profile, asked", "KL", "over asked", "worst over asked", "bits per value", "perplexity", "top-1")
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        for name, kl, got in promises:
            over = f"{got['kl'] / float(kl):.2f} | {got['kl_worst'] / float(kl):.2f}"
            rest = f"{got['bits_per_value']:.2f} | {got['perplexity']:.3f} | {got['top1']:.3f}"
            lines.append(f"| {name}, kl={kl} | {got['kl']:.4f} | {over} | {rest} |")
        lines.append("")
    if not any(found["points"] for found in profiles.values()):
        return "\n".join(lines)
    lines += ["| bits per value at KL | " + " | ".join(f"{kl:g}" for kl in TARGET_KLS) + " |"]
    lines.append("|---" * (len(TARGET_KLS) + 1) + "|")
    for name, found in profiles.items():
        lines.append(f"| {name} ({found['group']}) | " + " | ".join(map(number, found["bits_at"].values())) + " |")
    lines += ["", "| baseline | bits per value | KL | top-1 | " + " | ".join(f"{n} is smaller" for n in names) + " |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for key, found in result["rivals"].items():
        times = " | ".join(times_or_not(found["times_smaller"][n]) for n in names)
        facts = f"{found['bits_per_value']:.2f} | {found['kl']:.2g} | {found['top1']:.3f}"
        lines.append(f"| {key} | {facts} | {times} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the top of this file; exit code 1 and one line on standard error for bad input."""
    parser = argparse.ArgumentParser(prog="python -m cuvee.eval.rate", description="Size at equal quality.")
    parser.add_argument("model", help="a folder, a hub name, books-3m or smollm2")
    parser.add_argument("profiles", nargs="+", type=Path, help="profiles learned for it")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="what to measure on")
    parser.add_argument("--sequences", type=int, default=6, help="of each text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--cached", type=int, help="how many of them are cached; the rest is scored (default: 3/4)")
    parser.add_argument(
        "--kl", action="append", type=float, default=[], help="also ask the codec for this KL and show what it gives"
    )
    parser.add_argument("--no-curve", action="store_true", help="measure nothing of the profiles but --kl")
    parser.add_argument("--reread", action="store_true", help="every second sequence repeats a part of its cache")
    parser.add_argument("--methods", default=",".join(COMPARED_BASELINES), help=f"baselines: {', '.join(BASELINES)}")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plots", type=Path, help="write a plot for each text into this folder")
    asked = parser.parse_args(arguments)
    try:
        _run(asked)
    except (CuveeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _told(asked: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as the results record it. Files go by name, since their folders are nobody's business."""
    return {
        "model": Path(asked.model).name,
        "profiles": [path.name for path in asked.profiles],
        "texts": {name: Path(file).name for name, _, file in (text.partition("=") for text in asked.text)},
        "sequences": asked.sequences,
        "length": asked.length,
        "cached": asked.cached,
        "kl": asked.kl,
        "curve": not asked.no_curve,
        "reread": asked.reread,
        "methods": asked.methods,
    }


def _run(asked: argparse.Namespace) -> None:
    pairs = [text.partition("=") for text in asked.text]
    for name, found, file in pairs:
        if not (name and found and file):
            raise InputError(f"--text {name}{found}{file}: must be NAME=FILE")
    rivals = [name for name in asked.methods.split(",") if name]
    for name in rivals:
        baseline(name)
    profiles = {path.stem: Profile.load(path) for path in asked.profiles}
    model = load_model(asked.model, "float32")
    results: dict[str, Any] = {"hardware": hardware(), "asked": _told(asked), "texts": {}}
    for name, _, file in pairs:
        tokens = spread_sequences([read_corpus(file, asked.model)], asked.length, asked.sequences)
        if asked.reread:
            tokens = reread(tokens, 3 * asked.length // 4 if asked.cached is None else asked.cached)
        # Two at a time, because their logits are kept and long caches are large.
        bench = QualityBench(model, tokens, asked.cached, dtype="bfloat16", batch_size=2)
        steps = () if asked.no_curve else STEPS
        results["texts"][name] = measure_rates(bench, profiles, rivals, asked.kl, steps)
        title = f"{name}: {len(tokens)} sequences, {bench.prefix} tokens cached, {asked.length - bench.prefix} scored"
        if asked.plots is not None:
            plot_rates(results["texts"][name], asked.plots / f"{name}.svg", title)
        print(_table(title + (", rereading" if asked.reread else ""), results["texts"][name]), flush=True)
    if asked.json is not None:
        write_json(asked.json, results)


if __name__ == "__main__":
    sys.exit(main())
