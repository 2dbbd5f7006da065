"""Uncompressed caches in files: safetensors with `layer.0.keys` and `layer.0.values` `[T, H, D]`, `layer.1.keys`, ….

Keys are as the model's attention sees them, after RoPE. The metadata holds `start`, the position of the first token.
A file may hold the tokens' ids, `token_ids` int64 `[T]`, with -1 for a token without one.
`cuvee encode` and `cuvee decode` read and write these files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cuvee.codec.chunk import KVChunk
from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import CuveeError, FormatError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.support.arrays import I64
from cuvee.codec.support.files import replacing

POSITION_DIGITS = 10
_TOKEN_IDS = "token_ids"


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(errno.ENOENT, "no such cache file", str(path))
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise FormatError(f"{path}: must be a safetensors file, got a truncated one or another: {error}") from error


def write_cache_file(
    path: str | os.PathLike[str],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    start: int = 0,
    token_ids: I64 | None = None,
) -> None:
    """Write a cache, and replace any file of that name.

    Args:
        path: of the file.
        keys: per layer `[T, H, D]`, on any device.
        values: the same for values.
        start: position of the first token.
        token_ids: ids of the tokens, `[T]`, NO_TOKEN for a token without one; None if unknown.

    Raises:
        OSError: the file cannot be written; no part of it is left behind.
    """
    tensors = {}
    for layer, (own_keys, own_values) in enumerate(zip(keys, values, strict=True)):
        tensors[f"layer.{layer}.keys"] = own_keys.contiguous()
        tensors[f"layer.{layer}.values"] = own_values.contiguous()
    if token_ids is not None:
        tensors[_TOKEN_IDS] = torch.from_numpy(token_ids).contiguous()
    with replacing(path) as temporary:
        save_file(tensors, temporary, {"start": str(start)})


def cache_file_dtype(path: str | os.PathLike[str]) -> str:
    """Return the dtype of a cache in a file.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: it is not a safetensors file, or holds no cache.
        InputError: its tensors have several dtypes.
    """
    with _opened(path) as file:
        dtypes = {str(file.get_slice(name).get_dtype()) for name in set(file.keys()) - {_TOKEN_IDS}}
    if len(dtypes) != 1:
        raise InputError(f"{path}: must hold tensors of one dtype, got {', '.join(sorted(dtypes)) or 'no tensors'}")
    (dtype,) = dtypes
    known = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    if dtype not in known:
        raise InputError(f"{path}: must hold {', '.join(TORCH_DTYPES)}, got {dtype}")
    return known[dtype]


def read_cache_file(path: str | os.PathLike[str], layout: KVLayout) -> KVChunk:
    """Read a cache.

    Args:
        path: of a file in this format.
        layout: layout of the model; the dtype is the file's.

    Returns:
        the cache on the CPU, in the file's dtype, with the file's token ids.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: it is not a safetensors file.
        InputError: the file does not hold a cache of the model; the message begins with the path.
    """
    own = replace(layout, dtype=cache_file_dtype(path))
    expected = [f"layer.{i}.{kind}" for i in range(layout.num_layers) for kind in ("keys", "values")]
    with _opened(path) as file:
        names = set(file.keys())
        if missing := [name for name in expected if name not in names]:
            raise InputError(
                f"{path}: must hold the {layout.num_layers} layers of the model, got no tensor {missing[0]!r}"
            )
        if extra := sorted(names - {*expected, _TOKEN_IDS}):
            raise InputError(f"{path}: must hold only layers of the model, got a tensor {extra[0]!r}")
        text = (file.metadata() or {}).get("start", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= POSITION_DIGITS):
            raise InputError(f"{path}: must have a position as `start` in its metadata, got {text!r}")
        tensors = [file.get_tensor(name) for name in expected]
        token_ids = file.get_tensor(_TOKEN_IDS) if _TOKEN_IDS in names else None
    try:
        return KVChunk(tensors[::2], tensors[1::2], own, int(text), token_ids)
    except CuveeError as error:
        raise type(error)(f"{path}: {error}") from error
