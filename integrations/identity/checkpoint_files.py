"""Files of checkpoints: found by path or hub id, and headers of safetensors files."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.models.kimi import as_deepseek_v3, is_deepseek_v3
from cuvee.codec.support.plain_json import parse_json

_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def resolve(path: str | Path, revision: str | None) -> Path:
    """Return the local file or folder of a path or a hub id.

    Raises:
        InputError: there is none on this machine.
        ImportError: hub ids need huggingface_hub.
    """
    local = Path(path)
    if local.exists():
        return local
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ImportError("hub ids need huggingface_hub: pip install 'cuvee[transformers]'") from error
    try:
        return Path(snapshot_download(str(path), revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise InputError(
            f"model: must be a local folder or in the local cache of huggingface_hub, got {path}: give a folder that "
            "exists, or set option 'model_id' to a name of your own that changes with the weights"
        ) from error


def load_config(path: str | Path, revision: str | None = None) -> Any:
    """Read the configuration of a checkpoint on this machine. Code beside it is not run, and nobody is asked to."""
    from transformers import AutoConfig, PreTrainedConfig

    entries, _ = PreTrainedConfig.get_config_dict(path, revision=revision, local_files_only=True)
    if is_deepseek_v3(entries):
        return as_deepseek_v3(entries)
    return AutoConfig.from_pretrained(path, revision=revision, local_files_only=True, trust_remote_code=False)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a safetensors file: its bytes are `[begin, end)` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path, stream: FileIO) -> tuple[bytes, dict[str, Tensor]]:
    """Return the header of a safetensors file, raw and by tensor.

    Raises:
        InputError: the file is damaged or incomplete.
    """
    size = os.fstat(stream.fileno()).st_size
    try:
        (length,) = struct.unpack("<Q", os.pread(stream.fileno(), 8, 0))
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        raw = os.pread(stream.fileno(), length, 8)
        tensors = {
            name: Tensor(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
            for name, entry in parse_json(raw, constants=True).items()
            if name != "__metadata__"
        }
        if not all(8 + length <= tensor.begin <= tensor.end <= size for tensor in tensors.values()):
            raise ValueError("tensors outside of the file")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(f"model: must hold complete safetensors files, got {file} ({error}): copy it again") from error
    return raw, tensors


def open_file(file: Path) -> FileIO:
    """Open a file that is read here and there."""
    stream = FileIO(file)
    if hasattr(os, "posix_fadvise"):  # reads are scattered: no read-ahead
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return stream
