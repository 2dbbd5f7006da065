"""Faults on real vLLM engines: what happens to a store, a load or a process while an engine serves.

    python faults.py GROUP FOLDER MODEL ...  ->  FOLDER/results.json: scenario -> "" or what went wrong

A scenario drives an engine in this process step by step, breaks something, and checks the connector's counters. Every
answer that any scenario got is compared, at the end, with that of an engine without a connector. A group is one process
with one or more engines, since a process takes longer to start than all its scenarios; and an engine runs all scenarios
of its store.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm import gpu_defaults
from tests.integrations.vllm.engines import (
    cuvee,
    end_engine,
    ids,
    import_vllm,
    mark,
    run_script,
    run_steps,
    snapshot,
    start_engine,
    total,
)
from tests.waiting import PATIENCE, wait_until

from cuvee.integrations.stores import Store, open_store
from cuvee.integrations.stores.base import RECORDS
from cuvee.integrations.stores.envelope import HEADER_BYTES

BLOCK, CHUNK = 32, 64
CHUNKS = 5  # of a usual prompt
BLOCKS = 34  # of the engine's cache: one prompt of MAX_LEN, or a few usual ones
MAX_LEN = 1024
ANSWER = 12
LONGEST = 300.0  # seconds for one process
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,  # a long prompt takes several steps
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "gpu_memory_utilization": 0.2,  # of the RAM, which others use, too
    "skip_tokenizer_init": True,
    "seed": 0,
}
RANKS_OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 8 * BLOCKS, "disable_log_stats": False}
Totals = dict[tuple[str, str], float]


def prompt_of(name: str, chunks: int = CHUNKS) -> list[int]:
    """So many chunks, and some tokens more."""
    return ids(chunks * CHUNK + 10, name)


class FaultStore(DictStore):
    """A dict that a scenario breaks.

    Attributes:
        vanishing: keys whose entries go at the next get: after the lookup that saw them.
        closed: operations by name that wait until it is opened.
        waiting: how many wait now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vanishing: set[str] = set()
        self.waiting = 0
        self._gate = threading.Event()
        self._gate.set()
        self._closed = ""
        self.before = self._wait

    def get(self, key: str) -> bytes | None:
        if key in self.vanishing:
            self.vanishing.discard(key)
            self.entries.pop(key, None)
        return super().get(key)

    @contextmanager
    def hanging(self, operation: str) -> Iterator[None]:
        """Let an operation hang until the end of the context."""
        self._closed = operation
        self._gate.clear()
        try:
            yield
        finally:
            self._closed = ""
            self._gate.set()

    def _wait(self, operation: str) -> None:
        if operation == self._closed:
            self.waiting += 1
            self._gate.wait()
            self.waiting -= 1


HOW = ("RuntimeError", "OutOfMemoryError", "SystemExit", "KeyboardInterrupt", "SIGTERM")
WHERE = ("before", "in", "after")  # a layer; in it, its attention has written K and V


@contextmanager
def failing(layer: Any, where: str, how: str, call: int = 1) -> Iterator[list[str]]:
    """Let a layer's forward raise at its `call`th call. What it yields is no longer empty once it has."""
    import torch

    calls, raised = [0], list[str]()

    def end(*_: object) -> None:
        raise SystemExit(143)

    def fail(*_: object) -> None:
        calls[0] += 1
        if calls[0] == call:
            raised.append(how)
            if how == "SIGTERM":
                signal.raise_signal(signal.SIGTERM)
            raise {"OutOfMemoryError": torch.OutOfMemoryError, "SystemExit": SystemExit,
                   "KeyboardInterrupt": KeyboardInterrupt}.get(how, RuntimeError)(f"{where} a layer")  # fmt: skip

    usual = signal.signal(signal.SIGTERM, end)
    part = layer.mlp if where == "in" else layer
    handle = part.register_forward_hook(fail) if where == "after" else part.register_forward_pre_hook(fail)
    try:
        yield raised
    finally:
        handle.remove()
        signal.signal(signal.SIGTERM, usual)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that is compared with the reference's at the end."""

    scenario: str
    prompt: tuple[int, ...]
    tokens: list[int]


class Driven:
    """An engine in this process, driven step by step.

    Args:
        model: checkpoint.
        store: what its connector is given; None: no connector.
        connector: more of its options.
        options: of `vllm.LLM`.
    """

    def __init__(
        self,
        model: Path,
        store: Store | None,
        connector: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.answered: list[Answered] = []
        self.scenario = ""
        self.store = store
        self._count = 0
        if store is not None:
            from cuvee.integrations.vllm import shared_stores

            cast(Any, shared_stores).open_store = lambda urls: store
            options["kv_transfer_config"] = cuvee("memory://", chunk_tokens=CHUNK, **(connector or {}))
        self.llm: Any = start_engine(model, **{**OPTIONS, "enable_prefix_caching": store is not None, **options})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        if store is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.scheduling: Any = self.core.scheduler.connector._scheduler
            self.working: Any = get_kv_transfer_group()._worker
        self.all_blocks = self.free_blocks()

    def close(self) -> None:
        """Shut the engine down."""
        self.engine.engine_core.shutdown()

    # Requests ----------------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], max_tokens: int = ANSWER) -> str:
        """Add a request; its id."""
        from vllm import SamplingParams

        self._count += 1
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        name = f"{self.scenario} {self._count}"
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        return name

    def step(self) -> dict[str, Answered]:
        """One step; the requests that it ended."""
        done = {}
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                tokens = list(output.outputs[0].token_ids)
                done[output.request_id] = Answered(self.scenario, tuple(output.prompt_token_ids), tokens)
        if not outputs:
            time.sleep(0.001)
        self.answered += done.values()
        return done

    def finish(self) -> dict[str, Answered]:
        """Step until no request is left."""
        done: dict[str, Answered] = {}
        while self.engine.has_unfinished_requests():
            done |= self.step()
        return done

    def ask(self, *prompts: Sequence[int], max_tokens: int = ANSWER) -> None:
        """Answer prompts at the same time. None may be lost."""
        names = [self.submit(prompt, max_tokens) for prompt in prompts]
        done = self.finish()
        for name in names:
            assert len(done[name].tokens) == max_tokens, f"{name}: {done.get(name)}"

    @property
    def layers(self) -> Any:
        """Of the engine's model."""
        return self.core.model_executor.driver_worker.worker.model_runner.model.model.layers

    def start_over(self) -> None:
        """With an empty store, for the next scenario."""
        self.faults.entries.clear()
        self.scheduling._recent.clear()
        self.forget()

    def clear_up(self) -> None:
        """Leave nothing of a failed scenario for the next one."""
        self.engine.abort_request([request.request_id for request in self.core.scheduler.requests.values()], True)
        self.load_threads_idle()
        self.settle()

    def revive(self) -> None:
        """As if the engine had been started anew, after a step that failed."""
        self.forget()
        self.scheduling._recent.clear()
        self.working.saves._ended = self.scheduling._step

    def store_and_forget(self, *prompts: Sequence[int]) -> None:
        """Have prompts computed and stored, then forgotten by the engine."""
        self.ask(*prompts)
        self.settle()
        self.forget()

    def abort(self, name: str) -> None:
        """As if the client went away."""
        self.engine.abort_request([name])

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.llm.reset_prefix_cache(), "blocks are still in use"

    # What goes on behind -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until everything is stored, or failed to be, and counted."""
        wait_until(lambda: not self.working.saves._sizes, "chunks are stored")
        self.ask([1], max_tokens=1)

    def load_threads_idle(self) -> None:
        """Wait until every thread that loads has come back."""
        count = self.working._pools.loaders.threads
        barrier = threading.Barrier(count + 1)
        for _ in range(count):
            self.working._pools.loaders.submit(barrier.wait, PATIENCE)
        barrier.wait(PATIENCE)

    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def key(self, prompt: Sequence[int], chunk: int) -> str:
        """Of a chunk in the store."""
        from cuvee.naming.identity import PrefixChain, Scope, store_key

        chain = PrefixChain(self.scheduling._requests.identity, Scope(), CHUNK)
        return store_key("", chain.digests(prompt, chunk + 1)[chunk])

    def totals(self) -> Totals:
        """Counters of both sides, and the number of loads."""
        totals = self.scheduling._recorder.totals()
        loads = sum(value for (name, _), value in totals.items() if name == "load_seconds")
        return {
            **{key: value for key, value in totals.items() if not key[0].endswith(("load_seconds", "lookup_seconds"))},
            ("loads", ""): loads,
        }

    @contextmanager
    def counting(self) -> Iterator[Totals]:
        """What is counted within the context; filled in at its end."""
        before, change = self.totals(), Totals()
        yield change
        self.settle()
        for key, value in self.totals().items():
            if value != before.get(key, 0):
                change[key] = value - before.get(key, 0)

    @contextmanager
    def load_timeout(self, seconds: float) -> Iterator[None]:
        """Another `load_timeout` for a while."""
        usual, self.working._state.timeout = self.working._state.timeout, seconds
        try:
            yield
        finally:
            self.working._state.timeout = usual

    @property
    def faults(self) -> FaultStore:
        """Its store, if that is one to be broken."""
        assert isinstance(self.store, FaultStore)
        return self.store


def expect(counted: Totals, **figures: float) -> None:
    """Counters by name, or name_label: exactly so much; those that are not named may be anything."""
    seen = {f"{name}_{label}".replace(":", "_") if label else name: value for (name, label), value in counted.items()}
    wrong = {name: seen.get(name, 0) for name, value in figures.items() if seen.get(name, 0) != value}
    assert not wrong, f"expected {figures}, counted {seen}"


# Scenarios: a store that fails ------------------------------------------------------------------------------------


def vanishes(engine: Driven) -> None:
    """An entry is deleted between lookup and load: what is before it is used, the rest computed, and stored again.

    Also in the second group of chunks that is fetched, and behind a chunk and a half that the engine has itself.
    """
    local_hit = CHUNK + BLOCK
    cases = [(12, chunk, 0) for chunk in (0, 2, 9)] + [(CHUNKS, chunk, local_hit) for chunk in (1, 2, CHUNKS - 1)]
    for chunks, chunk, local in cases:
        prompt = prompt_of(f"vanishes {chunk} {local}", chunks)
        engine.store_and_forget(prompt)
        if local:
            engine.ask(prompt[: local + 1])
        engine.faults.vanishing.add(engine.key(prompt, chunk))
        with engine.counting() as counted:
            engine.ask(prompt)
        loaded = max(chunk * CHUNK - local, 0)
        expect(
            counted,
            lookups_hit=1,
            loads=1,
            failures_load=1,
            loaded_tokens=loaded,
            recomputed_tokens=chunks * CHUNK - local - loaded,
            stored_chunk=1,
        )
        _found_again(engine, prompt)


def _found_again(engine: Driven, prompt: Sequence[int]) -> None:
    """Everything of a prompt is in the store, and sound."""
    engine.forget()
    with engine.counting() as counted:
        engine.ask(prompt)
    expect(counted, loads=1, loaded_tokens=(len(prompt) - 1) // CHUNK * CHUNK, failures_load=0, stored_chunk=0)


def vanishes_under_two(engine: Driven) -> None:
    """Two requests of one batch begin with the same chunks, of which one goes."""
    for chunk in (0, 2, 3):
        prompt = prompt_of(f"two {chunk}", 4)
        others = [[*prompt[: 4 * CHUNK], *ids(90, f"two {chunk} {index}")] for index in range(2)]
        engine.store_and_forget(prompt)
        engine.faults.vanishing.add(engine.key(prompt, chunk))
        with engine.counting() as counted:
            engine.ask(*others)
        assert counted["failures", "load"] >= 1
        assert engine.free_blocks() == engine.all_blocks
        _found_again(engine, prompt)


def abort_after_failure(engine: Driven) -> None:
    """A request's load failed, and it is gone before its blocks are computed: nobody may take them for good."""
    prompt = prompt_of("abort after failure")
    engine.store_and_forget(prompt)
    engine.faults.vanishing |= {engine.key(prompt, chunk) for chunk in range(CHUNKS)}
    failed = engine.totals().get(("failures", "load"), 0)
    name = engine.submit(prompt)
    while engine.totals().get(("failures", "load"), 0) == failed:
        assert not engine.step()
    engine.abort(name)
    engine.ask(prompt)
    engine.ask([*prompt, 1, 2, 3])
    engine.settle()
    _found_again(engine, prompt)


def load_hangs(engine: Driven) -> None:
    """A load is given up after `load_timeout`; or its client goes, and its blocks are freed after that. What comes late
    is written nowhere, although others have the blocks by then.
    """
    for aborted in (False, True):
        prompt, other = prompt_of(f"load hangs {aborted}", 12), prompt_of(f"load hangs {aborted}, another", 14)
        engine.store_and_forget(prompt)
        with engine.counting() as counted:
            with ExitStack() as stack:
                stack.enter_context(engine.faults.hanging("get"))
                name = engine.submit(prompt)
                while not engine.faults.waiting:
                    engine.step()
                stack.enter_context(engine.load_timeout(0.2))
                if aborted:
                    engine.abort(name)
                else:
                    assert len(engine.finish()[name].tokens) == ANSWER
                    engine.forget()
                # Another request takes nearly all blocks, most of which the load was to fill.
                name = engine.submit(other, 40)
                while engine.free_blocks() > BLOCKS - len(other) // BLOCK:
                    assert not engine.step()
                for _ in range(3):
                    assert not engine.step()
            engine.load_threads_idle()
            assert len(engine.finish()[name].tokens) == 40
        expect(
            counted, loads=1, failures_timeout=1, failures_load=0, loaded_tokens=0, recomputed_tokens=12 * CHUNK,
            stored_chunk=14,
        )  # fmt: skip
        assert engine.free_blocks() == engine.all_blocks
        _found_again(engine, prompt)


# Scenarios: resets, and steps that fail ---------------------------------------------------------------------------


def reset(engine: Driven) -> None:
    """What was stored before is found again, as the weights are the same, by requests that were waiting, too."""
    prompt = prompt_of("reset")
    engine.store_and_forget(prompt)
    entries = dict(engine.faults.entries)
    name = engine.submit(prompt)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    with engine.counting() as counted:
        assert name in engine.finish()
    expect(counted, loads=1, lookups_hit=1, stored_chunk=0)
    assert entries == engine.faults.entries
    _found_again(engine, prompt)


def reset_while_running(engine: Driven) -> None:
    """What a running request computes after the reset follows tokens of before it, and is not stored."""
    prompt = prompt_of("reset while running")
    engine.submit(prompt, 2 * CHUNK)
    while engine.free_blocks() > engine.all_blocks - len(prompt) // BLOCK:
        engine.step()
    for _ in range(5):
        engine.step()
    engine.llm.reset_prefix_cache(reset_connector=True)
    done = engine.finish().popitem()[1]
    engine.settle()
    whole = [*prompt, *done.tokens]
    chunks = range(len(prompt) // CHUNK, len(whole) // CHUNK)
    later = [chunk for chunk in chunks if engine.key(whole, chunk) in engine.faults.entries]
    assert not later, f"chunks {later} were stored"


def forwards_raise(engine: Driven) -> None:
    """A forward raises, anywhere in a layer: the store has nothing of that step, nor of any after it, and all that it
    has is what it gets when the same is asked and no forward raises.
    """
    # Steps of a prompt of five chunks and most of a sixth: four chunks; one, and the prompt's tail; tokens, the sixth
    # of which completes a chunk. Four chunks are stored by the second step, and six entries by the eighth.
    whens = {"first": (1, 0), "second": (2, 4), "decoding": (8, 6), "loaded": (1, 0)}
    kinds = [(where, how) for how in HOW for where in WHERE]
    asked: list[tuple[str, list[int]]] = []
    expected, before = 0, 0.0
    for number, (where, how) in enumerate(kinds):
        when, layer = list(whens)[number % len(whens)], number // len(WHERE) % len(engine.layers)
        prompt, (call, stored) = ids(CHUNKS * CHUNK + 58, f"forwards raise {number}"), whens[when]
        asked.append((when, prompt))
        if when == "loaded":
            engine.store_and_forget(prompt[: 2 * CHUNK + 1])
            before = engine.totals().get(("loads", ""), 0)
        with failing(engine.layers[layer], where, how, call) as raised:
            name = engine.submit(prompt)
            try:
                while not raised:
                    engine.step()
            except (RuntimeError, SystemExit, KeyboardInterrupt) as error:
                print(f"--- {when}, {where} layer {layer}, {how}: {type(error).__name__}", flush=True)
            assert raised, f"{when}, {where} layer {layer}, {how}"
        engine.abort(name)  # its tail is not stored either
        engine.ask(ids(CHUNK + BLOCK + 1, f"after {number}"))  # the engine goes on
        engine.settle()
        assert when != "loaded" or engine.totals()["loads", ""] == before + 1
        expected += 2 if when == "loaded" else stored
        engine.revive()
    kept = dict(engine.faults.entries)
    assert len(kept) == expected, f"{len(kept)} entries of {expected}"
    engine.faults.entries.clear()
    for when, prompt in asked:
        if when == "loaded":
            engine.store_and_forget(prompt[: 2 * CHUNK + 1])
        engine.ask(prompt)
    engine.settle()
    wrong = [key for key, blob in kept.items() if engine.faults.entries.get(key) != blob]
    assert not wrong, f"{len(wrong)} of {len(kept)} entries are not what they should be"


def forward_raises_before_a_blend(engine: Driven) -> None:
    """vLLM calls us after a forward that raised, too. No slice of a blend is computed then: another rank may hang in
    its forward, and would not take part.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    called: list[bool] = []
    with failing(engine.layers[0], "in", "RuntimeError", 2) as raised:
        connector._blender, engine.working.blends.advance = engine, lambda *_: called.append(bool(raised))
        name = engine.submit(prompt_of("before a blend"))
        try:
            while not raised:
                engine.step()
        except RuntimeError:
            print("--- raised", flush=True)
        finally:
            connector._blender = None
            del engine.working.blends.advance
    engine.abort(name)
    engine.ask([1], max_tokens=1)
    engine.revive()
    assert called and not any(called), called


Scenarios = dict[str, Callable[[Driven], None]]
# With asynchronous scheduling vLLM waits for ever for the tokens of a step that raised: no engine goes on after one.
_GOES_ON = () if gpu_defaults.wanted() else (forwards_raise, forward_raises_before_a_blend)
INJECTED: Scenarios = {
    scenario.__name__: scenario
    for scenario in (
        vanishes,
        vanishes_under_two,
        abort_after_failure,
        load_hangs,
        reset,
        reset_while_running,
        *_GOES_ON,
    )
}


# Running them -----------------------------------------------------------------------------------------------------


class Record:
    """What became of each scenario, written after each: a process that dies leaves what it did."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "results.json"
        self.results: dict[str, str] = {}

    def run(self, engine: Driven, name: str, scenario: Callable[[Driven], None]) -> None:
        """Run a scenario; a failure is noted."""
        engine.scenario = name
        print(f"--- {name}", flush=True)
        begun = time.monotonic()
        try:
            engine.start_over()
            scenario(engine)
            self.note(name, "")
        except Exception:
            self.note(name, traceback.format_exc())
            engine.clear_up()
        print(f"--- {name}: {time.monotonic() - begun:.1f} s {self.results[name]}", flush=True)

    def note(self, name: str, problem: str) -> None:
        """Add to what is known of a scenario."""
        self.results[name] = self.results.get(name, "") + problem
        self._path.write_text(json.dumps(self.results))


def compare(model: Path, record: Record, answered: Sequence[Answered]) -> None:
    """Ask an engine without a connector all that was asked."""
    reference = Driven(model, None, num_gpu_blocks_override=8 * MAX_LEN // BLOCK + 1)
    longest: dict[tuple[int, ...], int] = {}
    for one in answered:
        longest[one.prompt] = max(longest.get(one.prompt, 0), len(one.tokens))
    for prompt, count in longest.items():
        reference.submit(prompt, count)
    reference.finish()
    expected = {one.prompt: one.tokens for one in reference.answered}
    for one in answered:
        right = expected[one.prompt][: len(one.tokens)]
        if one.tokens != right:
            record.note(one.scenario, f"\n{len(one.prompt)} tokens: answered {one.tokens}, right is {right}")
    reference.close()


def run_served(model: Path, folder: Path) -> None:
    """Every scenario of one rank."""
    record, engine = Record(folder), Driven(model, FaultStore())
    for name, scenario in INJECTED.items():
        record.run(engine, name, scenario)
    engine.close()
    compare(model, record, engine.answered)


def run_ranks(model: Path, folder: Path, store: str) -> None:
    """Two tensor-parallel ranks, processes of their own: what one of them misses, both compute; then one raises.

    Before that they do what `folder`/order says.
    """
    from vllm import SamplingParams

    record, prompt = Record(folder), prompt_of("ranks")
    (order,) = pickle.loads((folder / "order").read_bytes())
    print(mark(order.name), flush=True)
    llm: Any = start_engine(model, **{**OPTIONS, **RANKS_OPTIONS, **order.options})
    (folder / "answers").write_bytes(pickle.dumps({order.name: run_steps(llm, order.steps)}))
    print("=== end ===", flush=True)

    def ask(*prompts: Sequence[int]) -> list[Any]:
        parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
        return list(llm.generate([{"prompt_token_ids": list(one)} for one in prompts], parameters, use_tqdm=False))

    def tokens(output: Any) -> list[int]:
        return list(output.outputs[0].token_ids)

    def count(name: str) -> float:
        ask([1])
        return total(snapshot(llm), f"vllm:cuvee_{name}")

    def trouble() -> float:
        return count("store_operations{result=error}")

    def again() -> Any:
        assert llm.reset_prefix_cache()
        return ask(prompt)[0]

    files = partial(_files, store)
    others, stored = files(), int(count("stored{kind=chunk}")) + 2 * CHUNKS
    (first,) = ask(prompt)
    expected = tokens(first)
    wait_until(lambda: count("stored{kind=chunk}") == stored, f"{stored} chunks are stored")
    paths = sorted(files() - others)
    assert len(paths) == 2 * CHUNKS
    try:
        path = random.Random("garbage").choice(paths)
        loads, failures, troubles = count("load_seconds_count"), count("failures"), trouble()
        good = path.read_bytes()

        def whole() -> bool:
            return path.exists() and path.read_bytes()[HEADER_BYTES:] == good[HEADER_BYTES:]

        path.write_bytes(random.Random(0).randbytes(len(good)))
        output = again()
        assert tokens(output) == expected
        assert count("failures") == failures + 1 and count("load_seconds_count") == loads + 1
        # Not by the number of stored chunks: a store that fails once on a machine without memory has more of them
        # stored, or leaves this one to the next request (`test_damaged_entries`).
        wait_until(lambda: trouble() > troubles or whole(), "the chunk is stored again")
        if trouble() > troubles:
            again()
            wait_until(lambda: count("stored") and whole(), "the chunk is stored again by the next request")
        failures = count("failures")
        output = again()
        assert tokens(output) == expected
        assert output.num_cached_tokens == CHUNKS * CHUNK and count("failures") == failures
        record.note("rank_garbage", "")
    except Exception:
        counts = {name: value for name, value in snapshot(llm).items() if "cuvee" in name and value}
        record.note("rank_garbage", f"{traceback.format_exc()}{counts}")

    # One rank raises when both have computed their layers: neither stores that step, and the step before is stored as
    # by an engine that nothing befalls. Here the engine ends.
    raising, others = ids(CHUNKS * CHUNK + 58, "raising"), files()

    def all_stored() -> bool:  # without another request
        return len(files() - others) == 2 * (CHUNKS + 2)  # with one chunk more, and the prompt's tail

    try:
        ask(raising)
        wait_until(all_stored, "all is stored")
        right = _blobs(store)
        for path in files() - others:
            path.unlink()
        llm.reset_prefix_cache()
        first_two = 2 * OPTIONS["max_num_batched_tokens"] // CHUNK
        llm.collective_rpc(_fail_on_one_rank, args=(store, len(others) + first_two))
        try:
            ask(raising)
        except Exception as error:
            print(f"--- {type(error).__name__}", flush=True)
        else:
            raise AssertionError("the engine lives")
        end_engine(llm)
        found = _blobs(store)
        assert len(found) == len(others) + first_two, f"{len(found) - len(others)} entries"
        wrong = [key for key, blob in found.items() if blob != right.get(key)]
        record.note("rank_raises", f"{len(wrong)} entries are wrong" if wrong else "")
    except Exception:
        record.note("rank_raises", traceback.format_exc())
    sys.stdout.flush()
    os._exit(0)  # vLLM's own exit waits for the dead


def _fail_on_one_rank(worker: Any, store: str, enough: int) -> None:
    """Let the second rank raise in the second step, behind all layers, once the step before is stored."""
    model, calls = worker.model_runner.model.model, [0]

    def fail(*_: object) -> None:
        calls[0] += 1
        if calls[0] == 2:
            wait_until(lambda: len(_files(store)) >= enough, "the step before is stored")
            raise RuntimeError("on one rank")

    if worker.rank == 1:
        model.norm.register_forward_pre_hook(fail)


def _files(store: str) -> set[Path]:
    """Of entries: the record of the engine's identity is written anew each minute."""
    return {path for path in Path(store).glob("*/*/*") if path.is_file() and path.parts[-3] != RECORDS}


def _blobs(store: str) -> dict[str, bytes | None]:
    keys = [f"{path.parents[1].name}/{path.name}" for path in _files(store)]
    return dict(zip(keys, open_store(f"file://{store}", guarded=False).get_many(keys), strict=True))


RANKS = ("rank_garbage", "rank_raises")
GROUPS: dict[str, Callable[..., None]] = {"served": run_served, "ranks": run_ranks}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a process with engines: its exit status, what became of its scenarios, and what it said."""

    status: int | str
    scenarios: dict[str, str]
    log: str

    def expect_sound(self, scenario: str) -> None:
        """Fail as the scenario did."""
        problem = self.scenarios.get(scenario, f"the process ended before it, with {self.status}\n{self.log[-4000:]}")
        assert not problem, f"{scenario}: {problem}"


def run_group(
    group: str, folder: Path, model: Path, *arguments: str, script: str = __file__, **variables: str
) -> Outcome:
    """Run a group of scenarios in a new process.

    Args:
        group: one of `GROUPS`.
        folder: for results.
        model: checkpoint.
        arguments: of the group.
        script: path, of one with other groups.
        variables: of the environment.
    """
    given = (group, str(folder), str(model), *arguments)
    status, log = run_script(folder, script, *given, timeout=LONGEST, **variables)
    results = folder / "results.json"
    return Outcome(status, json.loads(results.read_text()) if results.exists() else {}, log)


def run_here(group: Callable[..., None], folder: Path, model: Path, *arguments: str) -> None:
    """Run a group in this process, which shows where it is if it takes too long."""
    faulthandler.dump_traceback_later(LONGEST - 5, exit=True)
    import_vllm()
    group(model, folder, *arguments)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run_here(GROUPS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
