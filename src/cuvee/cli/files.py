"""The files that commands read and write: blobs, profiles, outputs that are replaced only when asked."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.codec.errors import CuveeError, InputError

if TYPE_CHECKING:
    from cuvee.codec.profiles.profile import Profile

__all__ = ["SUFFIX", "blob_files", "check_absent", "named", "read_profile", "write_file", "write_folder"]

SUFFIX = ".cuvee"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Put the file's name before an error about its contents."""
    try:
        yield
    except CuveeError as error:
        raise type(error)(f"{path}: {error}") from error


def blob_files(source: Path) -> list[Path]:
    """The blobs of a folder in order, or the file itself.

    Raises:
        InputError: a folder without blobs.
    """
    if not source.is_dir():
        return [source]
    files = sorted(source.glob(f"*{SUFFIX}"))
    if not files:
        raise InputError(f"{source} holds no {SUFFIX} files")
    return files


def read_profile(file: Path | None, config: Path | None, dtype: str) -> Profile:
    """The profile in a file, or the generic one for the model of a config.

    Args:
        file: the profile.
        config: instead, a folder with a config.json, or that file.
        dtype: of the caches, where there is a config.

    Raises:
        CuveeError, OSError: the file cannot be read.
        ImportError: a config needs transformers.
    """
    from cuvee.codec.layout import KVLayout
    from cuvee.codec.profiles.profile import Profile

    if file is not None:
        return Profile.load(file)
    if config is None:
        raise InputError("config: give a profile, or the config of the model")
    if not config.exists():
        raise FileNotFoundError(errno.ENOENT, "no such config", str(config))
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError("--config needs transformers: install cuvee[transformers], or use --profile") from error
    try:
        # Never the code of a repository that the file names, and no question whether it may run.
        read = AutoConfig.from_pretrained(str(config), trust_remote_code=False).get_text_config(decoder=True)
        return Profile.generic(KVLayout.from_config(read, dtype=dtype))
    except (CuveeError, OSError, ImportError):
        raise
    except Exception as error:  # transformers has no class of its own for a configuration that makes no sense
        raise InputError(f"{config}: {error}") from error


def check_absent(path: Path, force: bool) -> None:
    """Refuse to replace what exists, unless forced.

    Raises:
        InputError: it exists.
    """
    if path.exists() and not force:
        raise InputError(f"{path} exists already: choose another name, or --force to replace it")


def write_file(path: Path, data: bytes, force: bool) -> None:
    """Write a file in one step: nobody reads half of it.

    Raises:
        InputError: it exists.
    """
    from cuvee.codec.support.files import write_atomically

    check_absent(path, force)
    write_atomically(path, data)


def write_folder(path: Path, files: dict[str, bytes], force: bool) -> None:
    """Write a folder in one step. Only a folder that holds nothing but blobs is ever replaced.

    Raises:
        InputError: it exists, or holds other things.
    """
    check_absent(path, force)
    if path.exists() and not (path.is_dir() and all(file.suffix == SUFFIX for file in path.iterdir())):
        raise InputError(f"{path} is not a folder of {SUFFIX} files alone, so --force leaves it as it is")
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    new.mkdir()
    try:
        for name, data in files.items():
            (new / name).write_bytes(data)
        if path.exists():
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)
