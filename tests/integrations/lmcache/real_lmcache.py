"""LMCache's own classes, which need no GPU: its factory of adapters, and what our adapter is given.

`NEED_LMCACHE`, as `pytestmark`, skips a module's tests where LMCache is not installed, unless CUVEE_REQUIRE_LMCACHE=1.
The Makefile installs it without its dependencies.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from cuvee.calibration.bundled import bundled_model_path

NEED_LMCACHE = [
    pytest.mark.skipif(
        importlib.util.find_spec("lmcache") is None and os.environ.get("CUVEE_REQUIRE_LMCACHE") != "1",
        reason="LMCache is not installed",
    ),
    # Of the handlers that LMCache gives each of its loggers, in modules that it imports late.
    pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk` is deprecated:DeprecationWarning"),
]

LAYERS, HEADS, DIM = 6, 2, 64  # of the bundled model
CHUNK = 32  # tokens
MODEL = str(bundled_model_path())
PLUGIN = {
    "type": "plugin", "module_path": "cuvee.integrations.lmcache.l2_adapter", "class_name": "CuveeL2Adapter",
}  # fmt: skip
PARAMS = {"model": MODEL, "model_name": "served", "chunk_tokens": CHUNK, "dtype": "bfloat16"}


def real(name: str) -> ModuleType:
    """Import one of LMCache's modules, or of ours that import them."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about devices that are not there
        return importlib.import_module(name)


def object_key(number: int, *, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    api = real("lmcache.v1.distributed.api")
    kv_rank = api.ObjectKey.ComputeKVRank(ranks, rank, ranks, rank)
    given = {"chunk_hash": number.to_bytes(32, "big"), "model_name": "served", "kv_rank": kv_rank, **changes}
    return api.ObjectKey(**given)


def layout_desc(shape: Sequence[int] | None = None, dtype: torch.dtype = torch.bfloat16, *, ranks: int = 1) -> Any:
    """Return LMCache's description of a chunk's memory: by default keys and values of a rank, apart."""
    api = real("lmcache.v1.distributed.api")
    given = (2, LAYERS, CHUNK, HEADS // ranks * DIM) if shape is None else shape
    return api.MemoryLayoutDesc([torch.Size(given)], [dtype])


def values(number: int, desc: Any) -> torch.Tensor:
    """Return values of a chunk, which depend on its number: smooth, so that they compress."""
    shape = desc.shapes[0]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return (noise + 3 * torch.arange(shape[-1]).sin()).to(desc.dtypes[0])


def configured(*adapters: dict[str, Any], **flags: Any) -> Any:
    config = real("lmcache.v1.distributed.config")
    parser = config.add_storage_manager_args(argparse.ArgumentParser())
    given = {"l1-size-gb": 0.2, "eviction-policy": "LRU", **flags}
    arguments = ["--no-l1-use-lazy", *(text for name, value in given.items() for text in (f"--{name}", str(value)))]
    for adapter in adapters:
        arguments += ["--l2-adapter", json.dumps(adapter)]
    return config.parse_args_to_config(parser.parse_args(arguments))


def plugin(params: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """Return the JSON of `--l2-adapter`, without the parameters that are None."""
    given = {name: value for name, value in {**PARAMS, **params}.items() if value is not None}
    return {**PLUGIN, "adapter_params": given, **beside}


def make_adapter(params: dict[str, Any]) -> Any:
    config = configured(plugin(params)).l2_adapter_config.adapters[0]
    return real("lmcache.v1.distributed.l2_adapters").create_l2_adapter(config, None)
