"""The target for the vLLM connector: options, reports of workers, and hostile entries of a store."""

from __future__ import annotations

import json
import math
import pickle
from functools import cache
from random import Random
from typing import Any

import torch
from tests.codec.forging import reseal, sections_of
from tests.fuzz.blobs import BlobTarget
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding
from tests.fuzz.profiles import odd_json
from tests.integrations.vllm.injection import POINTS, Injector
from tests.integrations.vllm.sides import LAYOUT, TENANT, Bench, Desk, make_request, poison
from tests.integrations.vllm.small_engine import SmallEngine, Wrong

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import CuveeError
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Report, StepPlan
from cuvee.integrations.vllm.metric_table import METRICS
from cuvee.integrations.vllm.metrics import Recorder, collect, interval_figures
from cuvee.naming.identity import store_key

_OPTIONS: dict[str, Any] = {
    "store": ["memory://?max_gb=1", "file:///nowhere"], "quality": "high", "chunk_tokens": 256, "min_tokens": 512,
    "decide": "always", "tenant": "somebody", "threads": 2,
    "max_pending_gb": 10.5, "lookup_timeout": 2.0, "model_id": "m", "key_env": ["A", "B"], "profile": "p",
}  # fmt: skip
_CHUNKS, _CHUNK, _BLOCK = 2, 16, 8
_END = _CHUNKS * _CHUNK + _BLOCK  # the end of the tail


def _names(dice: Dice) -> list[str]:
    return [dice.pick(("r", "s", "", "unknown", "r" * 200)) for _ in range(dice.number(0, 3))]


def _digests(dice: Dice) -> list[bytes]:
    return [dice.pick((bytes(32), b"", dice.junk(32))) for _ in range(dice.number(0, 3))]


def _metrics(dice: Dice) -> dict[str, float] | None:
    """Make the figures that a worker's recorder drains."""
    recorder = Recorder(dice.number(0, 3))
    for _ in range(dice.number(0, 6)):
        metric = dice.pick(list(METRICS.values()))
        tier, permitted = dice.pick(("disk", "redis", "x y")), dice.pick(metric.values) if metric.values else ""
        label = f"{tier}:{permitted}" if metric.second else (permitted or tier) * bool(metric.label)
        value = dice.pick((0.0, 1.0, 1e-9, 1e18, 3.5, float(1 << 60)))
        if metric.kind == "gauge":
            endless = metric.name == "break_even_tokens" and dice.chance(0.5)
            recorder.gauge(metric.name, math.inf if endless else value, label)
        else:
            recorder.count(metric.name, value, label)
    return recorder.drain()


def _restored(dice: Dice) -> Restored:
    work = dice.pick((1, 16, 1 << 40)), dice.pick((0.0, 1.0, 1e9))
    return Restored(dice.pick(("load", "blend")), *work, dice.pick((0.0, 1e-12, 1.0, 1e12, -1.0)))


def _report(dice: Dice) -> Report:
    """Make a report of the right types from a worker that is confused, late or repeats itself."""
    return Report(
        [dice.pick((0, 1, 2, -1, 1 << 40)) for _ in range(dice.number(0, 4))],
        set(_names(dice)),
        [_restored(dice) for _ in range(dice.number(0, 3))],
        set(_names(dice)),
        set(_digests(dice)),
        _metrics(dice),
    )


@cache
def _bench(permuted: bool = False) -> tuple[Bench, list[bytes]]:
    """Return a worker whose store holds two good chunks and a tail, and these blobs; its pages may be permuted."""
    noise = torch.randn(2, 3, 8 * _CHUNK, 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    bench = Bench(sequence=KVChunk(noise[0], noise[1], LAYOUT), permuted=permuted)
    blocks = list(range(6))
    bench.fill(blocks, _END)
    bench.worker.saves.save([*bench.saves(blocks, range(_CHUNKS)), bench.save_tail(blocks, _END)])
    bench.drain()
    return bench, [bench.store.entries[key] for key in _keys(bench)]


def _keys(bench: Bench) -> list[str]:
    """Return the keys of the chunks and of the tail."""
    tail = bench.save_tail(list(range(6)), _END)
    return [*(bench.key(chunk) for chunk in range(_CHUNKS)), store_key(TENANT, tail.entry.digest, 0)]


class ConnectorTarget:
    """Options, messages, loads, and entire engines."""

    name = "connector"
    weight = 1.0

    def warm_up(self) -> None:
        """Check that good loads arrive."""
        _, (first, _, tail) = _bench()
        for _ in range(3):
            if self.check(b"L" + first) != "load arrived" or self.check(b"T" + tail) != "load arrived":
                raise Finding("a good load fails")
        self.check(b"M" + bytes(8))
        self.check(b"E" + bytes(8))

    def memory(self, data: bytes) -> int:
        """Allow little memory, because messages and pages are small."""
        return (32 << 20) + 256 * len(data)

    def make(self, dice: Dice) -> bytes:
        """Make a letter for the kind, then JSON, a seed for messages or an engine, or the blob of a chunk or a tail."""
        kind = dice.pick("OOMMMMLLTTE")
        if kind == "O":
            options: Any = {name: value for name, value in _OPTIONS.items() if dice.chance(0.5)}
            for _ in range(dice.small(3)):
                options = odd_json(dice, options)
                options = options if isinstance(options, dict) else {"store": options}
            try:
                return b"O" + json.dumps(options).encode()
            except ValueError:  # a number too long to be converted
                return b"O{}"
        if kind in "ME":
            return kind.encode() + dice.junk(8)
        good, letter = dice.pick(_bench()[1]), kind.encode()
        how = dice.number(0, 4)
        if how == 4:
            return letter + good
        if how == 0:
            return letter + dice.damaged(good, _bench()[1])
        if how == 1:
            return letter + BlobTarget().make(dice)[1:]
        sections = sections_of(good)
        at = dice.number(0, len(sections) - 1)
        if how == 2:
            sections[at] = dice.damaged(sections[at])
        name = dice.pick(("tokens", "start", "step", "values"))
        fields = {name: dice.odd(4, 16)} if how == 3 else {}
        return letter + reseal(good, sections, **fields)

    def check(self, data: bytes) -> str:
        """Check a case by its kind."""
        kind, rest = data[:1], data[1:]
        if kind == b"O":
            return self._options(rest)
        if kind == b"M":
            return self._messages(rest)
        if kind == b"E":
            return self._engine(rest)
        outcomes = {self._load(rest, kind == b"T", permuted) for permuted in (False, True)}
        if len(outcomes) > 1:
            raise Finding("a load depends on the order of the pages")
        return outcomes.pop()

    def _options(self, text: bytes) -> str:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            return "no JSON"
        if not isinstance(given, dict):
            return "no object"
        try:
            options = Options.from_dict(given)
            if "somebody" in repr(options):
                raise Finding("options show the tenant")
            options.secrets()
        except CuveeError as error:
            return f"options: {type(error).__name__}"
        return "options taken"

    def _messages(self, seed: bytes) -> str:
        dice = Dice("messages", int.from_bytes(seed, "little"), 0)
        desk = Desk()
        request = make_request(tokens=40)
        try:
            for _ in range(dice.number(1, 4)):
                if dice.chance(0.3):
                    plan = desk.plan((request, 0, 40))
                    if pickle.loads(pickle.dumps(plan)) != plan:
                        raise Finding("a pickled plan changes")
                report = _report(dice)
                other = _report(dice)
                before = report.metrics
                report.add(pickle.loads(pickle.dumps(other)))
                if not (other.ended <= report.ended and other.failed <= report.failed):
                    raise Finding("a report is lost when two are added")
                if before is not None and report.metrics is None:
                    raise Finding("figures are lost when two reports are added")
                desk.now += dice.pick((0.0, 1.0, -5.0, 1e9))
                desk.side.take(report)
                totals = desk.recorder.totals()
                if any(map(math.isnan, totals.values())):
                    raise Finding("a figure is not a number")
                drained = desk.recorder.drain() or {}
                collect(drained)
                interval_figures(drained)
                desk.recorder.summary()
        finally:
            desk.side.close()
        return "messages taken"

    def _engine(self, seed: bytes) -> str:
        """Run requests while entries are damaged and calls fail; the engine checks every answer."""
        dice = Dice("engine", int.from_bytes(seed, "little"), 0)
        engine = SmallEngine(permuted=dice.chance(0.5), load_timeout=5.0)
        broken = {dice.pick(POINTS) for _ in range(dice.number(0, 3))} - {"s._load_is_over", "s._blends.drop"}
        draws = Random(int.from_bytes(seed, "little"))

        def decide(point: str) -> str | None:
            return draws.choice((None, "before", "after")) if point in broken else None

        injector = Injector(engine.side, engine.worker, decide)
        texts = [[dice.number(0, 60) for _ in range(dice.number(20, 80))] for _ in range(3)]
        try:
            for number in range(dice.number(3, 8)):
                ids = [*dice.pick(texts), *dice.pick(texts)[: dice.number(0, 20)]]
                start = dice.number(0, len(ids) - 17)
                params = {"cuvee": {"segments": [[start, start + 16]]}} if dice.chance(0.3) else None
                salt = dice.pick((None, "a", "b", "x" * 5000))
                engine.submit(f"{number}", ids, dice.number(1, 12), cache_salt=salt, kv_transfer_params=params)
                for _ in range(dice.number(0, 4)):
                    engine.step()
                if dice.chance(0.2):
                    engine.abort(f"{number}")
                if dice.chance(0.2):
                    engine.preempt(f"{number}")
                if dice.chance(0.3) and engine.store.entries:
                    key = dice.pick(sorted(engine.store.entries))
                    engine.store.entries[key] = dice.damaged(engine.store.entries[key])
            engine.run()
            injector.undo()
            engine.close()
        except Wrong as wrong:
            raise Finding(str(wrong)) from wrong
        return "engine survived"

    def _load(self, blob: bytes, tail: bool, permuted: bool) -> str:
        """Load two chunks and a tail, with this blob as the first chunk or the tail."""
        bench, good = _bench(permuted)
        entries, keys = bench.store.entries, _keys(bench)
        entries.update(zip(keys, good, strict=True))
        entries[keys[-1 if tail else 0]] = blob
        poison(bench.cache)
        blocks = [7, 3, 11, 5, 14]
        load = bench.load_tail(blocks, 0, _END)
        plan = StepPlan(1, [load], [bench.saves(blocks, range(1))[0]])
        if pickle.loads(pickle.dumps(plan)) != plan:
            raise Finding("a pickled plan changes")
        bench.worker.loads.start([load])
        bench.wait()
        report = bench.worker.report(1)
        invalid = bench.worker.loads.take_invalid_blocks()
        if report.ended != {"r"} or report.failed - {"r"}:
            raise Finding(f"a load ended as {report}")
        others = torch.tensor([block for block in range(24) if block not in blocks])
        slots = (others[:, None] * _BLOCK + torch.arange(_BLOCK)).flatten()
        held = bench.cache.read(slots, 0)
        if not all(bool(unit.isnan().all()) for unit in (*held.keys, *held.values)):
            raise Finding("a load wrote into other blocks")
        if not report.failed:
            if invalid:
                raise Finding("a load succeeded but names invalid blocks")
            if not bench.held(blocks, 0, _CHUNKS * _CHUNK if tail else _CHUNK) and blob in good:
                raise Finding("a good load is not in its pages")
            return "load arrived"
        failed = blocks[-1:] if tail else blocks
        if invalid != set(failed):
            raise Finding(f"a load of {blocks} failed from {failed} on, and {invalid} are invalid")
        if load.prefix[-1 if tail else 0].digest not in report.unsaved:
            raise Finding("the chunk of a failed load counts as stored")
        return "load failed"
