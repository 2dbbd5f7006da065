"""`cuvee demo`: what a cache costs, what it becomes, what that buys, and what the model then says; offline.

On any other model than the bundled one, such as "smollm2", a real one, it measures less and takes longer.

The model runs in float32. The coded caches are bfloat16, as in a serving engine, so sizes are compared with 16
bits per value. All predictions are compared with those after the float32 cache, and continuations with those after the
bfloat16 cache.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
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
from cuvee.codec.models.forward import cache_argument, cache_of
from cuvee.codec.models.frozen import frozen
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.codec.support.terminal_table import terminal_table
from cuvee.eval.baselines.quantizers import CacheGen, Float8, Kivi, Uncompressed
from cuvee.eval.formatting import with_error
from cuvee.eval.machine import torch_threads
from cuvee.eval.progress import StepLog
from cuvee.eval.quality import CHUNK_TOKENS, CodecMethod, Method, Quality, QualityBench, spans
from cuvee.learning.divergence import stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Continued", "Demo", "Restored", "run_demo"]

EVALUATION = "orchard"
PROMPT_TOKENS = (12, 24, 48, 96)  # every cached text goes on for each of these before the model takes over
CONTINUED_TOKENS = 24
SHOWN_PROMPTS = 3  # the first ones: none is chosen for how it turned out
SHOWN_TOKENS = 12  # of a prompt
SHOWN_QUALITY = "balanced"
TIMES = 3  # of a timing, whose shortest counts
WIDTH = 100

UNCOMPRESSED, FP8 = "bfloat16", "FP8 e4m3"
BASELINES: dict[str, Method] = {
    UNCOMPRESSED: Uncompressed(),
    FP8: Float8(),
    "int4 (KIVI)": Kivi(4),
    "CacheGen as shipped": CacheGen(),
}
CONTINUED = ("cuvee high", f"cuvee {SHOWN_QUALITY}", FP8)


@dataclass(frozen=True, slots=True)
class DemoScope:
    """The amount of measurements.

    Attributes:
        learned: sequences to calibrate on, at most.
        sequences: at most this many to measure on; None for all sequences of the text.
    """

    learned: int
    sequences: int | None


SCOPES = {BUNDLED_MODEL: DemoScope(learned=50, sequences=None)}
LARGER = DemoScope(learned=20, sequences=6)  # smollm2 is 40 times as large


@dataclass(frozen=True, slots=True)
class Restored:
    """One cache: its size in 16 bits and as blobs, and the seconds to compute it and to restore it from these."""

    raw_bytes: int
    blob_bytes: int
    compute_seconds: float
    restore_seconds: float


@dataclass(frozen=True, slots=True)
class Continued:
    """How the model continues the same prompts after each method's caches.

    Attributes:
        prompts: the last tokens of each, int64 `[t]`.
        exact: the continuations after the uncompressed caches, int64 `[prompts, CONTINUED_TOKENS]`.
        others: those after each method's.
    """

    prompts: list[torch.Tensor]
    exact: torch.Tensor
    others: dict[str, torch.Tensor]

    def equal(self, name: str) -> tuple[float, float]:
        """The share of a method's tokens that are those after the uncompressed caches, and its standard error.

        The error is over prompts: within one, a token that differs changes all that follow.
        """
        shares = (self.others[name] == self.exact).double().mean(1).tolist()
        return fmean(shares), stderr(shares) or 0.0


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo measured."""

    quality: list[Quality]
    restored: Restored
    continued: Continued


def run_demo(console: Console, model: str = BUNDLED_MODEL) -> Demo:
    """Run the demo.

    Args:
        console: where the report goes; progress goes to standard error.
        model: a folder, a hub name, "books-3m" or "smollm2" (see `cuvee.calibration.corpus.load_model`).

    Returns:
        What was measured and shown.

    Raises:
        ImportError: transformers is not installed.
        OSError, CuveeError: the model cannot be loaded, see `load_model`, or no profile can be learned for it.

    Example:
        >>> from rich.console import Console
        >>> from cuvee.eval.demo import run_demo
        >>> demo = run_demo(Console(), model="smollm2")  # doctest: +SKIP
    """
    scope = SCOPES.get(model, LARGER)
    began = time.perf_counter()
    # One thread for torch: with models this small more threads gain little, and on a busy machine they wait for each
    # other: calibrating smollm2 took over three times as long with two threads beside another job.
    log = StepLog(Console(stderr=True))
    with torch_threads(1):
        log.expect(5 + len(BASELINES) + 1 + len(PRESET_KL))
        with log.step("loading the model"):
            lm, tokenizer = load_model(model, "float32"), load_tokenizer(model)
            # The curve is measured on the last ones: those of the novel that is most like the one that is read.
            novels = [read_corpus(name, model) for name in reversed(CALIBRATION_TEXTS)]
            learning = reread(spread_sequences(novels, LENGTH, scope.learned))
            testing = reread(spread_sequences([read_corpus(EVALUATION, model)], LENGTH, scope.sequences))
        with log.step("learning a profile from three novels"):
            profile = cuvee.calibrate(lm, learning, "layer", prefix=PREFIX, progress=False)
        with log.step(f"exact predictions on “{EVALUATION}”"):
            bench = QualityBench(lm, testing, PREFIX, dtype="bfloat16")
        codecs = {"cuvee lossless": Codec.without_profile(bench.layout)}
        codecs |= {f"cuvee {name}": Codec(profile, name) for name in PRESET_KL}
        methods = BASELINES | {name: CodecMethod(codec) for name, codec in codecs.items()}
        quality = []
        for name, method in methods.items():
            with log.step(name):
                quality.append(bench.run(name, method))
        with log.step("computing a cache, and restoring it"):
            restored = _restored(lm, testing[:1, :PREFIX], bench.caches[0], codecs[f"cuvee {SHOWN_QUALITY}"])
        with log.step("continuing texts from restored caches"):
            tails = testing[:, PREFIX:]
            continued = _continued(lm, bench.caches, tails, {name: methods[name] for name in CONTINUED})
    demo = Demo(quality, restored, continued)
    shown, width = Path(model).name, min(console.width, WIDTH)
    console.print(_cost_panel(demo), width=width)
    console.print(_continuations(demo, tokenizer), width=width)
    console.print(_table(quality), width=width)
    console.print(_footnote(bench, shown, len(learning), time.perf_counter() - began), width=width)
    console.print(_commands(model), soft_wrap=True, markup=False, highlight=False)
    return demo


@torch.no_grad()
def _restored(model: PreTrainedModel, tokens: torch.Tensor, cache: KVChunk, codec: Codec) -> Restored:
    """Time computing the cache of `tokens` `[1, t]`, and decoding it for the model."""
    blobs = [codec.encode(cache.slice(*span)) for span in spans(cache.tokens, CHUNK_TOKENS)]

    def compute() -> None:
        model.base_model(input_ids=tokens.to(model.device), use_cache=True)  # without the head, which no cache needs

    def restore() -> None:
        cache_of(model, [KVChunk.concat([codec.decode(blob, device=model.device) for blob in blobs])])

    with frozen(model):
        return Restored(cache.nbytes, sum(map(len, blobs)), _shortest(compute), _shortest(restore))


def _shortest(work: Callable[[], None]) -> float:
    """Return the seconds of the fastest of several calls."""
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def _continued(
    model: PreTrainedModel, caches: Sequence[KVChunk], tails: torch.Tensor, methods: Mapping[str, Method]
) -> Continued:
    """Continue the texts, which go on behind their caches with `tails` `[n, t]`, from several places each."""

    def stored(cache: KVChunk, method: Method) -> KVChunk:
        pieces = [cache.slice(*span) for span in spans(cache.tokens, CHUNK_TOKENS)]
        return KVChunk.concat([method.decode(method.encode(piece)[0]) for piece in pieces])

    def after(chunks: Sequence[KVChunk]) -> torch.Tensor:
        return torch.cat([_greedy(model, chunks, tails[:, :count], CONTINUED_TOKENS) for count in PROMPT_TOKENS])

    prompts = [row[max(count - SHOWN_TOKENS, 0) : count] for count in PROMPT_TOKENS for row in tails]
    others = {name: after([stored(cache, method) for cache in caches]) for name, method in methods.items()}
    return Continued(prompts, after(caches), others)


@torch.no_grad()
def _greedy(model: PreTrainedModel, chunks: Sequence[KVChunk], prompts: torch.Tensor, count: int) -> torch.Tensor:
    """Generate the `count` most likely tokens, one by one, after a cache each and prompts `[n, t]`."""
    cache, fed, out = cache_of(model, chunks), prompts.to(model.device), []
    with frozen(model):
        for _ in range(count):
            fed = model(input_ids=fed, **cache_argument(model, cache), use_cache=True).logits[:, -1:].argmax(-1)
            out.append(fed)
    return torch.cat(out, dim=1).cpu()


def _cost_panel(demo: Demo) -> Panel:
    """Show what a cache costs, what it becomes, and what that buys."""
    one, fp8 = demo.restored, next(entry for entry in demo.quality if entry.name == FP8)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", style="bold")
    grid.add_column(overflow="fold")
    grid.add_row("the cache", f"{one.raw_bytes:,} bytes", f"computed in {one.compute_seconds:.3f} s")
    grid.add_row("in FP8", f"{one.raw_bytes / (fp8.ratio or 1):,.0f} bytes", f"{fp8.ratio:.1f}x smaller")
    smaller = f"{one.raw_bytes / one.blob_bytes:.1f}x smaller"
    buys = f"{smaller}; restored in {one.restore_seconds:.3f} s instead of {one.compute_seconds:.3f} s"
    grid.add_row(f"by cuvee, {SHOWN_QUALITY}", f"{one.blob_bytes:,} bytes", buys, style="green")
    return Panel(grid, title=f"The KV cache of one text of {PREFIX} tokens", padding=(0, 1))


def _continuations(demo: Demo, tokenizer: PreTrainedTokenizerBase) -> Panel:
    """Show the first prompts with their continuations below each other, and the share of equal tokens over all."""
    said = demo.continued

    def text(ids: torch.Tensor) -> str:
        return " ".join(str(tokenizer.decode(ids.tolist())).split())

    def marked(exact: torch.Tensor, other: torch.Tensor) -> Text:
        """Show where a continuation leaves the exact one."""
        apart = (exact != other).nonzero()
        first = int(apart[0]) if len(apart) else len(other)
        whole, same = text(other), text(other[:first])
        return Text.assemble(f"… {whole[: len(same)]}", (whole[len(same) :], "yellow"))

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    shown = f"cuvee {SHOWN_QUALITY}"
    for row in range(min(SHOWN_PROMPTS, len(said.prompts))):
        exact = said.exact[row]
        grid.add_row("prompt", Text(f"… {text(said.prompts[row])} …", style="bold"))
        grid.add_row("exact cache", Text(f"… {text(exact)}"))
        for name in (shown, FP8):
            grid.add_row(name, marked(exact, said.others[name][row]))
        grid.add_row("", "")
    ratios = {entry.name: entry.ratio or 0 for entry in demo.quality}
    verdict = Text(f"Tokens equal to the exact cache's, over all {len(said.prompts)} prompts: ")
    for index, name in enumerate(said.others):
        share, error = said.equal(name)
        words = f"{name}, {ratios[name]:.1f}x smaller: {share:.1%} ± {100 * error:.1f}"
        verdict.append("; " if index else "").append(words, "bold green" if name == shown else "")
    verdict.append(". One token that differs changes all after it: chance decides which of two close ones has more.")
    return Panel(
        Group(grid, verdict),
        title=f"The same texts, continued for {CONTINUED_TOKENS} tokens (yellow: after the first that differs)",
        padding=(0, 1),
    )


def _table(quality: list[Quality]) -> Table:
    columns = ("bits/value", "ratio", "KL ± s.e.", "top-1")
    table = terminal_table("What it saves and what it costs", "method", *columns)
    for q in quality:
        cells = (
            q.name, f"{q.bits_per_value:.2f}", f"{q.ratio or 0:.1f}x", with_error(q.kl, q.kl_stderr),
            f"{100 * q.top1:.1f}%",
        )  # fmt: skip
        table.add_row(*cells, style="bold green" if q.name == f"cuvee {SHOWN_QUALITY}" else "")
    return table


def _footnote(bench: QualityBench, model: str, calibrated: int, seconds: float) -> Text:
    name = REAL_MODEL_TITLE if model == REAL_MODEL else model
    return Text(
        f"KL in nats per token, against the model ({name}, float32) with its own cache; top-1: tokens whose likeliest "
        f"successor stays. The caches coded are bfloat16: the first row is the cost of that cast alone. Measured on "
        f"“{EVALUATION}”, {len(bench.caches)} sequences of {LENGTH} tokens, {PREFIX} cached and the rest scored, which "
        f"in every second sequence repeats part of the cache; the profile was learned on {calibrated} sequences of "
        f"three other novels. Presets stand for {', '.join(f'{kl:g}' for kl in PRESET_KL.values())} on texts like that "
        f"one; on another, as here, they may lose more. Bits count every byte of {CHUNK_TOKENS}-token chunks, not the "
        f"profile. {os.cpu_count()} cores, one thread of torch. A larger model takes longer to "
        f"compute, in proportion to its parameters; to restore, only as its cache grows. {seconds:.0f} s in all.",
        style="dim",
    )


def _commands(model: str) -> str:
    """Return the commands to go on with, as they can be typed here: `make demo` installs only what it needs itself."""
    activated = shutil.which("cuvee")
    program = "cuvee" if activated else os.path.relpath(Path(sys.executable).with_name("cuvee"))
    install = "pip install" if activated else f"{os.path.relpath(sys.executable)} -m pip install"
    name = REAL_MODEL if model == BUNDLED_MODEL else model
    serve = '{"kv_connector": "CuveeConnector", "kv_role": "kv_both",'
    options = '"kv_connector_extra_config": {"store": "file:///dev/shm/kv?max_gb=4", "profile": "profile.safetensors"}}'
    return (
        f"\nGo on with a model of yours, or with {REAL_MODEL}, which is downloaded once (93 MB):\n\n"
        f"# what {REAL_MODEL} and reports need\n{install} 'cuvee[eval]'\n"
        f"# once per model\n{program} profile learn {name} -o profile.safetensors\n"
        f"# every baseline, tasks, plots\n{program} report --model {name} --profile profile.safetensors --quick\n"
        f"# on a CPU: docs/guides/vllm-cpu.md\n"
        f"vllm serve MODEL --kv-transfer-config '{serve}\n  {options}'"
    )
