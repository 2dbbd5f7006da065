"""`make gpu-carry`: what a bare machine without a network lacks for `make gpu`, in folders that fit.

    1/   small wheels, SmolLM2's vocabulary and first layers
    2/   nvCOMP, more layers
    …    the other layers

The machine takes 64 MiB at a time, the working tree among them. The first folder is enough; with the others, nvCOMP and
all layers are there, too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from cuvee.calibration.bundled import TEXTS, bundled_text
from cuvee.calibration.real_model import smollm2_gguf, smollm2_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench.gpu.packed_model import pack_smollm2

__all__ = ["LIMIT", "fill_folders", "main", "tree_bytes", "trim_wheel"]

LIMIT = 64 << 20  # bytes that the machine takes at a time
SPARE = 256 << 10  # of them are left free: the tree may grow a little
# What a machine with torch, Triton, Numba and transformers may lack. Matplotlib is left out: 20 MB for one picture.
WHEELS = ("pytest", "pytest-xdist", "hypothesis", "typer", "rich", "xxhash")
NVCOMP = ("nvidia-nvcomp-cu13", "nvidia-libnvcomp-cu13")
_PYTHON = "312"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the folders and list them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cuvee.eval.bench.gpu.carry", description="Prepare `make gpu`.")
    parser.add_argument("--out", type=Path, default=Path("out/carry"))
    given = parser.parse_args(arguments)
    try:
        tree = tree_bytes(Path())
        folders = _prepare(given.out, LIMIT - SPARE - tree)
    except (CuveeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{tree:12,} bytes  the working tree, each time")
    for folder in folders:
        files = sorted(folder.iterdir())
        total = sum(path.stat().st_size for path in files)
        print(f"{total:12,} bytes  {folder}, {(tree + total) / LIMIT:.0%} of {LIMIT:,} with the tree")
        for path in files:
            print(f"{path.stat().st_size:12,}          {path.name}")
    return 0


def tree_bytes(root: Path) -> int:
    """Return the size of the files in a checkout that git does not ignore.

    Raises:
        InputError: it is no checkout.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"root: must be a git checkout, got {root.resolve()}: {done.stderr.strip()}")
    paths = (root / name for name in done.stdout.split("\0") if name)
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def fill_folders(files: Sequence[Path], out: Path, room: int) -> list[Path]:
    """Move files to the folders 1, 2, … of `out`, in order, each as full as `room` bytes allow.

    Raises:
        InputError: a file exceeds the room; nothing has been moved.
    """
    for path in files:
        if path.stat().st_size > room:
            raise InputError(
                f"{path.name}: must fit into {max(room, 0):,} bytes, what the tree leaves of {LIMIT:,}, got "
                f"{path.stat().st_size:,}; leave less in the tree (see git status)"
            )
    folders: list[Path] = []
    left = -1
    for path in files:
        size = path.stat().st_size
        if size > left:
            folders.append(out / str(len(folders) + 1))
            folders[-1].mkdir(parents=True)
            left = room
        shutil.move(path, folders[-1] / path.name)
        left -= size
    return folders


def trim_wheel(wheel: Path, folder: Path, dropped: Sequence[str]) -> Path:
    """Write a wheel without the members whose names contain one of `dropped`, packed as small as zip can."""
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as sink:
        for item in source.infolist():
            if not any(part in item.filename for part in dropped):
                sink.writestr(item.filename, source.read(item))
    return target


def _prepare(out: Path, room: int) -> list[Path]:
    """Fetch and pack everything in a folder beside `out`, and put it in the place of `out` once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        work = Path(name)
        wheels = _fetch(WHEELS, work / "wheels", dependencies=True)
        nvcomp = work / "nvcomp"
        nvcomp.mkdir()
        # Bindings of other Pythons, a tool, headers.
        other = [f"cpython-{version}" for version in ("39", "310", "311", "313", "314")]
        trimmed = [
            trim_wheel(path, nvcomp, (*other, "/bin/", "/include/", "/cmake/"))
            for path in _fetch(NVCOMP, work / "nvcomp-whole", dependencies=False)
        ]
        model = pack_smollm2(smollm2_gguf(work), smollm2_path(), _texts(), work / "model")
        # nvCOMP goes at the head of the second folder, with as many layers as the first one has no room for.
        first, size = [], sum(path.stat().st_size for path in wheels)
        for path in model:
            size += path.stat().st_size
            if size > room:
                break
            first.append(path)
        folders = fill_folders([*wheels, *first, *trimmed, *model[len(first) :]], work / "done", room)
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(work / "done", out)
    return [out / folder.name for folder in folders]


def _fetch(packages: Sequence[str], folder: Path, *, dependencies: bool) -> list[Path]:
    """Download wheels for the machine's Python.

    Raises:
        InputError: pip could not.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--dest={folder}"]
    command += [f"--python-version={_PYTHON}", "--implementation=cp", *(f"--platform={name}" for name in _PLATFORMS)]
    command += [] if dependencies else ["--no-deps"]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"packages: pip must be able to fetch {', '.join(packages)}: {done.stderr.strip()[-500:]}")
    return sorted(folder.iterdir())


def _texts() -> dict[str, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path(), local_files_only=True)
    return {name: tokenizer(bundled_text(name)).input_ids for name in TEXTS}


if __name__ == "__main__":
    sys.exit(main())
