"""A real engine, and everything in the connector fails at random: no engine ends, and no answer is another one.

    python tests/fuzz/chaos.py --seconds 600 --seed 0                                             `make chaos`
    python tests/fuzz/chaos.py --kind ngram         one that drafts tokens; draft_model: by layers of a drafter's own;
                                                    fp8: one with an fp8 cache; hybrid: recurrent layers, whose states
                                                    are entries of their own. No blends

Three tenants ask vLLM on the CPU for prompts that share beginnings and documents. Requests are aborted and preempted,
and caches emptied. Meanwhile any inner call of the connector's two sides raises, the store raises, hangs, and answers
with damaged bytes, with those of other keys, with lies about what it has and with nonsense about itself. Every answer
is compared with that of an engine without a connector: the same tokens, and logprobs that differ by no more than
batches of other sizes make them differ. Not those of a hybrid: without a connector, too, they differ by tenths of a nat
between batches. At the end nothing may be left over, and the cache works as on its first day.

A run goes on for longer than asked, up to MOST_LONGER times, until enough of all this has happened.

Whether a call fails depends on the seed, on the call, and on how often it was made. Threads make those numbers differ
between two runs of a seed, but not by much.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm.engines import (
    NO_FP8,
    Answer,
    distance,
    fp8_runs,
    import_vllm,
    run_script,
    save_tiny_model,
)
from tests.integrations.vllm.faults import BLOCK, CHUNK, Driven
from tests.integrations.vllm.injection import POINTS, Injector, kept
from tests.waiting import PATIENCE

from cuvee.calibration.bundled import bundled_model_path
from cuvee.integrations.stores.base import TierCounters

TENANTS = ("", "second tenant", "third tenant", "x" * 5000)
BLOCKS = 40  # of the engine's cache: less than what a few requests want
LIVE = 6  # requests at a time
NOISE = 1e-3  # nats, in float32, of batches of another size
STUCK = 120.0  # seconds without any end of a request
LOAD_TIMEOUT, LOOKUP_TIMEOUT = 1.0, 0.3
# Every few seconds other calls fail: most often a few alone, since little gets far where everything may fail.
ALL = (0.0, 0.002, 0.02, 0.1)  # shares of all inner calls
FEW = (0.05, 0.3, 1.0)  # of the calls of up to four
STORE = (0.0, 0.0, 0.05, 0.3)  # of the store's
NEEDED = {"arrived", "matched_tokens", "allocated", "plan", "take", "save", "report"}  # by the shortest run too
SPARED = ("s._load_is_over", "s._blends.drop")  # clear up; if they fail again and again, nothing else can
KINDS: dict[str, dict[str, Any]] = {  # options of the engine
    "plain": {},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "hybrid": {"enable_prefix_caching": True},
    "ngram": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }
    },
    "draft_model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},  # the model itself
}  # fmt: skip
MOST_LONGER = 8  # times the seconds asked for, until enough has happened
_COUNTS = (-1, 10**400, 1 << 64, "text", None, math.nan)


class Wrong(Exception):
    """The engine ended, waits for ever, or said something else."""


class Panic(BaseException):
    """What an extension in Rust raises where it panics."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and by whom. Its documents are segments that may be blended, if it says where they are."""

    ids: tuple[int, ...]
    tokens: int
    segments: tuple[tuple[int, int], ...] = ()


class Chance:
    """Decisions that a seed, a name and a count make."""

    def __init__(self, seed: int) -> None:
        self._seed, self._counts, self._lock = seed, Counter[str](), threading.Lock()

    def of(self, name: str) -> random.Random:
        """For the next call of this name."""
        with self._lock:
            self._counts[name] += 1
            return random.Random(zlib.crc32(f"{self._seed} {name} {self._counts[name]}".encode()))


class ChaosStore(DictStore):
    """A dict that does what the worst of stores do.

    Attributes:
        rate: share of the calls that go wrong.
        faults: what went wrong, by operation and kind.
    """

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self.rate = 0.0
        self.faults: Counter[str] = Counter()
        self._chance = chance

    def get(self, key: str) -> bytes | None:
        blob, dice = super().get(key), self._chance.of("get")
        if blob is None or dice.random() >= self.rate:
            return blob
        kind = dice.choice(("gone", "noise", "bit", "half", "other", "empty"))
        self.faults[f"get: {kind}"] += 1
        if kind == "gone":
            return None
        if kind == "noise":
            return dice.randbytes(len(blob))
        if kind == "other":
            others = list(self.entries.values())
            return dice.choice(others) if others else None
        if kind == "bit":
            at = dice.randrange(len(blob))
            return blob[:at] + bytes([blob[at] ^ 1 << dice.randrange(8)]) + blob[at + 1 :]
        return blob[: len(blob) // 2] if kind == "half" else b""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        there, dice = super().contains(keys), self._chance.of("contains")
        if dice.random() >= self.rate:
            return there
        kind = dice.choice(("all", "none", "other", "fewer", "odd"))
        self.faults[f"contains: {kind}"] += 1
        lies: dict[str, Any] = {
            "all": [True] * len(keys), "none": [False] * len(keys), "other": [not one for one in there],
            "fewer": there[:-1], "odd": ["yes", None, 2.5][: len(keys)],
        }  # fmt: skip
        return lies[kind]  # type: ignore[no-any-return]

    def counters(self) -> dict[str, TierCounters]:
        dice = self._chance.of("counters")
        said = super().counters()
        if dice.random() < self.rate:
            self.faults["counters"] += 1
            odd: Any = {dice.choice(("hits", "errors", "queued", "bytes")): dice.choice(_COUNTS)}
            return {dice.choice(("memory", "a|b", "\ud800")): replace(said["memory"], **odd)}
        return said

    def _begin(self, operation: str) -> None:
        self.calls.clear()
        dice = self._chance.of(f"begin {operation}")
        if dice.random() >= self.rate / 2:
            return
        kind = dice.choice(("raise", "raise", "panic", "slow", "hang"))
        self.faults[f"{operation}: {kind}"] += 1
        if kind == "raise":
            raise dice.choice((OSError, RuntimeError, MemoryError, TimeoutError, KeyError, RecursionError))("chaos")
        if kind == "panic":
            raise Panic("chaos")
        time.sleep(dice.uniform(0, LOOKUP_TIMEOUT) if kind == "slow" else LOAD_TIMEOUT + 0.3)


class Chaos(Driven):
    """An engine with a connector, and what was asked of it."""

    def __init__(self, model: Path, store: ChaosStore | None, kind: str = "plain") -> None:
        from vllm import SamplingParams

        blend = {"blend": {"segment_tokens": 48, "min_context": 0, "cost": 1}} if kind == "plain" else {}
        options: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 512, **KINDS[kind]}
        if kind == "draft_model":
            options["speculative_config"] = {**options["speculative_config"], "model": str(model)}
        if store is None:
            options["num_gpu_blocks_override"] = 8 * BLOCKS
        super().__init__(
            model, store, connector={**blend, "key_env": "CUVEE_CHAOS_KEY", "load_timeout": LOAD_TIMEOUT,
            "lookup_timeout": LOOKUP_TIMEOUT, "min_tokens": BLOCK}, **options,
        )  # fmt: skip
        self.kind = kind
        self._parameters = SamplingParams
        self.asked: dict[str, Prompt] = {}
        self.answers: list[tuple[Prompt, Answer]] = []
        self.counts: Counter[str] = Counter()
        preempt = self.core.scheduler._preempt_request

        def counted(*args: Any, **more: Any) -> Any:
            self.counts["preempted"] += 1
            return preempt(*args, **more)

        self.core.scheduler._preempt_request = counted

    def ask_for(self, prompt: Prompt, salt: str = "") -> str:
        """Add a request; its id."""
        self._count += 1
        segments = {"segments": [list(span) for span in prompt.segments], "cost": 1}
        parameters = self._parameters(
            temperature=0, max_tokens=prompt.tokens, ignore_eos=True, detokenize=False, logprobs=5,
            extra_args={"kv_transfer_params": {"cuvee": segments}} if prompt.segments else None,
        )  # fmt: skip
        name = f"chaos {self._count}"
        self.engine.add_request(
            name, {"prompt_token_ids": list(prompt.ids), **({"cache_salt": salt} if salt else {})}, parameters
        )
        self.asked[name] = prompt
        self.counts["asked"] += 1
        return name

    def advance(self) -> bool:
        """One step; whether any request ended."""
        ended = False
        for output in self.engine.step():
            if output.finished and output.request_id in self.asked:
                best, prompt = output.outputs[0], self.asked.pop(output.request_id)
                logprobs = [{token: entry.logprob for token, entry in at.items()} for at in best.logprobs]
                told = output.kv_transfer_params
                self.counts["blended"] += bool(told and told["cuvee"].get("blended"))
                answer = Answer(list(best.token_ids), logprobs, output.num_cached_tokens or 0)
                self.answers.append((prompt, answer))
                ended = True
        return ended

    def loads_wait(self) -> bool:
        """Whether requests that do not run have blocks, for a load or after one: vLLM itself fails to reset those."""
        scheduler = self.core.scheduler
        return any(
            each.status.name != "RUNNING" and any(scheduler.kv_cache_manager.get_block_ids(each.request_id))
            for each in scheduler.requests.values()
        )

    def finish_all(self) -> None:
        """Until no request is left."""
        last = time.monotonic()
        while self.engine.has_unfinished_requests():
            if self.advance():
                last = time.monotonic()
            if time.monotonic() - last > STUCK:
                raise Wrong(f"{list(self.asked)} have not ended for {STUCK:g} s")


def prompts_of(dice: random.Random) -> list[Prompt]:
    """Prompts that begin alike, end alike, and hold the same documents in other orders."""

    def text(least: int, most: int) -> tuple[int, ...]:
        return tuple(dice.choices(range(1, 4000), k=dice.randint(least, most)))

    starts, documents = [text(30, 200) for _ in range(4)], [text(48, 110) for _ in range(5)]
    prompts = []
    for _ in range(24):
        start = dice.choice(starts)
        ids = (*start[: dice.randint(20, len(start))], *text(1, 60))
        prompts.append(Prompt(ids, dice.randint(1, 40)))
    for _ in range(16):
        ids, spans = dice.choice(starts)[: dice.randint(10, 60)], []
        for document in dice.sample(documents, dice.randint(1, 3)):
            spans.append((len(ids), len(ids) + len(document)))
            ids = (*ids, *document, *text(0, 9))
        prompts.append(Prompt((*ids, *text(5, 20)), dice.randint(1, 24), tuple(spans) if dice.random() < 0.7 else ()))
    return [prompt for prompt in prompts if len(prompt.ids) + prompt.tokens < 500]


def fates_of(kind: str) -> tuple[str, ...]:
    """What is to happen to requests of an engine."""
    return ("preempted", "aborted", *(("blended",) if kind == "plain" else ()))


def _enough(engine: Chaos, store: ChaosStore, injector: Injector) -> bool:
    """Whether what a run is for has happened in it: hooks have raised, and requests have met every fate."""
    fates = all(engine.counts[fate] for fate in fates_of(engine.kind))
    hooks = set(injector.hooks()) >= NEEDED
    loads = engine.totals()["loads", ""] > 10
    return fates and hooks and loads and len(engine.answers) > 100 and sum(store.faults.values()) > 50


def _disturb(engine: Chaos, store: ChaosStore, seconds: float, seed: int) -> Injector:
    """Ask, break, abort and empty for so many seconds, and for longer until enough has happened."""
    dice, chance, shares = random.Random(seed), Chance(seed), dict[str, float]()

    def decide(point: str) -> str | None:
        share = shares.get(point)
        if not share:
            return None
        draw = chance.of(point)
        return draw.choice(("before", "after")) if draw.random() < share else None

    injector = Injector(engine.scheduling, engine.working, decide)
    prompts, begun, changed, last = prompts_of(dice), time.monotonic(), 0.0, time.monotonic()
    while (spent := time.monotonic() - begun) < MOST_LONGER * seconds:
        now = time.monotonic()
        if now > changed:
            if spent > seconds and _enough(engine, store, injector):
                break
            changed = now + dice.uniform(0.5, 3)
            few = dice.random() < 0.7
            share, store.rate = dice.choice(FEW if few else ALL), dice.choice(STORE)
            shares.clear()
            shares.update(dict.fromkeys(dice.sample(POINTS, dice.randint(1, 4)) if few else POINTS, share))
            for point in SPARED:
                shares.pop(point, None)
            if dice.random() < 0.1:
                prompts = prompts_of(dice)
        if len(engine.asked) < LIVE and dice.random() < 0.5:
            salt = dice.choices(TENANTS, (40, 30, 27, 3))[0]
            engine.ask_for(dice.choice(prompts), salt)
        if engine.asked and dice.random() < 0.01:
            name = dice.choice(list(engine.asked))
            engine.abort(name)
            del engine.asked[name]
            engine.counts["aborted"] += 1
            last = now
        if dice.random() < 0.02:
            with_store = dice.random() < 0.2
            running = dice.random() < 0.5 and not engine.loads_wait()
            done = engine.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=with_store)
            engine.counts["resets" if with_store else "forgotten"] += bool(done)
        if not engine.asked:
            engine.ask_for(dice.choice(prompts))
        if engine.advance():
            last = now
        if now - last > STUCK:
            raise Wrong(f"{list(engine.asked)} have not ended for {STUCK:g} s")
    injector.active, store.rate = False, 0.0
    engine.finish_all()
    return injector


def _examine(engine: Chaos, store: ChaosStore, dice: random.Random) -> None:
    """Nothing is left, and the cache works as on its first day, on a busy machine, too."""
    time.sleep(2 * LOAD_TIMEOUT)  # for what hangs
    object.__setattr__(engine.scheduling._state.options, "lookup_timeout", PATIENCE)
    engine.working._state.timeout = PATIENCE
    if engine.scheduling.reset() is not True:
        raise Wrong("the cache cannot be reset")
    store.entries.clear()
    prompt = Prompt(tuple(dice.choices(range(1, 4000), k=5 * CHUNK + 10)), 4)
    for _ in range(2):
        engine.ask_for(prompt)
        engine.finish_all()
        engine.settle()
        engine.forget()
    engine.ask_for(prompt)
    engine.finish_all()
    if engine.answers[-1][1].cached < 4 * CHUNK:
        raise Wrong("afterwards nothing is found")
    for name, table in kept(engine.scheduling, engine.working).items():
        if name != "_blends._drops":
            raise Wrong(f"{name} is left: {str(table)[:500]}")
    if engine.free_blocks() != engine.all_blocks:
        raise Wrong(f"{engine.all_blocks - engine.free_blocks()} of the engine's blocks are lost")


def _compare(model: Path, kind: str, answers: Sequence[tuple[Prompt, Answer]]) -> float:
    """The largest distance from what an engine without a connector says."""
    reference = Chaos(model, None, kind)
    right: dict[Prompt, Answer] = {}
    for prompt in dict.fromkeys(prompt for prompt, _ in answers):
        reference.ask_for(replace(prompt, segments=()))
        reference.finish_all()
        right[prompt] = reference.answers[-1][1]
    reference.close()
    worst = 0.0
    for prompt, answer in answers:
        far = distance(answer, right[prompt])
        if far > NOISE and kind != "hybrid":
            raise Wrong(f"{answer.tokens} instead of {right[prompt].tokens}, {far} nats away, of {asdict(prompt)}")
        worst = max(worst, far)
    return worst


def _within(seconds: float, seed: int, kind: str, results: Path) -> None:
    import_vllm()
    hybrid = kind == "hybrid"
    model = save_tiny_model("lfm2", results.parent / "lfm2", vocab_size=4096) if hybrid else bundled_model_path()
    store = ChaosStore(Chance(seed))
    engine = Chaos(model, store, kind)
    injector = _disturb(engine, store, seconds, seed)
    injector.undo()
    _examine(engine, store, random.Random(seed))
    totals = {" ".join(key).strip(): int(value) for key, value in engine.totals().items() if math.isfinite(value)}
    engine.close()
    worst = _compare(model, kind, engine.answers)
    points = {point for _, point in injector.fired}
    results.write_text(
        json.dumps(
            {
                "requests": dict(engine.counts) | {"answers": len(engine.answers)},
                "errors by hook": dict(injector.hooks()),
                "faults of the store": dict(store.faults),
                "points hit": len(points),
                "counted": totals,
                "largest distance": worst,
            }
        )
    )


def chaos(seconds: float, seed: int, folder: Path, kind: str = "plain") -> dict[str, Any]:
    """Run it in a process of its own, and say what was done.

    Raises:
        Wrong: something is not as it must be.
    """
    results = folder / "results.json"
    status, log = run_script(
        folder, __file__, "--within", str(results), "--seconds", str(seconds), "--seed", str(seed), "--kind", kind,
        timeout=3 * MOST_LONGER * seconds + 400, CUVEE_CHAOS_KEY="0123456789abcdef" * 2,
        ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16",
    )  # fmt: skip
    if status != 0:
        raise Wrong(f"{kind}, seed {seed}: {status}\n{log[-6000:]}")
    return json.loads(results.read_text())  # type: ignore[no-any-return]


def main() -> int:
    """Exit code 1 if something was wrong."""
    parser = argparse.ArgumentParser(description="Faults everywhere in the connector of a real engine.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="plain", help="of the engine (default: plain)")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind == "fp8" and not fp8_runs():
        parser.error(f"--kind: {NO_FP8}")
    if arguments.within:
        _within(arguments.seconds, arguments.seed, arguments.kind, arguments.within)
        return 0
    with tempfile.TemporaryDirectory(prefix="cuvee-chaos-") as folder:
        try:
            done = chaos(arguments.seconds, arguments.seed, Path(folder), arguments.kind)
        except Wrong as wrong:
            print(f"WRONG: {wrong}")
            return 1
    for what, figures in done.items():
        print(f"{what}: {json.dumps(figures)}")
    print("nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
