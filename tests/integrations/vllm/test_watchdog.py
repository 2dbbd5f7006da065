"""No file, socket or long hash on the engine's thread, which runs the hooks of both sides; stores work in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.integrations.stores.redis_server import redis_server
from tests.integrations.vllm.sides import image
from tests.integrations.vllm.small_engine import SmallEngine
from tests.integrations.vllm.test_identity import IDS, adapter
from tests.integrations.vllm.watchdog import LONGEST, Watchdog, watched

from cuvee.integrations.stores import open_store
from cuvee.integrations.vllm.scheduler.side import SchedulerSide
from cuvee.integrations.vllm.worker.loads import WorkerLoads
from cuvee.integrations.vllm.worker.saves import WorkerSaves
from cuvee.integrations.vllm.worker.side import WorkerSide

_HOOKS = {
    SchedulerSide: ("arrived", "matched_tokens", "allocated", "finished", "plan", "take", "reset"),
    WorkerSide: ("begin_step", "end_step", "settle", "report"),
    WorkerLoads: ("start", "take_arrived", "drop"),
    WorkerSaves: ("save",),
}


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    with watched(_HOOKS) as dog:
        yield dog


def _picture() -> SimpleNamespace:
    return image("cat", content="x" * (LONGEST // 4))


@pytest.fixture(params=["file", "tiered", "redis"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | list[str]]:
    folder = f"file://{tmp_path}/kv?max_gb=1"
    if request.param == "redis":
        with redis_server() as server:
            yield server.url
    else:
        yield folder if request.param == "file" else ["memory://?max_gb=1", folder]


def test_the_engines_thread_opens_nothing_and_hashes_little(
    watchdog: Watchdog, urls: str | list[str], tmp_path: Path, engine: Callable[..., SmallEngine]
) -> None:
    """Stores, loads, a tail, a blend, an adapter, an image, an abort and a reset."""
    e = engine(store=open_store(urls))
    tuned = adapter(tmp_path / "a", 1)
    for turn in range(2):
        e.submit(f"plain{turn}", [*IDS, turn])
        e.submit(f"tuned{turn}", [*IDS, turn], lora_request=tuned)
        e.submit(f"seen{turn}", [*IDS, turn], mm_features=[_picture()])
        e.submit(f"parts{turn}", [50 + turn, *IDS[8:]], kv_transfer_params={"cuvee": {"segments": [[1, 33]]}})
        e.run()
    e.submit("gone", IDS)
    e.step()
    e.abort("gone")
    e.side.reset()
    e.submit("anew", IDS)
    e.run()
    loads = sum(value for (name, _), value in e.recorder.totals().items() if name == "load_seconds")
    assert loads >= 3 and len(e.done) >= 9
    assert len(watchdog.hooks) >= 13
    assert watchdog.bites == []
