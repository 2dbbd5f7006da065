"""What a KV cache looks like (`KVLayout`) and a run of its tokens (`KVChunk`).

A layout holds what the codec must know about a model and nothing else: heads and head sizes per layer, the
rotary frequencies, the storage dtype, the position limit. It is plain data: frozen, hashable, exact through
JSON.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from cuvee.codec.errors import InputError, UnsupportedModel

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one layer (RoFormer, arXiv:2104.09864).

    Args:
        inv_freq: angle per position of each rotated pair (rad/token), finite, not negative: the model's own
            float32 values; others are rounded to float32.
        attention_scaling: factor on cos and sin (YaRN, arXiv:2309.00071); the keys carry it once.
        interleaved: pairs are dimensions (2i, 2i+1), not (i, i + rotary_dim/2).

    Raises:
        InputError: an empty, negative or non-finite table, or a scaling that is not positive and finite.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        _check_tuple("Rope.inv_freq", self.inv_freq, "frequency (rope=None says no RoPE)")
        object.__setattr__(self, "inv_freq", tuple(_float32(value) for value in self.inv_freq))
        object.__setattr__(self, "attention_scaling", _scaling(self.attention_scaling))
        _check_type("Rope.interleaved", self.interleaved, bool)

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of a head that are rotated."""
        return 2 * len(self.inv_freq)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict; floats survive `json` exactly."""
        return {
            "inv_freq": list(self.inv_freq),
            "attention_scaling": self.attention_scaling,
            "interleaved": self.interleaved,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rope:
        """Inverse of `to_dict`. Raises InputError for missing, unknown or ill-typed entries."""
        _check_keys("Rope", data, required=("inv_freq",), optional=("attention_scaling", "interleaved"))
        return cls(**{**data, "inv_freq": tuple(_list("Rope.inv_freq", data["inv_freq"]))})


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Shape and positions of one layer's cache.

    Args:
        kv_heads: number of key/value heads.
        head_dim: size of one key head.
        value_dim: size of one value head (usually `head_dim`).
        rope: rotary embedding of the cached keys, or None if they carry no rotation.
        sliding_window: number of tokens the layer attends to, or None for all.

    Raises:
        InputError: a count that is not a positive int, or a rope wider than the head.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope | None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim", "value_dim"):
            _check_positive(f"LayerLayout.{name}", getattr(self, name))
        if self.sliding_window is not None:
            _check_positive("LayerLayout.sliding_window", self.sliding_window)
        if self.rope is not None:
            _check_type("LayerLayout.rope", self.rope, Rope)
            if self.rope.rotary_dim > self.head_dim:
                raise InputError(
                    f"LayerLayout.rope rotates {self.rope.rotary_dim} dimensions, but head_dim is {self.head_dim}"
                )

    @property
    def key_values(self) -> int:
        """Numbers stored per token for the keys."""
        return self.kv_heads * self.head_dim

    @property
    def value_values(self) -> int:
        """Numbers stored per token for the values."""
        return self.kv_heads * self.value_dim

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return {
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "rope": None if self.rope is None else self.rope.to_dict(),
            "sliding_window": self.sliding_window,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerLayout:
        """Inverse of `to_dict`. Raises InputError for missing, unknown or ill-typed entries."""
        _check_keys(
            "LayerLayout",
            data,
            required=("kv_heads", "head_dim", "value_dim", "rope"),
            optional=("sliding_window",),
        )
        rope = None if data["rope"] is None else Rope.from_dict(data["rope"])
        return cls(**{**data, "rope": rope})


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of a model's whole KV cache; `from_config` makes one, or build it by hand for another model.

    Args:
        model_type: family name, part of the identity.
        layers: one `LayerLayout` per layer that caches, in order.
        dtype: "bfloat16", "float16" or "float32": how the cache stores its values.
        max_positions: number of positions the model can address, or None for no limit.

    Raises:
        InputError: a field of the wrong type or range.
    """

    model_type: str
    layers: tuple[LayerLayout, ...]
    dtype: str
    max_positions: int | None
    _fingerprint: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_type("KVLayout.model_type", self.model_type, str)
        if not self.model_type:
            raise InputError("KVLayout.model_type must name a family, got an empty string")
        _check_tuple("KVLayout.layers", self.layers, "LayerLayout")
        for index, layer in enumerate(self.layers):
            _check_type(f"KVLayout.layers[{index}]", layer, LayerLayout)
        _check_type("KVLayout.dtype", self.dtype, str)
        if self.dtype not in TORCH_DTYPES:
            raise InputError(f"KVLayout.dtype must be one of {', '.join(TORCH_DTYPES)}, got {self.dtype!r}")
        if self.max_positions is not None:
            _check_positive("KVLayout.max_positions", self.max_positions)

    @classmethod
    def from_config(cls, hf_config: Any, dtype: str | torch.dtype | None = None) -> KVLayout:
        """The layout of a transformers model, with the frequencies its own rotary module computes.

        Args:
            hf_config: transformers `PreTrainedConfig` of a text decoder.
            dtype: dtype of the cache; None takes `hf_config.dtype`.

        Raises:
            UnsupportedModel: the attention or the positions are of a kind cuvee does not handle.
            InputError: the config is a multimodal wrapper, or no dtype is known.
            ImportError: transformers is not installed.
        """
        return _layout_from_config(hf_config, dtype)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def values_per_token(self) -> int:
        """Numbers stored per token over all layers, keys and values."""
        return sum(layer.key_values + layer.value_values for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the uncompressed cache per token."""
        return self.values_per_token * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch spells it."""
        return TORCH_DTYPES[self.dtype]

    @property
    def relocatable(self) -> bool:
        """Whether cached keys can be moved to other positions: False where no layer has RoPE (GPT-2)."""
        return any(layer.rope is not None for layer in self.layers)

    def shard_heads(self, rank: int, size: int) -> tuple[range, ...]:
        """The KV heads, a range per layer, that a rank of a tensor-parallel group holds, as vLLM deals them out.

        Adjacent heads in equal parts; where there are more ranks than heads, adjacent ranks share one.

        Args:
            rank: of the group, 0 … size - 1.
            size: ranks in the group.

        Raises:
            InputError: a rank outside the group, or a layer whose heads cannot be dealt out evenly.
        """
        _check_positive("size", size)
        if type(rank) is not int or not 0 <= rank < size:
            raise InputError(f"rank must be one of 0 … {size - 1}, got {rank!r}")
        parts = []
        for index, layer in enumerate(self.layers):
            heads = layer.kv_heads
            if heads % size and size % heads:
                raise InputError(
                    f"size must divide the {heads} KV heads of layer {index} or be a multiple of them, got {size}"
                )
            first = rank * heads // size
            parts.append(range(first, first + max(heads // size, 1)))
        return tuple(parts)

    def shard(self, rank: int, size: int) -> KVLayout:
        """The layout of one tensor-parallel rank's part of the cache: fewer heads a layer, all else alike.

        Ranks have equal layouts, so a fingerprint does not tell them apart: whoever stores chunks of several ranks
        must name the rank.

        Args, Raises: as `shard_heads`.
        """
        parts = self.shard_heads(rank, size)
        layers = (replace(layer, kv_heads=len(heads)) for layer, heads in zip(self.layers, parts, strict=True))
        return replace(self, layers=tuple(layers))

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that name this layout: BLAKE2b over canonical JSON.

        Frequencies enter with four significant digits. The last bit of float32 `pow` differs between CPUs
        (baseline x86 and AVX2 disagree in about one frequency in seventy), and a blob must be readable on
        another machine of a fleet. Compare fingerprints, not layouts, to ask whether two caches belong to
        one model.
        """
        if self._fingerprint is None:
            data = self.to_dict()
            for kind in data["kinds"]:
                if kind["rope"] is not None:
                    kind["rope"]["inv_freq"] = [f"{value:.3e}" for value in kind["rope"]["inv_freq"]]
                    kind["rope"]["attention_scaling"] = f"{kind['rope']['attention_scaling']:.6e}"
            # Layers that differ by a last bit only must not count as two kinds here.
            data["layers"] = [_canonical_json(data["kinds"][index]) for index in data["layers"]]
            del data["kinds"]
            digest = hashlib.blake2b(_canonical_json(data).encode(), digest_size=16).digest()
            object.__setattr__(self, "_fingerprint", digest)
            return digest
        return self._fingerprint

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict: `kinds` lists each distinct layer once, `layers` indexes into it."""
        kinds = list(dict.fromkeys(self.layers))
        index = {kind: position for position, kind in enumerate(kinds)}
        return {
            "model_type": self.model_type,
            "kinds": [kind.to_dict() for kind in kinds],
            "layers": [index[layer] for layer in self.layers],
            "dtype": self.dtype,
            "max_positions": self.max_positions,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVLayout:
        """Inverse of `to_dict`. Raises InputError for missing, unknown or ill-typed entries."""
        _check_keys("KVLayout", data, required=("model_type", "kinds", "layers", "dtype", "max_positions"))
        kinds = [LayerLayout.from_dict(kind) for kind in _list("KVLayout.kinds", data["kinds"])]
        layers = []
        for position, index in enumerate(_list("KVLayout.layers", data["layers"])):
            if type(index) is not int or not 0 <= index < len(kinds):
                raise InputError(f"KVLayout.layers[{position}] must index one of {len(kinds)} kinds, got {index!r}")
            layers.append(kinds[index])
        return cls(data["model_type"], tuple(layers), data["dtype"], data["max_positions"])

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII, exact floats."""
        return _canonical_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> KVLayout:
        """Inverse of `to_json`. Raises InputError for text that is not a layout."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the layout is not JSON: {error}") from error
        return cls.from_dict(data)


@dataclass(frozen=True, slots=True, init=False, eq=False)
class KVChunk:
    """A run of adjacent tokens of one sequence's KV cache, keys as the model cached them (after RoPE).

    Args:
        keys: tensor [L, T, H, D], or a sequence of L tensors [T, H_l, D_l]; dtype `layout.dtype`.
        values: the same with the value size of each layer.
        layout: layout of the model.
        start: position of the first token.

    The tensors are kept as views: nothing is copied.

    Raises:
        InputError: wrong count, shape, dtype or device, no tokens, or positions the model does not have.
    """

    keys: tuple[torch.Tensor, ...] = field(repr=False)
    values: tuple[torch.Tensor, ...] = field(repr=False)
    layout: KVLayout = field(repr=False)
    start: int
    tokens: int

    def __init__(
        self,
        keys: torch.Tensor | Sequence[torch.Tensor],
        values: torch.Tensor | Sequence[torch.Tensor],
        layout: KVLayout,
        start: int = 0,
    ) -> None:
        _check_type("layout", layout, KVLayout)
        key_layers = _per_layer("keys", keys, layout)
        value_layers = _per_layer("values", values, layout)
        tokens, device = key_layers[0].shape[0], key_layers[0].device
        if tokens == 0:
            raise InputError("keys hold no tokens (T = 0): a chunk needs at least one")
        for index, layer in enumerate(layout.layers):
            for name, tensor, size in (
                ("keys", key_layers[index], layer.head_dim),
                ("values", value_layers[index], layer.value_dim),
            ):
                expected = (tokens, layer.kv_heads, size)
                if tuple(tensor.shape) != expected:
                    raise InputError(
                        f"{name} of layer {index} must have shape [T, H, D] = {list(expected)}, "
                        f"got {list(tensor.shape)}"
                    )
                if tensor.dtype != layout.torch_dtype:
                    raise InputError(_wrong_dtype(f"{name} of layer {index}", tensor.dtype, layout.dtype))
                if tensor.device != device:
                    raise InputError(
                        f"{name} of layer {index} are on {tensor.device}, keys of layer 0 on {device}: "
                        "move all layers to one device"
                    )
        if type(start) is not int or start < 0:
            raise InputError(f"start must be an int >= 0, got {start!r}")
        if layout.max_positions is not None and start + tokens > layout.max_positions:
            raise InputError(
                f"start + tokens = {start} + {tokens} is beyond the {layout.max_positions} positions of the "
                f"model ({layout.model_type}, KVLayout.max_positions)"
            )
        object.__setattr__(self, "keys", key_layers)
        object.__setattr__(self, "values", value_layers)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "tokens", tokens)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, uncompressed."""
        return self.tokens * self.layout.bytes_per_token

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.keys[0].device

    def slice(self, t0: int, t1: int) -> KVChunk:
        """Tokens t0 <= t < t1 of this chunk (views), at their own positions.

        Raises:
            InputError: not 0 <= t0 < t1 <= tokens.
        """
        if type(t0) is not int or type(t1) is not int or not 0 <= t0 < t1 <= self.tokens:
            raise InputError(f"slice needs 0 <= t0 < t1 <= {self.tokens}, got t0={t0!r}, t1={t1!r}")
        return KVChunk(
            [keys[t0:t1] for keys in self.keys],
            [values[t0:t1] for values in self.values],
            self.layout,
            self.start + t0,
        )

    @classmethod
    def concat(cls, chunks: Sequence[KVChunk]) -> KVChunk:
        """One chunk out of adjacent ones (copies).

        Raises:
            InputError: no chunks, a gap or overlap, or chunks of different layouts.
        """
        if not chunks:
            raise InputError("concat needs at least one chunk")
        layout = chunks[0].layout
        for index in range(1, len(chunks)):
            if chunks[index].layout.fingerprint != layout.fingerprint:
                raise InputError(f"chunks[{index}] has another layout than chunks[0]")
            if chunks[index].start != chunks[index - 1].end:
                raise InputError(
                    f"chunks[{index}] starts at {chunks[index].start}, but chunks[{index - 1}] "
                    f"ends at {chunks[index - 1].end}: pass adjacent chunks in order"
                )
        return cls(
            [torch.cat(layer) for layer in zip(*(chunk.keys for chunk in chunks), strict=True)],
            [torch.cat(layer) for layer in zip(*(chunk.values for chunk in chunks), strict=True)],
            layout,
            chunks[0].start,
        )


def _per_layer(name: str, tensors: torch.Tensor | Sequence[torch.Tensor], layout: KVLayout) -> tuple[torch.Tensor, ...]:
    if isinstance(tensors, torch.Tensor):
        if tensors.ndim != 4:
            raise InputError(f"{name} must have shape [L, T, H, D], got {list(tensors.shape)}")
        layers = tensors.unbind(0)
    else:
        layers = tuple(tensors)
        for index, tensor in enumerate(layers):
            shape = getattr(tensor, "shape", type(tensor).__name__)
            if isinstance(shape, str) or len(shape) != 3:
                raise InputError(f"{name} of layer {index} must be a tensor [T, H, D], got {shape}")
    if len(layers) != layout.num_layers:
        raise InputError(f"{name} have {len(layers)} layers, the layout ({layout.model_type}) {layout.num_layers}")
    return tuple(layer.detach() for layer in layers)  # a chunk is data: no graph hangs on to it


def _wrong_dtype(what: str, got: torch.dtype, expected: str) -> str:
    if got in (torch.uint8, torch.int8) or str(got).startswith("torch.float8"):
        return (
            f"{what} are {got}: an fp8 or int8 cache must be dequantised by value with its scales "
            f"to {expected} first, never reinterpreted"
        )
    return f"{what} are {got}, the layout says {expected}: convert them, or build the layout with that dtype"


def _float32(value: Any) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (struct.error, OverflowError, TypeError) as error:
        raise InputError(f"Rope.inv_freq must hold float32 numbers, got {value!r}") from error
    if isinstance(value, bool) or not math.isfinite(rounded) or rounded < 0:
        raise InputError(f"Rope.inv_freq must hold finite numbers >= 0, got {value!r}")
    return rounded


def _scaling(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"Rope.attention_scaling must be a finite number above 0, got {value!r}")
    return float(value)


def _check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise InputError(f"{name} must be a {kind.__name__}, got {value!r}")


def _check_tuple(name: str, value: Any, of: str) -> None:
    if not isinstance(value, tuple) or not value:
        raise InputError(f"{name} must be a tuple with at least one {of}, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if type(value) is not int or value <= 0:
        raise InputError(f"{name} must be an int above 0, got {value!r}")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list, got {value!r}")
    return value


def _check_keys(owner: str, data: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(data, Mapping):
        raise InputError(f"{owner} must be an object with named entries, got {type(data).__name__}")
    for key in data:
        if key not in required and key not in optional:
            close = difflib.get_close_matches(str(key), required + optional, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(required + optional)}"
            raise InputError(f"{owner} has no entry {key!r}: {hint}")
    for key in required:
        if key not in data:
            raise InputError(f"{owner} lacks the entry {key!r}")


def _canonical_json(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


class _Family(NamedTuple):
    """A model family whose cached keys were checked against transformers.

    rotary: "module.Class" of its rotary embedding, None for absolute positions.
    grouped: the model reads num_key_value_heads and head_dim; others ignore such entries of a config.
    """

    rotary: str | None
    interleaved: bool = False
    grouped: bool = True


_FAMILIES: dict[str, _Family] = {
    "cohere": _Family("cohere.CohereRotaryEmbedding", interleaved=True),
    "gemma": _Family("gemma.GemmaRotaryEmbedding"),
    "gemma2": _Family("gemma2.Gemma2RotaryEmbedding"),
    "gemma3_text": _Family("gemma3.Gemma3RotaryEmbedding"),
    "gpt2": _Family(None, grouped=False),
    "gpt_neox": _Family("gpt_neox.GPTNeoXRotaryEmbedding", grouped=False),
    "llama": _Family("llama.LlamaRotaryEmbedding"),
    "mistral": _Family("mistral.MistralRotaryEmbedding"),
    "mixtral": _Family("mixtral.MixtralRotaryEmbedding"),
    "phi3": _Family("phi3.Phi3RotaryEmbedding"),
    "qwen2": _Family("qwen2.Qwen2RotaryEmbedding"),
    "qwen2_moe": _Family("qwen2_moe.Qwen2MoeRotaryEmbedding"),
    "qwen3": _Family("qwen3.Qwen3RotaryEmbedding"),
    "qwen3_moe": _Family("qwen3_moe.Qwen3MoeRotaryEmbedding"),
}

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SEQUENCE_DEPENDENT_ROPE = {"dynamic": "dynamic NTK RoPE", "longrope": "LongRoPE"}
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")

_RECURRENT = frozenset(
    (
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
        *("lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    )
)


def _layout_from_config(config: Any, dtype: str | torch.dtype | None) -> KVLayout:
    try:
        from transformers import PreTrainedConfig
    except ImportError as error:
        raise ImportError("KVLayout.from_config needs transformers 5 or later: pip install transformers") from error
    if not isinstance(config, PreTrainedConfig):
        raise InputError(f"hf_config must be a transformers PreTrainedConfig, got {type(config).__name__}")
    _refuse_unsupported(config)
    dtype_name = _dtype_name(config.dtype if dtype is None else dtype)
    family = _FAMILIES[config.model_type]
    layer_types = _layer_types(config)
    ropes = _ropes(config, family, set(layer_types))
    heads = config.num_attention_heads
    kv_heads = (family.grouped and getattr(config, "num_key_value_heads", None)) or heads
    head_dim = (family.grouped and getattr(config, "head_dim", None)) or config.hidden_size // heads
    layers = tuple(
        LayerLayout(
            kv_heads,
            head_dim,
            head_dim,
            ropes[layer_type],
            config.sliding_window if layer_type == "sliding_attention" else None,
        )
        for layer_type in layer_types
    )
    return KVLayout(config.model_type, layers, dtype_name, config.max_position_embeddings)


def _refuse_unsupported(config: Any) -> None:
    kind = config.model_type
    rope_dicts = _rope_dicts(config)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModel(f"{kind}: encoder-decoder and cross-attention caches are not supported")
    if getattr(config, "text_config", None) is not None:
        raise InputError(
            f"hf_config is a multimodal wrapper ({kind}): pass its text decoder, hf_config.get_text_config()"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModel(f"{kind}: multi-head latent attention (MLA, kv_lora_rank) is not supported")
    if kind in _RECURRENT:
        raise UnsupportedModel(f"{kind}: recurrent, state-space and hybrid models are not supported")
    if kind in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise UnsupportedModel(f"{kind}: ALiBi positions are not supported")
    if any("mrope_section" in parameters for parameters in rope_dicts):
        raise UnsupportedModel(f"{kind}: multimodal RoPE (M-RoPE, mrope_section) is not supported")
    if kind not in _FAMILIES:
        raise UnsupportedModel(
            f"{kind or type(config).__name__}: not among the model types checked against transformers "
            f"({', '.join(_FAMILIES)}); if you know its cache, build KVLayout by hand"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(f"{kind}: bidirectional attention has no KV cache to continue from")
    for parameters in rope_dicts:
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type in _SEQUENCE_DEPENDENT_ROPE:
            raise UnsupportedModel(
                f"{kind}: {_SEQUENCE_DEPENDENT_ROPE[rope_type]} (rope_type {rope_type!r}) is not supported: "
                "its frequencies change with the sequence length, and a cached key does not tell which it got"
            )
        if rope_type not in _ROPE_TYPES:
            raise UnsupportedModel(
                f"{kind}: rope_type {rope_type!r} is not supported (supported: {', '.join(_ROPE_TYPES)})"
            )


def _rope_dicts(config: Any) -> list[Mapping[str, Any]]:
    """The RoPE parameters of the config: one dict, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _layer_types(config: Any) -> list[str]:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    for index, layer_type in enumerate(layer_types):
        if layer_type not in _ATTENTION_LAYERS:
            raise UnsupportedModel(
                f"{config.model_type}: layer {index} is {layer_type!r} (supported: {', '.join(_ATTENTION_LAYERS)})"
            )
    return list(layer_types)


def _ropes(config: Any, family: _Family, layer_types: set[str]) -> dict[str, Rope | None]:
    if family.rotary is None:
        return dict.fromkeys(layer_types)
    module_name, class_name = family.rotary.split(".")
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    # A surrounding `torch.device` context (meta, cuda) must not decide where or how the table is computed.
    with torch.device("cpu"):
        rotary = getattr(module, class_name)(config)
    ropes: dict[str, Rope | None] = {}
    for layer_type in layer_types:
        prefix = "" if hasattr(rotary, "inv_freq") else f"{layer_type}_"
        inv_freq: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        ropes[layer_type] = Rope(
            tuple(inv_freq.tolist()), float(getattr(rotary, f"{prefix}attention_scaling")), family.interleaved
        )
    return ropes


def _dtype_name(dtype: Any) -> str:
    if dtype is None:
        raise InputError("hf_config names no dtype: pass dtype=, for example dtype=model.dtype")
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise InputError(
            f"dtype must be one of {', '.join(TORCH_DTYPES)}, got {dtype!r}: dequantise other caches by value first"
        )
    return name
