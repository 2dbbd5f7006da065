"""Whatever happens to a store, a load or a process: every request of a real engine is answered right."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integrations.stores.redis_server import require_redis
from tests.integrations.vllm import vllm_faults
from tests.integrations.vllm.vllm_engine import environment, killed_at_the_end, need_vllm, save_tiny_model

from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.disk import DiskStore

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Ran:
    """A process with engines: its exit status, what became of its scenarios, and what it said."""

    status: int
    results: dict[str, str]
    log: str

    def check(self, scenario: str) -> None:
        """Fail as the scenario did."""
        problem = self.results.get(scenario, f"the process ended before it, with {self.status}\n{self.log[-4000:]}")
        assert not problem, f"{scenario}: {problem}"


def run(group: str, folder: Path, model: Path, *arguments: str, **variables: str) -> Ran:
    """Run a group of scenarios in a process of its own."""
    folder.mkdir()
    log, results = folder / "log.txt", folder / "results.json"
    command = [sys.executable, vllm_faults.__file__, group, str(folder), str(model), *arguments]
    env = environment(**variables)
    env["PYTHONPATH"] += f":{Path(__file__).parents[3]}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True
        )
        with killed_at_the_end(process):
            status = process.wait(vllm_faults.PATIENCE)
    return Ran(status, json.loads(results.read_text()) if results.exists() else {}, log.read_text(errors="replace"))


@contextmanager
def small_disk(folder: Path) -> Iterator[str]:
    """A file system of 1 MB, if we may mount one; otherwise an empty string."""
    folder.mkdir()
    mounted = False
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(folder)]
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
        yield str(folder) if mounted else ""
    except FileNotFoundError:  # no mount(8)
        yield ""
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return tmp_path_factory.mktemp("vllm_faults")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_tiny_model("llama", folder / "llama")


@pytest.fixture(scope="module")
def crashed(folder: Path, model: Path) -> Path:
    """The store of an engine that was killed while it wrote."""
    store = folder / "crashed"
    ran = run("crash", folder / "crash", model, str(store))
    assert ran.status == -signal.SIGKILL, ran.log[-4000:]
    return store


@pytest.fixture(scope="module")
def served(folder: Path, model: Path, crashed: Path) -> Ran:
    """Every scenario that its engine survives."""
    try:
        require_redis()
        redis = "yes"
    except pytest.skip.Exception:
        redis = "no"
    with small_disk(folder / "small") as small:
        return run("served", folder / "served", model, str(crashed), small, redis)


@pytest.mark.parametrize("scenario", vllm_faults.WITHOUT_REDIS)
def test_answers_are_right(scenario: str, served: Ran) -> None:
    served.check(scenario)


@pytest.mark.parametrize("scenario", vllm_faults.WITH_REDIS)
def test_answers_are_right_with_redis(scenario: str, served: Ran) -> None:
    require_redis()
    served.check(scenario)


def test_processes_end(served: Ran) -> None:
    """Also with loads given up, and stores that failed."""
    assert served.status == 0, served.log[-4000:]


@pytest.fixture(scope="module")
def ranks(folder: Path, model: Path) -> Ran:
    """Two tensor-parallel ranks."""
    store = str(folder / "ranks-store")
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    return run("ranks", folder / "ranks", model, store, **variables)


@pytest.mark.parametrize("scenario", vllm_faults.RANKS)
def test_ranks_agree(scenario: str, ranks: Ran) -> None:
    ranks.check(scenario)


def test_a_worker_killed_while_it_stores_leaves_sound_entries(folder: Path, ranks: Ran) -> None:
    ranks.check("rank_killed")
    root = folder / "ranks-store"
    entries = [f"{path.parents[1].name}/{path.name}" for path in root.glob("*/*/*")]
    assert len(entries) > 2 * vllm_faults.CHUNKS
    store = open_store(f"file://{root}", guarded=False)
    assert isinstance(store, DiskStore)
    assert None not in store.get_many(entries)
    assert store.counters()["disk"].corrupt == 0
