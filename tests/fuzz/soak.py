"""A soak test: three processes use one store, which must never return a wrong value.

    python tests/fuzz/soak.py --seconds 600               `make soak`: a folder, tiers and Redis, one after the other

Every value follows from its key, so each process can check the values that it gets. The processes put, get, look up,
delete and reopen the store. They are killed at random, their disk reports that it is full, their clocks jump, and the
Redis server is killed and restarts empty. At the end, no process may have seen a wrong value, the budget must hold, and
the store must still work.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

from cuvee.integrations.stores.base import Store, StoreError
from cuvee.integrations.stores.urls import open_store

PROCESSES = 3
TENANTS, NAMES = 3, 150
MAX_MB = 2
# A folder may exceed its budget by 2% per process, or by the entries that are being written.
SLACK = 0.02 * PROCESSES
_LARGEST = 60_000
KINDS = ("file", "tiered", "redis")


class Wrong(Exception):
    """A store broke its contract."""


def every_key() -> list[str]:
    return [
        f"{tenant:04x}/{hashlib.sha256(b'%d' % name).hexdigest()}" for tenant in range(TENANTS) for name in range(NAMES)
    ]


def value_of(key: str) -> bytes:
    """Return the only valid value of `key`: up to 60 kB, mostly much smaller."""
    size = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / (1 << 32)
    return hashlib.shake_256(key.encode()).digest(int(_LARGEST * size**3))


def checked(key: str, blob: bytes | None) -> bool:
    """Return whether there is a value; raise Wrong if it is not the value of the key."""
    if blob is None:
        return False
    if blob != value_of(key):
        raise Wrong(f"{key}: {len(blob)} bytes that are not its own")
    return True


# --- one process


@contextmanager
def _trouble(source: random.Random) -> Iterator[Callable[[], None]]:
    """Yield a function that randomly makes the disk full or changes the time."""
    real_write, real_time = os.write, time.time
    full = [0.0]
    ahead = [0.0]

    def write(file: int, data: Any) -> int:
        if source.random() < full[0]:
            if len(data) > 1 and source.random() < 0.5:
                real_write(file, data[: len(data) // 2])  # a disk writes as much as fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(file, data)

    def turn() -> None:
        full[0] = source.choice((0.0, 0.0, 0.0, 0.0, 0.3, 1.0))
        ahead[0] = source.choice((0.0, 0.0, 30.0, -30.0, -86400.0))
        if source.random() < 0.03:  # everything has expired
            ahead[0] = 86400.0

    os.write = write
    time.time = lambda: real_time() + ahead[0]
    try:
        yield turn
    finally:
        os.write, time.time = real_write, real_time


def work(url: str, seed: int, seconds: float, log: Path) -> None:
    """Do random things until the time is over or somebody ends this; a line of counts a second."""
    source = random.Random(f"{seed}/{os.getpid()}")
    every, counts = every_key(), Counter[str]()
    end, told = time.monotonic() + seconds, 0.0
    store = open_store(url, guarded=source.random() < 0.3)  # a guard tries less once something has failed
    with log.open("a", buffering=1) as lines, _trouble(source) as turn:
        while (now := time.monotonic()) < end:
            counts["operations"] += 1
            if now - told > 0.5:
                told = now
                turn()
                print(json.dumps(counts), file=lines)
            if source.random() < 0.002:
                store.close()
                store = open_store(url, guarded=source.random() < 0.3)
                counts["reopened"] += 1
            try:
                _one(store, source, every, counts)
            except StoreError:
                counts["failures"] += 1
            except Wrong as wrong:
                print(json.dumps({"wrong": str(wrong)}), file=lines)
                raise
        print(json.dumps(counts), file=lines)
    store.close()


def _one(store: Store, source: random.Random, every: list[str], counts: Counter[str]) -> None:
    # An eighth of the keys gets half of the operations.
    key = every[int(len(every) * source.random() ** 3)]
    what = source.random()
    if what < 0.45:
        counts["puts"] += store.put(key, value_of(key))
    elif what < 0.75:
        counts["hits" if checked(key, store.get(key)) else "misses"] += 1
    elif what < 0.85:
        several = source.sample(every, 5)
        for each, blob in zip(several, store.get_many(several), strict=True):
            counts["hits" if checked(each, blob) else "misses"] += 1
    elif what < 0.95:
        several = source.sample(every, 10)
        answers = store.contains(several)
        if len(answers) != len(several) or not all(type(answer) is bool for answer in answers):
            raise Wrong(f"contains answers {answers!r}")
        counts["looked"] += len(answers)
    elif what < 0.999:
        counts["deleted"] += store.delete(key)
    else:
        counts["tenants deleted"] += 1
        store.delete_tenant(key.partition("/")[0])


# --- all of them


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


@contextmanager
def _redis() -> Iterator[Any]:
    import pytest
    from tests.integrations.stores.redis_server import redis_server

    try:
        with redis_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
            yield server
    except pytest.skip.Exception as missing:
        raise SystemExit(f"soak: redis: {missing}") from None


def soak(kind: str, seconds: float, seed: int = 0) -> dict[str, int]:
    """Soak one kind of store; return the totals of all processes.

    Raises:
        Wrong: a value was wrong, the budget was exceeded, or the store no longer works.
    """
    source = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cuvee-soak-")))
        server = stack.enter_context(_redis()) if kind == "redis" else None
        root = folder / "store"
        urls = {"file": f"file://{root}?max_gb={MAX_MB / 1000}&ttl=1h"}
        urls["tiered"] = f"tiered:memory://?max_gb=0.001,{urls['file']}"
        if server is not None:
            urls["redis"] = f"{server.url}?ttl=1h&timeout=0.5"
        url = urls[kind]
        command = [sys.executable, __file__, "--worker", url, "--seed", str(seed), "--log"]
        logs: list[Path] = []
        running: list[subprocess.Popen[bytes]] = []

        def start() -> subprocess.Popen[bytes]:
            logs.append(folder / f"{len(logs)}.log")
            left = max(end - time.monotonic(), 0.5)
            return subprocess.Popen([*command, str(logs[-1]), "--seconds", str(left)], stderr=subprocess.PIPE)

        end = time.monotonic() + seconds
        totals = Counter[str](dict.fromkeys(("kills", "outages"), 0))
        for _ in range(PROCESSES):
            running.append(start())
        stack.callback(_end, running)
        while time.monotonic() < end:
            time.sleep(source.uniform(0.2, 2.5))
            for at, process in enumerate(running):
                code = process.poll()
                if code not in (None, 0):
                    raise Wrong(f"a process ended with {code}: {process.communicate()[1].decode()[-2000:]}")
                if code is None and source.random() < 0.3 and time.monotonic() < end - 2:
                    process.kill()
                    process.communicate()
                    running[at] = start()
                    totals["kills"] += 1
            if server is not None and source.random() < 0.1:
                server.restart()
                totals["outages"] += 1
        for process in running:
            _, errors = process.communicate(timeout=120)
            if process.returncode:
                raise Wrong(f"a process ended with {process.returncode}: {errors.decode()[-2000:]}")
        for log in logs:
            lines = log.read_text().splitlines() if log.exists() else []
            for line in lines:
                if "wrong" in line:
                    raise Wrong(line)
            if lines:
                totals += Counter(json.loads(lines[-1]))
        totals += Counter(_audit(url, root if root.exists() else None))
        return dict(totals)


def _audit(url: str, root: Path | None) -> dict[str, int]:
    """Check that the remaining values are right and within the budget, and that the store works; return counts."""
    with closing(open_store(url, guarded=False)) as store:
        return _audited(store, root)


def _audited(store: Store, root: Path | None) -> dict[str, int]:
    every = every_key()
    left = sum(checked(key, store.get(key)) for key in every)
    for _ in range(2):  # a put checks the budget
        for key in every[::3]:
            store.put(key, value_of(key))
        store.flush(30)
    held = sum(checked(key, store.get(key)) for key in every[::3])
    most = int(MAX_MB * 1e6 * (1 + SLACK)) + PROCESSES * _LARGEST
    used = 0
    if root is not None:
        used = sum(file.stat().st_size for file in root.glob("*/*/*") if file.is_file())
        if used > most:
            raise Wrong(f"the folder holds {used} bytes, its budget is {MAX_MB} MB")
    if not held:
        raise Wrong("no entry that was put can be found")
    for tenant in range(TENANTS):
        store.delete_tenant(f"{tenant:04x}")
    if any(store.contains(every)):
        raise Wrong("entries of deleted tenants are still there")
    if root is not None and (stray := [path.name for path in root.iterdir() if not path.name.startswith(".")]):
        raise Wrong(f"remains of deleted tenants: {stray}")
    return {"left at the end": left, "held in the audit": held, "bytes in the audit": used}


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak the stores.")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of all kinds in total")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.seed, arguments.seconds, arguments.log)
        return 0
    kinds = arguments.kinds.split(",")
    if unknown := {*kinds} - {*KINDS}:
        parser.error(f"--kinds: must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    if "redis" in kinds and shutil.which("redis-server") is None:
        kinds.remove("redis")
        print("redis: left out, there is no redis-server")
    for kind in kinds:
        try:
            done = soak(kind, arguments.seconds / len(kinds), arguments.seed)
        except Wrong as wrong:
            print(f"{kind}: WRONG: {wrong}")
            return 1
        print(
            f"{kind}: nothing wrong; " + ", ".join(f"{what} {count:,}" for what, count in sorted(done.items())),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
