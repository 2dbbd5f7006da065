"""Blending against the model's own passes: exact where it must be, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.blend.random_choice import Random
from tests.conftest import tiny_config, tiny_model
from tests.predicting import predicting
from transformers import DynamicCache

from cuvee.blend import (
    Blender,
    BlendResult,
    Boundary,
    Guided,
    Nothing,
    Prompt,
    Segment,
    Selector,
    blender,
)
from cuvee.blend.correction import Correction, Window
from cuvee.blend.recompute import Recompute
from cuvee.blend.recompute_model import FAMILIES
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, FormatError, InputError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.models.forward import cache_argument
from cuvee.codec.profiles.profile import Profile
from cuvee.learning.calibrate import fit

LAYERS = 4
VOCABULARY = 61
# The names that conftest gives to the families of FAMILIES.
FULL = "llama llama-llama3 llama-yarn mistral mixtral phi3 qwen2 qwen2_moe qwen3 qwen3_moe".split()
SELECTORS: tuple[Selector, ...] = (Nothing(), Random(0.3, seed=1), Boundary(0.25), Guided(0.4))

# Every family, and both attentions of one.
every_model = pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), *((name, "sdpa") for name in FULL)])
# Rotations that scale, projections in one matrix, and normed queries.
some_models = pytest.mark.parametrize("name", ["llama-yarn", "phi3", "qwen3"])


def build(name: str = "llama", attention: str = "sdpa", **changes: Any) -> Any:
    """A model of four layers whose attention is not close to uniform."""
    without = {"sliding_window": None} if name == "mistral" else {}
    model = tiny_model(name, **{"num_hidden_layers": LAYERS, "initializer_range": 0.15, **without, **changes})
    model.set_attn_implementation(attention)
    return model


@dataclass(frozen=True)
class Whole:
    """The results of a pass of the whole prompt: logits `[T, V]`, keys and values `[H, T, D]` per layer."""

    logits: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def chunk(self, model: Any, first: int, end: int, start: int | None = None) -> KVChunk:
        """Tokens first … end, as a chunk that says it starts at `start`."""
        keys, values = ([x[:, first:end].transpose(0, 1) for x in part] for part in (self.keys, self.values))
        return KVChunk(keys, values, layout_of(model), first if start is None else start)


def layers_of(cache: Any) -> Any:
    """Its keys and values, layer by layer. Not typed: transformers' caches may hold other things."""
    return cache.layers


def layout_of(model: Any) -> KVLayout:
    return KVLayout.from_config(model.config, dtype=model.dtype)


@torch.no_grad()
def whole(model: Any, tokens: torch.Tensor, start: int = 0) -> Whole:
    """The tokens alone, from position `start`."""
    positions = torch.arange(start, start + len(tokens))
    out = model(tokens[None], position_ids=positions[None], **cache_argument(model, DynamicCache()), use_cache=True)
    layers = layers_of(out.past_key_values)
    return Whole(out.logits[0].float(), [x.keys[0] for x in layers], [x.values[0] for x in layers])


def alone(model: Any, tokens: torch.Tensor, start: int = 0) -> KVChunk:
    return whole(model, tokens, start).chunk(model, 0, len(tokens), start)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def cut(tokens: torch.Tensor, ends: Sequence[int]) -> list[tuple[int, int, torch.Tensor]]:
    return [(a, b, tokens[a:b]) for a, b in itertools.pairwise([0, *ends])]


def stale(model: Any, tokens: torch.Tensor, ends: Sequence[int], cached: Sequence[int], made_at: int = 40) -> list[Any]:
    """Segments that end at `ends`, of which those of `cached` were computed alone and elsewhere."""
    return [
        Segment(part, alone(model, part, made_at + 3 * index) if index in cached else None)
        for index, (_, _, part) in enumerate(cut(tokens, ends))
    ]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> bool:
    """Relative to the largest number expected."""
    return got.shape == expected.shape and bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def caches_close(result: BlendResult, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], **kw: Any) -> bool:
    layers = layers_of(result.cache)
    return all(
        close(x.keys[0], k, **kw) and close(x.values[0], v, **kw) for x, k, v in zip(layers, keys, values, strict=True)
    )


def same_as(result: BlendResult, full: Whole, **tolerance: Any) -> bool:
    kept = full.logits[-len(result.logits) :]
    return close(result.logits, kept, **tolerance) and caches_close(result, full.keys, full.values, **tolerance)


@torch.no_grad()
def walk(model: Any, tokens: torch.Tensor, computed: torch.Tensor, cached: Whole) -> Whole:
    """The prompt token by token through the model's own forward: the reference for any choice of tokens."""
    cache = DynamicCache()
    logits = []
    for at, (token, fresh) in enumerate(zip(tokens, computed.tolist(), strict=True)):
        if fresh:
            out = model(
                token[None, None], **cache_argument(model, cache), position_ids=torch.tensor([[at]]), use_cache=True
            )
            logits.append(out.logits[0, -1].float())
            continue
        for index in range(len(cached.keys)):
            keys, values = cached.keys[index][None, :, at : at + 1], cached.values[index][None, :, at : at + 1]
            cache.update(keys, values, index)
    return Whole(torch.stack(logits), [x.keys[0] for x in layers_of(cache)], [x.values[0] for x in layers_of(cache)])


def placed(model: Any, tokens: torch.Tensor, ends: Sequence[int]) -> Whole:
    """KV of every part of the prompt computed alone at the positions where it stands."""
    parts = [whole(model, part, start) for start, _, part in cut(tokens, ends)]
    keys, values = (
        [torch.cat([getattr(part, which)[index] for part in parts], 1) for index in range(len(parts[0].keys))]
        for which in ("keys", "values")
    )
    return Whole(parts[-1].logits, keys, values)


@contextmanager
def passes(model: Any) -> Iterator[list[list[int]]]:
    """How many tokens each layer is given, call by call."""
    seen: list[list[int]] = [[] for _ in model.model.layers]
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs, n=n: seen[n].append(args[0].shape[1]), with_kwargs=True)
        for n, layer in enumerate(model.model.layers)
    ]
    yield seen
    for handle in handles:
        handle.remove()


class Chosen:
    """Selects given positions; shows the prompt it got."""

    def __init__(self, *positions: int, look: Callable[[Prompt], Any] = lambda prompt: None) -> None:
        self.positions = torch.tensor(positions, dtype=torch.int64)
        self.look = look
        self.seen: Any = None

    def select(self, prompt: Prompt) -> torch.Tensor:
        self.seen = self.look(prompt)
        return self.positions


# A full prefill -------------------------------------------------------------------------------------------------------


def test_every_family_is_tested() -> None:
    assert {tiny_config(name).model_type for name in FULL} == set(FAMILIES)


@every_model
def test_to_recompute_all_is_a_full_prefill(name: str, attention: str) -> None:
    model = build(name, attention)
    tokens = ids(34)
    full = whole(model, tokens)
    segments = stale(model, tokens, (3, 12, 15, 26, 34), (1, 3))
    assert not same_as(Blender(model, selector=Nothing()).blend(segments, logits_to_keep=8), full, tolerance=1e-2)
    for selector in (Random(1.0), Boundary(cost=1.0), Guided(cost=1)):
        result = Blender(model, selector=selector).blend(segments, logits_to_keep=8)
        assert same_as(result, full), selector
        assert result.record.cost == 1.0 and result.record.recomputed == 20, selector


# Stale chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attention", "rows"),
    [("llama-yarn", "sdpa", 1), ("llama", "eager", 4), ("phi3", "sdpa", 1000), ("qwen3", "eager", 1000)],
)
def test_any_choice_is_what_the_model_computes_token_by_token(
    name: str, attention: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of so many tokens. Those of a block are not corrected by those of later ones."""
    monkeypatch.setattr(blender, "Recompute", partial(Recompute, rows=rows))
    model = build(name, attention)
    tokens = ids(24)
    ends, cached = (2, 9, 16, 18, 24), (1, 2)
    segments = stale(model, tokens, ends, cached)
    cached_kv = placed(model, tokens, ends)
    for selector in (*SELECTORS, Chosen(2, 5, 8, 9, 15)):
        result = Blender(model, selector=selector, correct=False).blend(segments, logits_to_keep=6)
        reference = walk(model, tokens, result.record.computed, cached_kv)
        assert same_as(result, reference), selector


@some_models
def test_other_tokens_are_corrected_before_anything_attends_to_them(name: str) -> None:
    model = build(name)
    tokens = ids(24)
    ends, cached = (2, 9, 16, 18, 24), (1, 2)
    chosen = [2, 5, 6, 9, 14, 15]
    result = Blender(model, selector=Chosen(*chosen)).blend(stale(model, tokens, ends, cached), logits_to_keep=6)
    before, after = placed(model, tokens, ends), layers_of(result.cache)
    others = [at for at in range(2, 16) if at not in chosen]
    layout = layout_of(model)
    windows = [
        Window(torch.tensor([2, 5, 6]), torch.tensor([3, 4, 7, 8]), 2),
        Window(torch.tensor([9, 14, 15]), torch.tensor([10, 11, 12, 13]), 9),
    ]
    correction = Correction(layout, windows, torch.device("cpu"))
    largest = 0.0
    for index in range(LAYERS):
        old, new = [before.keys[index], before.values[index]], [after[index].keys[0], after[index].values[0]]
        changes = [(x - y)[:, chosen].transpose(0, 1) for x, y in zip(new, old, strict=True)]
        for added, x, y in zip(correction.estimate(index, *changes), new, old, strict=True):
            assert close(x[:, others], y[:, others] + added.transpose(0, 1), tolerance=1e-4)
            largest = max(largest, float(added.abs().max() / y.abs().max()))
    assert largest > 0.05, "the correction is large enough for this test"
    corrected = Whole(before.logits, [x.keys[0] for x in after], [x.values[0] for x in after])
    assert same_as(result, walk(model, tokens, result.record.computed, corrected), tolerance=1e-4)


# Shapes of prompts ----------------------------------------------------------------------------------------------------


def test_only_text() -> None:
    model = build()
    for count in (1, 9):
        tokens = ids(count)
        segments = [Segment(tokens)] if count == 1 else [Segment(tokens[:4]), Segment(tokens[4:])]
        for selector in (*SELECTORS, Guided(cost=0.1)):
            result = Blender(model, selector=selector).blend(segments, logits_to_keep=count)
            assert same_as(result, whole(model, tokens)), selector
            record = result.record
            assert (record.tokens, record.cached, record.cost) == (count, 0, 0.0)
            assert record.query_token_layers == 0, selector


def test_chunks_of_one_token() -> None:
    model, tokens = build(), ids(4)
    segments = stale(model, tokens, (1, 2, 3, 4), (0, 1, 2))
    for selector in SELECTORS:
        result = Blender(model, selector=selector).blend(segments)
        assert same_as(result, walk(model, tokens, result.record.computed, placed(model, tokens, (1, 2, 3, 4))))
        only = Blender(model, selector=selector).blend([Segment(tokens[:1], alone(model, tokens[:1], 5))])
        assert same_as(only, whole(model, tokens[:1]))
        assert only.record.cached == 0 and only.record.segments[0].cached


def test_nothing_that_was_given_is_written_to() -> None:
    model = build()
    tokens = ids(20)
    segments = stale(model, tokens, (8, 16, 20), (0, 1), made_at=0)
    before = [[x.clone() for x in (*s.chunk.keys, *s.chunk.values)] for s in segments[:2]]
    Blender(model, selector=Random(1.0)).blend(segments)
    for segment, old in zip(segments, before, strict=False):
        assert all(torch.equal(a, b) for a, b in zip((*segment.chunk.keys, *segment.chunk.values), old, strict=True))


# Blobs ----------------------------------------------------------------------------------------------------------------


def lossless(model: Any) -> Codec:
    return Codec(Profile.unlearned(layout_of(model)), "lossless")


def lossy(model: Any, step: float = 0.1) -> Codec:
    return Codec(fit(layout_of(model), [alone(model, ids(64, seed=seed)) for seed in range(8)]), step=step)


def equal(a: BlendResult, b: BlendResult) -> bool:
    layers = zip(layers_of(a.cache), layers_of(b.cache), strict=True)
    return torch.equal(a.logits, b.logits) and all(
        torch.equal(x.keys, y.keys) and torch.equal(x.values, y.values) for x, y in layers
    )


@pytest.mark.parametrize(("name", "dtype"), [("llama-yarn", torch.float32), ("phi3", torch.bfloat16)])
def test_a_lossless_blob_is_its_chunk(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype=dtype)
    codec = lossless(model)
    tokens = ids(32)
    segments = [
        Segment(tokens[:8], alone(model, tokens[:8])),
        Segment(tokens[8:18], alone(model, tokens[8:18], 30)),
        Segment(tokens[18:26], alone(model, tokens[18:26], 18)),
        Segment(tokens[26:]),
    ]
    blobs = [s if s.chunk is None else Segment(s.tokens, codec.encode(s.chunk)) for s in segments]  # type: ignore[arg-type]
    blend = Blender(model, codec, Random(0.3)).blend
    expected = blend(segments)
    assert equal(blend(blobs), expected)
    assert equal(blend([blobs[0], segments[1], blobs[2], segments[3]]), expected)
    assert equal(blend([segments[0], blobs[1], segments[2], segments[3]]), expected)
    assert expected.record.segments[0].leading and blend(blobs).record.segments == expected.record.segments


# The record -----------------------------------------------------------------------------------------------------------


def test_the_record_counts_what_the_layers_were_given() -> None:
    model = build()
    tokens = ids(40)
    segments = stale(model, tokens, (10, 14, 30, 32, 40), (0, 2), made_at=0)
    text = 4 + 2 + 8
    for selector in (*SELECTORS, Guided(cost=0.7)):
        with passes(model) as seen:
            record = Blender(model, selector=selector).blend(segments).record
        queries = [sum(calls[:-1]) for calls in seen]
        assert {calls[-1] - text for calls in seen} == {record.recomputed}, selector
        assert record.query_token_layers == sum(queries), selector
        assert record.cost == pytest.approx((record.recomputed * LAYERS + sum(queries)) / (26 * LAYERS)), selector
        assert (record.tokens, record.cached, record.layers) == (40, 26, LAYERS)
        assert record.text.tolist() == [False] * 10 + [True] * 4 + [False] * 16 + [True] * 10
        assert record.computed.dtype == torch.bool and bool(record.computed[record.text].all())
        assert record.selector == repr(selector)
        assert repr(record).startswith("BlendRecord(40 tokens, 26 cached in 5 segments, recomputed ")
        for part, (first, end) in zip(record.segments, ((0, 10), (10, 14), (14, 30), (30, 32), (32, 40)), strict=True):
            assert (part.start, part.end, part.cached, part.leading) == (first, end, first in (0, 14), first == 0)
            assert part.computed == int(record.computed[first:end].sum())
        spared = [isinstance(selector, Nothing | Boundary), not bool(record.computed[:10].any())]
        assert spared[1] or not spared[0], "tokens that are exact come last"
    assert Blender(model).blend(segments, selector=Random(0.5)).record.selector == repr(Random(0.5))


@pytest.mark.parametrize(("made_at", "first", "leading"), [(0, 0, True), (6, 0, False), (0, 3, False)])
def test_which_chunk_is_leading(made_at: int, first: int, leading: bool) -> None:
    model = build()
    tokens = ids(20)
    segments = [Segment(tokens[:first])] if first else []
    segments += [Segment(tokens[first:12], alone(model, tokens[first:12], made_at)), Segment(tokens[12:])]
    chosen = Chosen(look=lambda prompt: prompt)
    record = Blender(model, selector=chosen).blend(segments).record
    assert [part.leading for part in record.segments] == [False] * (len(segments) - 2) + [leading, False]
    assert chosen.seen.leading.tolist() == [leading] * 12 + [False] * 8
    assert chosen.seen.offset.tolist() == [*range(first), *range(12 - first), *range(8)]
    assert chosen.seen.segment.tolist() == [0] * first + [len(segments) - 2] * (12 - first) + [len(segments) - 1] * 8
    assert torch.equal(chosen.seen.tokens, tokens) and chosen.seen.layers == LAYERS
    assert chosen.seen.cached.tolist() == [first <= n < 12 for n in range(20)]


# The attention of the query -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "queries"), [*((name, 4) for name in FULL if name != "llama"), ("llama", 1), ("llama", 100)]
)
def test_attend_is_the_attention_of_the_model(name: str, queries: int) -> None:
    model = build(name)
    tokens = ids(26)
    ends, cached, layers = (3, 10, 12, 20, 26), (1, 3), (1, 2)
    segments = stale(model, tokens, ends, cached)
    chosen = Chosen(look=lambda prompt: prompt.attend(queries, layers))
    record = Blender(model, selector=chosen).blend(segments).record
    text = [0, 1, 2, 10, 11, *range(20, 26)][-queries:]
    assert record.query_token_layers == len(text) * 3
    # The text that asks, after all chunks and not after other text: from a cache of the chunks alone, token by token.
    model.set_attn_implementation("eager")
    kv = placed(model, tokens, ends)
    expected = torch.zeros(26)
    there: list[int] = [n for n in range(26) if 3 <= n < 10 or 12 <= n < 20]
    own: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for at in text:
        visible = sorted(n for n in (*there, *own) if n < at)
        cache = DynamicCache()
        for index in range(LAYERS):
            keys = [own[n][0][index] if n in own else kv.keys[index][:, n] for n in visible]
            values = [own[n][1][index] if n in own else kv.values[index][:, n] for n in visible]
            if visible:
                cache.update(torch.stack(keys, 1)[None], torch.stack(values, 1)[None], index)
        with torch.no_grad():
            out = model(
                tokens[None, at : at + 1], **cache_argument(model, cache), position_ids=torch.tensor([[at]]),
                output_attentions=True, use_cache=True,
            )  # fmt: skip
        own[at] = [x.keys[0, :, -1] for x in layers_of(cache)], [x.values[0, :, -1] for x in layers_of(cache)]
        for layer in layers:
            expected[[*visible, at]] += out.attentions[layer][0, :, 0].sum(0)
    assert close(chosen.seen, expected)
    assert expected.sum().item() == pytest.approx(4 * len(text) * 2, rel=1e-4)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> Any:
    return build()


PROMPT = ids(24)


def refused(
    model: Any, segments: Any, error: type[Exception], message: str, codec: Codec | None = None, **kw: Any
) -> None:
    with pytest.raises(error, match=message):
        Blender(model, codec, selector=Nothing()).blend(segments, **kw)


def test_chunks_of_another_model(llama: Any) -> None:
    for other in (build("qwen3", head_dim=8), build("llama", num_hidden_layers=3), build("llama-llama3")):
        chunk = alone(other, PROMPT[:16])
        message = r"^segments\[1\]: must have a chunk of this model, got one of another model"
        refused(llama, [Segment([1]), Segment(PROMPT[:16], chunk), Segment([2])], ProfileMismatchError, message)
        blob = lossless(other).encode(chunk)
        with pytest.raises(ProfileMismatchError, match="another"):
            Blender(llama, lossless(llama)).blend([Segment(PROMPT[:16], blob), Segment([2])])


def test_profiles_of_another_model(llama: Any) -> None:
    with pytest.raises(ProfileMismatchError, match=r"^layout: the profile is for .*RoPE or position limit differ"):
        Blender(llama, lossless(build("llama-llama3")))
    codec, other = lossy(llama), build()
    codec.profile.model = model_fingerprint(llama)
    Blender(other, codec)  # built alike: the same weights
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ProfileMismatchError, match=r"^codec: must have a profile calibrated on the model's weights"):
        Blender(other, codec)


def test_damaged_blobs(llama: Any) -> None:
    codec = lossless(llama)
    blob = codec.encode(alone(llama, PROMPT[:16]))
    flipped = bytes(byte ^ (at == len(blob) - 9) for at, byte in enumerate(blob))
    for data, error in ((flipped, CorruptError), (blob[:-5], FormatError), (b"", FormatError)):
        refused(llama, [Segment(PROMPT[:16], data), Segment([2])], error, ".", codec)


def test_numbers_of_tokens(llama: Any) -> None:
    chunk = alone(llama, PROMPT[:16])
    with pytest.raises(InputError, match=r"^chunk: must hold 15 tokens like the segment, got 16"):
        Segment(PROMPT[:15], chunk)
    blob = lossless(llama).encode(chunk)
    message = r"^segments\[1\]: must have the 16 tokens of its blob, got 17"
    refused(llama, [Segment([1]), Segment(PROMPT[:17], blob), Segment([2])], InputError, message, lossless(llama))


@pytest.mark.parametrize(
    ("held", "wrong"), [("chunk", "others"), ("lossless", "shifted"), ("lossy", "reversed"), ("lossy", "shifted")]
)
def test_other_tokens_than_the_chunks(llama: Any, held: str, wrong: str) -> None:
    tokens = ids(40)
    codec = lossless(llama) if held == "lossless" else lossy(llama, 0.3)
    chunk: Any = alone(llama, tokens[:32])
    chunk = chunk if held == "chunk" else codec.encode(chunk)
    given = {"others": ids(32, seed=9), "shifted": tokens[1:33], "reversed": tokens[:32].flip(0)}[wrong]
    right = [Segment([1]), Segment(tokens[:32], chunk), Segment([2])]
    Blender(llama, codec).blend(right)
    message = r"^segments\[1\]: must have the chunk of its tokens, got one of other tokens \(the first layer's"
    refused(llama, [right[0], Segment(given, chunk), right[2]], InputError, message, codec)
    message = message.replace(r"\[1\]", r"\[3\]")  # the one at fault is named
    refused(llama, [*right, Segment(given, chunk), right[2]], InputError, message, codec)


@pytest.mark.parametrize(("held", "at"), [("chunk", 0), ("lossless", 31), ("quantized", 0), ("decoded", 31)])
def test_an_edited_token(llama: Any, held: str, at: int) -> None:
    """Values show it in an exact chunk, and ids in a quantized one, if it holds them."""
    tokens, codec = ids(40), lossless(llama)
    chunk: Any = alone(llama, tokens[:32])
    if held in ("quantized", "decoded"):
        codec = Codec(predicting(lossy(llama, 0.3).profile), step=0.3)
        chunk = chunk.with_token_ids(tokens[:32])
    chunk = chunk if held == "chunk" else codec.encode(chunk)
    chunk = codec.decode(chunk) if held == "decoded" else chunk
    Blender(llama, codec).blend([Segment([1]), Segment(tokens[:32], chunk), Segment([2])])
    edited = tokens[:32].clone()
    edited[at] = (edited[at] + 1) % 50
    message = rf"^segments\[1\]: must have the chunk of its tokens, got one in which token {at} is another"
    refused(llama, [Segment([1]), Segment(edited, chunk), Segment([2])], InputError, message, codec)


def test_an_exact_chunk_in_another_dtype_is_not_edited(llama: Any) -> None:
    tokens = ids(40)
    chunk = alone(llama, tokens[:32])
    keys, values = ([part.bfloat16().to(part.dtype) for part in parts] for parts in (chunk.keys, chunk.values))
    rounded = KVChunk(keys, values, chunk.layout)
    Blender(llama).blend([Segment([1]), Segment(tokens[:32], rounded), Segment([2])])


def test_one_token_all_over_is_no_other_token(llama: Any) -> None:
    tokens = torch.full((20,), 7)
    Blender(llama).blend([Segment(tokens, alone(llama, tokens)), Segment(tokens)])


@pytest.mark.parametrize(
    "tokens",
    [[], [1.0], torch.tensor([1.0]), torch.tensor([True]), [[1], [2, 3]], torch.tensor(3), "ab", torch.tensor([1j])],
    ids=repr,
)
def test_tokens_must_be_a_row_of_integers(tokens: Any) -> None:
    with pytest.raises(InputError, match=r"^tokens: must be a row of at least one integer"):
        Segment(tokens)


def test_prompts_that_are_none(llama: Any) -> None:
    for wrong in (bytearray(b"cuvee"), 0):
        with pytest.raises(InputError, match=r"^chunk: must be a blob, a KVChunk or None for text, got "):
            Segment([1], wrong)  # type: ignore[arg-type]
    chunk = Segment(PROMPT[:16], alone(llama, PROMPT[:16]))
    blob = Segment(PROMPT, lossless(llama).encode(alone(llama, PROMPT)))
    none = r"^segments: must be a list of at least one Segment"
    vocabulary = "^segments: must hold tokens of the vocabulary, 0 … 60, got "
    prompts: dict[str, Any] = {
        none: ([], None, [Segment([1]), None]),
        f"{vocabulary}61": ([Segment([1]), Segment([3, 61])],),
        f"{vocabulary}-1": ([Segment([-1, 5])],),
        r"^segments\[1\]: must be text or a KVChunk for a Blender without codec=, got a blob": ([Segment([1]), blob],),
    }
    for message, wrong_ones in prompts.items():
        for segments in wrong_ones:
            refused(llama, segments, InputError, message)
    for kept in (0, 9, True):
        message = rf"^logits_to_keep: must be 1 … 8, the tokens of text at the end of this prompt, got {kept}"
        segments = [Segment([5]), chunk, Segment(PROMPT[16:])]
        refused(llama, segments, InputError, message, logits_to_keep=kept)
    refused(llama, [Segment([5]), chunk], InputError, r"^logits_to_keep: must be 1 … 1, ", logits_to_keep=2)
    with pytest.raises(InputError, match=r"^selector: must have select\(\), like the selectors of"):
        Blender(llama).blend([Segment([1])], selector="boundary")  # type: ignore[arg-type]


def test_more_tokens_than_positions() -> None:
    model = build(max_position_embeddings=32)
    segments = [Segment(PROMPT[:16], alone(model, PROMPT[:16])), Segment(PROMPT[:16])]
    Blender(model).blend(segments)
    message = r"^segments: must be at most 32 tokens, the model's positions, got 33"
    refused(model, [*segments, Segment([1])], InputError, message)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": 8}, "^mistral: sliding windows cannot be blended"),
        ("gemma", {}, r"^gemma \(GemmaForCausalLM\): blending was checked with llama, mistral, .* only"),
    ],
)
def test_models_that_cannot_be_blended(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Blender(tiny_model(name, **changes))


def test_models_in_the_wrong_state(llama: Any) -> None:
    with pytest.raises(InputError, match=r"^selector: must have select\(\), like the selectors of"):
        Blender(llama, selector=0.15)  # type: ignore[arg-type]
    for other, named in ((torch.nn.Linear(2, 2), "Linear"), (llama.model, "LlamaModel")):
        with pytest.raises(InputError, match=rf"^model: must be a transformers causal language model, got {named}"):
            Blender(other)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^model: must be in eval mode, got training mode; call model.eval\(\) first"):
        Blender(llama.train())
    llama.eval().config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match=r"^model: must .*, got 'flash_attention_2'.*attn_implementation=\"sdpa\""):
        Blender(llama)
