"""Shared fixtures: tiny random models of every supported family, layouts with synthetic caches, both models."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.codec import reference  # noqa: F401 - the backend "reference"
from tests.kernels.emulation import KERNELS_RUN_ON, start
from tests.learned import learned_once, shared_folder

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding import encoding, id_coding
from cuvee.codec.coding.open_blob import OpenBlob
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles import setting
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.rope import rotate
from cuvee.codec.stages.compiled import compiler
from cuvee.codec.support import torch_threads
from cuvee.codec.support.once import Once
from cuvee.learning.calibrate import calibrate, fit

# A background job of a script ignores Ctrl-C, and so would what tests start; rich breaks lines where a terminal ends.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["COLUMNS"] = "120"

MAX_POSITIONS = 4096
BOS = 0  # that `with_bos` puts before every text; no token of the bundled texts
# Workers that take whole files finish together only if no long one comes last. Engines alternate with what computes:
# two engines at a time wait for each other.
LONGEST = (
    "integrations/vllm/test_engine_kinds", "eval/report/test_report", "integrations/vllm/test_engine",
    "package/cli/test_profile", "integrations/vllm/blending/test_engine_blend",
    "kernels/test_transform", "codec/test_hostile",
    "integrations/vllm/test_serve", "kernels/test_backend", "learning/test_calibrate",
    "integrations/vllm/test_guard", "integrations/lmcache/test_engine",
    "integrations/vllm_tier/test_engine_tier", "integrations/sglang/test_engine",
    "package/test_docs",
    "integrations/vllm/test_docs", "integrations/transformers/test_kinds", "integrations/vllm/test_faults",
    "ptx/test_matrices", "codec/test_sections", "fuzz/test_soak", "package/test_package", "kernels/test_static_costs",
    "package/test_notebooks", "package/cli/test_warmup", "eval/test_tasks",  # long if nightly tests run
)  # fmt: skip

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SLIDING = {"sliding_window": 8}
_HEAD = {"head_dim": 12}
_MOE = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}

_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {**_HEAD, **_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "n_group": 1, "topk_group": 1}),
    "gemma": ("GemmaConfig", _HEAD),
    "gemma2": ("Gemma2Config", {**_HEAD, **_SLIDING}),
    "gemma3-full-first": (
        "Gemma3TextConfig",
        {**_HEAD, **_SLIDING, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma3-sliding-first": (
        "Gemma3TextConfig",
        {
            **_HEAD,
            **_SLIDING,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt2": ("GPT2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gpt_oss": ("GptOssConfig", {**_HEAD, **_SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "llama": ("LlamaConfig", _HEAD),
    "llama-llama3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 512,
                "rope_theta": 1e4,
            }
        },
    ),
    "mistral": ("MistralConfig", _SLIDING),
    "mixtral": ("MixtralConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_MOE, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3Config", _HEAD),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEAD, **_MOE}),
    "smollm3": ("SmolLM3Config", {**_HEAD, "no_rope_layers": [1, 0]}),
}


@pytest.fixture(scope="session", autouse=True)
def kernels_run() -> None:
    """Without a GPU, kernels are compiled and their PTX is emulated: see `emulation`."""
    start()


def pytest_report_header() -> str:
    """Say where kernels run."""
    return f"kernels run on: {KERNELS_RUN_ON}"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: a GPU, or the CPU that stands for one. Tests that use it carry the marker `gpu`."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without searching for garbage: they, and what they import, are a million objects that stay.

    Nor are they searched later. Without the search, collecting takes three fifths as long.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter collect what was frozen: nanobind, of Triton, reports all that is left at exit as leaked."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses, which in xdist's processes would come first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of kernels and of the real model, for `-m gpu` and `-m real`; the longest files come first."""
    for item in items:
        for fixture, marker in (("device", "gpu"), ("smollm2", "real")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
        if KERNELS_RUN_ON == "nowhere" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="kernels run nowhere: there is no GPU and no g++"))
    rank = {name: index for index, name in enumerate(LONGEST)}
    tests = Path(__file__).parent
    if stale := [name for name in LONGEST if not (tests / f"{name}.py").exists()]:
        raise pytest.UsageError(f"LONGEST in tests/conftest.py names files that are not there: {stale}")
    items.sort(key=lambda item: rank.get(str(item.path.relative_to(tests).with_suffix("")), len(rank)))


@pytest.fixture(params=sorted(_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn of those that cache unlike each other; `every_model` builds the others."""
    name: str = request.param
    return name


def tiny_config(family: str, **changes: Any) -> Any:
    """The transformers configuration of a tiny model of a family."""
    class_name, extra = _FAMILIES[family]
    return getattr(transformers, class_name)(**{**_SMALL, **extra, **changes})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random causal language model of a family, with two layers unless `changes` say otherwise."""
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _rope(rotary_dim: int, scaling: float = 1.0, interleaved: bool = False) -> Rope:
    return Rope(tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)), scaling, interleaved)


def _uniform(layer: LayerLayout, layers: int = 3, dtype: str = "float32") -> KVLayout:
    return KVLayout("synthetic", (layer,) * layers, dtype, MAX_POSITIONS)


LAYOUTS: dict[str, KVLayout] = {
    "gqa": _uniform(LayerLayout(2, 16, 16, _rope(16))),
    "mha": _uniform(LayerLayout(4, 8, 8, _rope(8))),
    "mqa": _uniform(LayerLayout(1, 32, 32, _rope(32))),
    "bfloat16": _uniform(LayerLayout(2, 16, 16, _rope(16)), dtype="bfloat16"),
    "float16": _uniform(LayerLayout(2, 16, 16, _rope(16)), dtype="float16"),
    "narrow-values": _uniform(LayerLayout(2, 16, 6, _rope(16))),
    "no-rope": _uniform(LayerLayout(2, 16, 16, None)),
    "partial": _uniform(LayerLayout(2, 16, 16, _rope(6))),
    "interleaved": _uniform(LayerLayout(2, 16, 16, _rope(16, interleaved=True))),
    "yarn": _uniform(LayerLayout(2, 16, 16, _rope(16, scaling=1.3))),
    "irregular": KVLayout(
        "synthetic",
        (
            LayerLayout(2, 12, 20, _rope(12)),
            LayerLayout(1, 30, 7, _rope(10, scaling=1.2, interleaved=True)),
            LayerLayout(3, 5, 9, None),
        ),
        "float32",
        MAX_POSITIONS,
    ),
}


def synthetic_chunk(layout: KVLayout, tokens: int, seed: int = 0, start: int = 0) -> KVChunk:
    """A cache with means, falling variances and correlated channels, the same statistics for every seed."""
    noise = torch.Generator().manual_seed(seed)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for index, layer in enumerate(layout.layers):
        fixed = torch.Generator().manual_seed(1000 + index)
        for size, rope, out in ((layer.head_dim, layer.rope, keys), (layer.value_dim, None, values)):
            width = layer.kv_heads * size
            falling = 0.8 ** torch.arange(width)
            mixing = torch.randn(width, width, generator=fixed) * falling[:, None]
            x = torch.randn(tokens, width, generator=noise) @ mixing + 2 * torch.randn(width, generator=fixed)
            x = x.unflatten(1, (layer.kv_heads, size))
            turned = rotate(x, rope, torch.arange(start, start + tokens))
            out.append(turned.to(layout.torch_dtype))
    return KVChunk(keys, values, layout, start)


def decoded_layers(
    codec: Codec,
    blob: bytes | memoryview | OpenBlob,
    layers: range,
    start: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values `[T, H, D]` of some layers, of which alone the sections are read."""
    opened = blob if isinstance(blob, OpenBlob) else codec.open(blob)
    cache = PagedCache.empty(opened.layout, opened.tokens, range(codec.profile.layout.num_layers), torch.device(device))
    slots = torch.arange(opened.tokens, device=device)
    codec.decode_paged([opened], cache, [slots], None if start is None else [start], layers).check()
    keys, values = ([unit[0] for unit in units[layers.start : layers.stop]] for units in (cache.keys, cache.values))
    return keys, values


def fitted_profile(name: str, group: str) -> Profile:
    """A profile of LAYOUTS[name], without a curve."""
    return fitted_to(LAYOUTS[name], group)


@cache
def fitted_to(layout: KVLayout, group: str = "layer", model: str | None = None) -> Profile:
    """A profile of a layout and of weights, learned from synthetic chunks, without a curve."""
    tokens = max(200, 4 * layout.values_per_token // 7 + 8)  # enough for any group
    if layout.max_positions is not None:
        tokens = min(tokens, layout.max_positions - 100)  # too few for a group of all layers, in a short model
    last = 10_000 if layout.max_positions is None else layout.max_positions - tokens
    chunks = [synthetic_chunk(layout, tokens, seed, min(10 * seed, last)) for seed in range(100, 107)]
    return fit(layout, chunks, group, model=model)


def make_codec(name: str, scheme: str, **arguments: Any) -> Codec:
    """A codec of LAYOUTS[name]; a scheme is "lossless" or a group."""
    if scheme == "lossless":
        return Codec(Profile.unlearned(LAYOUTS[name]), "lossless", **arguments)
    return Codec(fitted_profile(name, scheme), **arguments)


@dataclass(frozen=True)
class Books:
    """The bundled model, sequences of both texts `[N, 256]` of which 192 tokens count as cached, and a profile."""

    model: Any
    harbour: torch.Tensor
    orchard: torch.Tensor
    profile: Profile
    prefix: int = 192

    @property
    def layout(self) -> KVLayout:
        """Of the model."""
        return self.profile.layout


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """The bundled model, calibrated on `harbour`."""
    from cuvee.calibration.corpus import BUNDLED_MODEL, load_bundled_model, read_corpus, spread_sequences
    from cuvee.calibration.sequences import reread

    model, _ = load_bundled_model()

    def sequences(name: str) -> torch.Tensor:
        return reread(spread_sequences([read_corpus(name, BUNDLED_MODEL)], 256), 192)

    harbour = sequences("harbour")
    learn = learned_once(calibrate, shared_folder(tmp_path_factory, "learned"))
    profile = learn(model, harbour, "layer", prefix=192, progress=False)
    return Books(model, harbour, sequences("orchard"), profile)


@pytest.fixture(scope="session")
def bundled() -> tuple[Any, Any]:
    """The bundled model and its tokenizer."""
    from cuvee.calibration.corpus import load_bundled_model

    return load_bundled_model()


@pytest.fixture(scope="session")
def with_bos() -> Any:
    """The bundled tokenizer, which puts a token before every text, as those of Llama, Mistral and Gemma do."""
    from tokenizers.processors import TemplateProcessing

    from cuvee.calibration.corpus import BUNDLED_MODEL, load_tokenizer

    tokenizer: Any = load_tokenizer(BUNDLED_MODEL)
    name = tokenizer.convert_ids_to_tokens(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, BOS)])
    return tokenizer


def load_real_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer.

    Where it cannot be had the test is skipped, or fails if the environment variable CUVEE_REQUIRE_MODEL is 1. A
    download that is not the pinned file always fails.
    """
    from cuvee.calibration import corpus as data
    from cuvee.calibration.real_model import ModelUnavailableError

    try:
        return data.load_model("smollm2", "float32"), data.load_tokenizer("smollm2")
    except (ImportError, ModelUnavailableError) as error:
        if os.environ.get("CUVEE_REQUIRE_MODEL") == "1":
            pytest.fail(f"CUVEE_REQUIRE_MODEL=1, but {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def require_smollm2() -> Callable[[], tuple[Any, Any]]:
    """What `smollm2` calls."""
    return load_real_model


@pytest.fixture(scope="session")
def smollm2(require_smollm2: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """The real model in float32 and its tokenizer. Tests that use it carry the marker `real`."""
    return require_smollm2()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--regenerate-golden` writes the vectors of `test_golden.py` anew, which a change of the format needs."""
    parser.addoption("--regenerate-golden", action="store_true", help="write tests/codec/golden anew before testing it")


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the codec logs once per process has not been logged yet."""
    for module in (encoding, id_coding, setting, compiler, torch_threads):
        monkeypatch.setattr(module, "_once", Once(logging.getLogger(module.__name__)))
