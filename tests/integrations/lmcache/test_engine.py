"""Real vLLM engines whose cache an LMCache server keeps, with our adapter behind its memory, over a restart of both.

Nothing is replaced. On a CPU, LMCache's connector for vLLM copies pages in the engine's process and sends them to the
server's (its engine-driven transfer).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integrations.lmcache.real_lmcache import NEED_LMCACHE, PLUGIN
from tests.integrations.stores.loopback import free_port
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    cached,
    distance,
    ids,
    need_vllm,
    run_engines,
    save_tiny_model,
    serving,
)
from tests.integrations.vllm.faults import CHUNK
from tests.waiting import PATIENCE, wait_until

pytestmark = [*NEED_LMCACHE, pytest.mark.slow]

PROMPTS = [ids(6 * CHUNK + 7, 1), ids(3 * CHUNK + 5, 2)]
CHUNKS = 6 + 3
SERVER = ["-m", "lmcache.cli.main", "server"]


class Server:
    """LMCache's server over a store that outlives it. `options`: an engine's."""

    def __init__(self, url: str, port: int) -> None:
        self._url = url
        self.options = {
            "kv_transfer_config": {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
        }

    @classmethod
    @contextmanager
    def started(cls, folder: Path, model: Path, name: str) -> Iterator[Server]:
        port, http = free_port(), free_port()
        store = f"file://{folder / 'store'}?max_gb=1"
        params = {"lookup_timeout": PATIENCE, "load_timeout": PATIENCE, "store": store, "chunk_tokens": CHUNK}
        adapter = {**PLUGIN, "adapter_params": {"model": str(model), **params}}
        flags = {
            "host": "127.0.0.1", "port": port, "http-host": "127.0.0.1", "http-port": http, "chunk-size": CHUNK,
            "l1-size-gb": 0.1, "eviction-policy": "LRU", "supported-transfer-mode": "engine_driven",
            "l2-adapter": json.dumps(adapter),
        }  # fmt: skip
        command = [*SERVER, "--no-l1-use-lazy", "--disable-metrics"]
        command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        (place := folder / f"server {name}").mkdir()
        with serving(place, command, http, page="status", fresh=name == "loaded") as url:
            yield cls(url, port)

    def settled(self, counter: str) -> dict[str, float]:
        """Our adapter's counters once this one is of all chunks."""
        wait_until(lambda: self._counters().get(counter) == CHUNKS)
        return self._counters()

    def _counters(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self._url}/status", timeout=30) as answer:
            (adapter,) = json.load(answer)["storage_manager"]["l2_adapters"]
        counters: dict[str, float] = adapter["counters"]
        return counters


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Ran], list[dict[str, float]]]:
    """Engines without a connector, that stores, and, behind another server, that loads; the adapters' counters."""
    need_vllm()
    folder = tmp_path_factory.mktemp("lmcache")
    model = save_tiny_model("llama", folder / "llama")
    done: dict[str, Ran] = {}
    counters = []
    for name in ("stored", "loaded"):
        with Server.started(folder, model, name) as server:
            engines = [Engine(name, model, [Step(PROMPTS)], server.options)]
            if name == "stored":
                engines.append(Engine("reference", model, [Step(PROMPTS)] * 2))
            results = run_engines(folder / name, engines, fresh=name == "loaded")
            done |= {engine.name: results[engine.name] for engine in engines}
            counters.append(server.settled("saved_pages" if name == "stored" else "identity_entries{same}"))
    return done, counters


@pytest.mark.serves(where="engine")
def test_after_a_restart_a_load_answers_as_a_hit_in_the_engines_own_cache(
    ran: tuple[Mapping[str, Ran], list[dict[str, float]]],
) -> None:
    engines, (stored, loaded) = ran
    first, second = engines["reference"].steps
    assert [distance(*pair) for pair in zip(engines["stored"].steps[0], first, strict=True)] == [0, 0]
    assert [distance(*pair) for pair in zip(engines["loaded"].steps[0], second, strict=True)] == [0, 0]
    assert cached(engines["stored"].steps[0]) == [0, 0]
    assert cached(engines["loaded"].steps[0]) == cached(second) == [6 * CHUNK, 3 * CHUNK]
    assert stored["saved_pages"] == CHUNKS == loaded["loaded_pages"] == loaded["identity_entries{same}"]
    assert 0 < stored["blob_bytes"] < stored["raw_bytes"] == loaded["loaded_raw_bytes"]
    trouble = ("failures", "contained", "opaque", "missed", "unsaved", "refused")
    assert not [name for name in {**stored, **loaded} if name.startswith(trouble)]
