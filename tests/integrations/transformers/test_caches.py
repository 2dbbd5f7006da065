"""transformers caches through a codec and back: structure, and generation that continues identically."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.conftest import fitted_to, tiny_config, tiny_model
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from cuvee.codec.backends import PendingDecode
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import (
    CorruptError,
    FormatError,
    InputError,
    OutOfMemoryError,
    ProfileMismatchError,
    UnsupportedModelError,
)
from cuvee.codec.format.container import inspect, read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.models.forward import cache_argument
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles import profile as codec_profile
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.transformers.cache_file import read_cache_file
from cuvee.integrations.transformers.caches import chunks_from_cache, decode_cache, encode_cache, load_cache, save_cache
from cuvee.learning.calibrate import calibrate

TOKENS, CHUNK = 21, 8
MODELS = ["llama", "qwen3", "gemma3-sliding-first", "gpt2"]
DTYPES = [torch.float32, torch.bfloat16]


def lossless_codec(layout: KVLayout) -> Codec:
    return Codec.without_profile(layout)


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def layout(model: Any) -> KVLayout:
    return KVLayout.from_config(model.config, dtype=model.dtype)


def prompt(rows: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(1, 61, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def prefill(model: Any, ids: torch.Tensor, cache: Any = None, mask: torch.Tensor | None = None) -> Any:
    """Cache of `ids`; DynamicCache() without a config keeps all tokens of sliding layers too."""
    cache = DynamicCache() if cache is None else cache
    where = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, **cache_argument(model, cache), attention_mask=mask, position_ids=where)
    return cache


def generate(
    model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [B, new] and the logits [B, new, V] they were taken from."""
    out = model.generate(
        ids,
        **cache_argument(model, cache),
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)


def same_text(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def same(left: Any, right: Any) -> None:
    assert len(left.layers) == len(right.layers)
    for a, b in zip(left.layers, right.layers, strict=True):
        assert a.keys.shape == b.keys.shape and a.keys.dtype == b.keys.dtype
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert a.get_seq_length() == b.get_seq_length()


@pytest.mark.parametrize(
    ("name", "rows", "dtype"), [(name, 1 + at % 2, DTYPES[at // 2]) for at, name in enumerate(MODELS)]
)
def test_generation_continues_identically(name: str, rows: int, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype=dtype)
    codec = lossless_codec(KVLayout.from_config(model.config, dtype=dtype))
    ids = prompt(rows)
    blobs = encode_cache(codec, prefill(model, ids[:, :-1]), chunk_tokens=CHUNK)
    assert len(blobs) == rows * 3
    decoded = decode_cache(codec, blobs, model.config)
    # What the model keeps by itself: sliding layers hold the window only.
    same(decoded, prefill(model, ids[:, :-1], DynamicCache(config=model.config)))
    expected = generate(model, ids, prefill(model, ids[:, :-1], DynamicCache(config=model.config)))
    same_text(generate(model, ids, decoded), expected)


@pytest.mark.parametrize("name", ["gemma3-sliding-first", "gpt2"])
def test_left_padded_batch(name: str) -> None:
    model = tiny_model(name)
    codec = lossless_codec(KVLayout.from_config(model.config, dtype="float32"))
    ids, mask = prompt(3), torch.ones(3, TOKENS, dtype=torch.int64)
    mask[1, :13] = 0
    mask[2, :1] = 0
    ids = ids * mask
    cached = mask[:, :-1]
    blobs = encode_cache(codec, prefill(model, ids[:, :-1], mask=cached), chunk_tokens=CHUNK, attention_mask=cached)
    chunks = [codec.decode(blob) for blob in blobs]
    assert [(chunk.start, chunk.tokens) for chunk in chunks] == [
        *[(0, 8), (8, 8), (16, 4)],
        *[(0, 7)],
        *[(0, 8), (8, 8), (16, 3)],
    ]
    decoded = decode_cache(codec, blobs, model.config, attention_mask=cached)
    expected = generate(model, ids, prefill(model, ids[:, :-1], DynamicCache(config=model.config), cached), mask)
    same_text(generate(model, ids, decoded, mask), expected)
    # A row's blobs do not depend on the padding around it.
    alone = encode_cache(codec, prefill(model, ids[1:2, 13:-1]), chunk_tokens=CHUNK)
    for got, want in zip(chunks[3].keys, codec.decode(alone[0]).keys, strict=True):
        torch.testing.assert_close(got, want)


def test_chunks_are_views_in_order(model: Any, layout: KVLayout) -> None:
    cache = prefill(model, prompt(2))
    chunks = chunks_from_cache(cache, layout, chunk_tokens=CHUNK, row=1)
    assert [(chunk.start, chunk.tokens) for chunk in chunks] == [(0, 8), (8, 8), (16, 5)]
    assert chunks[1].values[0].data_ptr() == cache.layers[0].values[1, :, 8:].data_ptr()
    whole = KVChunk.concat(chunks)
    for index, layer in enumerate(cache.layers):
        assert torch.equal(whole.keys[index], layer.keys[1].transpose(0, 1))
        assert torch.equal(whole.values[index], layer.values[1].transpose(0, 1))
    skipped = chunks_from_cache(cache, layout, chunk_tokens=CHUNK, row=1, padding=4)
    assert [(chunk.start, chunk.tokens) for chunk in skipped] == [(0, 8), (8, 8), (16, 1)]
    assert torch.equal(skipped[0].keys[0], whole.keys[0][4:12])


@pytest.mark.parametrize("chunk_tokens", [1, TOKENS - 1, TOKENS, 256])
def test_chunk_sizes(chunk_tokens: int, model: Any, layout: KVLayout) -> None:
    codec = lossless_codec(layout)
    cache = prefill(model, prompt(2))
    blobs = encode_cache(codec, cache, chunk_tokens=chunk_tokens)
    assert len(blobs) == 2 * -(-TOKENS // chunk_tokens)
    same(decode_cache(codec, blobs, model.config), cache)


# Token ids --------------------------------------------------------------------------------------------------------


@pytest.fixture
def predicts(model: Any) -> Profile:
    return calibrate(model, prompt(40, 40), "unit", progress=False)


def test_blobs_hold_the_ids_of_their_tokens_without_padding(model: Any, layout: KVLayout, predicts: Profile) -> None:
    codec, ids, mask = Codec(predicts, step=2.0), prompt(2), torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :5] = 0
    cache = prefill(model, ids * mask, mask=mask)
    # The ids of padding are nobody's, and a part of an image has none.
    given = ids.masked_fill(mask == 0, -100)
    given[0, 3] = NO_TOKEN
    with pytest.raises(InputError, match=r"^token_ids: must be below 61, the vocabulary .*, got 64$"):
        encode_cache(codec, cache, given + (given == given[1, 5]) * (64 - given), attention_mask=mask)
    blobs = encode_cache(codec, cache, given.int(), chunk_tokens=CHUNK, attention_mask=mask)
    chunks = [codec.decode(blob) for blob in blobs]
    assert chunks[0].token_ids is None  # it holds the part of an image
    for row, expected in ((chunks[1:3], given[0, CHUNK:]), (chunks[3:], given[1, 5:])):
        assert KVChunk.concat(row).token_ids.tolist() == expected.tolist()  # type: ignore[union-attr]
    assert [blob.token_id_bytes for blob in map(inspect, blobs)] == [0, 16, 10, 16, 16]
    same_chunks = chunks_from_cache(cache, layout, given, chunk_tokens=CHUNK, row=1, padding=5)
    assert [codec.encode(chunk) for chunk in same_chunks] == blobs[3:]
    # The ids are of use to this profile at a lossy quality alone.
    plain = encode_cache(codec, cache, chunk_tokens=CHUNK, attention_mask=mask)
    assert not any(inspect(blob).token_id_bytes for blob in plain)
    lossless = encode_cache(lossless_codec(layout), cache, given, chunk_tokens=CHUNK, attention_mask=mask)
    assert lossless == encode_cache(lossless_codec(layout), cache, chunk_tokens=CHUNK, attention_mask=mask)


def test_a_row_of_ids_serves_a_cache_of_one_row(model: Any, predicts: Profile) -> None:
    codec, ids = Codec(predicts, step=0.5), prompt(1)
    cache = prefill(model, ids)
    assert encode_cache(codec, cache, ids[0]) == encode_cache(codec, cache, ids)


def test_a_run_of_one_id_at_the_beginning_of_a_row_is_reported_once(
    model: Any, layout: KVLayout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain forward pass counts columns, so that keys of padding look like those of tokens."""
    codec, ids = lossless_codec(layout), prompt(2)
    ids[:, 1] = (ids[:, 0] + 1) % 61
    cache = prefill(model, ids)
    encode_cache(codec, cache, ids)
    assert not caplog.records
    padded, mask = ids.clone(), torch.ones(2, TOKENS, dtype=torch.int64)
    padded[1, :3], mask[1, :3] = 7, 0
    cache = prefill(model, padded)
    encode_cache(codec, cache, padded, attention_mask=mask)
    encode_cache(codec, cache, torch.full_like(ids, 5))  # no row of padding alone
    encode_cache(codec, cache, padded.masked_fill(mask == 0, NO_TOKEN))
    save_cache(cache, tmp_path / "one", row=0, input_ids=padded)
    assert not caplog.records
    for _ in range(2):
        encode_cache(codec, cache, padded)
        save_cache(cache, tmp_path / "one", row=1, input_ids=padded)
    (record,) = caplog.records
    assert "begins with a run of the id 7" in record.message and "attention_mask=" in record.message


def test_device_is_the_one_asked_for(model: Any, layout: KVLayout) -> None:
    codec = lossless_codec(layout)
    blobs = encode_cache(codec, prefill(model, prompt(1)))
    for device, expected in ((None, "cpu"), ("meta", "meta")):
        decoded: Any = decode_cache(codec, blobs, model.config, device=device)
        assert decoded.layers[0].keys.device.type == expected


def test_a_static_window_that_dropped_tokens_is_refused() -> None:
    model = tiny_model("gemma3-full-first")
    codec = lossless_codec(KVLayout.from_config(model.config, dtype="float32"))
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*holds [78] of 21; prefill .*DynamicCache\(\)"):
        encode_cache(codec, prefill(model, prompt(1), StaticCache(config=model.config, max_cache_len=64)))
    short = prefill(model, prompt(1)[:, :6], StaticCache(config=model.config, max_cache_len=64))
    same(decode_cache(codec, encode_cache(codec, short), model.config), prefill(model, prompt(1)[:, :6]))


def padded(model: Any, mask: torch.Tensor) -> DynamicCache:
    """A prefill whose positions count from the first real token, as those of `generate` do."""
    cache = DynamicCache()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        model(
            input_ids=prompt(*mask.shape) * mask,
            attention_mask=mask,
            position_ids=positions,
            **cache_argument(model, cache),
        )
    return cache


def test_a_right_padded_batch_without_a_mask_keeps_its_padding(model: Any, layout: KVLayout) -> None:
    """Its real tokens are at the right positions; what is behind them is coded like tokens."""
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 16:] = 0
    cache = padded(model, mask)
    codec = lossless_codec(layout)
    decoded = decode_cache(codec, encode_cache(codec, cache, chunk_tokens=CHUNK), model.config)
    same(decoded, cache)


# What is refused ----------------------------------------------------------------------------------------------------


class Given:
    """A cache of two rows, and its blobs, three of each row; `pads`: of which 5 columns of row 1 are padding."""

    def __init__(self, model: Any, pads: bool = False) -> None:
        self.model, self.mask = model, torch.ones(2, TOKENS, dtype=torch.int64)
        self.mask[1, : 5 * pads] = 0
        self.layout = KVLayout.from_config(model.config, dtype=model.dtype)
        self.codec, self.cache = lossless_codec(self.layout), padded(model, self.mask)
        self.blobs = encode_cache(self.codec, self.cache, chunk_tokens=CHUNK, attention_mask=self.mask)

    def encode(self, cache: Any = None, *given: Any, **options: Any) -> None:
        encode_cache(self.codec, cache or self.cache, *given, **options)

    def decode(self, order: Sequence[int], config: Any = None, **options: Any) -> None:
        decode_cache(self.codec, [self.blobs[index] for index in order], config or self.model.config, **options)

    def masked(self, order: Sequence[int], rows: int) -> None:
        self.decode(order, attention_mask=torch.ones(rows, TOKENS, dtype=torch.int64))

    def changed(self, change: Callable[[Any], object]) -> None:
        change(self.cache)
        self.encode()


def other(**changes: Any) -> Any:
    return prefill(tiny_model("llama", **changes), prompt(1))


def with_zero(row: int, column: int) -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[row, column] = 0
    return mask


def cut(cache: Any, layer: int, kept: tuple[slice, ...], keys: bool = True) -> None:
    held = cache.layers[layer]
    held.values = held.values[kept]
    if keys:
        held.keys = held.keys[kept]


def quantized(cache: Any) -> None:
    kind = type("QuantizedLayer", (type(cache.layers[0]),), {})
    cache.layers = [kind()]


def long_cache() -> DynamicCache:
    cache = DynamicCache()
    for index in range(2):
        cache.update(torch.zeros(1, 2, 4097, 12), torch.zeros(1, 2, 4097, 12), index)
    return cache


OTHER_ROPE = {"rope_type": "default", "rope_theta": 2e4}
ADVICE = r"pass sequences\[:, : cache.get_seq_length\(\)\]$"
SAME = r"^cache: must hold the same batch and tokens in every layer, got "
REFUSED: dict[type[Exception], list[tuple[Callable[[Given], object], str]]] = {
    InputError: [
        (lambda g: g.encode(((1, 2),)), "^cache: must be a transformers Cache, got tuple; build"),
        (lambda g: encode_cache(g.cache, g.codec), "^codec: must be .* first argument, got DynamicCache"),  # type: ignore[arg-type]
        (lambda g: decode_cache([], g.codec, g.model), "^codec: must be a cuvee.Codec, .* got list"),  # type: ignore[arg-type]
        (lambda g: encode_cache(g.codec, DynamicCache()), "^cache: must hold tokens, got an empty one"),
        (lambda g: encode_cache(g.codec, DynamicCache(config=g.model.config)), "^cache: .* layer 0 is empty"),
        (lambda g: g.changed(lambda c: setattr(c, "offloading", True)), "must not offload .* this DynamicCache"),
        (lambda g: g.changed(lambda c: cut(c, 1, (slice(None), slice(None), slice(-1)))), f"{SAME}.* in layer 1"),
        (lambda g: g.changed(lambda c: cut(c, 0, (slice(1),))), SAME),
        (lambda g: g.changed(lambda c: cut(c, 0, (slice(None), slice(None), slice(-5)), keys=False)), SAME),
        (lambda g: g.encode(other(num_hidden_layers=1)), "^keys: must have the"),
        (lambda g: g.encode(other(num_hidden_layers=3)), "^keys: must have the"),
        (lambda g: g.encode(other(num_key_value_heads=4)), r"^keys\[0\]: must have shape"),
        (lambda g: g.encode(other(head_dim=24)), r"^keys\[0\]: must have shape"),
        (lambda g: g.encode(other(dtype=torch.float64)), "must be float32 as the layout says, got torch.float64"),
        (lambda g: g.encode(long_cache()), "^tokens: must be among the 4096 positions .*, got 4097 tokens: "),
        (lambda g: g.encode(filled(g.layout, 1, 3, torch.float32, torch.device("meta"))), "^cache: .* meta device"),
        (lambda g: g.encode(chunk_tokens=0), "^chunk_tokens: must be"),
        (lambda g: g.encode(chunk_tokens=True), "^chunk_tokens: must be"),
        (lambda g: chunks_from_cache(g.cache, g.layout, row=2), "^row: must be an int from 0 to 1"),
        (lambda g: chunks_from_cache(g.cache, g.layout, padding=TOKENS), "^padding: must be an int from 0 to 20"),
        (lambda g: g.encode(attention_mask=[[1]]), r"^attention_mask: must be a tensor \[B, T\], got list"),
        (lambda g: g.encode(attention_mask=g.mask[0]), r"^attention_mask: must have shape \[B, T\], got \[21\]"),
        (lambda g: g.encode(attention_mask=g.mask[:1]), r"shape \[B, T\] = \[2, 21\] .*, got \[1, 21\]"),
        (lambda g: g.encode(attention_mask=with_zero(1, -1)), "^attention_mask: .* row 1 is not; pad on the left"),
        (lambda g: g.encode(attention_mask=with_zero(0, 1)), "^attention_mask: must be zeros, .* but row 0 is not"),
        (lambda g: g.encode(attention_mask=g.mask * 0), "^attention_mask: must be zeros, .* but row 0 is not"),
        (lambda g: Given(g.model, True).encode(), "^attention_mask: must be given .* row 1 begins with padding"),
        (lambda g: g.encode(None, prompt(2)[:, 1:]), rf"^input_ids: must have the shape .* \[2, 21\] .*{ADVICE}"),
        (lambda g: g.encode(None, prompt(2)[0]), rf"^input_ids: must have the shape .* \[2, 21\] .*{ADVICE}"),
        (lambda g: g.encode(None, 128), r"^input_ids: must be a tensor \[B, T\], got int$"),
        (lambda g: g.encode(None, prompt(2) / 1), "^input_ids: must be 42 integers, one id per token, got float32"),
        (lambda g: save_cache(g.cache, "none", row=0, input_ids=-100 * g.mask), "^input_ids: .* got -100$"),
        (lambda g: g.decode([]), "non-empty list"),
        (lambda g: decode_cache(g.codec, b"0", g.model.config), "non-empty list"),  # type: ignore[arg-type]
        (lambda g: g.decode([1, 2]), r"blobs\[0\]: must continue row 0 at token 0 of \d+, got tokens 8 to 16;"),
        (lambda g: g.decode([0, 2, 1, 3, 4, 5]), r"blobs\[1\]: .* row 0 at token 8 of \d+, got tokens 16 to 21;"),
        (lambda g: g.decode([0, 1, 1, 2, 3, 4, 5]), r"blobs\[2\]: .* row 0 at token 16 of \d+, got tokens 8 to 1"),
        (lambda g: g.decode([0, 1, 2, 3, 4]), r"blobs\[2\]: .* row 0 at token 16 of \d+, got tokens 16 to 21;"),
        (lambda g: g.decode([0, 1, 2, 4, 5]), r"blobs\[3\]: .* row 0 at token 21 of \d+, got tokens 8 to 16;"),
        (lambda g: Given(g.model, True).decode(range(5)), r"^blobs\[2\]: .* rows of different lengths its"),
        (lambda g: Given(g.model, True).masked(range(5), 2), "^blobs: must hold 21 tokens of row 1, got 16: "),
        (lambda g: g.masked([0, 1], 1), "^blobs: must hold 21 tokens of row 0, got 16: the last blobs are m"),
        (lambda g: g.masked([0, 1, 2], 2), "^attention_mask: must have one row for each row of blobs, 1, got 2"),
        (lambda g: g.masked(range(6), 1), r"^attention_mask: .* got 1 rows, but blobs\[3\] starts another"),
        (lambda g: g.decode(range(6), attention_mask=[[1]]), r"^attention_mask: must be a tensor \[B, T\], got list"),
        (lambda g: g.decode(range(6), device="gpu"), "device: must be a device that torch can use here, got 'gpu'"),
        (lambda g: g.decode(range(6), device="cuda:99"), "device: must be a device that torch can use here"),
    ],
    UnsupportedModelError: [
        (lambda g: g.encode(EncoderDecoderCache(g.cache, DynamicCache())), "EncoderDecoderCache"),
        (lambda g: g.changed(quantized), "^cache: .* plain .*, but layer 0 is a QuantizedLayer"),
    ],
    ProfileMismatchError: [
        (
            lambda g: g.decode(range(6), tiny_config("llama", num_hidden_layers=3)),
            r"^model: must have .* \(llama, 2 layers\), got llama, 3 layers, with",
        ),
        (
            lambda g: g.decode(range(6), tiny_config("qwen3")),
            r"^model: .* codec's profile \(llama, 2 layers\), got qwen3, 2 layers, with other ",
        ),
        (
            lambda g: g.decode(range(6), tiny_config("llama", rope_parameters=OTHER_ROPE)),
            "RoPE",
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *row) for error, rows in REFUSED.items() for row in rows]
)
def test_what_is_refused(model: Any, error: type[Exception], call: Callable[[Given], object], message: str) -> None:
    given = Given(model)
    with pytest.raises(error, match=message):
        call(given)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_blobs_are_bound_to_their_row(
    where: str, device: torch.device, model: Any, layout: KVLayout, both: Callable[..., Both]
) -> None:
    codec, to = (both("lossless", key=bytes(range(32))).cpu, torch.device("cpu"))
    if where == "device":
        codec, to = both("lossless", key=bytes(range(32))).device, device
    cache, names = filled(layout, 2, 7, torch.float32, to), [b"aa/one", b"aa/two"]
    blobs = encode_cache(codec, cache, chunk_tokens=4, associated_data=names)
    same(decode_cache(codec, blobs, model.config, to, associated_data=names), cache)
    for stored, bound in ((blobs, names[::-1]), (blobs[2:] + blobs[:2], names), (blobs, None)):
        with pytest.raises(CorruptError, match="tag"):
            decode_cache(codec, stored, model.config, to, associated_data=bound)
    with pytest.raises(
        InputError, match=r"^associated_data: must be a list with one entry per row, 2 in all, got 1 entries"
    ):
        encode_cache(codec, cache, chunk_tokens=4, associated_data=names[:1])
    with pytest.raises(InputError, match=r"^associated_data: must be .*, got bytes"):
        decode_cache(codec, blobs, model.config, to, associated_data=names[0])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^associated_data: must be empty without a key"):
        encode_cache(lossless_codec(layout), filled(layout, 1, 7, torch.float32, to), associated_data=names[:1])


def test_other_weights_than_the_profiles_are_reported_once(
    model: Any, layout: KVLayout, caplog: pytest.LogCaptureFixture
) -> None:
    own, cache = fitted_to(layout, model=model_fingerprint(model)), prefill(model, prompt(1))
    other = tiny_model("llama")
    other.lm_head.weight.data[0, 0] += 1

    def warnings(profile: Profile, quality: str, given: Any) -> int:
        caplog.clear()
        codec = Codec(profile, quality)
        decode_cache(codec, encode_cache(codec, cache, chunk_tokens=CHUNK), given)
        return caplog.text.count("learned from other weights")

    assert warnings(own, "lossless", other) == 0, "no KL is promised"
    assert [warnings(own, "balanced", given) for given in (model, other.config, other, other)] == [0, 0, 1, 0]
    assert warnings(own, "balanced", other.to("meta")) == 0


def test_layout_made_by_hand_needs_no_supported_config(model: Any) -> None:
    config = tiny_config("llama", hidden_act="none that transformers knows")
    with pytest.raises(UnsupportedModelError, match="must be able to build"):
        KVLayout.from_config(config, "float32")
    codec = lossless_codec(replace(KVLayout.from_config(model.config, "float32"), model_type="handmade"))
    cache = prefill(model, prompt(1))
    same(decode_cache(codec, encode_cache(codec, cache, chunk_tokens=CHUNK), config), cache)


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_profile_of_one_dtype_serves_a_cache_of_another(quality: str, model: Any, layout: KVLayout) -> None:
    """Calibrated in float32, served in bfloat16: the blob's own dtype decides."""
    profile = fitted_to(layout)
    codec = Codec(profile, quality)
    narrow: Any = DynamicCache()
    for index, layer in enumerate(prefill(model, prompt(1)).layers):
        narrow.update(layer.keys.bfloat16(), layer.values.bfloat16(), index)
    back: Any = decode_cache(codec, encode_cache(codec, narrow, chunk_tokens=CHUNK), model.config)
    for ours, theirs in zip(back.layers, narrow.layers, strict=True):
        assert ours.keys.dtype == torch.bfloat16
        assert ours.keys.shape == theirs.keys.shape
        if quality == "lossless":
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
    short = replace(layout, dtype="bfloat16")
    other = codec_profile.Profile(
        short, profile.group, profile.source, profile.family, profile.learned, min_step_index=profile.min_step_index,
    )  # fmt: skip
    assert other.id == profile.id


# A cache on a device ----------------------------------------------------------------------------------------------


@dataclass
class Both:
    """Codecs of one profile for the CPU and for a device; they read each other's blobs."""

    cpu: Codec
    device: Codec


@pytest.fixture
def both(layout: KVLayout) -> Callable[..., Both]:
    """both("lossless" or a step) -> Both."""

    def make(quality: str | float, **changes: Any) -> Both:
        asked = {"step": quality} if isinstance(quality, float) else {"quality": quality}
        return Both(*(Codec(fitted_to(layout), **asked, **changes, backend=name) for name in ("numba", "triton")))

    return make


@pytest.fixture
def whole_batches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that the device's codec gets, and of waits for it; blob by blob is an error."""
    calls: list[str] = []

    def watch(name: str) -> None:
        right = getattr(Codec, name)

        def call(self: Codec, *args: Any, **kwargs: Any) -> Any:
            if self._backends.name == "triton":
                assert name.endswith("_paged") or isinstance(args[0], PagedChunks), "one by one"
                calls.append(name)
            return right(self, *args, **kwargs)

        monkeypatch.setattr(Codec, name, call)

    for name in ("encode", "decode", "decode_paged"):
        watch(name)
    waits = PendingDecode.check

    def check(self: PendingDecode) -> None:
        calls.append("check")
        waits(self)

    monkeypatch.setattr(PendingDecode, "check", check)
    return calls


def filled(
    layout: KVLayout, rows: int, tokens: int, dtype: torch.dtype, device: torch.device, mask: torch.Tensor | None = None
) -> Any:
    """A cache of noise; padded columns are zero."""
    cache, noise = DynamicCache(), torch.Generator().manual_seed(0)
    for index, layer in enumerate(layout.layers):
        pair = [torch.randn(rows, layer.kv_heads, tokens, size, generator=noise) for size in (layer.head_dim,) * 2]
        kept = [tensor if mask is None else tensor * mask[:, None, :, None] for tensor in pair]
        keys, values = (tensor.to(device, dtype) for tensor in kept)
        cache.update(keys, values, index)
    return cache


@pytest.mark.parametrize(("dtype", "quality"), [(torch.float32, "lossless"), (torch.bfloat16, 2.0**-7)])
def test_a_cache_on_a_device_is_coded_there_in_one_batch(
    dtype: torch.dtype,
    quality: str | float,
    device: torch.device,
    model: Any,
    layout: KVLayout,
    both: Callable[..., Both],
    whole_batches: list[str],
) -> None:
    codecs = both(quality)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
    cache, cpu_cache = (filled(layout, 2, 7, dtype, at, mask) for at in (device, torch.device("cpu")))
    blobs = encode_cache(codecs.device, cache, chunk_tokens=3, attention_mask=mask.to(device))
    assert whole_batches == ["encode"]
    theirs = encode_cache(codecs.cpu, cpu_cache, chunk_tokens=3, attention_mask=mask)
    headers = [read_header(blob) for blob in blobs]
    assert [(h.start, h.tokens) for h in headers] == [(0, 3), (3, 3), (6, 1), (0, 3), (3, 2)]
    if quality == "lossless":
        assert blobs == theirs
    got: Any = decode_cache(codecs.device, theirs, model.config, device, attention_mask=mask.to(device))
    assert whole_batches == ["encode", "decode_paged", "check"]
    want: Any = decode_cache(codecs.cpu, theirs, model.config, attention_mask=mask)
    mine: Any = decode_cache(codecs.cpu, blobs, model.config, attention_mask=mask)
    for ours, others, again, raw in zip(got.layers, want.layers, mine.layers, cpu_cache.layers, strict=True):
        for name in ("keys", "values"):
            a, b, c, exact = (getattr(layer, name) for layer in (ours, others, again, raw))
            assert a.shape == b.shape == (2, 2, 7, 12) and a.dtype == dtype and a.device.type == device.type
            assert bool((a[1, :, :2] == 0).all())
            if quality == "lossless":
                assert torch.equal(a.cpu(), exact)
            else:  # products of devices are rounded differently, which may also move a level
                for one in (a.cpu(), c):
                    assert float((one.float() - b.float()).norm()) < 2**-6 * float(b.float().norm())


def test_a_static_cache_is_read_where_it_is(
    device: torch.device, model: Any, layout: KVLayout, both: Callable[..., Both], whole_batches: list[str]
) -> None:
    static = StaticCache(config=model.config, max_cache_len=16)
    cache = filled(layout, 2, 5, torch.bfloat16, device)
    for index, layer in enumerate(cache.layers):
        static.update(layer.keys, layer.values, index)
    blobs = encode_cache(both("lossless").device, static, chunk_tokens=4)
    assert whole_batches == ["encode"] and len(blobs) == 4
    same(decode_cache(both("lossless").cpu, blobs, model.config, device), cache)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_blobs_that_claim_a_huge_cache_are_refused(
    device: torch.device,
    model: Any,
    layout: KVLayout,
    both: Callable[..., Both],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """B * T counts: of a row that a far last blob makes long, and of rows that small blobs begin by the thousand."""
    codecs = both("lossless")
    codec, to = (codecs.cpu, "cpu") if where == "cpu" else (codecs.device, device)
    blobs = encode_cache(codecs.cpu, filled(layout, 3, 5, torch.float32, torch.device("cpu")), chunk_tokens=5)
    for limit in (15, None):
        assert decode_cache(codec, blobs, model.config, to, max_tokens=limit).get_seq_length() == 5
    with pytest.raises(InputError, match=r"^max_tokens: must be at least 15 to restore these tokens, got 14"):
        decode_cache(codec, blobs, model.config, to, max_tokens=14)
    long = replace(layout, max_positions=None)
    free = Codec(codec_profile.Profile.unlearned(long), "lossless", backend=codec._backends.name)
    zeros = [torch.zeros(1, layer.kv_heads, layer.head_dim) for layer in long.layers]
    far = free.encode(KVChunk(zeros, zeros, long, 1 << 31))
    monkeypatch.setattr("cuvee.integrations.transformers.caches._check_model", lambda *_: None)
    with pytest.raises(InputError, match="must be at least 2147483649 to restore"):
        decode_cache(free, [free.encode(KVChunk(zeros, zeros, long)), far], model.config, to)


def test_a_cache_that_does_not_fit_is_our_error(
    model: Any, layout: KVLayout, both: Callable[..., Both], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = both("lossless").cpu
    blobs = encode_cache(codec, filled(layout, 1, 5, torch.float32, torch.device("cpu")), chunk_tokens=5)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1 << 52, dtype=torch.uint8))
    with pytest.raises(OutOfMemoryError, match="rebuilding a cache: not enough memory: "):
        decode_cache(codec, blobs, model.config)


def test_a_cache_of_one_16_bit_dtype_is_refused_for_a_model_of_the_other(tmp_path: Path) -> None:
    ids = prompt(1)
    for dtype, other in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)):
        model, given = tiny_model("llama", dtype=dtype), tiny_model("llama", dtype=other)
        codec, cache = lossless_codec(KVLayout.of(model)), prefill(model, ids[:, :-1])
        blobs = encode_cache(codec, cache)
        save_cache(cache, tmp_path / "cache.safetensors")
        name, own = (str(each).removeprefix("torch.") for each in (dtype, other))
        said = f"must hold a cache in {own}, the dtype of the model, got {name}: load the model with dtype='{name}', or"
        with pytest.raises(InputError, match=f"^blobs: {said}"):
            decode_cache(codec, blobs, given)
        with pytest.raises(InputError, match=f"cache.safetensors: {said}"):
            load_cache(tmp_path / "cache.safetensors", given)
        same(decode_cache(codec, blobs, given.config), cache)
    wider = tiny_model("llama")
    generate(wider, ids, decode_cache(codec, blobs, wider))


# A cache in a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[at % 2]) for at, name in enumerate(MODELS)])
def test_a_saved_cache_goes_on_identically(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = tiny_model(name, dtype=dtype), prompt(1)
    save_cache(prefill(model, ids[:, :-1]), tmp_path / "cache.safetensors")
    for of in (model, model.config):
        loaded = load_cache(tmp_path / "cache.safetensors", of)
        same(loaded, prefill(model, ids[:, :-1], DynamicCache(config=model.config)))
        expected = generate(model, ids, prefill(model, ids[:, :-1], DynamicCache(config=model.config)))
        same_text(generate(model, ids, loaded), expected)


def test_a_row_of_a_padded_batch_is_saved_without_its_padding(model: Any, layout: KVLayout, tmp_path: Path) -> None:
    ids, mask = prompt(2), torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :5] = 0
    cache = prefill(model, ids * mask, mask=mask)
    path = tmp_path / "row"
    save_cache(cache, path, input_ids=ids, row=1, attention_mask=mask)
    held = read_cache_file(path, layout).token_ids
    assert held is not None and held.tolist() == ids[1, 5:].tolist()
    loaded: Any = load_cache(path, model)
    for got, want in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(got.keys[0], want.keys[1, :, 5:]) and torch.equal(got.values[0], want.values[1, :, 5:])
    with pytest.raises(InputError, match=r"^row: must be given for a cache of 2 sequences"):
        save_cache(cache, path)
    with pytest.raises(InputError, match=r"^row: must be an int from 0 to 1, got 2"):
        save_cache(cache, path, row=2)
    # What was there stays when nothing can be saved.
    assert load_cache(path, model).get_seq_length() == TOKENS - 5


def test_files_that_hold_no_cache_of_the_model(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    with pytest.raises(FileNotFoundError, match="no such cache file"):
        load_cache(path, model)
    save_cache(prefill(model, prompt(1)), path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], bytes([255] * 8) + whole[8:], b"{}" + whole):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="must be a safetensors file, got a truncated one"):
            load_cache(path, model)
    tensors = {f"layer.{i}.{kind}": torch.zeros(3, 2, 12) for i in range(2) for kind in ("keys", "values")}
    for changes, metadata, message in (
        ({"layer.1.values": None}, {}, "must hold the 2 layers of the model, got no tensor 'layer.1.values'"),
        (
            {"layer.2.keys": torch.zeros(3, 2, 12)},
            {},
            "must hold only layers of the model, got a tensor 'layer.2.keys'",
        ),
        ({"layer.1.values": torch.zeros(3, 2, 13)}, {}, r"values\[1\]: must have shape"),
        ({"layer.1.values": torch.zeros(3, 2, 12).bfloat16()}, {}, "must hold tensors of one dtype, got BF16, F32"),
        ({name: torch.zeros(3, 2, 12, dtype=torch.int8) for name in tensors}, {}, "must hold .*, got I8"),
        (dict.fromkeys(tensors), {"start": "0"}, "must hold tensors of one dtype, got no tensors"),
        ({"token_ids": torch.zeros(2, dtype=torch.int64)}, {}, "token_ids: must be 3 integers, one id per token"),
        ({"token_ids": torch.zeros(3)}, {}, "token_ids: must be 3 integers, one id per token, got float32"),
        ({"token_ids": torch.full((3,), -2)}, {}, "token_ids: must be ids of the vocabulary, or -1 "),
        ({}, {"start": "-1"}, "must have a position as `start` in its metadata, got '-1'"),
        ({}, {"start": "9" * 5000}, "must have a position as `start`"),
        ({}, {"start": "4094"}, "among the 4096 positions"),
        ({}, {"start": "7"}, "must begin at position 0 for a transformers cache, got 7"),
    ):
        kept = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        save_file(kept, path, metadata)
        with pytest.raises(InputError, match=message) as raised:
            load_cache(path, model)
        assert str(raised.value).startswith(str(path))
    save_file(tensors, path)
    assert load_cache(path, model).get_seq_length() == 3
    with pytest.raises(InputError, match=r"^model: must be a transformers model or its configuration, got str"):
        load_cache(path, "llama")  # type: ignore[arg-type]


def test_a_disk_that_is_full_leaves_the_old_file(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.safetensors"
    save_cache(prefill(model, prompt(1)), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cuvee.integrations.transformers.cache_file.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_cache(prefill(model, prompt(1, 5)), path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
