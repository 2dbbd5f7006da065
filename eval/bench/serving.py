"""A model that vLLM serves with `CuveeConnector`: first tokens of restored prompts, traffic, and what storing costs.

    first-token   seconds to the first token of a prompt whose cache is restored from RAM, files or Redis, over those of
                  computing it. The first engine computes every prompt, stores it in all three and restores it from RAM;
                  further engines restore from one of the others what the first one stored there.
    traffic       conversations over a context that all of them share and one of their own, of which more are live than
                  the engine's own cache holds. Turns arrive by a Poisson process, and each repeats the conversation so
                  far with the engine's own answers. One that has had its turns makes room for a new one.
    storing       throughput of a batch of new prompts whose caches are stored, over that of one whose caches are not,
                  in the same engine: two processes of one engine differ by up to a tenth.

One engine runs at a time, because a model may fill the memory, on the cores that this process may use: `taskset -c 0`
gives it one for the model and the codec together. Prompts are text, those of `storing` its tokens in any order. All
arms of the traffic get the same arrivals.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuvee.calibration.bundled import EVALUATION_TEXTS
from cuvee.calibration.corpus import read_corpus
from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS, Quality
from cuvee.eval.bench.engine_process import CHUNK, DTYPE, QUESTION, Arrival, Engine, Traffic, conditions
from cuvee.eval.bench.frame import Shown, checkpoint, machine_and_vllm, need_vllm, run_bench, say
from cuvee.eval.bench.timing import paired, rates, spread
from cuvee.eval.documents import ReportTable
from cuvee.integrations.identity.checkpoint import read_layout
from cuvee.integrations.stores import open_store
from cuvee.naming.identity import store_key

__all__ = ["NO_CACHE", "OWN_CACHE", "ServingScope", "Words", "arrivals", "run_serving_bench", "show_serving", "summary"]

NO_CACHE, OWN_CACHE = "no cache", "own cache"
BLOCK = 128  # vLLM's on a CPU
_DTYPES = (DTYPE, "float32")
_UNSTORED = {"cuvee": {"store": False}}


@dataclass(frozen=True, slots=True)
class ServingScope:
    """The scope of the benchmark.

    Attributes:
        dtype: of the model and its cache, "bfloat16" or "float32", which many CPUs multiply faster.
        lengths: tokens of the prompts whose first token is timed, before a question; multiples of the chunk.
        rounds: prompts of each length, and batches that are stored.
        restores: how often each is restored.
        shared: tokens with which all conversations begin.
        own: tokens of a conversation's own context: one of these, drawn.
        turns: of a conversation.
        question, answer: tokens of a turn.
        live: conversations at a time.
        rate: turns that arrive in a second.
        seconds: of each arm.
        cached: tokens that the engine's own cache holds.
        step: most tokens that a step of the engine computes.
        batch: prompts that are stored together, tokens of each, and tokens to generate.
    """

    dtype: str = DTYPE
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    rounds: int = 5
    restores: int = 3
    shared: int = 512
    own: tuple[int, ...] = (512, 1024, 1536)
    turns: int = 6
    question: int = 64
    answer: int = 16
    live: int = 6
    rate: float = 0.2
    seconds: float = 300.0
    cached: int = 4096
    step: int = 512
    batch: tuple[int, int, int] = (8, 512, 16)

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return self.shared + max(self.own) + self.turns * (self.question + self.answer)


class Words:
    """Hands out the tokens of a text in order, each once.

    Args:
        tokens: of the text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._taken = 0

    @classmethod
    def of(cls, texts: Sequence[str], model: Path) -> Words:
        """Read texts, as `read_corpus` does, with a model's tokenizer."""
        corpora = [read_corpus(text, str(model)) for text in texts]
        return cls([int(token) for corpus in corpora for document in corpus.documents for token in document])

    def take(self, count: int) -> list[int]:
        """Return the next tokens.

        Raises:
            InputError: there are not as many.
        """
        self._taken += count
        if self._taken > len(self._tokens):
            raise InputError(
                f"text: must have at least {self._taken} tokens, got {len(self._tokens)}: give a longer one"
            )
        return list(self._tokens[self._taken - count : self._taken])

    def mixed(self, count: int, draw: random.Random) -> list[int]:
        """Return tokens drawn from all of the text, which it keeps."""
        return draw.choices(self._tokens, k=count)


@dataclass(frozen=True, slots=True)
class _Given:
    """What a measurement needs beside its scope: a checkpoint, a text, a profile or None, and Redis's URL or None."""

    model: Path
    words: Words
    profile: Path | None
    redis: str | None

    def start(self, engine: Engine, quality: str, store: str, options: Mapping[str, Any]) -> None:
        """Start an engine with the connector."""
        profile = None if quality == LOSSLESS else self.profile
        engine.start(self.model, options, store, quality, profile)


def run_serving_bench(
    what: str, scope: ServingScope, model: Path, arms: Sequence[str], texts: Sequence[str] = (),
    profile: Path | None = None, redis: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run one of the benchmarks.

    Args:
        what: "first-token", "traffic" or "storing".
        scope: what to measure.
        model: folder of a checkpoint, with its tokenizer.
        arms: qualities; for traffic also `NO_CACHE` and `OWN_CACHE`.
        texts: of the prompts, as `read_corpus` reads them; empty: the bundled evaluation texts.
        profile: of the model, for qualities that are not lossless.
        redis: URL of a server; None: nothing is restored from Redis.

    Returns:
        The report, as a dict for JSON.

    Raises:
        ImportError: vLLM is not installed.
        InputError: the texts are too short, a length is not a multiple of the chunk, the dtype or an arm is not known,
            or an arm needs a profile.
        ProfileMismatchError: the profile is another model's.
        StoreError: Redis cannot be reached.
        CuveeError: an engine failed, did not restore the expected tokens, or said something else after a lossless
            restore.
    """
    need_vllm()
    if any(length < CHUNK or length % CHUNK for length in scope.lengths):
        raise InputError(f"lengths: must be multiples of {CHUNK}, got {', '.join(map(str, scope.lengths))}")
    if scope.dtype not in _DTYPES:
        raise InputError(f"dtype: must be {' or '.join(_DTYPES)}, got {scope.dtype!r}")
    _check_arms(what, arms, model, profile, TORCH_DTYPES[scope.dtype])
    if redis is not None:
        with closing(open_store(redis, guarded=False)) as store:
            store.contains([store_key("", bytes(32))])
    given = _Given(model, Words.of(texts or EVALUATION_TEXTS, model), profile, redis)
    plan = list(arrivals(scope, given.words)) if what == "traffic" else []
    prompts = {
        length: [given.words.take(length + QUESTION) for _ in range(scope.rounds)]
        for length in (scope.lengths if what == "first-token" else ())
    }
    found: dict[str, Any] = {}
    for arm in arms:
        before = os.getloadavg()[0]
        if what == "traffic":
            measured = _traffic(scope, given, arm, plan)
        else:
            measured = _first_tokens(scope, given, arm, prompts) if prompts else _storing(scope, given, arm)
        found[arm] = {**measured, "load_before_and_after": [before, os.getloadavg()[0]]}
    under = conditions(model, ", ".join(arms), profile, scope.dtype)
    return {**under, "scope": asdict(scope), "what": what, "arms": found}


def _check_arms(what: str, arms: Sequence[str], model: Path, profile: Path | None, dtype: torch.dtype) -> None:
    """Refuse what an engine would only refuse after those of the arms before it have run."""
    plain = (LOSSLESS, NO_CACHE, OWN_CACHE) if what == "traffic" else (LOSSLESS,)
    loaded = None if profile is None else Profile.load(profile)
    if loaded is not None:
        loaded.check_layout(read_layout(str(model), dtype))
    for arm in arms:
        if arm not in plain:
            if loaded is None:
                raise InputError(f"arm: must be one of {', '.join(plain)} without --profile, got {arm!r}")
            Quality(arm)


# First tokens ---------------------------------------------------------------------------------------------------------


def _first_tokens(
    scope: ServingScope, given: _Given, quality: str, prompts: Mapping[int, list[list[int]]]
) -> dict[str, Any]:
    """Measure the seconds of computing, and the ratios to them of an engine's own cache and of each store."""
    options = {"dtype": scope.dtype, "max_model_len": max(prompts) + QUESTION + 1, "block_size": BLOCK}
    computed: dict[int, list[float]] = {length: [] for length in prompts}
    own: dict[int, list[list[float]]] = {length: [] for length in prompts}
    restored: dict[str, dict[int, list[list[float]]]] = {}
    said: dict[tuple[int, int], list[list[int]]] = {}
    with tempfile.TemporaryDirectory(prefix="cuvee-bench-") as folder:
        stores = {"memory": "memory://?max_gb=2", "file": f"file://{folder}/store"}
        if given.redis is not None:
            stores["redis"] = given.redis
        for name, store in stores.items():
            first = name == "memory"
            say(f"starting an engine: {quality}, {name}")
            with Engine(Path(folder) / f"{name}.log") as engine:
                given.start(engine, quality, f"tiered:{','.join(stores.values())}" if first else store, options)
                seconds = restored[name] = {length: [] for length in prompts}
                for at in range(scope.rounds):
                    say(f"{quality}, {name}: round {at + 1}")
                    for length, drawn in prompts.items() if first else ():
                        exact = engine.ask([drawn[at]], expect_cached=[0], forget=True, params=_UNSTORED)
                        again = engine.ask([drawn[at]], expect_cached=[length])  # stored out of the engine's own cache
                        computed[length].append(exact.seconds)
                        own[length].append([again.seconds])
                        said[length, at] = again.tokens
                        engine.idle(length // CHUNK)
                    for length, drawn in prompts.items():
                        hits = [
                            engine.ask([drawn[at]], expect_cached=[length], forget=True) for _ in range(scope.restores)
                        ]
                        if quality == LOSSLESS and any(hit.tokens != said[length, at] for hit in hits):
                            raise CuveeError(f"{name}: restoring {length} tokens losslessly changed the next token")
                        seconds[length].append([hit.seconds for hit in hits])
    return {
        "computed_seconds": {length: spread(each) for length, each in computed.items()},
        "own_cache_over_computed": {length: paired(own[length], computed[length]) for length in prompts},
        "restored_over_computed": {
            name: {length: paired(seconds[length], computed[length]) for length in prompts}
            for name, seconds in restored.items()
        },
        "restored_seconds": {
            name: {length: spread([one for each in seconds[length] for one in each]) for length in prompts}
            for name, seconds in restored.items()
        },
    }


# Traffic --------------------------------------------------------------------------------------------------------------


def arrivals(scope: ServingScope, words: Words) -> Iterator[Arrival]:
    """Yield the turns that arrive within an arm, in order."""
    draw = random.Random(0)
    shared = words.take(scope.shared)
    live = [[0, 0] for _ in range(scope.live)]  # conversation, and the turns it still has
    begun, at = 0, 0.0
    while (at := at + draw.expovariate(scope.rate)) < scope.seconds:
        slot = live[draw.randrange(scope.live)]
        context: list[int] = []
        if not slot[1]:
            slot[:] = begun, scope.turns
            begun += 1
            context = [*shared, *words.take(draw.choice(scope.own))]
        slot[1] -= 1
        yield Arrival(at, slot[0], [*context, *words.take(scope.question)])


def _traffic(scope: ServingScope, given: _Given, arm: str, plan: Sequence[Arrival]) -> dict[str, Any]:
    """Run one arm."""
    options = {
        "dtype": scope.dtype,
        "max_model_len": scope.longest + 1,
        "max_num_batched_tokens": scope.step,
        "block_size": BLOCK,
        "num_gpu_blocks_override": scope.cached // BLOCK,
        "enable_prefix_caching": arm != NO_CACHE,
    }
    with tempfile.TemporaryDirectory(prefix="cuvee-bench-") as folder, Engine(Path(folder) / "engine.log") as engine:
        say(f"starting an engine: {arm}")
        if arm in (NO_CACHE, OWN_CACHE):
            engine.start(given.model, options)
        else:
            given.start(engine, arm, "memory://?max_gb=4", options)
        # What runs for the first time is compiled, or touches memory for the first time.
        engine.ask([[1] * scope.step], expect_cached=None, params=_UNSTORED)
        say(f"{arm}: {len(plan)} turns in {scope.seconds:.0f} s")
        return summary(scope, engine.converse(plan, scope.answer, scope.seconds))


def summary(scope: ServingScope, found: Traffic) -> dict[str, Any]:
    """Return the figures of an arm: of the turns that ended in its time, and of first tokens that came in it."""
    turns = [turn for turn in found.turns if len(turn.tokens_at) == scope.answer]
    waits = [turn.tokens_at[0] - turn.asked for turn in found.turns if turn.tokens_at]
    gaps = np.diff([turn.tokens_at for turn in turns]).ravel() if turns else np.zeros(0)
    return {
        "arrived": len(found.turns) + found.held,
        "completed": len(turns),
        "without_a_token": found.held + sum(not turn.tokens_at for turn in found.turns),
        "requests_per_hour": len(turns) / scope.seconds * 3600,
        "first_token_seconds": _percentiles(waits),
        "between_tokens_seconds": _percentiles(gaps),
        "prompt_tokens": sum(turn.prompt for turn in turns),
        "cached_tokens": sum(turn.cached for turn in turns),
        "cpu_seconds": found.cpu_seconds,
        "raw_bytes": found.raw_bytes,
        "stored_bytes": found.stored_bytes,
    }


def _percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float | int]:
    p50, p99 = np.quantile(values, [0.5, 0.99]).tolist() if len(values) else (float("inf"), float("inf"))
    return {"p50": p50, "p99": p99, "count": len(values)}


# Storing --------------------------------------------------------------------------------------------------------------


def _storing(scope: ServingScope, given: _Given, quality: str) -> dict[str, Any]:
    """Measure the throughput of batches of new prompts, half of which are stored, after two that warm up."""
    count, length, generated = scope.batch
    draw = random.Random(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="cuvee-bench-") as folder, Engine(Path(folder) / "engine.log") as engine:
        say(f"starting an engine: {quality}")
        options = {"dtype": scope.dtype, "max_model_len": length + generated, "block_size": BLOCK}
        given.start(engine, quality, f"file://{folder}/store", options)
        for turn in range(scope.rounds + 1):
            say(f"{quality}: round {turn}" if turn else f"{quality}: warming up")
            for stores in draw.sample((True, False), 2):
                asked = engine.ask(
                    [given.words.mixed(length, draw) for _ in range(count)], max_tokens=generated, forget=True,
                    expect_cached=[0] * count, params=None if stores else _UNSTORED,
                )  # fmt: skip
                if stores:
                    engine.idle(count * ((length + generated - 1) // CHUNK))
                if turn:
                    seconds[stores].append(asked.finished)
    return {
        "tokens_per_second": rates(seconds[False], count * (length + generated)),
        "throughput_over_not_storing": paired(
            [[1 / one] for one in seconds[True]], [1 / one for one in seconds[False]]
        ),
    }


# The report -----------------------------------------------------------------------------------------------------------


def show_serving(report: Mapping[str, Any]) -> Shown:
    """Make the tables of a report."""
    show = {"first-token": _show_first_tokens, "traffic": _show_traffic, "storing": _show_storing}[report["what"]]
    return Shown(machine_and_vllm(report), show(report))


def _show_first_tokens(report: Mapping[str, Any]) -> list[ReportTable]:
    tables = []
    for arm, found in report["arms"].items():
        lengths = list(found["computed_seconds"])
        rows = [["computed, s", *(f"{found['computed_seconds'][length]['median']:.3g}" for length in lengths)]]
        ratios = {"own prefix cache": found["own_cache_over_computed"], **found["restored_over_computed"]}
        for name, by_length in ratios.items():
            rows.append([f"{name}, ratio", *(f"{by_length[length]['median']:.2g}" for length in lengths)])
        load = " and ".join(f"{load:.1f}" for load in found["load_before_and_after"])
        title = f"First token, {arm}: medians over computing the same prompt; load {load}, {report['threads']} threads"
        tables.append(ReportTable(["tokens ", *map(str, lengths)], rows, title))
    return tables


def _show_traffic(report: Mapping[str, Any]) -> list[ReportTable]:
    rows = [
        [
            arm,
            f"{found['completed']} of {found['arrived']}",
            f"{found['requests_per_hour']:.0f}",
            *(f"{found['first_token_seconds'][key]:.2f}" for key in ("p50", "p99")),
            f"{found['between_tokens_seconds']['p99']:.2f}",
            f"{found['cached_tokens'] / max(found['prompt_tokens'], 1):.0%}",
            f"{found['cpu_seconds'] / max(found['completed'], 1):.1f}",
            f"{found['stored_bytes'] / 1e6:.0f} ({found['raw_bytes'] / 1e6:.0f})",
            " to ".join(f"{load:.1f}" for load in found["load_before_and_after"]),
        ]
        for arm, found in report["arms"].items()
    ]
    columns = [
        " ", "turns", "an hour", "first token p50, s", "p99, s", "between tokens p99, s", "not computed",
        "CPU s a turn", "MB stored (raw)", "load",
    ]  # fmt: skip
    scope = report["scope"]
    title = f"Conversations, {scope['seconds']:.0f} s an arm, {report['threads']} threads"
    return [ReportTable(columns, rows, title)]


def _show_storing(report: Mapping[str, Any]) -> list[ReportTable]:
    rows = []
    for arm, found in report["arms"].items():
        ratio = found["throughput_over_not_storing"]
        spread_of = f"{ratio['median']:.2f} ({ratio['p20']:.2f} to {ratio['p80']:.2f})"
        load = " to ".join(f"{load:.1f}" for load in found["load_before_and_after"])
        rows.append([arm, f"{found['tokens_per_second']['median']:.0f}", spread_of, load])
    count, length, generated = report["scope"]["batch"]
    title = f"Batches of {count} prompts of {length} tokens and {generated} more, {report['threads']} threads"
    return [ReportTable([" ", "tokens a second, not stored", "stored, ratio", "load"], rows, title)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("first-token", "traffic", "storing"))
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, help="of the model, for qualities that are not lossless")
    parser.add_argument("--text", action="append", default=[], help="file or bundled text of the prompts; repeatable")
    parser.add_argument("--redis", metavar="URL", help="a server to restore from")
    parser.add_argument(
        "--arm", action="append", default=[], metavar="QUALITY",
        help=f"repeatable; for traffic also {NO_CACHE!r} and {OWN_CACHE!r}",
    )  # fmt: skip
    parser.add_argument(
        "--length", action="append", type=int, default=[], metavar="TOKENS", help="of restored prompts; repeatable"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default=DTYPE, help="of the model and its cache")
    parser.add_argument("--rounds", type=int, default=ServingScope().rounds, help="prompts of each length, or batches")
    parser.add_argument("--seconds", type=float, default=ServingScope().seconds, help="of each arm of the traffic")


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    if given.seconds <= 0:
        raise InputError(f"seconds: must be more than 0, got {given.seconds:g}")
    if given.rounds < 1:
        raise InputError(f"rounds: must be at least 1, got {given.rounds}")
    scope = replace(ServingScope(), dtype=given.dtype, rounds=given.rounds, seconds=given.seconds)
    if given.length:
        scope = replace(scope, lengths=tuple(sorted(set(given.length))))
    arms = given.arm or ([NO_CACHE, OWN_CACHE, LOSSLESS] if given.what == "traffic" else [LOSSLESS])
    return run_serving_bench(given.what, scope, checkpoint(given.model), arms, given.text, given.profile, given.redis)


if __name__ == "__main__":
    sys.exit(
        run_bench(
            "serving", "A model that vLLM serves: first tokens, traffic, storing.", _options, _measure, show_serving
        )
    )
