"""KVLayout, LayerLayout, Rope and KVChunk: identity, JSON, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import tiny_config

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.models import stand_in
from cuvee.codec.paged import PagedCache
from cuvee.learning.calibrate import fit

ROPE = Rope((1.0, 0.1), attention_scaling=1.25)
LAYERS = (LayerLayout(2, 6, 6, ROPE), LayerLayout(1, 4, 3, None, sliding_window=5))
LAYOUT = KVLayout("handmade", LAYERS, "float32", 64)
UNIFORM = KVLayout("handmade", (LAYERS[0],) * 3, "bfloat16", 64)


def chunk(tokens: int = 5, start: int = 0, layout: KVLayout = LAYOUT) -> KVChunk:
    generator = torch.Generator().manual_seed(start)
    sizes = [(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in layout.layers]
    keys = [torch.randn(tokens, h, d, generator=generator).to(layout.torch_dtype) for h, d, _ in sizes]
    values = [torch.randn(tokens, h, d, generator=generator).to(layout.torch_dtype) for h, _, d in sizes]
    return KVChunk(keys, values, layout, start)


def test_fingerprint_is_stable() -> None:
    assert LAYOUT.fingerprint.hex() == FINGERPRINT


FINGERPRINT = "cda4d9abb53d636619f0103f72de87e4"


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, model_type="other"),
        replace(LAYOUT, dtype="bfloat16"),
        replace(LAYOUT, max_positions=65),
        replace(LAYOUT, max_positions=None),
        replace(LAYOUT, layers=LAYERS[::-1]),
        replace(LAYOUT, layers=LAYERS[:1]),
        replace(LAYOUT, layers=(replace(LAYERS[0], sliding_window=5), LAYERS[1])),
        replace(LAYOUT, layers=(replace(LAYERS[0], rope=None), LAYERS[1])),
        replace(LAYOUT, layers=(replace(LAYERS[0], rope=replace(ROPE, inv_freq=(1.0, 0.101))), LAYERS[1])),
        replace(LAYOUT, layers=(replace(LAYERS[0], rope=replace(ROPE, attention_scaling=1.26)), LAYERS[1])),
        replace(LAYOUT, layers=(replace(LAYERS[0], rope=replace(ROPE, interleaved=True)), LAYERS[1])),
    ],
)
def test_fingerprint_tells_layouts_apart(other: KVLayout) -> None:
    assert len(LAYOUT.fingerprint) == 16
    assert other.fingerprint != LAYOUT.fingerprint


GOOD = torch.zeros(3, 5, 2, 6, dtype=torch.bfloat16)
STATES_ALONE = KVLayout("mine", (), "float32", None, states=True)


def read(**changes: Any) -> KVLayout:
    """The layout from its dict with some entries changed; None takes one away."""
    return KVLayout.from_dict({k: v for k, v in {**LAYOUT.to_dict(), **changes}.items() if v is not None})


def made(keys: Any = GOOD, values: Any = GOOD, layout: KVLayout = UNIFORM, start: Any = 0) -> KVChunk:
    return KVChunk(keys, values, layout, start)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: read(dtpye="float32"), "known entries, got 'dtpye': did you mean 'dtype'"),
        (lambda: read(zzz=1), "known entries, got 'zzz': there are model_type"),
        (lambda: read(dtype="float64"), "dtype: must be one of"),
        (lambda: read(dtype=["float32"]), "dtype: must be a str"),
        (lambda: read(dtype=None), "KVLayout: must have the entry 'dtype'"),
        (lambda: read(model_type=3), "model_type: must be a str, got 3"),
        (lambda: read(max_positions=0), "max_positions: must be an int above 0"),
        (lambda: read(max_positions=1.5), "max_positions: must be an int above 0"),
        (lambda: read(layers=[0, 2]), r"layers\[1\]: must index one of 2"),
        (lambda: read(layers=[-1]), r"layers\[0\]: must index"),
        (lambda: read(layers=[True]), r"layers\[0\]: must index"),
        (lambda: read(layers=[]), "at least one LayerLayout"),
        (lambda: read(layers={}), "layers: must be a list"),
        (lambda: read(kinds=[3]), "LayerLayout: must be an object"),
        (lambda: LayerLayout.from_dict({**LAYERS[0].to_dict(), "kv_head": 1}),
         "LayerLayout: must have known entries, got 'kv_head': did you mean 'kv_heads'"),
        (lambda: Rope.from_dict({**ROPE.to_dict(), "theta": 1}), "Rope: must have known entries, got 'theta'"),
        (lambda: Rope(()), "^Rope.inv_freq: must be a tuple with at least one frequency"),
        (lambda: Rope((math.nan,)), "^Rope.inv_freq: must hold finite numbers >= 0, got nan"),
        (lambda: Rope((-1.0,)), "^Rope.inv_freq: must hold finite numbers >= 0, got -1.0"),
        (lambda: Rope((1e300,)), "^Rope.inv_freq: must hold float32 numbers"),
        (lambda: Rope(("1",)), "^Rope.inv_freq: must hold float32 numbers, got '1'"),  # type: ignore[arg-type]
        (lambda: Rope((True,)), "^Rope.inv_freq: must hold finite numbers >= 0, got True"),
        (lambda: Rope([1.0]), "^Rope.inv_freq: must be a tuple with at least one frequency"),  # type: ignore[arg-type]
        (lambda: Rope((1.0,), attention_scaling=0.0), "^Rope.attention_scaling: must be a finite number above 0"),
        (lambda: Rope((1.0,), interleaved=1), "^Rope.interleaved: must be a bool, got 1"),  # type: ignore[arg-type]
        (lambda: LayerLayout(0, 4, 4, None), "^LayerLayout.kv_heads: must be an int above 0, got 0"),
        (lambda: LayerLayout(1, True, 4, None), "^LayerLayout.head_dim: must be an int above 0, got True"),
        (lambda: LayerLayout(1, 4, 4, None, sliding_window=0), "^LayerLayout.sliding_window: must be an int above 0"),
        (lambda: LayerLayout(1, 2, 2, ROPE), "^LayerLayout.rope: must rotate at most head_dim = 2 dimensions"),
        (lambda: LayerLayout(1, 4, 4, (1.0,)), "^LayerLayout.rope: must be a Rope"),  # type: ignore[arg-type]
        (lambda: KVLayout("", LAYERS, "float32", None), "^KVLayout.model_type: must name a family"),
        (lambda: KVLayout("m", (), "float32", None), "^KVLayout.layers: must be a tuple with at least one LayerLayout"),
        (lambda: KVLayout("m", list(LAYERS), "float32", None), "^KVLayout.layers: must be a tuple"),  # type: ignore[arg-type]
        (lambda: KVLayout("m", (None,), "float32", None), r"^KVLayout.layers\[0\]: must be a LayerLayout"),  # type: ignore[arg-type]
        (lambda: KVLayout.from_config(transformers.Gemma3Config(), dtype="bfloat16"),
         r"^hf_config: .* multimodal wrapper \(gemma3\); .*get_text_config\(\)"),
        (lambda: KVLayout.from_config({"model_type": "llama"}),
         "must be a transformers PreTrainedConfig, got dict"),
        (lambda: KVLayout.from_config(transformers.LlamaConfig()),
         "^dtype: must be given, since hf_config names none"),
        (lambda: KVLayout.from_config(transformers.LlamaConfig(), dtype=torch.float8_e4m3fn),
         "^dtype: must be one of"),
        *(
            (partial(chunk().slice, *ends), "^t0, t1: must be 0 <= t0 < t1 <= ")
            for ends in ((0, 0), (2, 1), (-1, 2), (0, 6), (0, True))
        ),
        (lambda: KVChunk.concat([]), "at least one"),
        (lambda: KVChunk.concat([chunk().slice(0, 2), chunk().slice(3, 5)]),
         r"chunks\[1\]: must start at 2, where chunks\[0\] ends, got 3"),
        (lambda: KVChunk.concat([chunk(), chunk(start=5, layout=UNIFORM)]),
         r"chunks\[1\]: must have the layout"),
        (lambda: made(GOOD[0]), r"keys: must have shape \[L, T, H, D\], got \[5, 2, 6\]"),
        (lambda: made(GOOD[:2]), r"keys: must have the 3 layers of the layout \(handmade\), got 2"),
        (lambda: made(values=[GOOD[0], GOOD[0], GOOD]),
         r"values\[2\]: must be a tensor \[T, H, D\], got torch.Size\(\[3, 5"),
        (lambda: made(values=[GOOD[0], None, None]), r"values\[1\]: must be a tensor .* got NoneType"),
        (lambda: made(values=GOOD[..., :5]),
         r"values\[0\]: must have shape \[T, H, D\] = \[5, 2, 6\], got \[5, 2, 5\]"),
        (lambda: made([GOOD[0], GOOD[0], GOOD[0, :4]]), r"keys\[2\]: must have shape"),
        (lambda: made(GOOD[:, :0], GOOD[:, :0]), "keys: must hold at least one token"),
        (lambda: made(GOOD.float()), r"keys\[0\]: must be bfloat16 as the layout says, got torch\.float32"),
        (lambda: made(values=GOOD.to(torch.uint8)),
         "must be bfloat16, .*: dequantize .* by value with its scales first, never reinterpret"),
        (lambda: made(values=GOOD.to(torch.float8_e4m3fn)),
         r"values\[0\]: must be .*, got torch\.float8_e4m3fn: dequantize"),
        (lambda: made(values=GOOD.to("meta")), r"values\[0\]: must be on cpu like keys\[0\], got meta"),
        (lambda: made(start=-1), "start: must be an int of at least 0 and below .*, got -1"),
        (lambda: made(start=1.0), "start: must be an int"),
        (lambda: made(start=60), "start: must leave room for 5 tokens among the 64 positions"),
        (lambda: made(layout=replace(UNIFORM, max_positions=4)),
         r"^tokens: must be among the 4 positions .*max_position_embeddings.* got 5"),
        *(
            (partial(make, STATES_ALONE), "^layout: must have layers with keys and values, got states alone")
            for make in (
                lambda layout: made([], [], layout), lambda layout: PagedCache(layout, [], []),
                lambda layout: fit(layout, []),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(
    ("family", "rope", "positions"),
    [
        ("llama", {"rope_type": "default", "factor": 2.0}, 4096),  # which nothing reads
        ("qwen3", {"rope_type": "linear", "factor": 3}, 12288),
        ("mistral", {"rope_type": "linear", "factor": 1.3333}, 5461),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        # As Qwen's cards say: the limit before scaling, or a bit more than that.
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3276}, 13104),
        ("llama", {"rope_type": "yarn", "factor": 4.0}, 16384),
        ("llama", {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, 4096),
        (
            "llama",
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0},
            4096,
        ),
    ],
)  # fmt: skip
def test_from_config_positions(family: str, rope: dict[str, Any], positions: int) -> None:
    config = tiny_config(family, rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=4096)
    assert KVLayout.from_config(config, "float32").max_positions == positions


def test_positions_of_gemma3_are_those_it_says() -> None:
    config = tiny_config("gemma3-sliding-first")
    assert any(each.get("factor") == 8.0 for each in config.rope_parameters.values()), "they are scaled already"
    assert KVLayout.from_config(config, "float32").max_positions == config.max_position_embeddings


@pytest.mark.parametrize("factor", [None, True, 0.0, float("nan"), [4.0]])
def test_from_config_refuses_a_scaling_that_is_none(factor: Any) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
    with pytest.raises(InputError, match=r"^hf_config\.rope_parameters: must have a factor for linear RoPE"):
        KVLayout.from_config(config, "float32")


def test_from_config_sliding_windows() -> None:
    def windows(family: str, **changes: Any) -> list[int | None]:
        layout = KVLayout.from_config(tiny_config(family, **changes), "float32")
        return [layer.sliding_window for layer in layout.layers]

    assert windows("llama") == [None, None]
    assert windows("mistral") == [8, 8]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("gemma2") == [8, None]
    assert windows("gemma3-full-first") == [None, 8]
    assert windows("qwen2", use_sliding_window=False, sliding_window=16) == [None, None]
    assert windows("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1) == [None, 16]


@pytest.mark.parametrize("vocab_size", [61, 200_000])  # measured itself, and by a stand-in
def test_from_config_ignores_the_default_device(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    expected = KVLayout.from_config(tiny_config("llama"), "float32")
    monkeypatch.setattr(stand_in, "_of_configs", {})
    with torch.device("meta"):
        assert KVLayout.from_config(tiny_config("llama", vocab_size=vocab_size), "float32") == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (transformers.T5Config, "t5: must have no encoder-decoder"),
        (lambda: transformers.GPT2Config(add_cross_attention=True), "gpt2: must have no encoder-decoder or cross-"),
        (transformers.DeepseekV32Config, r"deepseek_v32: .* layer 0 \(DynamicIndexedLayer\) holds indexer_keys"),
        (transformers.MambaConfig, r"mamba: .* layer 0 \(LinearAttentionLayer\) holds conv_states"),
        (transformers.FalconH1Config, r"falcon_h1: .* layer 0 \(LinearAttentionAndFullAttentionLayer\) holds conv_"),
        (transformers.Qwen3NextConfig, r"qwen3_next: .* layer 0 \(LinearAttentionLayer\) holds .*recurrent_states"),
        (transformers.RwkvConfig, "rwkv: must return a cache"),
        (
            lambda: transformers.Gemma3TextConfig(num_hidden_layers=4, use_bidirectional_attention=True),
            r"gemma3_text: .*keys of layer 1 do \(bidirectional attention\)",
        ),
        (
            lambda: transformers.Qwen3Config(num_hidden_layers=1, layer_types=["chunked_attention"]),
            "qwen3: its cache must show .*attention_chunk_size",
        ),
    ],
)
def test_from_config_refuses_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        KVLayout.from_config(make(), dtype="bfloat16")


def test_chunk_slices_join_again() -> None:
    whole = chunk(tokens=63, start=1)
    joined = KVChunk.concat([whole.slice(0, 1), whole.slice(1, 32), whole.slice(32, 63)])
    assert joined.start == 1
    for got, want in zip(joined.keys + joined.values, whole.keys + whole.values, strict=True):
        assert torch.equal(got, want)


def _llama3(exact: np.ndarray, factor: float) -> np.ndarray:
    """Frequencies as Llama 3.1 scales them: low ones divided, some between mixed."""
    mixed: np.ndarray = np.clip((8192 * exact / (2 * np.pi) - 1) / 3, 0, 1)
    scaled: np.ndarray = (1 - mixed) * exact / factor + mixed * exact
    return scaled


@pytest.mark.parametrize(
    ("base", "dim", "scaled"),
    [
        (5e5, 256, None), (1e4, 64, None), (1e4, 128, None), (1e6, 128, None), (1.5e5, 80, None), (8e6, 96, None),
        (1e7, 128, None), (5e5, 128, lambda exact: _llama3(exact, 8)), (1e6, 128, lambda exact: exact / 8),
        (1e4, 128, lambda exact: exact / 4),
    ],
)  # fmt: skip
def test_the_last_bit_of_a_frequency_does_not_change_a_layout(
    base: float, dim: int, scaled: Callable[[np.ndarray], np.ndarray] | None
) -> None:
    """Of base 500000 and 256 dimensions, frequency 91 is 8.8795e-05 within one unit of float32; and 52 of Llama 3.1's
    is 2.9275e-06.
    """
    exact = base ** (-np.arange(0, dim, 2) / dim)
    rounded = (scaled(exact) if scaled else exact).astype(np.float32)
    names = set()
    for frequencies in (rounded, np.nextafter(rounded, np.float32(0)), np.nextafter(rounded, np.float32(2))):
        frequencies[0] = rounded[0]
        rope = Rope(tuple(map(float, frequencies)))
        names.add(KVLayout("mine", (LayerLayout(1, dim, dim, rope),), "float32", None).fingerprint)
    assert len(names) == 1
