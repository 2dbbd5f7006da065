"""Seconds from a request to its first token: computed, found in the engine's own cache, stored and loaded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.engine.process import Engine
from cuvee.eval.bench.engine.scope import (
    CHUNK,
    NO_CONNECTOR,
    PROOF_TOKENS,
    QUESTION,
    EngineScope,
    EngineVariant,
)
from cuvee.eval.bench.timing import paired, spread

__all__ = ["LOGPROB_TOLERANCE", "logprob_difference", "measure_first_token", "random_prompt"]

LOGPROB_TOLERANCE = 1e-3  # difference between logprobs of the same tokens after the same cache


@dataclass(slots=True)
class _Runs:
    """The measurements of one variant at one length, by turn."""

    miss: list[float] = field(default_factory=list)
    hit: list[list[float]] = field(default_factory=list)
    loads: list[Mapping[str, float]] = field(default_factory=list)


def measure_first_token(
    scope: EngineScope, model: Mapping[str, Any], engines: Mapping[str, Engine], chosen: Sequence[EngineVariant],
    say: Callable[[str], None], profile: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure the seconds to the first token by length: computed, own cache, and miss and hit of every variant.

    `profile` is the name of that which lossy variants have.
    """
    draw = random.Random(0)
    plain = engines[NO_CONNECTOR]
    proofs = {}
    for length in scope.lengths:
        say(f"first token: proof at {length} tokens")
        proofs[length] = _prove(random_prompt(draw, model, length), length, engines, chosen)
    recompute: dict[int, list[float]] = {length: [] for length in scope.lengths}
    own: dict[int, list[float]] = {length: [] for length in scope.lengths}
    runs = {(name, length): _Runs() for name in engines if name != NO_CONNECTOR for length in scope.lengths}
    for turn in range(scope.rounds):
        say(f"first token: round {turn + 1}")
        for length in scope.lengths:
            prompt = random_prompt(draw, model, length)
            fillers = [NO_CONNECTOR, *(variant.name for variant in chosen)]
            for name in draw.sample(fillers, len(fillers)):
                seconds = engines[name].ask([prompt], forget=True, expect_cached=[0]).seconds
                if name == NO_CONNECTOR:
                    recompute[length].append(seconds)
                else:
                    runs[name, length].miss.append(seconds)
                    engines[name].settle(length // CHUNK)
            expected, loaded = None, []
            exact = {variant.name for variant in chosen if variant.quality == "lossless"}
            names = [NO_CONNECTOR, *(variant.name for variant in chosen)]
            for name in draw.sample(names, len(names)):
                if name == NO_CONNECTOR:
                    found = plain.ask([prompt], expect_cached=[length])
                    own[length].append(found.seconds)
                    expected = found.tokens
                    continue
                entry = runs[name, length]
                entry.hit.append([])
                for _ in range(scope.hits):
                    hit = engines[name].ask([prompt], forget=True, expect_cached=[length])
                    entry.hit[-1].append(hit.seconds)
                    entry.loads.append(hit.figures)
                    if name in exact:
                        loaded.append((name, hit.tokens))
            for name, tokens in loaded:
                if tokens != expected:
                    raise CuveeError(f"{name}: a load of {length} tokens changed the next token")
    lengths = []
    for length in scope.lengths:
        prefill = [(length + QUESTION) / seconds for seconds in recompute[length]]
        lengths.append(
            {
                "tokens": length,
                "prompt_tokens": length + QUESTION,
                "recompute_seconds": spread(recompute[length]),
                "prefill_tokens_per_second": spread(prefill),
                "own_cache_seconds": spread(own[length]),
                "own_cache_over_recompute": paired([[seconds] for seconds in own[length]], recompute[length]),
                "variants": {
                    variant.name: _figures(runs[variant.name, length], recompute[length], model, length)
                    for variant in chosen
                },
            }
        )
    return {
        "chunk_tokens": CHUNK,
        "question_tokens": QUESTION,
        "proof_logprob_difference": proofs,
        "lengths": lengths,
        "variants": [
            {
                "name": variant.name,
                "quality": variant.quality,
                "profile": profile,
                "store": variant.store.partition(":")[0],
            }
            for variant in chosen
        ],
    }


def random_prompt(draw: random.Random, model: Mapping[str, Any], length: int) -> list[int]:
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
        engine.settle(length // CHUNK)
        loaded = engine.ask([prompt], forget=True, expect_cached=[length], **proof)
        worst = logprob_difference(loaded.logprobs[0], expected.logprobs[0])
        if variant.quality == "lossless" and (loaded.tokens != expected.tokens or worst > LOGPROB_TOLERANCE):
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


def _figures(runs: _Runs, recompute: Sequence[float], model: Mapping[str, Any], length: int) -> dict[str, Any]:
    load = [figures["load_seconds"] for figures in runs.loads]
    raw = length * model["raw_bytes_per_token"]
    entry = {
        "hit_seconds": spread([seconds for turn in runs.hit for seconds in turn]),
        "hit_over_recompute": paired(runs.hit, recompute),
        "miss_seconds": spread(runs.miss),
        "miss_over_recompute": paired([[seconds] for seconds in runs.miss], recompute),
        "load_seconds": spread(load),
        "load_tokens_per_second": spread([length / seconds for seconds in load]),
        # By the wall time of the threads that decode: the loads of a single request do not overlap.
        "decode_gb_per_s": spread([raw / 1e9 / figures["work_seconds{decode}"] for figures in runs.loads]),
    }
    for name, of in (
        ("decode_seconds", "work_seconds{decode}"),
        ("fetch_seconds", "work_seconds{fetch}"),
        ("steps",) * 2,
    ):
        entry[name] = spread([figures[of] for figures in runs.loads])
    return entry
