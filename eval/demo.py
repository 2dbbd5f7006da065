"""`cuvee demo`: show what compressing a cache saves and costs, on the bundled model, offline.

On any other model, such as "smollm2", a real one, it measures less and takes longer.

The model runs in float32. The coded caches are bfloat16, as in a serving engine, so sizes are compared with 16
bits per value. All predictions are compared with those after the float32 cache.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import cuvee
from cuvee.calibration.bundled import CALIBRATION_TEXTS
from cuvee.calibration.corpus import (
    BUNDLED_MODEL,
    load_model,
    load_tokenizer,
    read_corpus,
    spread_sequences,
)
from cuvee.calibration.real_model import REAL_MODEL, REAL_MODEL_TITLE
from cuvee.calibration.sequences import LENGTH, PREFIX, reread
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.format.container import inspect
from cuvee.codec.models.forward import append_units, cache_argument, empty_cache, score
from cuvee.codec.models.frozen import frozen
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.codec.support.terminal_table import terminal_table
from cuvee.eval.baselines.quantizers import CacheGen, Float8, Kivi, Uncompressed
from cuvee.eval.machine import torch_threads
from cuvee.eval.plots import plot_quality
from cuvee.eval.progress import StepLog
from cuvee.eval.quality import CHUNK_TOKENS, CodecMethod, Method, Quality, QualityBench, spans

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Demo", "run_demo"]

EVALUATION = "orchard"
SHOWN_QUALITY = "high"  # of the continuation: a table shows the others
SHOWN_TOKENS = 14  # of the prompt
LEAST_PROMPT = 10
CONTINUED_TOKENS = (12, 28)  # at least, at most
WIDTH = 100
GROUPS = {"none": "no profile", "layer": "by layer", "all": "all layers"}
SPANS = {"layer": "one basis per layer", "all": "one basis for all layers"}

SHOWN_BASELINES: dict[str, Method] = {
    "bfloat16": Uncompressed(),
    "FP8 e4m3": Float8(),
    "int4 (KIVI)": Kivi(4),
    "int2 (KIVI)": Kivi(2),
    "CacheGen as shipped": CacheGen(),
}


@dataclass(frozen=True, slots=True)
class DemoScope:
    """The amount of measurements.

    Attributes:
        learned: sequences to calibrate on, at most.
        sequences: at most this many to measure on; None for all sequences of the text.
        groups: of the profiles to learn.
        octaves: further steps for the plot, as powers of two.
    """

    learned: int
    sequences: int | None
    groups: tuple[str, ...]
    octaves: tuple[int, ...]


SCOPES = {
    BUNDLED_MODEL: DemoScope(learned=50, sequences=None, groups=("layer", "all"), octaves=(-5, -4, -3, -2, -1, 0)),
}
# For larger models: smollm2 is 40 times as large. A basis for all its layers would span 11,520 values.
LARGER = DemoScope(learned=20, sequences=6, groups=("layer",), octaves=(-4, -2, 0))


@dataclass(frozen=True, slots=True)
class Continuation:
    """One prompt, its cache before and after the codec, and how the model continues it."""

    raw_bytes: int
    blob_bytes: int
    passage: str
    prompt: str
    exact: str
    decoded: str
    empty: str
    agreeing: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo measured: of the baselines, and of the presets by group of the profile."""

    baselines: list[Quality]
    presets: dict[str, list[Quality]]
    continuation: Continuation


def run_demo(
    console: Console,
    out: Path,
    progress: Console | None = None,
    model: str = BUNDLED_MODEL,
) -> Demo:
    """Run the demo.

    Args:
        console: where the report goes.
        out: where to write the plot. Without matplotlib there is a hint instead.
        progress: where to show the progress; default: standard error.
        model: a folder, a hub name, "books-3m" or "smollm2" (see `cuvee.calibration.corpus.load_model`).

    Returns:
        What was measured and shown.

    Raises:
        ImportError: transformers is not installed.
        OSError, CuveeError: the model cannot be loaded, see `load_model`, or no profile can be learned for it.

    Example:
        >>> from rich.console import Console
        >>> from cuvee.eval.demo import run_demo
        >>> demo = run_demo(Console(), Path("demo.svg"), model="smollm2")  # doctest: +SKIP
    """
    scope = SCOPES.get(model, LARGER)
    began = time.perf_counter()
    # One thread for torch: with models this small more threads gain little, and on a busy machine they wait for each
    # other: calibrating smollm2 took over three times as long with two threads beside another job.
    log = StepLog(progress or Console(stderr=True))
    with torch_threads(1):
        of_a_group = 1 + len(PRESET_KL) + len(scope.octaves)
        log.expect(3 + len(SHOWN_BASELINES) + 1 + len(scope.groups) * of_a_group)
        with log.step("loading the model"):
            lm, tokenizer = load_model(model, "float32"), load_tokenizer(model)
            # The curve is measured on the last ones: those of the novel that is most like the one that is read.
            novels = [read_corpus(name, model) for name in reversed(CALIBRATION_TEXTS)]
            learning = reread(spread_sequences(novels, LENGTH, scope.learned))
            testing = reread(spread_sequences([read_corpus(EVALUATION, model)], LENGTH, scope.sequences))
        profiles = {}
        for group in scope.groups:
            with log.step(f"calibrating on three novels, {SPANS[group]}"):
                profiles[group] = cuvee.calibrate(lm, learning, group, prefix=PREFIX, progress=False)
        with log.step(f"exact predictions on “{EVALUATION}”"):
            bench = QualityBench(lm, testing, PREFIX, dtype="bfloat16")
        with log.step("continuing a text from a decoded cache"):
            row, first, run = _longest_repeat(lm, tokenizer, bench.caches, testing)
            count = min(max(run, CONTINUED_TOKENS[0]), CONTINUED_TOKENS[1])
            codec = Codec(profiles["layer"], SHOWN_QUALITY)
            continuation = _continue(lm, tokenizer, bench.caches[row], testing[row, PREFIX:], first, count, codec)

        def measure(name: str, method: Method, where: str) -> Quality:
            with log.step(f"{name}, {where}"):
                return bench.run(name, method)

        baselines = [measure(name, method, "a baseline") for name, method in SHOWN_BASELINES.items()]
        lossless = CodecMethod(Codec.without_profile(bench.layout))
        presets = {"none": [measure("lossless", lossless, GROUPS["none"])]}
        curves = {}
        for group, profile in profiles.items():
            presets[group] = [measure(name, CodecMethod(Codec(profile, name)), GROUPS[group]) for name in PRESET_KL]
            curves[group] = presets[group] + [
                measure(f"step 2^{n}", CodecMethod(Codec(profile, step=2.0**n)), GROUPS[group]) for n in scope.octaves
            ]
        shown_name = Path(model).name
        if find_spec("matplotlib") is not None:
            shown = {f"cuvee, {SPANS[group]}": curve for group, curve in curves.items()}
            plot_quality(out, shown, baselines[1:], f"{shown_name} on “{EVALUATION}”: size against quality")
    seconds = time.perf_counter() - began
    width = min(console.width, WIDTH)
    console.print(_prompt_panel(continuation), width=width)
    console.print(_table(baselines, presets), width=width)
    console.print(_footnote(bench, shown_name, len(learning), seconds), width=width)
    if find_spec("matplotlib") is None:
        console.print("No plot: it needs matplotlib (pip install 'cuvee\\[plot]').")
    else:
        console.print(f"Plot: [bold]{out}[/bold]", soft_wrap=True, highlight=False)
    return Demo(baselines, presets, continuation)


@torch.no_grad()
def _longest_repeat(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, caches: list[KVChunk], tokens: torch.Tensor
) -> tuple[int, int, int]:
    """Find the longest repeat of the exact cache by the model: row, first token, length."""
    rows = range(0, len(tokens), 2)
    scored = tokens[::2, PREFIX:]
    predicted = score(model, [caches[row] for row in rows], scored).argmax(-1)
    hits = predicted == scored[:, 1:]
    best = (0, LEAST_PROMPT, 0)
    for row, right in zip(rows, hits.tolist(), strict=True):
        for first in range(LEAST_PROMPT, len(right)):
            word = str(tokenizer.decode([int(tokens[row, PREFIX + first])]))
            run = next((n for n, hit in enumerate(right[first - 1 :]) if not hit), len(right) - first + 1)
            if run > best[2] and word.startswith(" "):
                best = (row, first, run)
    return best


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVChunk,
    tail: torch.Tensor,
    first: int,
    count: int,
    codec: Codec,
) -> Continuation:
    """Let the model continue `tail[:first]` for `count` tokens."""
    pieces = [cache.slice(*span) for span in spans(cache.tokens, CHUNK_TOKENS)]
    blobs = [codec.encode(piece) for piece in pieces]
    decoded = KVChunk.concat([codec.decode(blob) for blob in blobs])
    exact, after, empty = (greedy(model, chunk, tail[:first], count) for chunk in (cache, decoded, None))

    def text(ids: torch.Tensor) -> str:
        return " ".join(str(tokenizer.decode(ids.tolist())).split())

    shown = max(first - SHOWN_TOKENS, 0)
    while shown < first - 1 and not str(tokenizer.decode([int(tail[shown])])).startswith(" "):
        shown += 1  # to the beginning of a word

    return Continuation(
        sum(inspect(blob).raw_bytes for blob in blobs),
        sum(map(len, blobs)),
        text(tail[first : first + count]),
        text(tail[shown:first]),
        text(exact),
        text(after),
        text(empty),
        int((exact == after).sum()),
        count,
    )


@torch.no_grad()
def greedy(model: PreTrainedModel, chunk: KVChunk | None, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """Generate the `count` most likely tokens, one by one, after a cache (None for no cache) and a prompt `[t]`."""
    cache = empty_cache()
    if chunk is not None:
        for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            append_units(
                cache,
                keys.transpose(0, 1)[None].to(model.device, model.dtype),
                values.transpose(0, 1)[None].to(model.device, model.dtype),
                layer,
                chunk.layout.layers[layer],
            )
    fed, out = prompt[None].to(model.device), []
    with frozen(model):
        for _ in range(count):
            fed = model(input_ids=fed, **cache_argument(model, cache), use_cache=True).logits[:, -1:].argmax(-1)
            out.append(fed[0])
    return torch.cat(out).cpu()


def _prompt_panel(c: Continuation) -> Panel:
    sizes = Text.assemble(
        (f"{c.raw_bytes:,} bytes", "bold"),
        " of cache ──encode──▶ ",
        (f"{c.blob_bytes:,} bytes", "bold green"),
        " ──decode──▶ ",
        (f"{c.raw_bytes:,} bytes", "bold"),
        ", ",
        (f"{c.raw_bytes / c.blob_bytes:.1f}x smaller", "bold green"),
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("in the cache", Text(f"… {c.prompt} {c.passage} …"))
    grid.add_row("prompt", Text(f"{c.prompt} …", style="bold"))
    grid.add_row("exact cache", Text(f"… {c.exact}"))
    grid.add_row("decoded cache", Text(f"… {c.decoded}", style="green"))
    grid.add_row("no cache", Text(f"… {c.empty}", style="dim"))
    if c.agreeing == c.tokens:
        verdict = Text(f"All {c.tokens} tokens are those of the exact cache.", style="bold green")
    else:
        verdict = Text(f"{c.agreeing} of {c.tokens} tokens are those of the exact cache.", style="bold yellow")
    return Panel(
        Group(sizes, Text(), grid, Text(), verdict),
        title=f"One cache of {PREFIX} tokens, quality “{SHOWN_QUALITY}”",
        padding=(0, 1),
    )


def _table(baselines: list[Quality], presets: dict[str, list[Quality]]) -> Table:
    columns = ("bits/value", "ratio", "KL ± s.e.", "top-1", "encode", "decode")
    table = terminal_table("What it saves and what it costs", "method", *columns)
    for quality in baselines:
        table.add_row(*_row(quality.name, quality))
    for group, series in presets.items():
        table.add_section()
        for quality in series:
            style = "bold green" if quality.name == "balanced" else ""
            table.add_row(*_row(f"cuvee {quality.name}, {GROUPS[group]}", quality), style=style)
    return table


def _row(name: str, q: Quality) -> tuple[str, ...]:
    kl = f"{q.kl:.5f} ± {q.kl_stderr or 0:.5f}"
    speeds = [f"{1e3 * s:,.0f} MB/s" if s else "" for s in (q.encode_gb_per_s, q.decode_gb_per_s)]
    return (name, f"{q.bits_per_value:.2f}", f"{q.ratio or 0:.1f}x", kl, f"{100 * q.top1:.1f}%", *speeds)


def _footnote(bench: QualityBench, model: str, calibrated: int, seconds: float) -> Text:
    name = REAL_MODEL_TITLE if model == REAL_MODEL else model
    return Text(
        f"KL in nats per token, against the model ({name}, float32) with its own cache; top-1: tokens whose likeliest "
        f"successor stays. The caches coded are bfloat16: the first row is the cost of that cast alone. Measured on "
        f"“orchard”, {len(bench.caches)} sequences of {LENGTH} tokens, {PREFIX} cached and the rest scored, which in "
        f"every second sequence repeats part of the cache; profiles learned on {calibrated} sequences of three other "
        f"novels. Presets stand for {', '.join(f'{kl:g}' for kl in PRESET_KL.values())} on texts like that one; on "
        f"another, as here, they may lose more. Bits count every byte of {CHUNK_TOKENS}-token chunks, not the profile. "
        f"MB/s of 16-bit cache, {os.cpu_count()} cores. {seconds:.0f} s in all.",
        style="dim",
    )
