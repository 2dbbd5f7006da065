"""What `encode_cache` refuses: ids and positions that are not the cache's; and what it must not refuse."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Books, tiny_model
from transformers import DynamicCache
from typer.testing import CliRunner, Result

import cuvee
from cuvee.calibration import more_text
from cuvee.cli import app
from cuvee.codec.errors import InputError
from cuvee.integrations.transformers.cache_checks import check_chunk
from cuvee.integrations.transformers.cache_file import write_cache_file

CHUNK, PAD = 64, 24
KV = ("keys", "values")


def prefilled(model: Any, ids: torch.Tensor, **inputs: Any) -> DynamicCache:
    with torch.no_grad():
        cache: DynamicCache = model(ids, use_cache=True, **inputs).past_key_values
    return cache


def changed(cache: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> DynamicCache:
    out = DynamicCache()
    for index, layer in enumerate(cache.layers):
        out.update(change(layer.keys), change(layer.values), index)
    return out


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of two rows, the second one padded, and the positions of their tokens."""
    mask = torch.ones(2, 192, dtype=torch.int64)
    mask[1, :PAD] = 0
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


def calibrated(model: Any, rows: torch.Tensor, **options: Any) -> cuvee.Profile:
    """Without a curve but for one point: nobody asks for a quality here."""
    return cuvee.calibrate(model, rows, "layer", step_indices=[0], progress=False, **options)


@pytest.fixture(scope="module")
def codec(books: Books, bundled: tuple[Any, Any]) -> cuvee.Codec:
    """Of a profile that predicts from tokens."""
    text = more_text(bundled[1], 256)[::8]
    profile = calibrated(books.model, books.harbour[:24], prefix=192, more_text=text)
    return cuvee.Codec(profile, step=0.5)


def int4(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(2, keepdim=True) / 7
    return (values / scale).round() * scale


WRONG_IDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "of another text": lambda _, other: other,
    "shifted": lambda own, _: own.roll(1, 1),
    "of another row": lambda own, _: own.flip(0),
    "backwards": lambda own, _: own.flip(1),
    "without one in the middle": lambda own, _: torch.cat([own[:, :70], own[:, 71:], own[:, :1]], 1),
    "without one near the end": lambda own, _: torch.cat([own[:, :176], own[:, 177:], own[:, :1]], 1),
}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_ids_that_the_cache_is_not_of_are_refused(name: str, codec: cuvee.Codec, books: Books) -> None:
    own, other = books.orchard[1:3, :192], books.harbour[5:7, :192]
    with pytest.raises(InputError, match=r"^input_ids: must be the ids of the cache's tokens, got others for the tok"):
        cuvee.encode_cache(codec, prefilled(books.model, own), WRONG_IDS[name](own, other), CHUNK)


@pytest.mark.parametrize("known", [True, False])
def test_positions_that_are_not_those_of_the_tokens_are_refused(known: bool, codec: cuvee.Codec, books: Books) -> None:
    ids, (mask, positions) = books.orchard[1:3, :192], padded()
    given = ids if known else None
    right = prefilled(books.model, ids, attention_mask=mask, position_ids=positions)
    assert cuvee.encode_cache(codec, right, given, CHUNK, attention_mask=mask)
    plain = prefilled(books.model, ids, attention_mask=mask)  # positions count columns, padded or not
    with pytest.raises(InputError, match=r"^attention_mask: must fit the positions .* row 1: .*position_ids="):
        cuvee.encode_cache(codec, plain, given, CHUNK, attention_mask=mask)
    for moved in (1, 3, 24, 100, 200, 5000):
        late = prefilled(books.model, ids, position_ids=torch.arange(192)[None] + moved)
        with pytest.raises(InputError, match=rf"^cache: must fit the .* keys at positions {moved} later .* row 0: "):
            cuvee.encode_cache(codec, late, given, CHUNK)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("kept", "offset"),
    [
        (range(20, 192), "20 later"),
        ([*range(70), *range(110, 192)], "40 later"),
        ([*range(80), *range(75, 192)], "5 earlier"),
        ([*range(170), *range(16)], "170 earlier"),
        ([*range(144), *range(149, 165)], "5 later"),
    ],
    ids=["cropped", "without a part", "with a part twice", "packed rows", "without a part near the end"],
)
def test_a_cache_that_lacks_tokens_is_refused(
    kept: Sequence[int], offset: str, known: bool, codec: cuvee.Codec, books: Books
) -> None:
    ids = books.orchard[1:2, :192]
    cropped = changed(prefilled(books.model, ids), lambda values: values[:, :, list(kept)])
    with pytest.raises(InputError, match=rf"^cache: .* keys at positions {offset} for the tokens .* from its first"):
        cuvee.encode_cache(codec, cropped, ids[:, list(kept)] if known else None, CHUNK)


def test_right_caches_pass(codec: cuvee.Codec, books: Books) -> None:
    ids = books.orchard[1:3, :192]
    cache = prefilled(books.model, ids)
    again = cuvee.decode_cache(codec, cuvee.encode_cache(codec, cache, ids, CHUNK), books.model)
    fp8 = changed(cache, lambda values: values.to(torch.float8_e4m3fn).float())
    for right in (cache, again, fp8, changed(cache, int4), changed(cache, torch.Tensor.bfloat16)):
        assert len(cuvee.encode_cache(codec, right, ids, CHUNK)) == 6
        assert len(cuvee.encode_cache(codec, right, None, CHUNK)) == 6
    images = ids.clone()
    images[:, 50:60] = cuvee.NO_TOKEN  # what stands there is nobody's to predict
    assert cuvee.encode_cache(codec, cache, images, CHUNK)
    words = torch.Generator().manual_seed(0)
    alike = [torch.full((1, 100), token) for token in (0, 17, 1000)]
    texts = [*alike, torch.randint(0, 2000, (1, 100), generator=words), ids[:1, :1], ids[:1, :7], ids[:1].flip(1)]
    texts += [row[None, :192] for row in books.orchard[2:6]] + [ids[:1, :16].repeat(1, 8), ids[:1, 5:7].repeat(1, 40)]
    for text in texts:
        for given in (text, None):
            assert cuvee.encode_cache(codec, prefilled(books.model, text), given, 16)


def test_a_saved_cache_is_checked(codec: cuvee.Codec, books: Books, tmp_path: Path) -> None:
    """By `cuvee encode`, also where it begins later than its sequence."""
    ids = books.orchard[1:2, :192]
    layers: Any = prefilled(books.model, ids).layers
    codec.profile.save(tmp_path / "profile")

    def encode(start: int, own: torch.Tensor) -> Result:
        cut = slice(40, None)
        keys, values = ([getattr(layer, unit)[0, :, cut].transpose(0, 1) for layer in layers] for unit in KV)
        write_cache_file(tmp_path / "cache", keys, values, start, own[0, cut].numpy())
        given = [tmp_path / "cache", tmp_path / "out", "--profile", tmp_path / "profile", "--step", "0.5", "--force"]
        return CliRunner().invoke(app, ["encode", *map(str, given)])

    assert encode(40, ids).exit_code == 0
    for done, message in (
        (encode(0, ids), "cache: must fit the positions"), (encode(41, ids), "keys at positions 1 earlier"),
        (encode(40, ids.roll(1, 1)), "input_ids: must be the ids"),
    ):  # fmt: skip
        assert done.exit_code == 1 and message in " ".join(done.stderr.split()), done.output
    known, layout = codec.profile.known_layers, dataclasses.replace(codec.profile.layout, max_positions=None)
    keys, values = ([getattr(layer, unit)[0].transpose(0, 1) for layer in layers] for unit in KV)
    assert known
    with pytest.raises(InputError, match=r"^cache: must fit the positions .* the tokens 4000000000 to"):
        check_chunk(known, cuvee.KVChunk(keys, values, layout, 4_000_000_000, ids[0].numpy()), CHUNK)


@pytest.mark.parametrize("family", ["gemma3-sliding-first", "gpt2"])
def test_right_caches_of_other_models_pass(family: str) -> None:
    model = tiny_model(family)
    rows = torch.randint(1, 61, (60, 40), generator=torch.Generator().manual_seed(0))
    profile = calibrated(model, rows)
    assert profile.token_table is not None
    ids = torch.randint(1, 61, (3, 40), generator=torch.Generator().manual_seed(1))
    cache = prefilled(model, ids)
    assert cuvee.encode_cache(cuvee.Codec(profile, step=0.25), copy.deepcopy(cache), ids, 16)
    assert cuvee.encode_cache(cuvee.Codec(profile, step=0.25), cache, None, 16)
    with pytest.raises(InputError, match=r"^input_ids: must be the ids of the cache's tokens"):
        cuvee.encode_cache(cuvee.Codec(profile, step=0.25), cache, ids.roll(1, 1), 16)


def test_lossless_coding_takes_any_ids_and_positions(books: Books) -> None:
    ids, (mask, _) = books.orchard[1:3, :192], padded()
    cache: Any = prefilled(books.model, ids, attention_mask=mask)
    codec = cuvee.Codec(books.profile, "lossless")
    blobs = cuvee.encode_cache(codec, cache, ids.roll(1), attention_mask=mask)
    back: Any = cuvee.decode_cache(codec, blobs, books.model, attention_mask=mask)
    assert torch.equal(back.layers[2].keys[1, :, PAD:], cache.layers[2].keys[1, :, PAD:])


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "gpt_neox", "cohere"])
def test_the_offset_of_keys_is_found(family: str) -> None:
    """Of keys that are turned whole, in part and in neighbouring pairs, and with a scaling of attention."""
    model = tiny_model(family)
    rows = torch.randint(1, 61, (60, 40), generator=torch.Generator().manual_seed(0))
    known = calibrated(model, rows).known_layers
    keys = known and known.keys(True)
    assert keys
    for moved in (37, -11, 2000, 0):
        positions = torch.arange(40) + 50
        cache: Any = prefilled(model, rows[7:8], position_ids=positions[None] + moved)
        own = cache.layers[keys.layer].keys[0].transpose(0, 1)
        assert keys.offset(own, positions, rows[7].numpy()) == moved
