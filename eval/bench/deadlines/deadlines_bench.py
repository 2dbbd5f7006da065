"""Deadlines met in vLLM, and what they cost in quality, behind links of known rates.

    prompts --> vLLM, CuveeConnector --> throttled proxy --> an HTTP object store
                      |                  1 … 64 MB/s, or stepping while a prompt is loaded
                      +--> first token, what was loaded, the KL that was expected; then a text, read token by token

Prompts are stored in parts. Then the engine's own cache is emptied before each request, and each prompt is asked for
without a deadline, which loads all of it, and with deadlines of half, once and twice the time of that and of computing.

An engine without the connector computes the same prompts, and reads the same text behind each. The KL of an answer is
that between what both expect on the way through this text, over the whole vocabulary. The end of every second prompt,
and the text behind it, repeat a part of the prompt, so the model has to read its cache. In bfloat16, rounding alone
moves predictions by about a thousandth of a nat, as soon as anything in the cache is not the same to the last bit.

**Which deadlines can be met** is taken from measurements that the engine does not have: the bytes of the least that the
floor allows, what the link carries from the request on, the time that these bytes take over a link without a limit,
where decoding counts, and the time to compute the prompt. A deadline counts if the least, and then the question, or
the whole prompt, would be done by then. Of several turns, four of five have to be so quick.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from cuvee.calibration.bundled import EVALUATION_TEXTS
from cuvee.calibration.corpus import read_corpus, spread_sequences
from cuvee.calibration.sequences import reread
from cuvee.codec.entropy.residuals import MAX_REFINEMENTS
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.learning.divergence import compare, stderr
from cuvee.codec.part_keys import MAX_PARTS
from cuvee.eval.bench.deadlines.links import MB, Link, ThrottledProxy
from cuvee.eval.bench.deadlines.object_server import ObjectServer
from cuvee.eval.bench.engine.process import FOLLOWING, Engine, EngineAnswer
from cuvee.eval.bench.engine.scope import CHUNK, DTYPE, QUESTION, EngineVariant, conditions
from cuvee.eval.bench.frame import need_vllm, timed_lines
from cuvee.eval.bench.timing import spread

__all__ = [
    "COMPUTING",
    "DEADLINES_FULL",
    "DEADLINES_QUICK",
    "LOADING",
    "DeadlinesScope",
    "Load",
    "report_of",
    "run_deadlines_bench",
]  # fmt: skip

LOADING, COMPUTING = "loading", "computing"  # what deadlines are multiples of
FASTEST = Link("unlimited", (math.inf,))
_SPEEDS = 1, 4, 16, 64  # MB/s
_STEPPING = (16, 1, 64, 4), 0.2  # MB/s, and the seconds of each
_SETTLE_SECONDS = 60.0
_LATE = 80  # percentile of turns
_NO_TIME_MS = 0.001


@dataclass(frozen=True, slots=True)
class DeadlinesScope:
    """The scope of the benchmark.

    Attributes:
        tokens: of each prompt that are stored; a multiple of the chunk.
        prompts: number of different ones.
        follow: tokens of text after a prompt over which the KL is measured.
        kl_max: nats per token that the loaded part of a prompt may lose.
        quality: of all parts together.
        dtype: in which the engine computes, and has its cache.
        texts: where prompts are from, by the names of `read_corpus`.
        links: what answers of the stores go over.
        factors: deadlines, over the time that loading everything takes, and over that of computing.
        turns: how often each prompt is computed, and the least of it loaded, to know what can be met.
        seed: of the order of deadlines, and of what is repeated.
    """

    tokens: int = 2048
    prompts: int = 6
    follow: int = 32
    kl_max: float = 0.02
    quality: str = "high"
    dtype: str = DTYPE
    texts: tuple[str, ...] = EVALUATION_TEXTS
    links: tuple[Link, ...] = (
        *(Link(f"{speed} MB/s", (speed * MB,)) for speed in _SPEEDS),
        Link("stepping", tuple(speed * MB for speed in _STEPPING[0]), _STEPPING[1]),
    )
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    turns: int = 3
    seed: int = 0


DEADLINES_FULL = DeadlinesScope()
DEADLINES_QUICK = DeadlinesScope(tokens=1024, prompts=3, turns=2)


@dataclass(frozen=True, slots=True)
class Load:
    """One answer.

    Attributes:
        link: its name.
        prompt: its number.
        of: what the deadline is a multiple of; empty for a request without a deadline.
        factor: this multiple.
        deadline: seconds; None for a request without one.
        seconds: to the first token.
        cached: tokens that were not computed.
        parts: tokens that were loaded from the base alone, and with its refinement; None without a deadline.
        expected_kl: nats per token of the loaded tokens, as the answer told; None without a deadline.
        kl: nats per token of the text behind the prompt.
        nbytes: over the link.
        possible: seconds of the bound, see the module.
    """

    link: str
    prompt: int
    of: str
    factor: float
    deadline: float | None
    seconds: float
    cached: int
    parts: tuple[int, ...] | None
    expected_kl: float | None
    kl: float
    nbytes: int
    possible: float

    @property
    def met(self) -> bool:
        """Whether the first token came in time."""
        return self.deadline is None or self.seconds <= self.deadline

    @property
    def can_be_met(self) -> bool:
        """Whether the bound meets the deadline."""
        return self.deadline is None or self.possible <= self.deadline


def run_deadlines_bench(
    scope: DeadlinesScope, model: Path, profile: Path, progress: Console | None = None
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        scope: what to measure.
        model: folder of a checkpoint, with its tokenizer.
        profile: of this model.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON: `report_of`, the conditions, and all loads.

    Raises:
        ImportError: vLLM is not installed, or what reads the object store.
        InputError: an argument is out of range, or the texts have too few tokens.
        CuveeError: an engine failed, or did not tell what a request with a deadline is to be told.
    """
    need_vllm()
    _check(scope)
    say, began = timed_lines(progress), time.perf_counter()
    texts = _texts(scope, model)
    with (
        tempfile.TemporaryDirectory(prefix="cuvee-deadlines-") as temporary,
        Engine(Path(temporary) / "engine.log") as engine,
    ):
        folder = Path(temporary)
        say("computing")
        engine.start(model, _options(scope))
        exact = _Exact.measured(engine, texts, scope, folder)
        engine.stop()
        with ObjectServer() as server, ThrottledProxy(server.port, FASTEST) as proxy:
            say("storing")
            more = {"refinements": MAX_REFINEMENTS, "kl_max": scope.kl_max}
            variant = EngineVariant("objects", scope.quality, server.url(proxy.port))
            engine.start(model, _options(scope), variant, profile, more=more)
            for text in texts:
                _store(engine, server, text, scope)
            loads = _Loads(scope, engine, proxy, texts, exact, folder, say).all()
            engine.stop()
    return {
        **conditions(model, scope.quality, profile),
        **{name: getattr(scope, name) for name in ("dtype", "texts", "tokens", "prompts", "follow", "kl_max", "seed")},
        "links": [asdict(link) for link in scope.links],
        **report_of(loads, exact.seconds, exact.hits),
        "loads": [asdict(load) for load in loads],
        "seconds": time.perf_counter() - began,
    }


def _check(scope: DeadlinesScope) -> None:
    if scope.tokens < CHUNK or scope.tokens % CHUNK:
        raise InputError(f"tokens: must be a multiple of {CHUNK}, got {scope.tokens}")
    for name, number in (("prompts", scope.prompts), ("follow", scope.follow), ("turns", scope.turns)):
        if number < 1:
            raise InputError(f"{name}: must be at least 1, got {number}")
    if not 0 < scope.kl_max < 1:
        raise InputError(f"kl_max: must be above 0 and below 1, got {scope.kl_max}")
    if scope.dtype not in ("bfloat16", "float16", "float32"):
        raise InputError(f"dtype: must be bfloat16, float16 or float32, got {scope.dtype!r}")
    if find_spec("obstore") is None:
        raise ImportError("the store of this benchmark needs obstore: pip install cuvee[objects]")


def _texts(scope: DeadlinesScope, model: Path) -> list[list[int]]:
    """Return token ids: prompts, with a question of `QUESTION` tokens, and what follows them.

    Every second one repeats, from the question on, a part of what is before.
    """
    corpora = [read_corpus(name, str(model)) for name in scope.texts]
    found = spread_sequences(corpora, scope.tokens + QUESTION + scope.follow, scope.prompts)
    if len(found) < scope.prompts:
        raise InputError(f"prompts: must be at most {len(found)}, as many as the texts have, got {scope.prompts}")
    rows: list[list[int]] = reread(found, scope.tokens, scope.seed).tolist()
    return rows


def _options(scope: DeadlinesScope) -> dict[str, Any]:
    longest = scope.tokens + QUESTION + scope.follow
    # All of a prompt in one step, as when it is loaded: what is computed in steps is not the same to the last digit.
    return {
        "dtype": scope.dtype, "max_model_len": longest, "max_num_batched_tokens": longest, "block_size": 32,
        **FOLLOWING,
    }  # fmt: skip


def _read(
    engine: Engine, text: Sequence[int], scope: DeadlinesScope, into: Path, params: Mapping[str, Any] | None = None
) -> tuple[EngineAnswer, torch.Tensor]:
    """Ask for a prompt that the engine has forgotten; also return what it expects of the text, `[1, follow, V]`."""
    prompt, follow = text[: -scope.follow], text[-scope.follow :]
    answer = engine.ask(
        [prompt], expect_cached=None, max_tokens=len(follow), forget=True, params=params, follow=follow, read_into=into
    )
    if answer.tokens[0] != list(follow):
        raise CuveeError("the engine generated other tokens than those that it was to follow")
    return answer, torch.from_numpy(np.load(into))[None]


@dataclass(frozen=True, slots=True)
class _Exact:
    """What an engine without the connector does.

    Attributes:
        seconds: to compute each prompt, by turn.
        hits: with the prompt in the engine's own cache.
        reads: what it expects of each text, log-probabilities `[1, follow, V]`.
    """

    seconds: list[list[float]]
    hits: list[float]
    reads: list[torch.Tensor]

    @classmethod
    def measured(cls, plain: Engine, texts: Sequence[Sequence[int]], scope: DeadlinesScope, folder: Path) -> _Exact:
        into = folder / "exact.npy"
        plain.ask([texts[0][: -scope.follow]], expect_cached=None)  # what an engine does once
        seconds: list[list[float]] = [[] for _ in texts]
        hits: list[float] = []
        reads: list[torch.Tensor] = []
        for turn in range(scope.turns):
            for number, text in enumerate(texts):
                answer, read = _read(plain, text, scope, into)
                seconds[number].append(answer.seconds)
                if turn == 0:
                    hits.append(plain.ask([text[: -scope.follow]], expect_cached=None).seconds)
                    reads.append(read)
        return cls(seconds, hits, reads)


def _store(engine: Engine, server: ObjectServer, text: Sequence[int], scope: DeadlinesScope) -> None:
    """Have a prompt stored, in parts."""
    before = server.entries()
    engine.ask([text[: -scope.follow]], expect_cached=[0], forget=True)
    least, end = MAX_PARTS * scope.tokens // CHUNK, time.monotonic() + _SETTLE_SECONDS
    while True:
        engine.idle()
        stored = server.entries() - before
        if stored >= least:
            return
        if time.monotonic() > end:
            raise CuveeError(f"the store has {stored} parts of a prompt, expected {least}")


@dataclass(frozen=True, slots=True)
class _Least:
    """The least that may be loaded of a prompt.

    Attributes:
        seconds: to the first token over a link without a limit.
        nbytes: over the link.
    """

    seconds: float
    nbytes: int

    @classmethod
    def of(cls, turns: Sequence[tuple[float, int]]) -> _Least:
        return cls(_late([seconds for seconds, _ in turns]), min(nbytes for _, nbytes in turns))

    def by(self, link: Link, hit: float) -> float:
        """Return the seconds to the first token over a link, if the question takes the time of a `hit`."""
        return max(self.seconds, link.seconds_for(self.nbytes) + hit)


def _late(turns: Sequence[float]) -> float:
    """Return the seconds within which most turns were done."""
    return float(np.percentile(turns, _LATE))


class _Loads:
    """Asks for prompts that a store has."""

    def __init__(
        self,
        scope: DeadlinesScope,
        engine: Engine,
        proxy: ThrottledProxy,
        texts: Sequence[Sequence[int]],
        exact: _Exact,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._scope, self._engine, self._proxy = scope, engine, proxy
        self._texts, self._exact, self._say = texts, exact, say
        self._into = folder / "read.npy"
        self._random = random.Random(scope.seed)

    def all(self) -> list[Load]:
        """Ask for everything over every link."""
        self._say("the least that may be loaded")
        self._least(self._texts[0])  # what a process does once, such as loading compiled code
        turns = [[self._least(text) for text in self._texts] for _ in range(self._scope.turns)]
        least = [_Least.of(own) for own in zip(*turns, strict=True)]
        loads: list[Load] = []
        for link in self._scope.links:
            self._say(f"{link.name}: no deadline")
            possible = [
                min(each.by(link, hit), _late(seconds))
                for each, hit, seconds in zip(least, self._exact.hits, self._exact.seconds, strict=True)
            ]
            whole = [self._asked(link, possible, prompt) for prompt in range(len(self._texts))]
            times = {
                LOADING: [load.seconds for load in whole],
                COMPUTING: [float(np.median(seconds)) for seconds in self._exact.seconds],
            }
            wanted = [
                (prompt, of, factor, factor * own[prompt])
                for of, own in times.items()
                for factor in self._scope.factors
                for prompt in range(len(self._texts))
            ]
            self._random.shuffle(wanted)
            self._say(f"{link.name}: {len(wanted)} deadlines")
            loads += whole
            loads += [self._asked(link, possible, *each) for each in wanted]
        return loads

    def _least(self, text: Sequence[int]) -> tuple[float, int]:
        """Return the seconds to the first token, and the bytes, of a prompt that is late already."""
        before = self._proxy.carried
        self._proxy.switch(FASTEST)
        prompt, params = text[: -self._scope.follow], {"cuvee": {"deadline_ms": _NO_TIME_MS}}
        seconds = self._engine.ask([prompt], expect_cached=None, forget=True, params=params).seconds
        self._proxy.drain()
        return seconds, self._proxy.carried - before

    def _asked(
        self,
        link: Link,
        possible: Sequence[float],
        prompt: int,
        of: str = "",
        factor: float = 0.0,
        deadline: float | None = None,
    ) -> Load:
        params = None if deadline is None else {"cuvee": {"deadline_ms": 1e3 * deadline}}
        before = self._proxy.carried
        self._proxy.switch(link)
        answer, read = _read(self._engine, self._texts[prompt], self._scope, self._into, params)
        self._proxy.drain()
        told = ((answer.told[0] or {}).get("cuvee") or {}) if deadline is not None else None
        if told is not None and (lacking := [name for name in ("parts", "loaded_tokens") if name not in told]):
            raise CuveeError(f"an answer to a deadline must tell its {lacking[0]}, it told {told}")
        exact = self._exact.reads[prompt]
        (kl,), _, _ = compare(exact, read, torch.zeros(exact.shape[:2], dtype=torch.int64))
        return Load(
            link.name, prompt, of, factor, deadline, answer.seconds, answer.cached[0],
            None if told is None else tuple(told["parts"]), None if told is None else told.get("expected_kl", 0.0), kl,
            self._proxy.carried - before, possible[prompt],
        )  # fmt: skip


def report_of(loads: Sequence[Load], computing: Sequence[Sequence[float]], hits: Sequence[float]) -> dict[str, Any]:
    """Sum up loads, as a dict for JSON.

    Args:
        loads: all of them.
        computing: seconds to compute each prompt, by turn.
        hits: seconds to the first token of each prompt if it is in the engine's own cache.
    """
    groups = []
    for link in dict.fromkeys(load.link for load in loads):
        own = [load for load in loads if load.link == link]
        wanted = sorted(
            {(load.of, load.factor) for load in own if load.of}, key=lambda each: (each[0] != LOADING, each)
        )
        groups.append(
            {
                "link": link, "no_deadline": _figures([load for load in own if not load.of]),
                "deadlines": [
                    {"of": of, "factor": factor}
                    | _figures([load for load in own if (load.of, load.factor) == (of, factor)])
                    for of, factor in wanted
                ],
            }
        )  # fmt: skip
    return {
        "computing": spread([each for own in computing for each in own]),
        "own_cache": spread(hits),
        "groups": groups,
        "all": _figures([load for load in loads if load.of]),
    }


def _figures(loads: Sequence[Load]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "loads": len(loads),
        "seconds": spread([load.seconds for load in loads]),
        "cached_tokens": _mean(load.cached for load in loads),
        "mb": _mean(load.nbytes / MB for load in loads),
        "kl": _mean(load.kl for load in loads),
        "kl_stderr": stderr([load.kl for load in loads]),
    }
    deadlines = [load for load in loads if load.deadline is not None]
    if deadlines:
        counted = [load for load in deadlines if load.can_be_met]
        expected = _mean(load.expected_kl or 0.0 for load in deadlines)
        figures |= {
            "deadline": spread([load.deadline or 0.0 for load in deadlines]),
            "met": _mean(load.met for load in deadlines),
            "can_be_met": len(counted),
            "met_of_possible": _mean(load.met for load in counted) if counted else None,
            "expected_kl": expected,
            "worst_expected_kl": max(load.expected_kl or 0.0 for load in deadlines),
            "kl_over_expected": figures["kl"] / expected if expected else None,
            "parts": [_mean((load.parts or ())[at] for load in deadlines) for at in range(MAX_PARTS)],
        }
    return figures


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
