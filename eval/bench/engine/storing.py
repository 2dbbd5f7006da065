"""Throughput of a batch of new prompts, with and without storing their caches.

Two processes of one engine differ by up to a tenth, more than storing may cost. So each engine with the connector also
computes prompts that are not to be stored (`"store": false`): what storing costs is the ratio within the engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuvee.eval.bench.engine.first_token import random_prompt
from cuvee.eval.bench.engine.process import Engine
from cuvee.eval.bench.engine.scope import CHUNK, NO_CONNECTOR, QUESTION, EngineScope, EngineVariant
from cuvee.eval.bench.timing import paired, spread

__all__ = ["measure_storing"]


def measure_storing(
    scope: EngineScope, model: Mapping[str, Any], engines: Mapping[str, Engine], chosen: Sequence[EngineVariant],
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Measure the throughput of a batch of new prompts, with and without storing them, after a round that warms up."""

    def new_prompts() -> list[list[int]]:
        return [random_prompt(draw, model, length - QUESTION) for _ in range(count)]

    count, length, generated = scope.batch
    draw = random.Random(1)
    names = [NO_CONNECTOR, *(variant.name for variant in chosen)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    unstored: dict[str, list[float]] = {name: [] for name in names[1:]}
    behind: dict[str, list[float]] = {name: [] for name in names[1:]}
    for turn in range(scope.batch_rounds + 1):
        say(f"storing: round {turn}" if turn else "storing: warming up")
        prompts, others = new_prompts(), new_prompts()
        for name in draw.sample(names, len(names)):
            for stores in draw.sample((True, False), 2) if name in behind else (True,):
                asked = engines[name].ask(
                    prompts if stores else others, max_tokens=generated, forget=True, expect_cached=[0] * count,
                    params=None if stores else {"cuvee": {"store": False}},
                )  # fmt: skip
                began = time.perf_counter()
                if name in behind and stores:
                    engines[name].settle(count * ((length + generated - 1) // CHUNK))
                if turn:
                    (seconds if stores else unstored)[name].append(asked.finished)
                    if name in behind and stores:
                        behind[name].append(time.perf_counter() - began)
    tokens = count * (length + generated)
    return {
        "prompts": count,
        "prompt_tokens": length,
        "generated_tokens": generated,
        "tokens_per_second": {name: spread([tokens / s for s in seconds[name]]) for name in names},
        "throughput_over_no_connector": {
            name: paired([[1 / s] for s in seconds[name]], [1 / s for s in seconds[NO_CONNECTOR]]) for name in names[1:]
        },
        "throughput_over_not_storing": {
            name: paired([[1 / s] for s in seconds[name]], [1 / s for s in unstored[name]]) for name in names[1:]
        },
        "seconds_until_stored": {name: spread(behind[name]) for name in names[1:]},
    }
