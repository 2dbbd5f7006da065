"""Caches whose sliding windows have dropped tokens come back as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.conftest import tiny_model
from transformers import DynamicCache

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, InputError, ProfileError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.transformers.caches import chunks_from_cache, decode_cache, encode_cache, save_cache
from cuvee.learning.calibrate import choose_group, fit

TOKENS, WINDOW = 21, 8


def prompt(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 61, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def prefilled(model: Any, ids: torch.Tensor, **changes: Any) -> Any:
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True, **changes)
    assert any(layer.keys.shape[2] == WINDOW - 1 for layer in cache.layers), "a window has dropped tokens"
    return cache


def same(ours: Any, theirs: Any) -> None:
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert own.get_seq_length() == other.get_seq_length()
        assert torch.equal(own.keys, other.keys) and torch.equal(own.values, other.values)


@pytest.fixture
def gemma() -> Any:
    return tiny_model("gemma3-sliding-first")


@pytest.mark.parametrize(("rows", "chunk_tokens"), [(3, 5), (1, 256)])
def test_a_model_continues_from_its_blobs(gemma: Any, rows: int, chunk_tokens: int) -> None:
    codec = Codec.without_profile(gemma)
    ids = prompt(rows)
    cache = prefilled(gemma, ids)
    back = decode_cache(codec, encode_cache(codec, cache, ids, chunk_tokens), gemma)
    same(back, cache)
    following = prompt(rows, seed=1)
    with torch.no_grad():
        own, ours = (gemma(following, past_key_values=copy.deepcopy(each)).logits for each in (cache, back))
    assert torch.equal(own, ours)


def test_what_windows_dropped_takes_no_space(gemma: Any) -> None:
    codec = Codec.without_profile(gemma)
    headers = [read_header(blob) for blob in encode_cache(codec, prefilled(gemma, prompt()), chunk_tokens=6)]
    layout = codec.profile.layout
    one = layout.values_per_token // 2
    assert [(own.start, own.tokens, own.values_per_token // one) for own in headers] == [
        (0, 6, 1), (6, 6, 1), (12, 2, 1), (14, 4, 2), (18, 3, 2),
    ]  # fmt: skip


def test_padded_rows_and_bound_blobs(gemma: Any) -> None:
    key = bytes(range(16))
    codec = Codec.without_profile(gemma, key=key)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = prefilled(gemma, prompt(2), attention_mask=mask, position_ids=positions)
    names = [b"first", b"second"]
    blobs = encode_cache(codec, cache, chunk_tokens=5, attention_mask=mask, associated_data=names)
    back: Any = decode_cache(codec, blobs, gemma, attention_mask=mask, associated_data=names)
    for own, other in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(own.keys[0], other.keys[0])
        assert torch.equal(own.keys[1, :, -7:], other.keys[1, :, -7:])
    with pytest.raises(CorruptError):
        decode_cache(codec, blobs, gemma, attention_mask=mask, associated_data=names[::-1])


def test_a_prefix_of_the_blobs_lacks_windows(gemma: Any) -> None:
    """Its chunks are sound, but the windows of its last tokens were dropped before the cache was encoded."""
    codec = Codec.without_profile(gemma)
    blobs = encode_cache(codec, prefilled(gemma, prompt()), chunk_tokens=5)
    for count in range(1, len(blobs)):
        with pytest.raises(InputError, match=r"^blobs: must hold the last \d+ tokens of layer 0 in row 0, got"):
            decode_cache(codec, blobs[:count], gemma)
    with pytest.raises(InputError, match=r"^blobs\[0\]: must continue row 0 at token 0"):
        decode_cache(codec, blobs[1:], gemma)


def test_blobs_of_other_layers_are_refused(gemma: Any) -> None:
    codec = Codec.without_profile(gemma)
    blobs = encode_cache(codec, prefilled(gemma, prompt()), chunk_tokens=5)
    full = [index for index, layer in enumerate(codec.profile.layout.layers) if layer.sliding_window is None]
    (window,) = {0, 1} - set(full)
    (chunk,) = chunks_from_cache(prefilled_whole(gemma), codec.profile.layout)
    only = codec.of_layers([window])
    part = KVChunk([chunk.keys[window]], [chunk.values[window]], only.profile.layout).slice(0, 5)
    with pytest.raises(ProfileMismatchError, match=r"^blobs\[0\]: must have the layout .* a codec of its model"):
        decode_cache(codec, [only.encode(part), *blobs[1:]], gemma)


def prefilled_whole(model: Any, seed: int = 0) -> Any:
    cache: Any = DynamicCache()
    with torch.no_grad():
        model(prompt(seed=seed), past_key_values=cache)
    return cache


def fitted(model: Any, group: str) -> Profile:
    layout = KVLayout.of(model)
    text = [chunks_from_cache(prefilled_whole(model, seed), layout)[0] for seed in range(32)]
    return fit(layout, text, group)


def test_a_learned_profile_codes_what_the_windows_hold(gemma: Any) -> None:
    """Each chunk is a lossy blob of the layers that hold it, and the finer the step, the nearer the predictions."""
    profile, cache = fitted(gemma, "unit"), prefilled(gemma, prompt(2))
    following, exact, errors = prompt(2, seed=1), None, []
    for step in (0.02, 0.5):
        codec = Codec(profile, step=step)
        blobs = encode_cache(codec, cache, prompt(2), 5)
        assert not any(header.lossless for header in map(read_header, blobs))
        assert len(blobs[0]) < len(encode_cache(Codec.without_profile(gemma), cache, prompt(2), 5)[0])
        back: Any = decode_cache(codec, blobs, gemma)
        with torch.no_grad():
            exact, ours = (gemma(following, past_key_values=copy.deepcopy(each)).logits for each in (cache, back))
        for own, other in zip(back.layers, cache.layers, strict=True):
            assert own.keys.shape == other.keys.shape and own.get_seq_length() == other.get_seq_length()
        errors.append(float((exact - ours).abs().mean()))
    assert 0 < errors[0] < errors[1] / 4


def test_bases_over_windows_and_full_layers_cannot_code_a_part(gemma: Any) -> None:
    with pytest.raises(ProfileError, match=r"^group: must be 'layer', .* got 'all', whose bases mix them with others"):
        encode_cache(Codec(fitted(gemma, "all"), step=0.1), prefilled(gemma, prompt()))
    assert choose_group(KVLayout.of(gemma), 1 << 30, 1e9)[0] == "layer"
    mistral = tiny_model("mistral")  # windows in all layers
    assert choose_group(KVLayout.of(mistral), 1 << 30, 1e9)[0] == "all"
    codec = Codec(fitted(mistral, "all"), step=0.1)
    cache = prefilled(mistral, prompt())
    back: Any = decode_cache(codec, encode_cache(codec, cache, chunk_tokens=5), mistral)
    assert back.layers[0].keys.shape == cache.layers[0].keys.shape


def test_a_part_of_a_profile_codes_as_the_whole(gemma: Any) -> None:
    profile = fitted(gemma, "unit")
    (chunk,) = chunks_from_cache(prefilled_whole(gemma), profile.layout)
    whole = Codec(profile, step=0.1)
    decoded = whole.decode(whole.encode(chunk))
    for layer in range(profile.layout.num_layers):
        part = whole.of_layers([layer])
        assert part is whole.of_layers([layer]) and part.profile.id != profile.id
        own = part.decode(part.encode(KVChunk([chunk.keys[layer]], [chunk.values[layer]], part.profile.layout)))
        assert torch.equal(own.keys[0], decoded.keys[layer]) and torch.equal(own.values[0], decoded.values[layer])


def test_files_need_all_tokens(gemma: Any, tmp_path: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^cache: must hold all tokens, but layer 0 is a sliding window"):
        save_cache(prefilled(gemma, prompt()), tmp_path / "c")


def test_windows_are_coded_where_they_are(gemma: Any, device: torch.device) -> None:
    cpu, there = (
        Codec(Profile.unlearned(KVLayout.of(gemma)), "lossless", backend=name) for name in ("numba", "triton")
    )
    cache = prefilled(gemma, prompt(2))
    moved = copy.deepcopy(cache)
    for layer in moved.layers:
        layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
    blobs = encode_cache(there, moved, chunk_tokens=5)
    assert blobs == encode_cache(cpu, cache, chunk_tokens=5)
    back: Any = decode_cache(there, blobs, gemma, device)
    assert back.layers[0].keys.device.type == device.type
    for own, other in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(own.keys.cpu(), other.keys) and torch.equal(own.values.cpu(), other.values)
