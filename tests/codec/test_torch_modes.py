"""Modes of torch that a program has set change neither bytes nor values, and stop nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.predicting import predicting
from tests.recognizing import small_model
from transformers import LlamaForCausalLM

import cuvee
from cuvee.blend import Blender, ChunkCache, Segment
from cuvee.integrations.stores import open_store
from cuvee.integrations.transformers.caches import chunks_from_cache

ROOMS = ("codec", "kernels", "blend", "integrations")
# Calls that take the default dtype. Python's floats do in the others.
FLOATS = {"zeros", "ones", "empty", "rand", "randn", "normal", "linspace", "logspace", "eye"}
WITH_FLOATS = {"full", "tensor", "as_tensor", "scalar_tensor"}

Seen = list[bytes | torch.Tensor]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
}


@dataclass(frozen=True)
class World:
    """A model, its cache of one sequence, and a profile, all made without any mode."""

    model: LlamaForCausalLM
    ids: torch.Tensor
    cache: Any
    profile: cuvee.Profile

    def chunks(self) -> list[cuvee.KVChunk]:
        return chunks_from_cache(self.cache, self.profile.layout, self.ids[:1])

    def doors(self, folder: Path) -> Seen:
        """What the public doors make of the cache: blobs, decoded tensors, files, blends."""
        model, ids, profile, layout = self.model, self.ids, self.profile, cuvee.KVLayout.of(self.model)
        seen: Seen = [layout.fingerprint]
        lossy = cuvee.Codec(profile, step=0.5)
        for codec in (lossy, cuvee.Codec(profile, step=0.5, backend="reference"), cuvee.Codec.without_profile(model)):
            blobs = cuvee.encode_cache(codec, self.cache, ids[:1])
            back: Any = cuvee.decode_cache(codec, blobs, model)
            seen += [*blobs, *(x for layer in back.layers for x in (layer.keys, layer.values))]
            seen += codec.decode(blobs[0], start=100).keys
        parts = cuvee.Codec(profile, step=0.5, refinements=1)
        seen += parts.encode_parts(self.chunks()[0])
        cuvee.save_cache(self.cache, folder / "cache.safetensors", input_ids=ids[:1])
        loaded: Any = cuvee.load_cache(folder / "cache.safetensors", model)
        seen += [layer.keys for layer in loaded.layers]
        library = ChunkCache(model, lossy, open_store("memory://?max_gb=0.01"))
        segments = [library.segment(ids[1], leading=True), library.segment(ids[2]), Segment(ids[3, :20])]
        return [*seen, Blender(model, lossy).blend(segments).logits]


@pytest.fixture(scope="module")
def world() -> World:
    model = small_model(3, vocab_size=61, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2)
    ids = torch.randint(61, (12, 96), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        cache = model(ids[:1], use_cache=True).past_key_values
    return World(model, ids, cache, cuvee.calibrate(model, ids, "layer", progress=False))


@pytest.mark.parametrize("mode", MODES)
def test_every_door_does_the_same_in_every_mode(world: World, mode: str, tmp_path: Path) -> None:
    plain = world.doors(tmp_path)
    with MODES[mode]():
        found = world.doors(tmp_path)
    assert len(found) == len(plain) > 20
    for ours, expected in zip(found, plain, strict=True):
        if isinstance(expected, torch.Tensor):
            assert isinstance(ours, torch.Tensor) and ours.dtype == expected.dtype and torch.equal(ours, expected)
        else:
            assert ours == expected


def test_predictions_that_began_in_inference_mode_go_on_outside(world: World) -> None:
    """As in its threads: the mode is a thread's own."""
    codec, (chunk,) = cuvee.Codec(predicting(world.profile), step=0.5), world.chunks()
    with torch.inference_mode():
        codec.encode(chunk.slice(0, 8))
    fresh = cuvee.Codec(predicting(world.profile), step=0.5)
    assert codec.encode(chunk) == fresh.encode(chunk)


@pytest.mark.parametrize("mode", ["bfloat16", "device", "inference"])
def test_learning_does_the_same_in_every_mode(world: World, mode: str) -> None:
    with MODES[mode]():
        learned = cuvee.calibrate(world.model, world.ids, "layer", progress=False)
        fitted = cuvee.fit(world.profile.layout, world.chunks(), "head")
    assert learned.id == world.profile.id
    assert fitted.id == cuvee.fit(world.profile.layout, world.chunks(), "head").id


def test_whatever_makes_floats_names_their_dtype() -> None:
    root = Path(__file__).parents[2]
    wrong = [
        f"{file.relative_to(root)}:{call.lineno}"
        for room in ROOMS
        for file in sorted((root / room).rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and takes_the_default_dtype(call)
    ]
    assert not wrong


def takes_the_default_dtype(call: ast.Call) -> bool:
    """Whether a call makes a tensor whose dtype depends on the default one, as far as its source shows."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return False
    if function.value.id != "torch" or {"dtype", None} & {word.arg for word in call.keywords}:
        return False
    floats = any(isinstance(each, ast.Constant) and isinstance(each.value, float) for each in ast.walk(call))
    return function.attr in FLOATS or (function.attr in WITH_FLOATS and floats)
