"""What holds for a model of each kind: blobs continue elsewhere, profiles are learned, chunks move or say why not."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.every_model import build
from tests.kinds import KINDS, Kind

import cuvee
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill, score
from cuvee.eval.quality import CodecMethod, QualityBench
from cuvee.integrations.transformers.caches import chunks_from_cache, decode_cache, encode_cache
from cuvee.learning.curve import measure

BOUND = ("hybrid", "absolute positions", "biases", "encoder-decoder")


@pytest.fixture(scope="module")
def made() -> dict[str, Kind]:
    return {name: make() for name, make in KINDS.items()}


CONTINUE = """
import json, sys
from pathlib import Path
from tests.every_model import build
from tests.kinds import KINDS
import cuvee
found = {}
for name, make in KINDS.items():
    kind = make()
    blobs = [path.read_bytes() for path in sorted((Path(sys.argv[1]) / name).iterdir())]
    kind.cache = None
    found[name] = kind.generated(cuvee.decode_cache(cuvee.Codec.without_profile(kind.model), blobs, kind.model))
print(json.dumps(found))
"""


def test_generation_goes_on_in_another_process(made: dict[str, Kind], tmp_path: Path) -> None:
    for name, kind in made.items():
        (tmp_path / name).mkdir()
        for index, blob in enumerate(encode_cache(lossless(kind), kind.cache, kind.known, 8)):
            (tmp_path / name / f"{index:03}").write_bytes(blob)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CONTINUE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found == {name: kind.generated(copy.deepcopy(kind.cache)) for name, kind in made.items()}


def text(kind: Kind, rows: int, length: int = 40) -> torch.Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(2))


def lossless(kind: Kind) -> cuvee.Codec:
    return cuvee.Codec.without_profile(kind.model)


def samples(kind: Kind, layout: KVLayout) -> list[cuvee.KVChunk]:
    rows = text(kind, 24)
    with torch.no_grad():
        if not kind.model.config.is_encoder_decoder:
            return prefill(kind.model, rows, layout)
        said = {"encoder_outputs": (torch.zeros(24, 9, 32),)}
        cache = kind.model(**said, decoder_input_ids=rows, use_cache=True).past_key_values
    return [chunks_from_cache(cache, layout, row=row)[0] for row in range(24)]


@pytest.mark.parametrize("name", KINDS)
def test_balanced_after_fit_goes_on_with_a_finite_loss(made: dict[str, Kind], name: str) -> None:
    kind = made[name]
    layout = KVLayout.of(kind.model, states=True)
    profile = cuvee.fit(layout, samples(kind, layout), "unit")
    if kind.model.config.is_encoder_decoder:
        with pytest.raises(UnsupportedModelError, match="its decoder goes on from an encoder"):
            measure(profile, kind.model, text(kind, 4), progress=False)
    else:
        profile = measure(profile, kind.model, text(kind, 4), step_indices=(-192, -128, -64), progress=False)
        assert all(math.isfinite(point.kl or math.nan) for point in profile.curve)
    exact = kind.predicted(copy.deepcopy(kind.cache))
    codec = cuvee.Codec(profile, "balanced")
    blobs = encode_cache(codec, kind.cache, kind.known, 16)
    back = kind.predicted(decode_cache(codec, blobs, kind.model))
    loss = float((exact.exp() * (exact - back)).sum(-1).mean())
    assert math.isfinite(loss) and abs(loss) < 0.1 and not torch.equal(exact, back)
    assert sum(map(len, blobs)) < sum(map(len, encode_cache(lossless(kind), kind.cache, kind.known, 16)))


@pytest.mark.parametrize("name", KINDS)
def test_chunks_move_where_positions_are_relative(made: dict[str, Kind], name: str) -> None:
    """A chunk decodes at another position as the model computes it there; elsewhere moving is refused by name."""
    kind = made[name]
    codec = lossless(kind)
    layout, rows = codec.profile.layout, text(kind, 1, 12)
    assert layout.relocatable == (name not in BOUND)
    if not layout.relocatable:
        (chunk,) = samples(kind, layout)[:1]
        with pytest.raises(InputError, match=r"^start: must be 0, .* got 5: \w+ has no RoPE, so its cache cannot"):
            codec.decode(codec.encode(chunk), start=5)
        return
    (chunk,) = prefill_at(kind.model, rows, layout, 0)
    (wanted,) = prefill_at(kind.model, rows, layout, 5)
    moved = codec.decode(codec.encode(chunk), start=5)
    for own, other, before, layer in zip(moved.keys, wanted.keys, chunk.keys, layout.layers, strict=True):
        assert (own - other).abs().max() < 1e-4 * other.abs().max()
        assert layer.rope is None or (own - before).abs().max() > 1e-2 * other.abs().max()


def prefill_at(model: Any, rows: torch.Tensor, layout: KVLayout, start: int) -> list[cuvee.KVChunk]:
    forward = model.forward
    positions = torch.arange(start, start + rows.shape[1])[None]
    try:
        model.forward = lambda **given: forward(**given, position_ids=positions)
        with torch.no_grad():
            return prefill(model, rows, layout)
    finally:
        del model.forward


@pytest.mark.parametrize("name", ["hybrid", "latents with index keys"])
def test_calibration(made: dict[str, Kind], name: str, tmp_path: Path) -> None:
    """A profile with gradients: a sane curve, a file that codes the same, and nothing lost without loss."""
    kind = made[name]
    profile = cuvee.calibrate(kind.model, text(kind, 24, 48), "unit", progress=False)
    sizes = [point.bits_per_value for point in profile.curve]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 2 and sizes[0] > 6
    assert all(math.isfinite(point.kl or math.nan) and abs(point.kl or 0) < 0.1 for point in profile.curve)
    assert abs(profile.curve[0].kl or 0) < (profile.curve[-1].kl or 0) / 10
    bench = QualityBench(kind.model, text(kind, 4, 48))
    exact = bench.run("lossless", CodecMethod(lossless(kind)))
    coarse = bench.run("coarse", CodecMethod(cuvee.Codec(profile, step=1.0)))
    assert exact.kl == 0 and exact.top1 == 1 and coarse.kl > 0 and coarse.bits_per_value < exact.bits_per_value / 5
    profile.save(tmp_path / "profile")
    blobs = encode_cache(cuvee.Codec(profile, "balanced"), kind.cache, kind.ids, 16)
    again = cuvee.Codec(cuvee.Profile.load(tmp_path / "profile"), "high")
    assert decode_cache(again, blobs, kind.model).get_seq_length() == kind.ids.shape[1]


def test_models_without_attention_are_not_calibrated() -> None:
    model, ids, _ = build("mamba")
    for run in (lambda: cuvee.calibrate(model, ids.expand(8, -1)), lambda: QualityBench(model, ids)):
        with pytest.raises(UnsupportedModelError, match="no layer of it holds keys and values: encode_cache"):
            run()


def test_what_is_beside_chunks_must_be_given(made: dict[str, Kind]) -> None:
    kind = made["hybrid"]
    layout = KVLayout.of(kind.model, states=True)
    with torch.no_grad(), pytest.raises(InputError, match=r"^filled: must be given for qwen3_next"):
        score(kind.model, prefill(kind.model, kind.ids, layout), kind.ids)
    deep, ids, _ = build("deepseek_v4")  # windows that are a class of their own
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedModelError, match=r"values of all 40 tokens .* cannot be turned off"),
    ):
        prefill(deep, ids, KVLayout.of(deep, states=True))
