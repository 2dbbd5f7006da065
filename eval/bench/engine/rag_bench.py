"""Retrieval traffic in vLLM: blends beside the engine's own prefix cache, on questions about public paragraphs.

    questions of XQuAD, paragraphs by Zipf's law --> prompts: an instruction, some paragraphs in any order, a question
    the same prompts, one after the other --> an engine with its prefix cache alone, and one that blends
                                          --> further prompts, after a restart of both
                                          --> once more with every blend checked: its KL

Nobody prepares documents or marks them: parts come from the traffic alone, and are found by paragraphs. In a real
prompt neighbors change, so the engine's prefix cache finds little more than the instruction.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from cuvee.codec.data.corpus import load_tokenizer
from cuvee.codec.errors import InputError
from cuvee.eval import plots
from cuvee.eval.bench.engine.process import Engine, EngineAnswer
from cuvee.eval.bench.engine.ratios import paired
from cuvee.eval.bench.engine.scope import EngineVariant, conditions
from cuvee.eval.documents import ReportTable
from cuvee.eval.machine import machine_line, vllm_version
from cuvee.eval.progress import timed_lines
from cuvee.eval.tasks.public import open_questions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RagScope", "draw_rag_report", "print_rag_report", "run_rag_bench"]

_INSTRUCTION = "Read these paragraphs, and answer the question that follows them from what they say.\n\n"
_STEPS = 8  # of the prompts: parts of the traffic that are summed up separately
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class RagScope:
    """The scope of the benchmark.

    Attributes:
        questions: number of prompts.
        paragraphs: number of different paragraphs in the traffic.
        passages: paragraphs per prompt, one of which answers the question.
        exponent: of Zipf's law: the n-th most popular paragraph is asked for n^-exponent times as often as the first.
        restarted: number of further prompts, after a restart.
        quality: of the store.
        blend: options of blending.
        seed: of the traffic.
    """

    questions: int = 60
    paragraphs: int = 60
    passages: int = 6
    exponent: float = 1.0
    restarted: int = 15
    quality: str = "lossless"
    blend: tuple[tuple[str, Any], ...] = ()
    seed: int = 0


def run_rag_bench(
    scope: RagScope,
    model: Path,
    data: str | None = None,
    profile: Path | None = None,
    any_version: bool = False,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        scope: what to measure.
        model: folder of a checkpoint, with its tokenizer.
        data: the folder with XQuAD; default: the copy on the hub.
        profile: of this model, for a lossy quality.
        any_version: take another file than the published one.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON.

    Raises:
        ImportError: vLLM is not installed.
        InputError: there are not so many paragraphs, or the data is missing.
        CuveeError: an engine failed.
    """
    if find_spec("vllm") is None:
        raise ImportError("this benchmark needs vLLM: pip install vllm")
    say = timed_lines(progress)
    every = rag_prompts(scope, model, data, any_version)
    prompts, further = every[: scope.questions], every[scope.questions :]
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store?max_gb=20"
        variant = EngineVariant("blend", scope.quality, store)
        with Engine(Path(folder) / "engine.log") as engine:
            run = _Runs(scope, engine, model, profile, max(map(len, every)), say)
            plain = run.asked("the engine's own prefix cache", prompts, None, {})
            plain_again = run.asked("the same, after a restart", further, None, {})
            blended = run.asked("blends", prompts, variant, {})
            blended_again = run.asked("blends, after a restart", further, variant, {})
            checked = EngineVariant("blend", scope.quality, "memory://?max_gb=8")
            kls = run.asked("blends, each checked", prompts, checked, {"check_every": 1})
    return {
        **conditions(model, scope.quality, profile),
        "blend": dict(scope.blend),
        "questions": len(prompts),
        "paragraphs": scope.paragraphs,
        "passages": scope.passages,
        "exponent": scope.exponent,
        "seed": scope.seed,
        "prompt_tokens": {"mean": float(np.mean([len(prompt) for prompt in prompts])), "most": max(map(len, prompts))},
        "traffic": _compared(prompts, blended, plain),
        "restart": _compared(further, blended_again, plain_again),
        "kl": {
            **_kl(kls),
            "recomputed": _total(kls, "blend_recomputed_tokens") / max(_total(kls, "blend_reused_tokens"), 1),
        },
    }


def rag_prompts(scope: RagScope, model: Path, data: str | None, any_version: bool) -> list[list[int]]:
    """Return the token ids of all prompts, those after the restart last.

    Raises:
        InputError: see `run_rag_bench`.
    """
    tokenizer = load_tokenizer(str(model))
    rng = random.Random(scope.seed)
    about: dict[str, list[str]] = {}
    for question in open_questions("xquad", data, passages=1, any_version=any_version):
        about.setdefault(question.passages[0], []).append(question.document()["question"])
    if not 1 <= scope.passages <= scope.paragraphs <= len(about):
        raise InputError(
            f"paragraphs: must be from passages={scope.passages} to the {len(about)} of the data, got "
            f"{scope.paragraphs}"
        )
    paragraphs = rng.sample(sorted(about), scope.paragraphs)
    popularity = [rank**-scope.exponent for rank in range(1, len(paragraphs) + 1)]

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    instruction = [*tokenizer("").input_ids, *ids(_INSTRUCTION)]
    tokens = {paragraph: ids(f"{paragraph}\n\n") for paragraph in paragraphs}
    prompts = []
    for _ in range(scope.questions + scope.restarted):
        chosen = _drawn(rng, paragraphs, popularity, scope.passages)
        asked = rng.choice(about[chosen[0]])
        rng.shuffle(chosen)
        prompts.append([*instruction, *(token for one in chosen for token in tokens[one]), *ids(asked)])
    return prompts


def _drawn(rng: random.Random, paragraphs: Sequence[str], popularity: Sequence[float], count: int) -> list[str]:
    """Draw different paragraphs by their popularity."""
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen.setdefault(rng.choices(paragraphs, popularity)[0])
    return list(chosen)


class _Runs:
    """Asks engines for prompts, one at a time.

    Args:
        scope: what to measure.
        engine: starts engines.
        model, profile: of them.
        longest: tokens of the longest prompt.
        say: tells the progress.
    """

    def __init__(
        self,
        scope: RagScope,
        engine: Engine,
        model: Path,
        profile: Path | None,
        longest: int,
        say: Callable[[str], None],
    ) -> None:
        self._scope = scope
        self._engine = engine
        self._model, self._profile = model, profile
        self._longest = longest
        self._say = say

    def asked(
        self, name: str, prompts: Sequence[Sequence[int]], variant: EngineVariant | None, blend: Mapping[str, Any]
    ) -> list[EngineAnswer]:
        """Start an engine, ask it for all prompts, and stop it."""
        longest = self._longest + 1 + _BLOCK
        options = {
            "max_model_len": longest,
            "max_num_batched_tokens": longest,
            "block_size": _BLOCK,
            "skip_tokenizer_init": False,  # blending finds paragraphs by it
        }
        if variant is None:
            self._engine.start(self._model, options)
        else:
            options_of_blend = {**dict(self._scope.blend), **blend}
            self._engine.start(self._model, options, variant, self._profile, blend=options_of_blend, decide="measured")
        answers = []
        for number, prompt in enumerate(prompts, 1):
            if number % _STEPS == 1:
                self._say(f"{name}: prompt {number} of {len(prompts)}")
            answers.append(self._engine.ask([prompt], expect_cached=None))
            if variant is not None:
                self._engine.idle()  # questions come seconds apart
        self._engine.stop()
        return answers


def _reused(answer: EngineAnswer) -> float:
    """Count a prompt's tokens that were not computed. Of the tokens that count as cached, a blend computes some."""
    figures = answer.figures
    between = figures.get("blended_tokens", 0.0) - figures.get("blend_reused_tokens", 0.0)
    return answer.cached[0] - between - figures.get("blend_recomputed_tokens", 0.0)


def _total(answers: Sequence[EngineAnswer], figure: str) -> float:
    return sum(answer.figures.get(figure, 0.0) for answer in answers)


def _kl(answers: Sequence[EngineAnswer]) -> dict[str, Any]:
    """Return the KL of the blends among the answers, all of which were checked, in nats."""
    each = [answer.figures.get("blend_kl", 0.0) for answer in answers if answer.figures.get("blends")]
    found = np.array(each or [0.0])
    return {
        "checked": len(each),
        "mean": float(found.mean()),
        "standard_error": float(found.std(ddof=1) / len(found) ** 0.5) if len(found) > 1 else 0.0,
        "median": float(np.median(found)),
        "each": each,
    }


def _compared(
    prompts: Sequence[Sequence[int]], blended: Sequence[EngineAnswer], plain: Sequence[EngineAnswer]
) -> dict[str, Any]:
    """Compare an engine that blends with one that does not, over the same prompts."""
    parts = np.array_split(np.arange(len(prompts)), min(_STEPS, len(prompts)))
    lengths = np.array([len(prompt) for prompt in prompts])

    def figures(answers: Sequence[EngineAnswer]) -> dict[str, Any]:
        seconds, reused = np.array([a.seconds for a in answers]), np.array([_reused(a) for a in answers])
        return {
            "p50": float(np.percentile(seconds, 50)),
            "p99": float(np.percentile(seconds, 99)),
            "reused": float(reused.sum() / lengths.sum()),
            "reused_over_time": [float(reused[part].sum() / lengths[part].sum()) for part in parts],
            "p50_over_time": [float(np.percentile(seconds[part], 50)) for part in parts],
        }

    ours, theirs = figures(blended), figures(plain)
    return {
        "blends": ours,
        "prefix_cache": theirs,
        "p50_ratio": ours["p50"] / theirs["p50"],
        "p99_ratio": ours["p99"] / theirs["p99"],
        "over_prefix_cache": paired([[a.seconds] for a in blended], [a.seconds for a in plain]),
    }


def print_rag_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as a table."""
    machine = report["hardware"]
    console.print(
        machine_line(machine, f"vLLM {vllm_version(machine)}", f"torch {machine['torch']}"),
        style="dim",
        highlight=False,
    )
    rows = []
    for name, entry in (("all prompts", report["traffic"]), ("after a restart", report["restart"])):
        for engine, label in (("prefix_cache", "vLLM's prefix cache"), ("blends", "blends")):
            own = entry[engine]
            rows.append([name, label, f"{own['reused']:.0%}", f"{own['p50']:.2f}", f"{own['p99']:.2f}"])
        rows.append([name, "ratio", "", f"{entry['p50_ratio']:.2f}", f"{entry['p99_ratio']:.2f}"])
    options = ", ".join(f"{name} {value}" for name, value in report["blend"].items()) or "default options"
    console.print(
        f"\n{report['questions']} questions about {report['passages']} of {report['paragraphs']} paragraphs each, "
        f"{report['prompt_tokens']['mean']:.0f} tokens; {report['model']}, {report['quality']}, {options}\n",
        highlight=False,
    )
    header = ["", "engine", "tokens not computed", "first token p50, s", "p99, s"]
    console.print(ReportTable(header, rows).for_terminal())
    kl = report["kl"]
    console.print(
        f"KL of the next token, {kl['checked']} blends: {kl['mean']:.3g} ± {kl['standard_error']:.1g} nats, median "
        f"{kl['median']:.3g}; {kl['recomputed']:.0%} of the reused tokens were recomputed",
        highlight=False,
    )


def draw_rag_report(report: dict[str, Any]) -> Figure:
    """Draw the share of tokens that were not computed, and the time to the first token, over the traffic."""
    traffic = report["traffic"]
    with plots.styled():
        figure = plots.new_figure(4.4)
        left, right = figure.subplots(1, 2)
        plots.add_title(left, "Retrieval traffic in vLLM", f"parts come from the traffic alone; {report['model']}")
        for engine, label, color in (
            ("prefix_cache", "vLLM's prefix cache", plots.VERMILION),
            ("blends", "blends", plots.BLUE),
        ):
            own = traffic[engine]
            ends = [
                report["questions"] * (at + 1) / len(own["reused_over_time"])
                for at in range(len(own["reused_over_time"]))
            ]
            left.plot(ends, [100 * share for share in own["reused_over_time"]], marker="o", color=color, label=label)
            right.plot(ends, own["p50_over_time"], marker="o", color=color)
        left.set_ylabel("tokens that are not computed, %")
        right.set_ylabel("time to first token, median, s")
        for axes in (left, right):
            axes.set_xlabel("questions asked")
            axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower left", ncols=2, fontsize=8.5)
        return figure
