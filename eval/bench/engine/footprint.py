"""Bytes in a file store over the raw bytes of the engine's cache, for every preset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cuvee
from cuvee.codec.data.bundled import CALIBRATION_TEXTS, EVALUATION_TEXTS, bundled_model_path, load_bundled_model
from cuvee.codec.data.corpus import BUNDLED_MODEL, calibration_windows, read_corpus, spread_sequences
from cuvee.codec.errors import CuveeError
from cuvee.codec.learning.sequences import LENGTH, PREFIX, reread
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.engine.process import Engine
from cuvee.eval.bench.engine.scope import EngineScope, EngineVariant
from cuvee.eval.machine import torch_threads

__all__ = ["learn_profile", "measure_footprint"]


def measure_footprint(scope: EngineScope, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Count the bytes of books-3m's caches in a file store, as the engine stored them."""
    name = BUNDLED_MODEL
    prompts = spread_sequences([read_corpus(text, name) for text in EVALUATION_TEXTS], LENGTH, scope.prompts).tolist()
    profiles: dict[str, Path] = {}
    for group in scope.groups:
        say(f"footprint: learning a profile, group {group}")
        profiles[group] = folder / f"{group.replace(':', '-')}.safetensors"
        learn_profile(group, scope.windows).save(profiles[group])
    entries: list[dict[str, Any]] = []
    # Only the tokens of whole chunks are stored, so the question is not.
    options = {"max_model_len": LENGTH + 1, "block_size": min(64, *scope.chunks)}
    with Engine(folder / "footprint.log", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1") as engine:
        for tokens in scope.chunks:
            for quality in scope.presets:
                # Lossless needs no profile.
                for group in scope.groups if quality != "lossless" else scope.groups[:1]:
                    say(f"footprint: {quality}, {group}, chunks of {tokens} tokens")
                    store = folder / f"footprint-{len(entries)}"
                    variant = EngineVariant("footprint", quality, f"file://{store}")
                    engine.start(bundled_model_path(), options, variant, profiles[group], tokens)
                    engine.ask(prompts, expect_cached=[0] * len(prompts))
                    figures = engine.settle(len(prompts) * (LENGTH // tokens))
                    engine.stop()
                    entries.append(
                        {
                            "quality": quality,
                            "profile": None if quality == "lossless" else group,
                            "chunk_tokens": tokens,
                            **_footprint(figures, store),
                        }
                    )
    return {
        "model": name,
        "texts": list(EVALUATION_TEXTS),
        "calibration_texts": list(CALIBRATION_TEXTS),
        "prompts": len(prompts),
        "prompt_tokens": LENGTH,
        "entries": entries,
    }


def learn_profile(group: str, windows: int) -> Profile:
    """Calibrate a profile of books-3m on the bundled texts, as a report does."""
    corpora = [read_corpus(text, BUNDLED_MODEL) for text in CALIBRATION_TEXTS]
    learning = reread(calibration_windows(corpora, LENGTH, windows))
    with torch_threads(
        1
    ):  # with a model this small more threads gain little, and on a busy machine they wait for each other
        return cuvee.calibrate(load_bundled_model()[0], learning, group, prefix=PREFIX, progress=False)


def _footprint(figures: Mapping[str, float], store: Path) -> dict[str, Any]:
    files = [path.stat() for path in store.rglob("*") if path.is_file()]
    raw, payload = figures["raw_bytes"], figures["stored_bytes"]
    on_disk = sum(file.st_size for file in files)
    if not raw or on_disk < payload:
        raise CuveeError(f"the engine says it stored {payload:.0f} bytes, {store.name} holds {on_disk}")
    return {
        "chunks": int(figures["stored_chunks"]),
        "raw_bytes": int(raw),
        "payload_bytes": int(payload),
        "file_bytes": on_disk,
        "allocated_bytes": sum(512 * file.st_blocks for file in files),
        "bits_per_value": 16 * payload / raw,
        "ratio": raw / payload,
        "ratio_on_disk": raw / on_disk,
    }
