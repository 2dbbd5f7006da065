"""The stores that an engine's processes share, and what is left of the default one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cuvee.integrations.stores import Store, open_store
from cuvee.integrations.vllm.shared_stores import SharedFolder, borrow_store, return_store


def test_the_default_store_ends_with_its_last_user(tmp_path: Path) -> None:
    """Those of one process, and other processes; what was killed leaves it to the next."""
    folder = tmp_path / "cuvee-1"
    urls = (f"file://{folder}?max_gb=1",)
    stores: list[Store] = [borrow_store(urls, unnamed=True) for _ in range(2)]
    assert stores[0] is stores[1] and stores[0].put("ab/01", b"x")
    code = f"""
        import sys
        from cuvee.integrations.vllm.shared_stores import borrow_store
        store = borrow_store(("file://{folder}?max_gb=1",), unnamed=True)
        print(store.get("ab/01") is not None, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        for _ in range(2):
            return_store(urls)
        assert open_store(urls[0]).get("ab/01") == b"x", "the other one uses it"
        other.kill()
    assert open_store(urls[0]).get("ab/01") == b"x", "nobody was left to remove it"
    assert borrow_store(urls, unnamed=True).get("ab/01") == b"x"
    return_store(urls)
    assert not folder.exists() and not list(tmp_path.iterdir())


def test_a_store_that_was_named_stays(tmp_path: Path) -> None:
    urls = (f"file://{tmp_path}/kv?max_gb=1",)
    borrow_store(urls).put("ab/01", b"x")
    return_store(urls)
    assert open_store(urls[0]).get("ab/01") == b"x" and not (tmp_path / "kv" / ".users").exists()


def test_who_comes_while_the_folder_is_removed_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cuvee-1"
    first = SharedFolder(str(path))
    lock = fcntl.flock
    times: list[int] = []

    def late(file: int, how: int) -> None:
        """The first user leaves between the other's opening and its locking."""
        if not times:
            times.append(how)
            first.leave()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = SharedFolder(str(path))
    assert (path / ".users").exists()
    third = SharedFolder(str(path))
    second.leave()
    assert path.exists(), "the third one uses it"
    third.leave()
    third.leave()
    assert not path.exists()


def test_a_folder_that_cannot_be_locked_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cuvee-1").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "cuvee-1" / ".users")
    SharedFolder(str(tmp_path / "cuvee-1")).leave()
    assert (tmp_path / "cuvee-1").exists() and not (tmp_path / "elsewhere").exists()
    assert "will not be removed" in caplog.text
