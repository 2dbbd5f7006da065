"""What the connector refuses when the engine starts, by name; and what names its blobs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import field, make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
)

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import CuveeError, InputError, ProfileError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.integrations.identity import checkpoint as checkpoint_module
from cuvee.integrations.identity.checkpoint import changed_while_loading
from cuvee.integrations.profiles.collection import ProfileCollection
from cuvee.integrations.vllm import setup
from cuvee.integrations.vllm.pages import draft_layers
from cuvee.integrations.vllm.pages.draft_layers import Drafts
from cuvee.integrations.vllm.pages.layer_groups import LayerGroup, all_latent
from cuvee.integrations.vllm.setup import Setup
from cuvee.learning.calibrate import fit

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, dtype=torch.bfloat16,
)  # fmt: skip
LAYOUT = KVLayout.from_config(CONFIG)
WINDOWED = MistralConfig(**{**CONFIG.to_dict(), "sliding_window": 64})
HYBRID = Lfm2Config(
    vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, layer_types=["conv", "full_attention"],
    block_auto_adjust_ff_dim=False, dtype=torch.bfloat16,
)  # fmt: skip
LATENTS = DeepseekV3Config(
    vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, first_k_dense_replace=2,
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=256, dtype=torch.bfloat16,
)  # fmt: skip


class FullAttentionSpec(SimpleNamespace):
    """By the name of vLLM's class, which is what is asked for."""


class MLAAttentionSpec(FullAttentionSpec):
    """Likewise."""


class SlidingWindowSpec(FullAttentionSpec):
    """Likewise."""


class MambaSpec(FullAttentionSpec):
    """Likewise."""


def _spec(kind: type[FullAttentionSpec] = FullAttentionSpec, **changes: Any) -> FullAttentionSpec:
    fields = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return kind(**{**fields, **changes})


def _drafts(method: str, drafter: str = "head") -> SimpleNamespace:
    """vLLM's `SpeculativeConfig`."""
    model = SimpleNamespace(model=drafter, revision=None, dtype=torch.bfloat16)
    return SimpleNamespace(method=method, draft_model_config=model)


def _options(part: str, fields: dict[str, Any]) -> Any:
    """A dataclass by the name of vLLM's, whose fields have these defaults."""
    kind = "".join(word.capitalize() for word in part.split("_")) + "Config"
    made = [(name, Any, field(default_factory=partial(copy, value))) for name, value in fields.items()]
    return make_dataclass(kind, made)()


def _engine(
    specs: list[FullAttentionSpec] | None = None,
    layers: int = 2,
    extra: dict[str, Any] | None = None,
    names: list[str] | None = None,
    **changes: Any,
) -> tuple[Any, SimpleNamespace]:
    """vLLM's `VllmConfig` and `KVCacheConfig`, with changes to any part by `part__name`.

    Each spec is a group's; the layers are dealt out to the groups in turn.
    """
    parts: dict[str, dict[str, Any]] = {
        "model": {
            "model": "folder", "tokenizer": "folder", "skip_tokenizer_init": False, "revision": None,
            "tokenizer_revision": None,
            "hf_text_config": CONFIG, "is_encoder_decoder": False, "runner_type": "generate", "dtype": torch.bfloat16,
            "quantization": None, "hf_overrides": {}, "seed": 0, "hf_config": CONFIG, "max_model_len": 4096,
        },
        "parallel": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1, "distributed_executor_backend": "uni",
            "data_parallel_size": 1,
        },
        "cache": {
            "cache_dtype": "auto", "enable_prefix_caching": True, "gpu_memory_utilization": 0.92,
            "kv_cache_memory_bytes": None, "prefix_match_unit": None, "use_replayssm": False,
        },
        "scheduler": {"max_num_batched_tokens": 2048, "enable_chunked_prefill": True},
        "load": {"load_format": "auto", "download_dir": None},
        "kv_transfer": {"kv_connector_extra_config": extra or {}, "is_kv_consumer": True, "is_kv_producer": True},
    }  # fmt: skip
    speculative, lora = changes.pop("speculative", None), changes.pop("lora", None)
    made = {part: _options(part, fields) for part, fields in parts.items()}
    for name, value in changes.items():
        part, _, option = name.partition("__")
        setattr(made[part], option, value)
    names = [f"model.layers.{index}" for index in range(layers)] if names is None else names
    specs = specs or [_spec()]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names[at :: len(specs)]) for at, spec in enumerate(specs)]
    config = _options("vllm", {
        **{f"{name}_config": part for name, part in made.items()}, "speculative_config": speculative,
        "lora_config": lora, "ec_transfer_config": None, "instance_id": secrets.token_hex(8),
    })  # fmt: skip
    return config, SimpleNamespace(kv_cache_groups=groups)


def _profile(group: str, layout: KVLayout = LAYOUT) -> Profile:
    noise = torch.randn(8, 2, 2, 128, 2, 8).bfloat16()
    return fit(layout, [KVChunk(keys, values, layout) for keys, values in noise], group)


def test_a_ratio_is_that_of_the_engines_cache(tmp_path: Path) -> None:
    """A profile learned in float32, as on a CPU, serves an engine in bfloat16, and the other way round."""
    points = [CurvePoint(64 * k, 4.0 - k, 1e-2 * 4.0**k) for k in range(-4, 2)]
    fitted = _profile("head")
    for learned, served, ratio in (("float32", torch.bfloat16, 4), ("bfloat16", torch.float32, 8)):
        layout = replace(LAYOUT, dtype=learned)
        Profile(layout, "head", "fitted", fitted.family, fitted.learned, curve=points).save(tmp_path / learned)
        extra = {"profile": str(tmp_path / learned), "ratio": ratio}
        made = Setup.of_engine(*_engine([_spec(dtype=served)], extra=extra))
        assert made.quality == "step:0", "the step at which the curve has 4 bits"
        assert made.codec(0).step_index == 0, "of the rank as well"
        with pytest.raises(ProfileError, match=f"^ratio: .* {str(served).removeprefix('torch.')} cache, got 100"):
            Setup.of_engine(*_engine([_spec(dtype=served)], extra=extra | {"ratio": 100}))


def _hybrid(dtype: torch.dtype = torch.bfloat16, mode: str = "align", **changes: Any) -> dict[str, Any]:
    """An engine whose first layer keeps states, of larger blocks than the other's."""
    states = _spec(MambaSpec, block_size=64, shapes=((2, 32),), dtypes=(dtype,), mamba_cache_mode=mode)
    return {"specs": [states, _spec()], "model__hf_text_config": HYBRID, **changes}


def test_what_is_supported_starts() -> None:
    made = Setup.of_engine(*_engine(kv_transfer__is_kv_producer=False, cache__gpu_memory_utilization=0.75))
    assert (made.block_tokens, made.shards, made.loads, made.stores, made.left) == (32, 1, True, False, 0.25)
    assert Setup.of_engine(*_engine(cache__kv_cache_memory_bytes=10**9)).left == 1.0, "as much as the driver says"


def test_latents_are_one_vector_of_a_token(tmp_path: Path) -> None:
    """Served losslessly, where the engine attends to what is loaded."""
    latents: dict[str, Any] = {
        "specs": [_spec(MLAAttentionSpec, num_kv_heads=1, head_size=20, head_size_v=0)],
        "model__hf_text_config": LATENTS,
    }
    made = Setup.of_engine(*_engine(**latents))
    assert [(layer.head_dim, layer.value_dim) for layer in made.layout.layers] == [(4, 16)] * 2
    several = Setup.of_engine(*_engine(**latents, parallel__tensor_parallel_size=2))
    assert several.layout_of_pages(1) == made.layout, "every rank holds all of it"
    assert several.holders == (0,) and several.holder(1) == 0, "one of them stores it"
    heads = Setup.of_engine(*_engine(specs=[_spec(num_kv_heads=1)], parallel__tensor_parallel_size=2))
    assert heads.holders == (0, 1) and heads.holder(1) == 1
    beside = {**latents, "specs": [*latents["specs"], _spec()]}
    assert not all_latent(_engine(**beside)[1]), "a drafter's heads, which are each rank's own"
    off: dict[str, Any] = {"scheduler__enable_chunked_prefill": False, "cache__enable_prefix_caching": False}
    with pytest.raises(UnsupportedModelError, match="does not attend to what is loaded: pass --enable-prefix-caching"):
        Setup.of_engine(*_engine(**latents, **off))
    with pytest.raises(UnsupportedModelError, match="another order than in vLLM's latents; remove it"):
        Setup.of_engine(*_engine(**latents, extra={"profile": str(tmp_path / "p")}))


@pytest.mark.parametrize(
    ("method", "drafter"),
    [
        ("suffix", []),
        ("eagle", ["model.layers.2.attn"]),
        ("mtp", ["model.layers.2.mtp_block.attn"]),
    ],
)
@pytest.mark.serves(drafts="suffix", where="classes")
@pytest.mark.serves(drafts="eagle", where="classes")
@pytest.mark.serves(drafts="mtp", where="classes")
def test_layers_of_a_drafter_are_none_of_the_models(method: str, drafter: list[str]) -> None:
    """They may be in a group of the model's layers, or in one of their own."""
    own = ["model.layers.0.attn", "model.layers.1.attn"]
    speculative = _drafts(method)
    made = Setup.of_engine(*_engine(names=[*drafter, *own], speculative=speculative))
    assert made.layers is not None and (made.layers.names, made.groups) == (tuple(own), (LayerGroup((0, 1)),))
    config, cache = _engine(names=own, speculative=speculative)
    cache.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=_spec(head_size=4), layer_names=drafter))
    assert Setup.of_engine(config, cache).groups == (LayerGroup((0, 1)), LayerGroup(()))
    with pytest.raises(UnsupportedModelError, match=r"one number|the model has 2"):
        Setup.of_engine(*_engine(names=[*drafter, *own, "model.layers.3.attn", "model.layers.1.indexer"]))


def _read_drafts(names: Sequence[str], drafts: Sequence[FullAttentionSpec], **changes: Any) -> Drafts | None:
    """The drafter's layers in a group of their own."""
    config, cache = _engine(**changes)
    setup = Setup.of_engine(config, cache)
    for name, spec in zip(names, drafts, strict=True):
        cache.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=[name]))
    return Drafts.of_engine(config, cache, setup)


def test_layers_of_a_drafter_have_a_layout_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a name, from its weights and that layout."""
    monkeypatch.setattr(
        draft_layers,
        "Checkpoint",
        lambda path, revision: SimpleNamespace(identity=lambda stop: f"weights of {path}"),
    )
    names = ["draft_model.model.layers.1.attn", "draft_model.model.layers.0.attn"]

    def read(drafter: str = "head", size: int = 4, **changes: Any) -> Drafts:
        dtype = changes.pop("dtype", torch.bfloat16)
        specs = [_spec(head_size=size, dtype=dtype), _spec(num_kv_heads=1, dtype=dtype)]
        found = _read_drafts(names, specs, speculative=_drafts("draft_model", drafter), **changes)
        assert found is not None
        return found

    made = read()
    assert made.layers.names == tuple(reversed(names))
    assert [(each.kv_heads, each.head_dim) for each in made.pages.layers] == [(1, 8), (2, 4)]
    assert made.layers.groups == (LayerGroup(()), LayerGroup((1,)), LayerGroup((0,)))
    assert made.codec.lossless and made.codec.profile.layout == made.pages
    eight = read(specs=[_spec(dtype=torch.uint8)], dtype=torch.uint8, cache__cache_dtype="fp8")
    assert (eight.codes, eight.pages) == (torch.float8_e4m3fn, made.pages)
    assert [each.head_dim for each in eight.codec.profile.layout.layers] == [4, 2], "pairs of codes"

    def name(drafts: Drafts) -> str:
        named = drafts.name.wait(60)
        assert named is not None
        return named.text

    assert len({name(each) for each in (made, read("other"), read(size=6), eight)}) == 4
    assert name(read()) == name(made)
    served = _engine()[0].model_config.model
    assert name(read(served)) != name(read(served, model__revision="tuned")), "the drafter's are of `main`"
    assert _read_drafts([], [], speculative=_drafts("ngram")) is None and _read_drafts([], []) is None


@pytest.mark.parametrize(
    ("spec", "why"),
    [(_spec(MambaSpec), "recurrent layers"), (_spec(dtype=torch.float16, num_kv_heads=1), "no weights")],
)
def test_a_drafter_that_cannot_be_stored_is_told(
    spec: FullAttentionSpec, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(path: str, revision: str | None) -> str:
        raise InputError("no weights")

    monkeypatch.setattr(draft_layers, "Checkpoint", missing)
    assert _read_drafts(["model.layers.2.attn"], [spec], speculative=_drafts("eagle")) is None
    assert "a drafter's layers are not stored" in caplog.text and why in caplog.text


@pytest.mark.parametrize("shared", [None, "model.layers.7"])
def test_layers_with_a_cache_that_the_scheduler_does_not_know_are_refused(shared: str | None) -> None:
    """Others may attend to the cache of one that it knows."""
    own = {"model.layers.0": None, "model.layers.1": None}
    config, cache = _engine()
    made = Setup.of_engine(config, cache)
    made.check_registered({**own, "model.layers.2": "model.layers.1"}, config)
    with pytest.raises(UnsupportedModelError, match=r"model.layers.2: has a cache that .*without CuveeConnector"):
        made.check_registered({**own, "model.layers.2": shared}, config)
    config, cache = _engine(speculative=_drafts("eagle"))
    Setup.of_engine(config, cache).check_registered({**own, "model.layers.2": shared}, config)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 1.3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        None,
    ],
    ids=lambda rope: f"{rope['rope_type']}-{rope.get('factor')}" if rope else "gemma3",
)  # fmt: skip
def test_positions_are_those_that_the_engine_serves(rope: dict[str, Any] | None) -> None:
    """As vLLM derives its longest prompt from the same configuration."""
    longest = pytest.importorskip("vllm.config.model")._get_and_verify_max_len
    if rope is None:
        config: Any = Gemma3TextConfig(
            num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], dtype=torch.bfloat16,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        )  # fmt: skip
    else:
        config = LlamaConfig(**{**CONFIG.to_dict(), "rope_parameters": {"rope_theta": 1e4, **rope}})
    said = SimpleNamespace(derived_max_model_len_and_key=(config.max_position_embeddings, "max_position_embeddings"))
    assert KVLayout.from_config(config).max_positions == longest(config, said, None, None, False, None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            _hybrid(mode="none"),
            UnsupportedModelError,
            "recurrent layers .*mamba_cache_mode='none' are not supported, .*pass --enable-prefix-caching to vLLM",
        ),
        (
            _hybrid(extra={"chunk_tokens": 96}),
            InputError,
            "chunk_tokens: must be a multiple of the engine's block size 64, got 96",
        ),
        (_hybrid(cache__prefix_match_unit=32), UnsupportedModelError, "leave --prefix-match-unit out"),
        (_hybrid(cache__use_replayssm=True), UnsupportedModelError, "leave --use-replayssm out"),
        ({"specs": [_spec(), _spec(block_size=96)]}, InputError, "chunk_tokens: must be a multiple of .* 96, got 256"),
        (
            {"specs": [_spec(), _spec(SlidingWindowSpec, sliding_window=80)]},
            InputError,
            "chunk_tokens: must be at most the 80 tokens of the model's sliding window, .*got 256: set it to 64",
        ),
        (
            {"specs": [_spec(), _spec(SlidingWindowSpec, sliding_window=8)]},
            InputError,
            "chunk_tokens: .*pass --block-size 8 or less",
        ),
        ({"layers": 0}, UnsupportedModelError, "caches no keys and values"),
        (
            {
                "specs": [_spec(MLAAttentionSpec, num_kv_heads=1, head_size=20, head_size_v=0)],
                "model__hf_text_config": LATENTS,
                "names": [
                    f"model.layers.{at}.self_attn.{cache}" for at in (0, 1) for cache in ("attn", "indexer.k_cache")
                ],
            },
            UnsupportedModelError,
            "^model.layers.0.self_attn.indexer.k_cache: sparse attention .*: serve this model without CuveeConnector",
        ),
        ({"names": ["model.layers.0", "model.tail"]}, UnsupportedModelError, "model.tail: must have one number"),
        ({"specs": [_spec(), _spec(dtype=torch.float16)]}, UnsupportedModelError, "cache of bfloat16 and float16"),
        (
            {"specs": [_spec(), _spec(head_size=16)]},
            UnsupportedModelError,
            "layer 1: the engine caches 2 heads of 16, .*says 2 heads of 8",
        ),
        ({"specs": [_spec(non_causal=True)]}, UnsupportedModelError, "non-causal attention"),
        ({"specs": [_spec(dtype=torch.uint8)]}, UnsupportedModelError, "a KV cache of uint8"),
        ({"specs": [_spec(num_kv_heads=1)]}, UnsupportedModelError, "caches 1 heads of 8.*says 2 heads of 8"),
        ({"specs": [_spec(head_size_v=4)]}, UnsupportedModelError, "caches 2 heads of 8"),
        (
            {"cache__cache_dtype": "nvfp4"},
            UnsupportedModelError,
            "kv_cache_dtype='nvfp4': set --kv-cache-dtype to auto, bfloat16, float16, float32, fp8, fp8_e4m3, fp8_e5m2",
        ),
        (
            {"cache__cache_dtype": "fp8", "specs": [_spec(), _spec(dtype=torch.uint8)]},
            UnsupportedModelError,
            "partly torch.bfloat16 with kv_cache_dtype='fp8' .kv_cache_dtype_skip_layers.: give all layers one dtype",
        ),
        ({"parallel__decode_context_parallel_size": 2}, UnsupportedModelError, "context parallelism"),
        (
            {"parallel__pipeline_parallel_size": 2},
            UnsupportedModelError,
            "pipeline parallelism: set --pipeline-parallel-size to 1 and --tensor-parallel-size to",
        ),
        (
            {"speculative": _drafts("dflash")},
            UnsupportedModelError,
            "speculative decoding by 'dflash': set \"method\" in --speculative-config to one of ngram, ngram_gpu, ",
        ),
        (
            {"extra": {"blend": {"segment_tokens": 2460}}},
            InputError,
            "blend.segment_tokens: must be at most 2459, .* --max-model-len 4096 .* got 2460",
        ),
        ({"extra": {"kl": 0.1}}, InputError, "kl: must be left out without a profile"),
    ],
)
@pytest.mark.serves(model="recurrent layers, no states kept", where="refused")
@pytest.mark.serves(model="latents (MLA) with a sparse indexer", where="refused")
@pytest.mark.serves(cache="nvfp4", where="refused")
@pytest.mark.serves(drafts="dflash", where="refused")
@pytest.mark.serves(parallel="context parallelism", where="refused")
@pytest.mark.serves(parallel="pipeline parallelism", where="refused")
def test_what_is_refused(changes: dict[str, Any], error: type[CuveeError], message: str) -> None:
    """Besides what `test_random_options` draws."""
    with pytest.raises(error, match=message):
        Setup.of_engine(*_engine(**changes))


def test_ranks_code_their_own_heads(tmp_path: Path) -> None:
    group = "head"
    for learned in (group, "layer"):
        _profile(learned).save(tmp_path / learned)
    two: dict[str, Any] = {"parallel__tensor_parallel_size": 2, "specs": [_spec(num_kv_heads=1)]}
    made = Setup.of_engine(*_engine(extra={"profile": str(tmp_path / group)}, **two))
    layouts = [made.codec(rank).profile.layout for rank in range(2)]
    assert [layer.kv_heads for layout in layouts for layer in layout.layers] == [1] * 4
    assert made.codec(0).profile.id != made.codec(1).profile.id
    with pytest.raises(
        ProfileError, match="group: must be 'heads:n' or 'head' for tensor-parallel shards, got 'layer'"
    ):
        Setup.of_engine(*_engine(extra={"profile": str(tmp_path / "layer")}, **two))


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say what the checkpoint's files are, and whether a profile is of them."""

    def say(verdict: str = "match", weights: str = "weights") -> None:
        monkeypatch.setattr(checkpoint_module, "checking_profile", lambda *_: lambda stop: verdict)
        monkeypatch.setattr(setup, "Checkpoint", lambda path, **_: SimpleNamespace(identity=lambda stop: weights))
        monkeypatch.setattr(setup, "tokenizer_identity", lambda path, **_: "tokenizer")

    say()
    return say


def test_a_profile_of_other_weights_or_another_layout_is_refused(
    tmp_path: Path, checkpoint: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that is named in a collection."""
    _profile("head", replace(LAYOUT, max_positions=512)).save(tmp_path / "p")
    with pytest.raises(ProfileMismatchError):
        Setup.of_engine(*_engine(extra={"profile": str(tmp_path / "p")}))
    _profile("head").save(tmp_path / "p")
    where = f"file://{tmp_path}/collection"
    for name in (str(tmp_path / "p"), f"{where}#{_push(_profile('head'), where).hex()}"):
        config, cache = _engine(extra={"profile": name})
        caplog.clear()
        with caplog.at_level(logging.INFO, "cuvee"):
            made = Setup.of_engine(config, cache)
            assert Setup.of_engine(config, cache).profile.id == made.profile.id
            assert caplog.text.count("took profile") == ("#" in name), "both roles of a process have the same one"
            checkpoint("unknown: no weights")
            made.identity(config)
        assert "unknown: no weights" in caplog.text, "it could not be checked"
        checkpoint()
        made.identity(config)
        checkpoint("mismatch")
        with pytest.raises(ProfileMismatchError, match=r"other weights than folder.*check_model to false"):
            made.identity(config)
        config, cache = _engine(extra={"profile": name, "check_model": False})
        Setup.of_engine(config, cache).identity(config)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A checkpoint with `CONFIG`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _push(profile: Profile, where: str) -> bytes:
    ProfileCollection(where).push(profile)
    return profile.id


def test_without_the_profile_that_is_named_the_engine_does_not_start(tmp_path: Path) -> None:
    for where, error in ((str(tmp_path / "missing"), FileNotFoundError), (f"file://{tmp_path}/missing", InputError)):
        with pytest.raises(error, match=r"^(no profile at|profile: must name a file, or a place and an id) "):
            Setup.of_engine(*_engine(extra={"profile": where}))
    with pytest.raises(InputError, match=r"profile: must name a folder, .* got 'redis://user:\*\*\*@127.0.0.1:1'"):
        Setup.of_engine(*_engine(extra={"profile": "redis://user:secret@127.0.0.1:1"}))


def test_what_names_a_blob(tmp_path: Path, checkpoint: Callable[..., None]) -> None:
    _profile("head").save(tmp_path / "p")

    def identity(**changes: Any) -> Any:
        config, cache = _engine(**changes)
        return Setup.of_engine(config, cache).identity(config)

    base = identity()
    with_profile = identity(extra={"profile": str(tmp_path / "p")})
    others = [
        with_profile,
        identity(extra={"profile": str(tmp_path / "p"), "quality": "small"}),
        identity(extra={"model_id": "mine"}),
        identity(model__dtype=torch.float32),
        identity(specs=[_spec(dtype=torch.float32)]),
        identity(model__quantization="awq"),
        identity(model__hf_overrides={"rope_theta": 1}),
        identity(load__load_format="dummy"),
        identity(load__load_format="dummy", model__seed=1),
        identity(model__skip_tokenizer_init=True),
        identity(parallel__tensor_parallel_size=2, specs=[_spec(num_kv_heads=1)]),
        identity(**_hybrid()),
        identity(**_hybrid(torch.float32)),  # later layers compute something else of such states
    ]
    assert len({base, *others}) == len(others) + 1
    same = [
        identity(specs=[_spec(block_size=64)]),
        identity(model__model="elsewhere", model__tokenizer="elsewhere"),
        identity(model__seed=1),
        identity(load__load_format="safetensors"),
        identity(extra={"threads": 7, "store": "file:///x"}),
        identity(extra={"quality": "lossless"}),
        # Data-parallel ranks find what others stored.
        identity(parallel__data_parallel_rank=1, parallel__data_parallel_size=2, kv_transfer__engine_id="e_dp1"),
    ]
    assert set(same) == {base}
    assert base.profile == b"", "lossless needs no profile"
    checkpoint(weights="others")
    assert identity() != base


def test_the_id_of_the_key_is_logged_and_not_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CUVEE_NEW", "a new secret, 16+")
    monkeypatch.setenv("CUVEE_OLD", "an old secret, 16+")
    codec = Setup.of_engine(*_engine(extra={"quality": "lossless", "key_env": ["CUVEE_NEW", "CUVEE_OLD"]})).codec(0)
    new, old = (key_id.hex() for key_id in codec.key_ids)
    assert f"signed with the key of id {new}; also accepted: {old}" in caplog.text
    assert "secret" not in caplog.text
    caplog.clear()
    Setup.of_engine(*_engine(extra={"quality": "lossless"})).codec(0)
    assert "signed" not in caplog.text


def test_a_checkpoint_that_changes_while_the_engine_starts_is_not_used(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's id is the time at which it read its configuration; the weights were read some time after."""

    def changed(path: Path | str, began: str) -> bool:
        config, _ = _engine(model__model=str(path))
        config.instance_id = began
        return changed_while_loading(config, config.model_config.model)

    newest = max(file.stat().st_ctime_ns for file in model_path.iterdir())
    assert not changed(model_path, str(newest)) and not caplog.messages
    assert changed(model_path, str(newest - 10**9))
    assert str(model_path) in caplog.text and "restart it" in caplog.text
    assert not changed(model_path, "a1b2c"), "another version's id tells no time"
    assert not changed("org/model", str(newest - 10**9)), "what a hub id stands for never changes"
