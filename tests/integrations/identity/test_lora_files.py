"""The files that an engine has an adapter's weights from."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.identity.test_checkpoint import edit_json, overwrite, write_safetensors

from cuvee.integrations.identity import lora_files as module
from cuvee.integrations.identity.checkpoint import checkpoint_identity
from cuvee.integrations.identity.lora_files import AdapterFiles, AdapterFolders, Adapters, watch_loads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "/models/a"}')
    write_safetensors(path / "adapter_model.safetensors", [("lora_A", 100), ("lora_B", 100)])
    return path


def find(adapters: Adapters, path: Path, number: int = 1, name: str = "sql") -> AdapterFiles | None:
    return adapters.find(number, name, str(path))


def tick() -> None:
    """Wait until the kernel's clock of files has gone on: a new file may have the number of one that was deleted."""
    time.sleep(0.02)


def deploy(source: Path, folder: Path) -> None:
    tick()
    shutil.rmtree(folder)
    shutil.copytree(source, folder)


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "other")
    overwrite(tmp_path / "other" / "adapter_model.safetensors", 250, b"\x01")
    return tmp_path / "other"


def test_an_adapter_is_its_name_and_content(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = find(Adapters(), folder)
    assert files is not None
    copy = tmp_path / "replica"
    shutil.copytree(folder, copy)
    edit_json(copy / "adapter_config.json", base_model_name_or_path="/elsewhere")
    replica = find(Adapters(), copy)
    assert replica is not None and replica.identity("sql") == files.identity("sql")
    assert len({files.identity(name) for name in ("sql", "sqm", "\ud800")}) == 3
    changes: list[Callable[[Path], None]] = [
        lambda path: overwrite(path / "adapter_model.safetensors", 250, b"\x01"),
        lambda path: edit_json(path / "adapter_config.json", r=16),
    ]
    for index, change in enumerate(changes):
        changed = tmp_path / f"changed{index}"
        shutil.copytree(folder, changed)
        change(changed)
        found = find(Adapters(), changed)
        assert found is not None and found.content != files.content
    assert not caplog.records


def test_an_adapter_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(path: str) -> str:
        calls.append(path)
        return checkpoint_identity(path)

    monkeypatch.setattr(module, "checkpoint_identity", counted)
    adapters = Adapters()
    first = find(adapters, folder)
    (folder / "README.md").write_text("hello")
    assert first is not None and find(adapters, folder) == find(adapters, folder, 2) == first and len(calls) == 1


def test_an_adapter_that_cannot_be_read_is_not_cached(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters, missing = Adapters(), tmp_path / "late"
    assert [find(adapters, missing) for _ in range(3)] == [None] * 3
    (message,) = caplog.messages
    assert "'sql'" in message and str(missing) in message and "are not cached" in message
    shutil.copytree(folder, missing)  # the engine has fetched it
    assert find(adapters, missing) is not None


def test_an_adapter_without_or_with_damaged_weights_is_not_cached(folder: Path) -> None:
    for data in (b"damaged", None):
        file = folder / "adapter_model.safetensors"
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        assert find(Adapters(), folder) is None and find(Adapters(), file) is None


def rewrite(folder: Path, other: Path) -> None:
    """The same file, of the same size and time."""
    file = folder / "adapter_model.safetensors"
    stat = file.stat()
    tick()
    overwrite(file, 250, b"\x01")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def rename(folder: Path, other: Path) -> None:
    """Another folder takes the place; none of its files is touched."""
    folder.rename(folder.parent / "old")
    other.rename(folder)


@pytest.mark.parametrize("change", [rewrite, rename, lambda folder, other: deploy(other, folder)])
@pytest.mark.parametrize("back", [False, True])
def test_an_adapter_that_changes_is_not_cached_from_then_on(
    folder: Path, other: Path, change: Callable[[Path, Path], None], back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may have the old weights or the new ones, also once the old files are there again."""
    adapters, saved = Adapters(), folder.parent / "saved"
    shutil.copytree(folder, saved)
    files = find(adapters, folder)
    assert files is not None
    change(folder, other)
    if back:
        deploy(saved, folder)
    assert [find(adapters, folder) for _ in range(2)] == [None, None]
    assert len(caplog.messages) == 1 and str(folder) in caplog.text and "load it anew" in caplog.text
    assert AdapterFolders().holds(files) is back, "each rank compares contents: its folder may be a copy"


def test_a_link_that_leads_elsewhere_and_back_is_a_change(folder: Path, other: Path, tmp_path: Path) -> None:
    adapters, link = Adapters(), tmp_path / "current"
    link.symlink_to(folder)
    assert find(adapters, link) is not None
    tick()
    for target in (other, folder):
        link.unlink()
        link.symlink_to(target)
    assert find(adapters, link) is None


def test_a_number_stands_for_the_weights_that_were_loaded_first(folder: Path, other: Path) -> None:
    """vLLM keeps one set of weights by each number, whatever path comes with it."""
    adapters = Adapters()
    assert find(adapters, folder) is not None and find(adapters, other, 2) is not None
    assert find(adapters, other) is None and find(adapters, folder) is None
    assert find(adapters, other, 2) is not None


class Executor:
    """vLLM's, as far as it is wrapped: `load` is what it does while it reads an adapter."""

    def __init__(self, load: Callable[[], Any] = lambda: True) -> None:
        self.load = load

    def add_lora(self, lora_request: Any) -> Any:
        return self.load()

    def remove_lora(self, lora_id: int) -> bool:
        return True


@pytest.fixture
def watched() -> tuple[Adapters, type[Executor]]:
    kind = type("Executor", (Executor,), {"add_lora": Executor.add_lora, "remove_lora": Executor.remove_lora})
    adapters = Adapters()
    for _ in range(2):  # of two engines in one process
        watch_loads(adapters, kind)
    return adapters, kind


def request(path: Path, again: bool = False, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_name="sql", lora_path=str(path), load_inplace=again)


def test_an_adapter_is_what_it_was_when_it_was_loaded(
    folder: Path, other: Path, watched: tuple[Adapters, type[Executor]]
) -> None:
    adapters, kind = watched
    assert kind().add_lora(request(folder)) is True
    old = AdapterFolders().read(str(folder))[1]
    deploy(other, folder)
    assert find(adapters, folder) is None, "the engine has the old weights"
    kind().add_lora(request(folder))
    assert find(adapters, folder) is None, "it has them by this number, and reads nothing"
    kind().add_lora(request(folder, again=True))
    new = find(adapters, folder)
    assert new is not None and new.content != old.content
    deploy(other, folder)
    kind().remove_lora(1)
    assert find(adapters, folder) == new, "it will be read again"


def test_files_that_change_while_they_are_loaded(
    folder: Path, other: Path, watched: tuple[Adapters, type[Executor]], tmp_path: Path
) -> None:
    adapters, kind = watched
    kind(lambda: deploy(other, folder)).add_lora(request(folder))
    assert find(adapters, folder) is None
    late = tmp_path / "late"
    kind(lambda: shutil.copytree(other, late)).add_lora(request(late, number=2))
    assert find(adapters, late, 2) is None, "nobody knows what was there before"

    def fails() -> None:
        raise OSError

    with pytest.raises(OSError):
        kind(fails).add_lora(request(other, number=3))
    assert find(adapters, other, 3) is not None, "nothing was loaded"


def test_files_that_change_while_they_are_identified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(path: str) -> str:
        tick()
        overwrite(folder / "adapter_model.safetensors", 250, b"\x01")
        return checkpoint_identity(path)

    monkeypatch.setattr(module, "checkpoint_identity", changing)
    adapters = Adapters()
    assert find(adapters, folder) is None
    monkeypatch.undo()
    assert find(adapters, folder) is None, "the engine may have read them before they changed"


def test_no_thread_sees_what_another_has_not_verified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reads files that change meanwhile, and are the old ones again when the other looks."""
    folders, signature, seen = AdapterFolders(), module._signature(str(folder)), list[AdapterFiles]()
    mixed, after = AdapterFiles(str(folder), "mixed"), iter([signature, None])

    def signature_of(path: str) -> Any:
        found = next(after, signature)
        if found is None:  # the first thread verifies; the second comes now
            monkeypatch.setattr(module, "checkpoint_identity", checkpoint_identity)
            seen.append(folders.read(path)[1])
        return found

    monkeypatch.setattr(module, "_signature", signature_of)
    monkeypatch.setattr(module, "checkpoint_identity", lambda path: mixed.content)
    assert folders.holds(mixed) is False
    assert [files.content for files in seen] == [checkpoint_identity(str(folder))]


def test_files_that_change_after_an_overdue_naming(folder: Path, other: Path) -> None:
    """The engine has read the old ones for the request that was not named in time."""
    adapters = Adapters()
    adapters.overdue(1)
    deploy(other, folder)
    assert find(adapters, folder) is None
    assert find(adapters, folder, 2) is not None
    adapters.overdue(2)
    assert find(adapters, folder, 2) is not None, "its files were noted in time"
