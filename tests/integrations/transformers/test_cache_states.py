"""Caches that hold more than keys and values of tokens come back whole: hybrids, index keys, cross-attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.every_model import build
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, InputError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.format.container import Kind, read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.states import States
from cuvee.integrations.transformers.cache_states import ATTENTION
from cuvee.integrations.transformers.caches import decode_cache, encode_cache

TOKENS = 40  # of the caches that `build` returns


@pytest.fixture(scope="module")
def hybrid() -> tuple[Any, torch.Tensor, Any]:
    return build("qwen3_next")


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Everything that a cache holds, by path."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    elif isinstance(value, CacheLayerMixin | LinearAttentionCacheLayerMixin):
        inner = list(vars(value).items())
    else:
        return {path: value}
    return {own: each for key, part in inner for own, each in leaves(part, f"{path}.{key}").items()}


def same(ours: Any, theirs: Any) -> None:
    found, wanted = (
        {path: value for path, value in leaves(cache).items() if value is not None and not isinstance(value, type)}
        for cache in (ours.layers, theirs.layers)
    )
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[path].dtype == value.dtype and torch.equal(found[path], value), path
        else:
            assert found[path] == value and type(found[path]) is type(value), path


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=True).past_key_values


def test_a_hybrid_comes_back_as_it_is(hybrid: tuple[Any, torch.Tensor, Any]) -> None:
    model, ids, cache = hybrid
    codec = Codec.without_profile(model)
    layout = codec.profile.layout
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert layout.states and layout.num_layers == kinds.count("DynamicLayer") < len(kinds)
    blobs = encode_cache(codec, cache, ids, 16)
    assert [(own.kind, own.start, own.tokens) for own in map(read_header, blobs)] == [
        (Kind.CHUNK, 0, 16), (Kind.CHUNK, 16, 16), (Kind.CHUNK, 32, 8), (Kind.STATES, TOKENS, TOKENS),
    ]  # fmt: skip
    same(decode_cache(codec, blobs, model), cache)
    same(decode_cache(codec, blobs, model.config), cache)


class Nothing:
    """What transformers 5.24 puts in the place of a layer that caches nothing."""

    def __init__(self) -> None:
        self.is_initialized, self.keys, self.values = True, None, None


def test_a_layer_without_tensors_has_no_states(hybrid: tuple[Any, torch.Tensor, Any]) -> None:
    model, ids, cache = hybrid
    held = copy.deepcopy(cache)
    held.layers.append(Nothing())
    codec = Codec.without_profile(model)
    found, wanted = (codec.decode_states(encode_cache(codec, each, ids, 16)[-1]).tensors for each in (held, cache))
    assert found.keys() == wanted.keys() and any(name.startswith("0.") for name in wanted)


def test_a_part_of_a_hybrid_is_refused(hybrid: tuple[Any, torch.Tensor, Any]) -> None:
    model, ids, cache = hybrid
    codec = Codec.without_profile(model)
    blobs = encode_cache(codec, cache, ids, 16)
    for part in (blobs[:-1], blobs[:1], [*blobs[:2], *blobs]):
        with pytest.raises(InputError, match=r"^blobs: must end each row with its states, .* restored as a whole"):
            decode_cache(codec, part, model)
    for part in (blobs[-1:], [*blobs[:2], blobs[-1]], [*blobs, blobs[-1]]):
        with pytest.raises(InputError, match=r"^blobs\[\d\]: must follow the chunks of its 40 tokens, got it after"):
            decode_cache(codec, part, model)
    with pytest.raises(InputError, match=r"^blobs\[0\]: must continue row 0 at token 0"):
        decode_cache(codec, blobs[1:], model)


def test_rows_of_a_batch_bound_to_their_names(hybrid: tuple[Any, torch.Tensor, Any]) -> None:
    model, ids, _ = hybrid
    cache = prefilled(model, torch.cat([ids, ids.flip(1), ids.roll(3, 1)]))
    codec = Codec.without_profile(model, key=bytes(range(16)))
    names = [b"first", b"second", b"third"]
    blobs = encode_cache(codec, cache, chunk_tokens=32, associated_data=names)
    assert len(blobs) == 9
    same(decode_cache(codec, blobs, model, associated_data=names), cache)
    with pytest.raises(CorruptError):
        decode_cache(codec, blobs, model, associated_data=names[::-1])
    swapped = [*blobs[:2], blobs[5], *blobs[3:5], blobs[2], *blobs[6:]]
    with pytest.raises(CorruptError):  # the states of another row
        decode_cache(codec, swapped, model, associated_data=names)


def test_a_layout_tells_of_states_only_if_asked(hybrid: tuple[Any, torch.Tensor, Any]) -> None:
    model, _, _ = hybrid
    layout = KVLayout.of(model, states=True)
    assert KVLayout.from_dict(layout.to_dict()) == layout and not layout.relocatable
    for refused in (model, model.config):
        with pytest.raises(UnsupportedModelError, match=r"layer 0 .* holds conv_states.*: use encode_cache"):
            KVLayout.of(refused)
    plain = KVLayout("mine", layout.layers, layout.dtype, None)
    assert "states" not in plain.to_dict()
    assert plain.fingerprint != KVLayout("mine", layout.layers, layout.dtype, None, states=True).fingerprint
    with pytest.raises(InputError, match=r"KVLayout\.layers"):
        KVLayout("mine", (), "float32", None)


PLACELESS = "which has no place in a cache of this model"
SHAPELESS = "^blobs: must hold {} of a shape like .* after 6 tokens"
# A name, what a forged blob sets there (None: it leaves the name out), and what that is refused with.
FORGED: list[tuple[str, torch.Tensor | None, str]] = [
    ("99.conv_states.0", torch.ones(1), PLACELESS),
    ("-1.conv_states.0", torch.ones(1), PLACELESS),
    ("0", torch.ones(1), PLACELESS),
    ("0.conv_states", torch.ones(1), PLACELESS),
    ("0.conv_states.7", torch.ones(1), PLACELESS),
    ("0.conv_states.0.data", torch.ones(1), PLACELESS),
    ("0.update", torch.ones(1), PLACELESS),
    ("0.update:dtype", torch.ones(0), PLACELESS),
    ("0.__class__:dtype", torch.ones(0), PLACELESS),
    ("0.new", torch.ones(1), PLACELESS),
    ("0.new:number", torch.tensor(1), PLACELESS),
    ("0.has_previous_state.0", torch.ones(1), PLACELESS),
    ("0.has_previous_state.0:number", torch.tensor(1), PLACELESS),
    ("0.number_of_states:number", torch.ones(2), PLACELESS),
    ("0.conv_states.0:else", torch.ones(1), PLACELESS),
    ("attention:number", torch.tensor(1), PLACELESS),
    ("other.0.keys", torch.ones(1), PLACELESS),
    *(
        (name, torch.zeros(shape), SHAPELESS.format(name))
        for name, shape in (
            ("0.conv_states.0", (1, 100, 4)), ("0.conv_states.0", (1, 128, 4, 1)), ("0.conv_states.0", (128, 4)),
            ("0.conv_states.0", (1, 0, 4)), ("0.recurrent_states.0", (1, 4, 16, 17)), ("0.recurrent_states.0", ()),
        )
    ),
    *(
        (ATTENTION, indices, "^blobs: must hold states")
        for indices in (
            torch.tensor([99]), torch.tensor([-1]), torch.tensor([1, 0]), torch.ones(1), torch.tensor(3), None,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), FORGED)
def test_forged_states_set_nothing(
    hybrid: tuple[Any, torch.Tensor, Any], name: str, value: torch.Tensor | None, message: str
) -> None:
    model, ids, cache = hybrid
    codec = Codec.without_profile(model)
    *chunks, last = encode_cache(codec, cache, ids)
    states = codec.decode_states(last)
    tensors = {key: each for key, each in {**states.tensors, name: value}.items() if each is not None}
    forged = codec.encode_states(States(TOKENS, tensors, states.dtype))
    for whose in (model, model.config):
        with pytest.raises(ProfileMismatchError, match=message):
            decode_cache(codec, [*chunks, forged], whose)


def test_without_attention_the_ids_tell_the_tokens() -> None:
    model, ids, cache = build("mamba")
    codec = Codec.without_profile(model)
    with pytest.raises(InputError, match=r"^input_ids: must be given, or attention_mask"):
        encode_cache(codec, cache)
    (blob,) = encode_cache(codec, cache, ids)
    assert read_header(blob).start == TOKENS
    same(decode_cache(codec, [blob], model), cache)


def test_caches_with_room_are_refused(hybrid: tuple[Any, torch.Tensor, Any]) -> None:
    model, ids, _ = hybrid
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(UnsupportedModelError, match=r"^cache: must grow with its tokens .*StaticLayer"):
        encode_cache(Codec.without_profile(model), cache)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=10,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 20)}


def test_cross_attention_comes_back() -> None:
    """A decoder goes on from blobs without what its encoder said: the cache holds keys and values of that."""
    torch.manual_seed(0)
    model, inputs = whisper()
    model.eval()
    ids = torch.randint(3, 60, (2, 21))
    with torch.no_grad():
        output = model(**inputs, decoder_input_ids=ids, use_cache=True)
    cache = output.past_key_values
    codec = Codec.without_profile(model.config)
    with pytest.raises(UnsupportedModelError, match="must have no encoder-decoder or cross-attention cache here"):
        KVLayout.of(model)
    back: Any = decode_cache(codec, encode_cache(codec, cache, ids, 8), model)
    same(back.self_attention_cache, cache.self_attention_cache)
    same(back.cross_attention_cache, cache.cross_attention_cache)
    assert back.is_updated == cache.is_updated
    row = copy.deepcopy(cache)
    row.batch_select_indices(torch.tensor([0]))
    *chunks, last = encode_cache(codec, row, ids[:1], 8)
    states = codec.decode_states(last)
    for name, size in (("cross:dtype", 0), ("cross:number", 2), ("cross.9.keys", 1)):
        blob = codec.encode_states(States(21, {**states.tensors, name: torch.ones(size)}, states.dtype))
        with pytest.raises(ProfileMismatchError, match=f"^blobs: hold {name}, which"):
            decode_cache(codec, [*chunks, blob], model)
    following, nothing = ids[:, 3:6], torch.zeros_like(output.encoder_last_hidden_state)
    with torch.no_grad():
        own, ours = (
            model(encoder_outputs=(nothing,), decoder_input_ids=following, past_key_values=each).logits
            for each in (copy.deepcopy(cache), back)
        )
    assert torch.equal(own, ours)
