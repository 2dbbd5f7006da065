"""`cuvee bench loading`: deadlines met, and what they cost in quality, by policy, over simulated links.

Nothing is loaded or computed: links are traces (`traces.py`), costs those of a real model and engine (`cases.py`), and
every policy drives the same engine (`policies.py`). `cuvee.integrations.loading` decides as it would in an engine.

A policy may meet more deadlines by losing more, and the other way round. So those that know no caution are reported
twice: as they are, and planning for so much less time that they meet 95 % of the deadlines that can be met. That share
of the time is chosen in hindsight, in their favor. Ours is told to meet 95 % before.

KL is the mean over the loads whose deadline the oracle meets, late answers among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from cuvee.codec.errors import InputError
from cuvee.eval.bench.loading.cases import CHUNK_TOKENS, LEVELS, LoadCase, Outcome
from cuvee.eval.bench.loading.policies import best_single, cachegen, computed, fixed, oracle, raw, refined
from cuvee.eval.bench.loading.traces import SPEEDS, STEPPING, TRACES
from cuvee.eval.machine import hardware
from cuvee.eval.progress import timed_lines
from cuvee.integrations.loading import Compute

__all__ = ["BEST", "CACHEGEN", "LOADS", "NEEDED", "ORACLE", "OURS", "QUICK_LOADS", "RAW", "run_loading_bench", "tuned"]

LOADS, QUICK_LOADS = 60, 4  # per trace and speed
CHUNKS = 4, 31  # of a prompt, log-uniform
DEADLINES = 0.2, 4.0  # seconds, log-uniform
LATENCY, MOBILE_LATENCY = 0.002, 0.02
TARGET = 0.95  # of the deadlines that the oracle meets
TRUSTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
RAW, COMPUTED, BEST, CACHEGEN = "raw", "computed", "best single quality", "CacheGen"
OURS, NEEDED, ORACLE = "cuvee", "cuvee, computing if needed", "oracle"


def tuned(name: str) -> str:
    """Return the name under which a policy with a dial is reported at 95 % of the deadlines."""
    return f"{name}, for {TARGET:.0%}"


_PLAIN: dict[str, Callable[[LoadCase], Outcome]] = {
    RAW: raw,
    COMPUTED: computed,
    **{name: (lambda case, level=level: fixed(case, level)) for level, name in enumerate(LEVELS)},  # type: ignore[misc]
}
_DIALS: dict[str, Callable[[LoadCase, float], Outcome]] = {BEST: best_single, CACHEGEN: cachegen}


@dataclass(frozen=True, slots=True)
class _Load:
    """A case, its outcome by policy, and the seconds that planning took."""

    case: LoadCase
    outcomes: dict[str, Outcome]
    bound: Outcome | None
    planning: float


def run_loading_bench(
    loads: int = LOADS,
    kl_max: float = 0.02,
    seed: int = 0,
    traces: Sequence[str] = tuple(TRACES),
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the simulation.

    Args:
        loads: per trace and speed of the link.
        kl_max: nats per token that no answer may exceed. Policies that know no floor are held to it nevertheless.
        seed: of prompts, deadlines and traces.
        traces: kinds of links to simulate, of `TRACES`.
        progress: where to list what is being simulated; None for nowhere.

    Returns:
        The report, as a dict for JSON. `policies`, and for every trace and speed `groups`, hold for each policy the
        shares of deadlines met (of all, and of those that the oracle meets), and over the latter loads the mean KL, KL
        over the oracle's, MB, share of the tokens that were computed, median first token, and in how many of all loads
        the floor was broken. `targets` are figures of ours over others', each where it meets 95 %.

    Raises:
        InputError: an argument is out of range.
    """
    if loads < 1:
        raise InputError(f"loads: must be at least 1, got {loads}")
    if not 0 < kl_max < 1:
        raise InputError(f"kl_max: must be above 0 and below 1, got {kl_max}")
    if unknown := [name for name in traces if name not in TRACES]:
        raise InputError(f"traces: must be among {', '.join(TRACES)}, got {unknown[0]!r}")
    say = timed_lines(progress)
    done: list[_Load] = []
    for trace in dict.fromkeys(traces):
        for speed in (0.0,) if trace == STEPPING else SPEEDS:
            say(f"{trace}{f', {speed / 1e6:.0f} MB/s' if speed else ''}: {loads} loads")
            done += [_run(case) for case in _cases(trace, speed, loads, kl_max, seed)]
    dials = {name: _dial(name, done) for name in _DIALS}
    groups: list[tuple[str, Callable[[LoadCase], Any]]] = [
        ("trace", lambda case: case.trace),
        ("mb_per_s", lambda case: case.speed / 1e6 or STEPPING),
    ]
    policies = _compare(done, dials)
    return {
        "hardware": hardware(), "loads": len(done), "kl_max": kl_max, "seed": seed, "trust": dials,
        "policies": policies,
        "groups": {
            name: [
                {"is": value, "policies": _compare([load for load in done if key(load.case) == value], dials)}
                for value in dict.fromkeys(key(load.case) for load in done)
            ]
            for name, key in groups
        },
        "targets": _targets(policies),
        "planning_ms": _quantiles([1e3 * load.planning for load in done]),
    }  # fmt: skip


def _cases(trace: str, speed: float, loads: int, kl_max: float, seed: int) -> list[LoadCase]:
    cases = []
    for number in range(loads):
        own = np.random.SeedSequence([seed, list(TRACES).index(trace), int(speed), number]).generate_state(2)
        random = np.random.default_rng(own[0])
        chunks = int(np.exp(random.uniform(np.log(CHUNKS[0]), np.log(CHUNKS[1] + 1))))
        deadline = float(np.exp(random.uniform(*np.log(DEADLINES))))
        latency = MOBILE_LATENCY if trace == "mobile" else LATENCY
        cases.append(LoadCase(trace, speed, CHUNK_TOKENS * chunks, deadline, latency, kl_max, int(own[1])))
    return cases


def _run(case: LoadCase) -> _Load:
    outcomes = {name: policy(case) for name, policy in _PLAIN.items()}
    for name, policy in _DIALS.items():
        for trust in TRUSTS:
            outcomes[_at(name, trust)] = policy(case, trust)
    link = case.measured_link()
    began = time.perf_counter()
    outcomes[OURS] = refined(case, deepcopy(link), Compute.EXACT)
    planning = time.perf_counter() - began
    outcomes[NEEDED] = refined(case, link, Compute.NEEDED)
    return _Load(case, outcomes, oracle(case), planning)


def _at(name: str, trust: float) -> str:
    return f"{name} {trust}"


def _dial(name: str, loads: Sequence[_Load]) -> float:
    """Return the largest trust with which a policy meets 95 % of what can be met, or the one that meets most."""
    met = [_met_of_oracle(_at(name, trust), loads) or 0.0 for trust in TRUSTS]
    return next(
        (trust for trust, share in zip(TRUSTS, met, strict=True) if share >= TARGET), TRUSTS[int(np.argmax(met))]
    )


def _met_of_oracle(name: str, loads: Sequence[_Load]) -> float | None:
    met = [load.outcomes[name].seconds <= load.case.deadline for load in loads if load.bound is not None]
    return float(np.mean(met)) if met else None


def _compare(loads: Sequence[_Load], dials: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    names = {name: name for name in _PLAIN}
    for name in _DIALS:
        names |= {name: _at(name, 1.0), tuned(name): _at(name, dials[name])}
    names |= {OURS: OURS, NEEDED: NEEDED}
    compared = {
        shown: _figures([load.outcomes[name] for load in loads], loads, _met_of_oracle(name, loads))
        for shown, name in names.items()
    }
    bounds = [load.bound or Outcome(np.inf, 0.0, 0.0, 0.0) for load in loads]
    compared[ORACLE] = _figures(bounds, loads, 1.0 if any(load.bound for load in loads) else None)
    return compared


def _figures(outcomes: Sequence[Outcome], loads: Sequence[_Load], met_of_oracle: float | None) -> dict[str, Any]:
    judged = [(outcome, load.bound) for outcome, load in zip(outcomes, loads, strict=True) if load.bound is not None]
    figures: dict[str, Any] = {
        "met": float(np.mean([o.seconds <= load.case.deadline for o, load in zip(outcomes, loads, strict=True)])),
        "met_of_oracle": met_of_oracle,
        "floor_broken": sum(
            outcome.kl > load.case.kl_max * (1 + 1e-9) for outcome, load in zip(outcomes, loads, strict=True)
        ),
        "judged": len(judged),
    }
    if judged:
        bound = float(np.mean([of.kl for _, of in judged]))
        figures |= {
            "kl": float(np.mean([outcome.kl for outcome, _ in judged])),
            "mb": float(np.mean([outcome.nbytes for outcome, _ in judged])) / 1e6,
            "computed": float(np.mean([outcome.computed for outcome, _ in judged])),
            "seconds": _quantiles([outcome.seconds for outcome, _ in judged]),
        }
        figures["kl_over_oracle"] = figures["kl"] / bound if bound else None
    return figures


def _targets(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return ours over others', and what the oracle would reach: no policy can be below that."""
    ours, bound = policies[OURS].get("kl"), policies[ORACLE].get("kl")
    over = {name: policies[name].get("kl") for name in (tuned(BEST), tuned(CACHEGEN), ORACLE)}
    return {
        "met_of_oracle": policies[OURS]["met_of_oracle"],
        "kl_over": {name: ours / kl if kl else None for name, kl in over.items()},
        "least_kl_over": {name: bound / kl if kl else None for name, kl in over.items()},
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    p50, p95 = np.quantile(values, [0.5, 0.95]).tolist()
    return {"p50": p50, "p95": p95}
