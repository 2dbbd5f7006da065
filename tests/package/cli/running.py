"""Run commands in this process, and make files for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from cuvee.cli import app
from cuvee.codec.chunk import KVChunk

RUN = CliRunner(env={"COLUMNS": "200"})


def run(*args: str | Path, code: int = 0, answer: str | None = None) -> Result:
    done = RUN.invoke(app, [str(arg) for arg in args], input=answer)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def fails(*args: str | Path, match: str) -> str:
    """Expect exit code 1, nothing on standard output, one line on standard error."""
    done = run(*args, code=1)
    assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.output
    assert match in done.stderr and "Traceback" not in done.stderr
    return done.stderr


def misused(*args: str | Path) -> str:
    """Expect exit code 2 and nothing on standard output; return standard error."""
    done = run(*args, code=2)
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.stderr


def save_cache(chunk: KVChunk, path: Path) -> Path:
    tensors = {f"layer.{i}.keys": k.contiguous() for i, k in enumerate(chunk.keys)}
    tensors |= {f"layer.{i}.values": v.contiguous() for i, v in enumerate(chunk.values)}
    save_file(tensors, path, {"start": str(chunk.start)})
    return path


@dataclass(frozen=True)
class Files:
    """A folder with a profile and a cache of its model."""

    folder: Path
    profile: Path
    cache: Path
    chunk: KVChunk
