"""Files that commands read and write: blobs, profiles, and outputs that only --force replaces."""

from __future__ import annotations

import errno
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.codec.errors import CuveeError, InputError

if TYPE_CHECKING:
    from cuvee.codec.profiles.profile import Profile

__all__ = [
    "SUFFIX", "blob_files", "blob_name", "check_absent", "check_output", "errors_of", "read_profile", "whole_folder",
    "write_folder",
]  # fmt: skip

SUFFIX = ".cuvee"


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Prefix errors about a file's contents with its name."""
    try:
        yield
    except CuveeError as error:
        raise type(error)(f"{path}: {error}") from error


def blob_files(source: Path) -> list[Path]:
    """Return the blobs of a folder in order, or the file itself.

    Raises:
        InputError: the folder holds no blobs, or is missing since it was replaced.
    """
    if not source.exists() and (old := next(source.parent.glob(f".{escape(source.name)}.*/old"), None)):
        raise InputError(
            f"{source}: must exist, but `encode --force` was stopped while it replaced the folder: move back what it "
            f"held, {old}, or move what it should hold, {old.with_name('new')}"
        )
    if not source.is_dir():
        return [source]
    files = sorted(source.glob(f"*{SUFFIX}"))
    if not files:
        raise InputError(f"{source}: must hold {SUFFIX} files, got a folder without any")
    return files


def blob_name(index: int, count: int) -> str:
    """Return the name of a blob of a cache, which says how many blobs the cache has: `00000-of-00003.cuvee`."""
    return f"{index:05}-of-{count:05}{SUFFIX}"


def whole_folder(source: Path, files: list[Path]) -> None:
    """Refuse the blobs of a folder if some are missing, or of another cache, by their names.

    Raises:
        InputError: a blob is missing or does not belong here.
    """
    if not source.is_dir():
        return
    counts = {found[1] for file in files if (found := re.fullmatch(rf"\d+-of-(\d+){SUFFIX}", file.name))}
    if not counts:
        print(f"note: {source}: the names do not say how many blobs there are: some may be missing", file=sys.stderr)
        return
    count = int(max(counts))
    if count > len(files) + 1_000_000:  # a name of anyone's making
        raise InputError(f"{source}: must hold all {count} blobs of a cache, got {len(files)}")
    wanted, names = [blob_name(index, count) for index in range(count)], [file.name for file in files]
    if missing := sorted({*wanted} - {*names}):
        raise InputError(f"{source}: must hold all {count} blobs of a cache, but {missing[0]} is missing")
    if other := sorted({*names} - {*wanted}):
        raise InputError(f"{source}: must hold the blobs of one cache, got also {other[0]}: move it elsewhere")


def read_profile(file: Path | None, config: Path | None, dtype: str) -> Profile:
    """Load a profile, or make one that has learned nothing from a model's configuration.

    Args:
        file: the profile.
        config: instead of a profile, a config.json or the folder that holds it.
        dtype: the dtype of the caches; used with `config` only.

    Raises:
        CuveeError, OSError: the file cannot be read.
        ImportError: `config` is given and transformers is not installed.
    """
    from cuvee.codec.layout import KVLayout
    from cuvee.codec.profiles.profile import Profile

    if file is not None:
        return Profile.load(file)
    if config is None:
        raise InputError("config: must be given without a profile, got neither: pass --profile or --config")
    from cuvee.calibration.corpus import load_config

    if not config.exists():
        raise FileNotFoundError(errno.ENOENT, "no such config", str(config))
    try:
        read = load_config(str(config)).get_text_config(decoder=True)
        return Profile.unlearned(KVLayout.from_config(read, dtype=dtype))
    except (CuveeError, OSError, ImportError):
        raise
    except Exception as error:  # transformers raises errors of any class for an invalid configuration
        raise InputError(f"{config}: must be a configuration that transformers reads, got {error}") from error


def check_absent(path: Path, force: bool) -> None:
    """Refuse to replace an existing file or folder, unless forced.

    Raises:
        InputError: `path` exists.
    """
    if path.exists() and not force:
        raise InputError(
            f"{path}: must be new, got a path that exists: choose another name, or pass --force to replace it"
        )


def check_output(path: Path, force: bool, *, blobs: bool = False) -> None:
    """Find out before long work whether a file, or a folder of blobs, can be written. Leaves nothing behind.

    Raises:
        InputError: `path` exists and is not to be replaced, or its folder cannot be written.
    """
    check_absent(path, force)
    if blobs:
        _check_replaceable(path)
    elif path.is_dir():
        raise InputError(f"{path}: must be a file, got a folder, which --force does not replace: name a file in it")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{path.name[:32]}.", dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{path}: must be in a folder that can be written, got {error.strerror}: {folder}") from error


def write_folder(path: Path, files: dict[str, bytes], force: bool) -> None:
    """Write a folder of files atomically. Only a folder that holds blobs alone is ever replaced.

    Raises:
        InputError: `path` exists, or holds other files.
    """
    check_absent(path, force)
    _check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
        new, old = Path(work, "new"), Path(work, "old")
        new.mkdir()
        for name, data in files.items():
            (new / name).write_bytes(data)
        try:
            if path.exists():
                path.rename(old)
            new.rename(path)
        except BaseException:  # Ctrl-C, too, which may come as either call returns
            if old.exists() and not path.exists():
                old.rename(path)
            raise


def _check_replaceable(path: Path) -> None:
    """Refuse to replace anything but a folder of blobs."""
    if path.exists() and not (path.is_dir() and all(file.suffix == SUFFIX for file in path.iterdir())):
        raise InputError(f"{path}: must hold only {SUFFIX} files for --force to replace it: choose another name")
