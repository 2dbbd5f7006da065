"""Real engines with vLLM's offloading and our tier behind it, in one process that is killed at its end.

    python tier_faults.py offloading FOLDER MODEL  ->  FOLDER/answers, to FOLDER/order; FOLDER/results.json

What is not vLLM's own is in `cpu_copies`. Scenarios are as in `tests.integrations.vllm.faults`: every answer is
compared with that of an engine without a connector.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tests.integrations.vllm.engines import Ran, ids, mark, run_engine
from tests.integrations.vllm.faults import (
    CHUNK,
    HOW,
    WHERE,
    Driven,
    FaultStore,
    Record,
    compare,
    failing,
    prompt_of,
    run_here,
)
from tests.waiting import wait_until

from cuvee.integrations.stores import Store, StoreError, open_store

_KEY = "CUVEE_TIER_KEY"  # holds a secret, without which bytes of another chunk pass for a chunk's own
CHUNKS = 16  # of the primary tier: three usual prompts
KILLED = prompt_of("killed", 6)  # of the engine that is killed while it stores this


def offloading(store: str, chunk: dict[str, int] | None = None, **tier: Any) -> dict[str, Any]:
    """`kv_transfer_config` of vLLM's own offloading, with our tier as a user sets it.

    Args:
        store: URL.
        chunk: `block_size` or `blocks_per_chunk` of vLLM.
        tier: more of its options.
    """
    own = {"type": "CuveeTier", "module_path": "cuvee.integrations.vllm_tier", "store": store, **tier}
    extra = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 32 << 20, "canonical_layout": True,
        **(chunk or {"block_size": CHUNK}), "secondary_tiers": [own],
    }  # fmt: skip
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Offloading(Driven):
    """An engine with the tier, driven step by step. Its primary tier is small, so that it evicts.

    Args:
        model: checkpoint.
        store: of the tier.
        tier: more of its options.
    """

    def __init__(self, model: Path, store: Store, **tier: Any) -> None:
        from cuvee.integrations.pages import opening

        cast(Any, opening).open_store = lambda urls: store
        os.environ[_KEY] = "0123456789abcdef" * 2
        config = offloading("memory://", load_timeout=60.0, lookup_timeout=60.0, **tier)
        config["kv_connector_extra_config"]["cpu_bytes_to_use"] = CHUNKS * 3 * CHUNK * 2 * 2 * 32 * 4
        super().__init__(model, None, enable_prefix_caching=True, kv_transfer_config=config)
        self.store = store
        self.manager: Any = self.core.scheduler.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers

    def settle(self) -> None:
        """Step until vLLM and the tier have nothing to do."""

        def idle() -> bool:
            self.step()
            return not self.core.scheduler.has_requests()

        wait_until(idle, "all is stored")

    def forget(self) -> None:
        """Empty the engine's own cache and its primary tier: only the store is left."""
        self.settle()
        self._reset()

    def _reset(self) -> None:
        assert self.llm.reset_prefix_cache(reset_connector=True), "blocks are still in use"
        self.ask([1], max_tokens=1)  # vLLM asserts that a step tells its workers before the next reset

    def start_over(self) -> None:
        """With an empty store, for the next scenario."""
        self.faults.entries.clear()
        self.forget()

    def clear_up(self) -> None:
        """Leave nothing of a failed scenario for the next one."""
        self.engine.abort_request([request.request_id for request in self.core.scheduler.requests.values()], True)
        self.revive()

    def revive(self) -> None:
        """As if the engine had been started anew, after a step that failed. vLLM has lost what the step reported, and
        0.33 waits for it for ever.
        """
        self.step()
        self._reset()
        getattr(self.core.scheduler.connector.connector_scheduler, "_reset_fence", {}).clear()
        getattr(self.manager, "on_reset_flushed", lambda: None)()
        self.tier._failed = False

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Another `load_timeout` and `lookup_timeout` for a while."""
        pages, names = self.tier._stores._any, ("_load_timeout", "_lookup_timeout")
        usual = [getattr(pages, name) for name in names]
        vars(pages).update(dict.fromkeys(names, seconds))
        try:
            yield
        finally:
            vars(pages).update(zip(names, usual, strict=True))

    def counted(self, name: str) -> float:
        return float(self.tier.counters().get(name, 0))

    def expect_all_stored(self, prompt: list[int]) -> None:
        """Every chunk of a prompt is in the store, and sound."""
        self.forget()
        loaded, missed = (self.counted(name) for name in ("loaded_pages", "missed_pages"))
        self.store_and_forget(prompt)
        chunks = len(prompt) // CHUNK
        assert self.counted("loaded_pages") == loaded + chunks and self.counted("missed_pages") == missed


# Scenarios: a store that fails ------------------------------------------------------------------------------------


def fails(engine: Offloading) -> None:
    """Each operation of the store raises: what cannot be loaded is computed, what cannot be stored is stored later."""
    for operation, label in (("contains", "lookup"), ("put", "store"), ("get", "fetch")):
        prompt = prompt_of(f"fails {operation}")
        if operation == "get":
            engine.store_and_forget(prompt)

        def fail(called: str, operation: str = operation) -> None:
            if called == operation:
                raise StoreError(f"{called} fails")

        usual, engine.faults.before = engine.faults.before, fail
        failed = engine.counted(f"failures{{{label}}}")
        try:
            engine.ask(prompt)
            engine.settle()
        finally:
            engine.faults.before = usual
        assert engine.counted(f"failures{{{label}}}") > failed, operation
        engine.forget()
        engine.store_and_forget(prompt)
        engine.expect_all_stored(prompt)


def hangs(engine: Offloading) -> None:
    """Each operation hangs: after a time-out the request is computed, and others do not wait for it."""
    for operation in ("contains", "put", "get"):
        prompt, other = prompt_of(f"hangs {operation}"), prompt_of(f"hangs {operation}, another", 2)
        engine.store_and_forget(other)
        if operation == "get":
            engine.store_and_forget(prompt)
        with engine.patience(0.3), engine.faults.hanging(operation):
            engine.ask(prompt, other)
            engine.settle()
            assert engine.faults.waiting, operation
        wait_until(lambda: not engine.faults.waiting)
        engine.forget()
        engine.store_and_forget(prompt)
        engine.expect_all_stored(prompt)


def lies(engine: Offloading) -> None:
    """Bytes are damaged, cut off, or another chunk's: what is before them is loaded, and they are stored anew."""
    prompt, other = prompt_of("lies"), prompt_of("lies, another")
    engine.store_and_forget(other)
    theirs = list(engine.faults.entries.values())
    before = set(engine.faults.entries)
    engine.store_and_forget(prompt)
    damages: list[Callable[[bytes], bytes]] = [
        lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
        lambda blob: blob[: len(blob) // 2],
        lambda blob: theirs[0],
        lambda blob: b"",
        lambda blob: random.Random(0).randbytes(len(blob)),
    ]
    for number, (key, damage) in enumerate(zip(sorted(set(engine.faults.entries) - before), damages, strict=True)):
        failed, blob = engine.counted("failures{decode}"), engine.faults.entries[key]
        engine.faults.entries[key] = damage(blob)
        engine.store_and_forget(prompt)
        assert engine.counted("failures{decode}") == failed + 1, number
        assert engine.faults.entries[key] == blob, "stored anew"
        engine.expect_all_stored(prompt)


def vanishes(engine: Offloading) -> None:
    """An entry goes between lookup and load, also one that two requests wait for."""
    prompt = prompt_of("vanishes")
    others = [[*prompt[: 4 * CHUNK], *ids(90, f"vanishes {index}")] for index in range(2)]
    engine.store_and_forget(prompt)
    for key in sorted(engine.faults.entries):
        for asked in ([prompt], others):
            engine.faults.vanishing.add(key)
            engine.store_and_forget(*asked)
    engine.store_and_forget(prompt)
    engine.expect_all_stored(prompt)
    assert engine.free_blocks() == engine.all_blocks


def aborts(engine: Offloading) -> None:
    """A client goes while its chunks are loaded, and while they are stored."""
    for operation in ("get", "put"):
        prompt = prompt_of(f"aborts {operation}")
        if operation == "get":
            engine.store_and_forget(prompt)
        with engine.faults.hanging(operation):
            name = engine.submit(prompt, max_tokens=60)
            while not engine.faults.waiting:
                engine.step()
            engine.abort(name)
            engine.ask(prompt_of("aborts, another", 2))
        engine.forget()
        assert engine.free_blocks() == engine.all_blocks
        engine.store_and_forget(prompt)
        engine.expect_all_stored(prompt)


def resets(engine: Offloading) -> None:
    """vLLM empties its caches while chunks are loaded or stored: it waits for them, and none is lost or mixed up."""
    for operation in ("get", "put"):
        prompt = prompt_of(f"resets {operation}")
        if operation == "get":
            engine.store_and_forget(prompt)
        with engine.patience(0.3), engine.faults.hanging(operation):
            engine.submit(prompt, max_tokens=60)
            while not engine.faults.waiting:
                engine.step()
            engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            engine.ask(prompt_of("resets, another", 2))
            engine.finish()
        engine.forget()
        engine.store_and_forget(prompt)
        engine.expect_all_stored(prompt)


def anything(engine: Offloading) -> None:
    """At random: the store raises, forgets and answers with other bytes, under several requests."""
    dice = random.Random(11)
    bases = [prompt_of(f"anything {number}", dice.randint(2, 7)) for number in range(5)]
    usual = engine.faults.before

    def misbehave(called: str) -> None:
        if dice.random() < 0.15:
            raise StoreError("at random")

    engine.faults.before = misbehave
    try:
        for turn in range(12):
            for key in list(engine.faults.entries):
                if dice.random() < 0.1:
                    engine.faults.entries[key] = dice.choice(
                        [b"", dice.randbytes(200), *engine.faults.entries.values()]
                    )
                elif dice.random() < 0.1:
                    engine.faults.vanishing.add(key)
            asked = [base[: dice.randint(CHUNK, len(base))] + ids(20, f"{turn}") for base in dice.sample(bases, 3)]
            engine.ask(*asked, max_tokens=4)
            if dice.random() < 0.5:
                engine.forget()
    finally:
        engine.faults.before = usual
    assert engine.counted("failures{decode}") and engine.counted("failures{store}")
    engine.forget()
    assert engine.free_blocks() == engine.all_blocks


# Scenarios: steps that fail ---------------------------------------------------------------------------------------


def forwards_raise(engine: Offloading) -> None:
    """A forward raises, anywhere in a layer: nothing is stored that it computed, nor what builds on it, and all that is
    stored is what an engine stores in which none raises. What was stored before is still loaded.
    """
    prompts: list[list[int]] = []
    kept: dict[str, bytes] = {}
    for number, (where, how) in enumerate(zip(itertools.cycle(WHERE), HOW, strict=False)):
        call = 1 + number % 3  # of a prompt in two steps: the first, the second, and a token
        prompt, before = prompt_of(f"forwards raise {number}"), prompt_of(f"before it {number}", 2)
        engine.store_and_forget(before)
        with failing(engine.layers[number % len(engine.layers)], where, how, call) as raised:
            name = engine.submit(prompt)
            try:
                while not raised:
                    engine.step()
            except (RuntimeError, SystemExit, KeyboardInterrupt) as error:
                print(f"--- {where}, {how}: {type(error).__name__}", flush=True)
            assert raised, f"{where}, {how}"
        wait_until(lambda: not engine.tier._jobs, "what was submitted is stored")
        stored, loaded = dict(engine.faults.entries), engine.counted("loaded_pages")
        engine.abort(name)
        engine.ask(ids(2 * CHUNK + 1, f"after {number}"))  # the engine goes on
        engine.ask(before)
        wait_until(lambda: not engine.tier._jobs, "what was submitted has ended")
        assert engine.faults.entries == stored, "stored after a step that failed"
        assert engine.counted("loaded_pages") == loaded + 2
        engine.revive()
        prompts += [prompt, before]
        kept |= stored
    engine.start_over()
    for prompt in prompts:
        engine.store_and_forget(prompt)
    wrong = [key for key, blob in kept.items() if engine.faults.entries.get(key) != blob]
    assert not wrong, f"{len(wrong)} of {len(kept)} entries are not what they should be"


Scenarios = dict[str, Callable[[Offloading], None]]
SCENARIOS: Scenarios = {
    each.__name__: each for each in (fails, hangs, lies, vanishes, aborts, resets, anything, forwards_raise)
}


# Running them -----------------------------------------------------------------------------------------------------


class Deadly(FaultStore):
    """Ends its process in the third put, once another is done. `inner`: has what was put before."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner, self._puts, self._done = inner, itertools.count(1), threading.Event()

    def put(self, key: str, blob: bytes) -> bool:
        if next(self._puts) == 3:
            self._done.wait()  # all three may have begun at the same moment
            os.kill(os.getpid(), signal.SIGKILL)
        stored = self._inner.put(key, blob)
        self._done.set()
        return stored


def run_offloading(model: Path, folder: Path) -> None:
    """Do what the order says, run every scenario, and be killed."""
    done: dict[str, Ran] = {}
    for order in pickle.loads((folder / "order").read_bytes()):
        print(mark(order.name), flush=True)
        done[order.name] = run_engine(order)
        print("=== end ===", flush=True)
    (folder / "answers").write_bytes(pickle.dumps(done))
    record, engine = Record(folder), Offloading(model, FaultStore(), key_env=_KEY)
    for name, scenario in SCENARIOS.items():
        record.run(engine, name, cast(Any, scenario))
    engine.close()
    compare(model, record, engine.answered)
    dying = Offloading(model, Deadly(open_store(f"file://{folder / 'stores' / 'killed'}", guarded=False)))
    Path(dying.manager.primary_tier._mmap_region.mmap_path).unlink()  # which vLLM leaves behind when it is killed
    dying.ask(KILLED)
    dying.settle()


if __name__ == "__main__":
    run_here({"offloading": run_offloading}[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
