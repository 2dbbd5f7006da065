"""A press for kvpress: a context's cache becomes what its blobs decode to, in kvpress's own pipeline too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import cuvee
from cuvee.calibration import bundled_text
from cuvee.eval.press import CuveePress

TOKENS = 192


def prefilled(model: Any, ids: torch.Tensor, press: CuveePress) -> Any:
    cache = DynamicCache(config=model.config)
    with press(model), torch.inference_mode():  # as kvpress's evaluation does
        model.model(input_ids=ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_the_cache_is_what_blobs_decode_to(books: Any, quality: str) -> None:
    codec, ids = cuvee.Codec(books.profile, quality), books.orchard[:1, :TOKENS]
    with torch.no_grad():
        exact: Any = books.model(ids, use_cache=True).past_key_values
    blobs = cuvee.encode_cache(codec, exact, ids)
    expected: Any = cuvee.decode_cache(codec, blobs, books.model)
    press = CuveePress(codec)
    cache = prefilled(books.model, ids, press)
    for layer, wanted, before in zip(cache.layers, expected.layers, exact.layers, strict=True):
        assert torch.equal(layer.keys, wanted.keys) and torch.equal(layer.values, wanted.values)
        assert torch.equal(layer.keys, before.keys) == (quality == "lossless")
    assert press.stored_bytes == sum(map(len, blobs))
    assert press.raw_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)
    assert press.compression_ratio == 1 - press.stored_bytes / press.raw_bytes > (0.1 if quality == "lossless" else 0.8)


def test_nothing_is_compressed_afterwards_and_a_filled_cache_is_refused(
    books: Any, caplog: pytest.LogCaptureFixture
) -> None:
    press, ids = CuveePress(cuvee.Codec(books.profile, "lossless")), books.orchard[:1, :40]
    press.compression_ratio = 0.5  # as an evaluation may
    assert press.compression_ratio == 0 and "0.5 is ignored" in caplog.text
    cache, stored = prefilled(books.model, ids, press), press.stored_bytes
    assert 0 < press.compression_ratio < 0.5
    with torch.no_grad():
        books.model.model(input_ids=ids, past_key_values=cache)
    assert cache.get_seq_length() == 80 and press.stored_bytes == stored
    refused = pytest.raises(cuvee.InputError, match=r"past_key_values: must hold the context's 40 tokens, got 120")
    with refused, press(books.model), torch.no_grad():
        books.model.model(input_ids=ids, past_key_values=cache)


def test_the_pipeline_of_kvpress_takes_it(bundled: tuple[Any, Any]) -> None:
    kvpress = pytest.importorskip("kvpress")
    model, tokenizer = bundled
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    press = CuveePress(cuvee.Codec.without_profile(model))
    context = bundled_text("orchard")[:600]
    asked = {"question": "The", "max_new_tokens": 8}
    assert pipe(context, press=press, **asked) == pipe(context, **asked)
    assert press.compression_ratio > 0.1
