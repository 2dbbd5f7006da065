"""Size at equal quality on one model: what profiles need for a KL, and for each baseline's own KL.

    python -m cuvee.eval.rate MODEL PROFILE… --text NAME=FILE… [--sequences 6] [--length 512] [--reread] [--json OUT]

Cuts sequences out of each text, stores the cache of their first three quarters in chunks of 256 tokens, with each
profile at several steps and with each baseline, and scores the rest (`QualityBench`). Sizes at a KL are read off in
(log bits, log KL); all bytes of a blob count. The report (`cuvee report`) measures more, and takes hours where this
takes minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from cuvee.codec.calibrate import tracked
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.family import OCTAVE, step_value
from cuvee.codec.profile import Profile
from cuvee.eval.corpus import load_model, read_corpus, spread_sequences
from cuvee.eval.machine import hardware
from cuvee.eval.methods import BASELINES, baseline
from cuvee.eval.protocol import reread
from cuvee.eval.quality import CodecMethod, Quality, QualityBench

__all__ = ["TARGETS", "bits_at", "main", "measure"]

TARGETS = (0.0034, 0.0088, 0.02)
STEPS = tuple(range(-3 * OCTAVE, 3 * OCTAVE // 2 + 1, OCTAVE // 2))
RIVALS = ("fp8-e4m3", "int8", "kivi4", "kivi3", "kivi2", "cachegen")


def bits_at(curve: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Bits per value at a KL, between two measured points; None where the curve does not pass it.

    Args:
        curve: (bits per value, KL) of each point.
        kl: nats per token.

    Example:
        >>> bits_at([(4.0, 0.001), (1.0, 0.004)], 0.002)
        2.0
    """
    known = sorted(point for point in curve if point[1] > 0)
    for (bits0, kl0), (bits1, kl1) in pairwise(known):
        if min(kl0, kl1) <= kl <= max(kl0, kl1) and kl0 != kl1:
            share = math.log(kl / kl0) / math.log(kl1 / kl0)
            return float(bits0 * (bits1 / bits0) ** share)
    return None


def measure(bench: QualityBench, profiles: dict[str, Profile], rivals: Sequence[str] = RIVALS) -> dict[str, Any]:
    """Curves of profiles, points of baselines, and what they are worth to each other; JSON-ready.

    Args:
        bench: the model and the sequences.
        profiles: by name.
        rivals: keys of `cuvee.eval.methods.BASELINES`.

    Returns:
        `profiles`: by name the points and the bits at TARGETS; `rivals`: by name the point, and by profile the bits
        at the rival's KL and how many times smaller that is. None where a curve does not reach.
    """
    out: dict[str, Any] = {"profiles": {}, "rivals": {}}
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, profile in profiles.items():
        points = [
            bench.run(f"step 2^{step / OCTAVE:g}", CodecMethod(Codec(profile, step=step_value(step))))
            for step in tracked(STEPS, name, progress=True)
        ]
        curves[name] = [(point.bits_per_value, point.kl) for point in points]
        out["profiles"][name] = {
            "group": profile.group,
            "points": [_figures(point) for point in points],
            "bits_at": {f"{kl:g}": bits_at(curves[name], kl) for kl in TARGETS},
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


def _table(title: str, result: dict[str, Any]) -> str:
    def number(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    names = list(result["profiles"])
    lines = [f"## {title}", "", "| bits per value at KL | " + " | ".join(f"{kl:g}" for kl in TARGETS) + " |"]
    lines.append("|---" * (len(TARGETS) + 1) + "|")
    for name, found in result["profiles"].items():
        lines.append(f"| {name} ({found['group']}) | " + " | ".join(map(number, found["bits_at"].values())) + " |")
    lines += ["", "| baseline | bits per value | KL | top-1 | " + " | ".join(f"{n} is smaller" for n in names) + " |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for key, found in result["rivals"].items():
        times = " | ".join(f"{number(found['times_smaller'][n], '.1f')}x" for n in names)
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
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence; three quarters are cached")
    parser.add_argument("--reread", action="store_true", help="every second sequence repeats a part of its cache")
    parser.add_argument("--methods", default=",".join(RIVALS), help=f"baselines: {', '.join(BASELINES)}")
    parser.add_argument("--json", type=Path, help="write all figures here")
    asked = parser.parse_args(arguments)
    try:
        _run(asked)
    except (CuveeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _told(asked: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, for the results: files by their names, for where they lie is nobody's business."""
    return {
        "model": Path(asked.model).name,
        "profiles": [path.name for path in asked.profiles],
        "texts": {name: Path(file).name for name, _, file in (text.partition("=") for text in asked.text)},
        "sequences": asked.sequences,
        "length": asked.length,
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
            tokens = reread(tokens, 3 * asked.length // 4)
        bench = QualityBench(model, tokens, dtype="bfloat16")
        results["texts"][name] = measure(bench, profiles, rivals)
        title = f"{name}: {len(tokens)} sequences, {bench.prefix} tokens cached, {asked.length - bench.prefix} scored"
        print(_table(title + (", rereading" if asked.reread else ""), results["texts"][name]), flush=True)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
