"""What routers are told of the store, and the connector beside others: in the scheduler's side, and in real engines.

Two engines run vLLM's `MultiConnector`, each with a publisher of KV events that this process subscribes to.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    cuvee,
    need_vllm,
    run_engines,
    save_tiny_model,
)
from tests.integrations.vllm.sides import CHUNK, Desk, make_request

from cuvee.integrations.vllm.messages import Report
from cuvee.integrations.vllm.scheduler import events as scheduler_events
from cuvee.integrations.vllm.scheduler.events import EventPair

BLOCK, ENGINE_CHUNK = 32, 64
PROMPTS = [[(7 * at + seed) % 250 + 1 for at in range(4 * ENGINE_CHUNK + 5)] for seed in (0, 1)]


def make(request: SimpleNamespace, tokens: range) -> EventPair:
    return EventPair(f"+{tokens.start}", f"-{tokens.start}")


def planned(d: Desk, request: SimpleNamespace) -> list[bytes]:
    """The digests of the chunks that a request is to store, which it computes in one step."""
    d.side.arrived(request)
    plan = d.plan((request, 0, request.num_tokens))
    return [save.entry.digest for save in plan.saves if save.entry.kind == "chunk"]


def test_a_chunk_is_reported_once_every_rank_has_stored_it(desk: Callable[..., Desk]) -> None:
    d = desk(shards=2, make_events=make)
    first, second, third = planned(d, make_request(tokens=3 * CHUNK + 9))
    assert d.side.take_events() == []
    d.side.take(Report(stored=[second, first]))
    assert d.side.take_events() == []
    d.side.take(Report(stored=[first, third], unsaved={second}))
    assert d.side.take_events() == ["+0"]
    d.side.take(Report(stored=[second]))
    assert d.side.take_events() == [], "one rank has not stored it"
    d.side.take(Report(stored=[third]))
    assert d.side.take_events() == [f"+{2 * CHUNK}"]


def test_a_chunk_that_a_lookup_misses_is_reported_as_removed(desk: Callable[..., Desk]) -> None:
    d, request = desk(make_events=make), make_request(tokens=3 * CHUNK + 9)
    d.side.take(Report(stored=planned(d, request)))
    assert len(d.side.take_events()) == 3
    d.side.finished(request, [[]])
    d.put(request, 1)
    again = make_request("again", tokens=3 * CHUNK + 9)
    assert d.matched(again) == (CHUNK, True)
    assert d.side.take_events() == [f"-{CHUNK}"]


def test_a_lookup_without_an_answer_removes_nothing(desk: Callable[..., Desk]) -> None:
    d, request = desk(make_events=make), make_request(tokens=3 * CHUNK + 9)
    d.side.take(Report(stored=planned(d, request)))
    d.side.finished(request, [[]])
    d.side.take_events()

    def fails(operation: str) -> None:
        raise OSError(operation)

    d.store.before = fails
    assert d.matched(make_request("again", tokens=3 * CHUNK + 9)) == (0, False)
    assert d.side.take_events() == []


def test_a_reset_removes_everything(desk: Callable[..., Desk]) -> None:
    d = desk(make_events=make)
    digests = planned(d, make_request(tokens=2 * CHUNK + 9))
    d.side.take(Report(stored=digests[:1]))
    assert d.side.take_events() == ["+0"]
    assert d.side.reset()
    assert d.side.take_events() == ["-0"]
    d.side.take(Report(stored=digests[1:]))
    assert d.side.take_events() == [], "it is stored under a name that is not looked for"


def test_without_routers_nothing_is_collected(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.side.take(Report(stored=planned(d, make_request(tokens=2 * CHUNK + 9))))
    assert d.side.take_events() == []


def test_the_tokens_of_what_was_reported_are_not_kept(desk: Callable[..., Desk]) -> None:
    d = desk(make_events=make)
    d.side.take(Report(stored=planned(d, make_request(tokens=2 * CHUNK + 9))))
    assert not d.side._events._planned
    assert list(d.side._events._stored.values()) == ["-0", f"-{CHUNK}"]


def test_what_is_remembered_is_bounded(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_events, "_MOST", 2)
    d = desk(make_events=make)
    digests = planned(d, make_request(tokens=3 * CHUNK + 9))
    d.side.take(Report(stored=digests))
    assert d.side.take_events() == [f"+{CHUNK}", f"+{2 * CHUNK}"]


class Heard:
    """Events that a publisher sent."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(endpoint)

    def events(self) -> list[dict[str, Any]]:
        """All that came until now."""
        import msgspec
        import zmq

        found = []
        while self._socket.poll(500):
            payload = self._socket.recv_multipart(zmq.NOBLOCK)[-1]
            found += msgspec.msgpack.decode(payload)[1]
        self._socket.close(0)
        return found


@pytest.fixture(scope="module")
def multi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ran, list[dict[str, Any]]]]:
    """Engines with two connectors: what they did, and what their publishers sent."""
    need_vllm()
    folder = tmp_path_factory.mktemp("multi")
    model = save_tiny_model("llama", folder / "llama")
    ours = cuvee(f"file://{folder / 'store'}", chunk_tokens=ENGINE_CHUNK)
    raw = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "raw")},
    }
    engines, heard = [], {}
    for name, children in {"reference": [], "filled": [ours, raw], "ours first": [ours, raw]}.items():
        options: dict[str, Any] = {}
        if children:
            endpoint = f"ipc://{folder / name.replace(' ', '-')}"
            heard[name] = Heard(endpoint)
            options = {
                "kv_transfer_config": {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"connectors": children},
                    "kv_load_failure_policy": "recompute",
                },
                "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint},
            }
        until = ("vllm:cuvee_stored{kind=chunk}", 8) if name == "filled" else None
        engines.append(Engine(name, model, [Step(PROMPTS, forget=True, heard=bool(children), until=until)], options))
    ran = run_engines(folder / "run", engines)
    assert list((folder / "raw").rglob("*.safetensors")), "the other connector saves as well"
    return {name: (ran[name], heard[name].events() if name in heard else []) for name in ran}


@pytest.mark.slow
def test_beside_another_connector_one_loads_and_both_save(multi: dict[str, tuple[Ran, list[dict[str, Any]]]]) -> None:
    expected = [answer.tokens for answer in multi["reference"][0].steps[0]]
    for name in ("filled", "ours first"):
        assert [answer.tokens for answer in multi[name][0].steps[0]] == expected
    filled, loaded = multi["filled"][0], multi["ours first"][0]
    assert filled.metric("vllm:cuvee_stored{kind=chunk}") == 8 and filled.metric("vllm:cuvee_load_seconds_count") == 0
    assert loaded.metric("vllm:cuvee_load_seconds_count") == 2
    assert [answer.cached for answer in loaded.steps[0]] == [4 * ENGINE_CHUNK] * 2


@pytest.mark.slow
def test_routers_learn_what_an_engine_has_stored(multi: dict[str, tuple[Ran, list[dict[str, Any]]]]) -> None:
    """By the names that the engine's own blocks have."""
    _, events = multi["filled"]
    stored = [event for event in events if event["type"] == "BlockStored"]
    own = {event["block_hashes"][0]: event for event in stored if event["medium"] == "GPU"}
    ours = [event for event in stored if event["medium"] == "STORAGE"]
    assert len(ours) == 8
    for event in ours:
        assert len(event["block_hashes"]) == ENGINE_CHUNK // BLOCK and event["block_size"] == BLOCK
        assert len(event["token_ids"]) == ENGINE_CHUNK
    named = {name for event in stored if event["medium"] == "GPU" for name in event["block_hashes"]}
    assert named >= {name for event in ours for name in event["block_hashes"]}
    parents = {event["parent_block_hash"] for event in ours}
    assert None in parents and parents - {None} <= {event["block_hashes"][-1] for event in ours}
    for prompt in PROMPTS:
        texts = [event["token_ids"] for event in ours]
        assert all(prompt[at : at + ENGINE_CHUNK] in texts for at in range(0, 4 * ENGINE_CHUNK, ENGINE_CHUNK))
    assert own
    assert not [event for event in multi["ours first"][1] if event.get("medium") == "STORAGE"], "nothing new"
