"""`KVLayout`: the layout of a model's KV cache.

A layout holds only what the codec must know about a model: heads and head sizes per layer, the rotary frequencies, the
storage dtype, the position limit. It is plain data: frozen, hashable, exact through JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError
from cuvee.codec.rope import Rope
from cuvee.codec.support.fields import check_keys, check_positive, check_tuple, check_type, checked_list
from cuvee.codec.support.torch_modes import without_modes

__all__ = ["KVLayout", "LayerLayout", "Rope"]

LAST_POSITION = (1 << 32) - 1  # the last one that a blob can store


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Shape and positions of one layer's cache.

    With multi-head latent attention, a token has one key, its rotated part, and one value, its latent (`latent`).

    Args:
        kv_heads: number of key/value heads.
        head_dim: size of one key head.
        value_dim: size of one value head (usually `head_dim`).
        rope: rotary embedding of the cached keys, or None if they carry no rotation.
        sliding_window: number of tokens that the layer attends to, or None for all.

    Raises:
        InputError: a count that is not a positive int, or a rope wider than the head.

    Example:
        >>> layer = LayerLayout(kv_heads=2, head_dim=8, value_dim=8, rope=Rope((1.0, 0.1, 0.01, 0.001)))
        >>> layer.key_values + layer.value_values
        32
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope | None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim", "value_dim"):
            check_positive(f"LayerLayout.{name}", getattr(self, name))
        if self.sliding_window is not None:
            check_positive("LayerLayout.sliding_window", self.sliding_window)
        if self.rope is not None:
            check_type("LayerLayout.rope", self.rope, Rope)
            if self.rope.rotary_dim > self.head_dim:
                raise InputError(
                    f"LayerLayout.rope: must rotate at most head_dim = {self.head_dim} dimensions, got "
                    f"{self.rope.rotary_dim}"
                )

    @property
    def key_values(self) -> int:
        """Numbers stored per token for the keys."""
        return self.kv_heads * self.head_dim

    @property
    def value_values(self) -> int:
        """Numbers stored per token for the values."""
        return self.kv_heads * self.value_dim

    @property
    def latent(self) -> bool:
        """Whether a token has a latent, as its value, and the rotated part of keys (multi-head latent attention).

        It shows in the sizes: one head, whose key is rotated as a whole and narrower than its value.
        """
        turned = 0 if self.rope is None else self.rope.rotary_dim
        return self.kv_heads == 1 and turned == self.head_dim < self.value_dim

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**asdict(self), "rope": None if self.rope is None else self.rope.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerLayout:
        """Invert `to_dict`. Raise InputError for missing, unknown or ill-typed entries."""
        check_keys("LayerLayout", data, ("kv_heads", "head_dim", "value_dim", "rope"), optional=("sliding_window",))
        rope = None if data["rope"] is None else Rope.from_dict(data["rope"])
        return cls(**{**data, "rope": rope})


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of a model's whole KV cache. `from_config` makes it; for other models, build it by hand.

    Args:
        model_type: family name, part of the identity.
        layers: one `LayerLayout` per caching layer, in order.
        dtype: "bfloat16", "float16" or "float32": how the cache stores its values.
        max_positions: number of positions that the model can address, including those added by scaling its RoPE; None
            for no limit.
        states: whether the model's layers hold more than these keys and values, such as recurrent states. A cache is
            whole only with its blob of states, which `encode_cache` makes; there may be no `layers` then.

    Raises:
        InputError: a field of the wrong type or range.

    Example:
        >>> layer = LayerLayout(kv_heads=2, head_dim=8, value_dim=8, rope=None)
        >>> layout = KVLayout("mine", (layer,) * 3, dtype="bfloat16", max_positions=4096)
        >>> layout.bytes_per_token
        192
        >>> KVLayout.from_dict(layout.to_dict()) == layout
        True
    """

    model_type: str
    layers: tuple[LayerLayout, ...]
    dtype: str
    max_positions: int | None
    states: bool = False
    _fingerprint: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_type("KVLayout.model_type", self.model_type, str)
        if not self.model_type:
            raise InputError("KVLayout.model_type: must name a family, got an empty string")
        check_type("KVLayout.states", self.states, bool)
        if self.layers or not self.states:
            check_tuple("KVLayout.layers", self.layers, "LayerLayout")
        for index, layer in enumerate(self.layers):
            check_type(f"KVLayout.layers[{index}]", layer, LayerLayout)
        check_type("KVLayout.dtype", self.dtype, str)
        if self.dtype not in TORCH_DTYPES:
            raise InputError(f"KVLayout.dtype: must be one of {', '.join(TORCH_DTYPES)}, got {self.dtype!r}")
        if self.max_positions is not None:
            check_positive("KVLayout.max_positions", self.max_positions)

    @classmethod
    @without_modes
    def from_config(cls, hf_config: Any, dtype: str | torch.dtype | None = None, *, states: bool = False) -> KVLayout:
        """Make the layout of a transformers model from its configuration alone.

        A model without weights shows what its layers keep, and a small one of the same class, with random weights, how
        keys depend on positions (`cuvee.codec.models.stand_in`). This takes about a second for a new configuration;
        results are kept in memory.

        Args:
            hf_config: transformers `PreTrainedConfig` of a text decoder.
            dtype: dtype of the cache; None takes `hf_config.dtype`.
            states: also take a model whose layers hold something else than keys and values of tokens, such as recurrent
                states. Its layout names the keys and values alone (`KVLayout.states`), and only `encode_cache` and
                `decode_cache` keep the rest.

        Raises:
            UnsupportedModelError: transformers cannot build or run the model, or, without `states`, its cache holds
                something else than keys and values of tokens; the message names the layer and what it holds.
            InputError: the config is a multimodal wrapper, or no dtype is known.
            OutOfMemoryError: there is no memory for the small model.
            ImportError: transformers is not installed.

        Example:
            >>> from transformers import LlamaConfig
            >>> KVLayout.from_config(LlamaConfig(num_key_value_heads=8), "bfloat16").bytes_per_token
            131072
        """
        from cuvee.codec.models.measured import describe_config

        return cls._of(**describe_config(hf_config, dtype, states))

    @classmethod
    @without_modes
    def of(cls, model: object, *, states: bool = False) -> KVLayout:
        """Make the layout of a transformers model or configuration; return a layout unchanged.

        A model runs a few random tokens at several positions, once. A configuration is measured as by `from_config`,
        which tells what `states` means.

        Raises:
            InputError: `model` is none of these.
            UnsupportedModelError, OutOfMemoryError, ImportError: as for `from_config`.

        Example:
            >>> from transformers import LlamaConfig
            >>> KVLayout.of(LlamaConfig(num_hidden_layers=2, dtype="bfloat16")).num_layers
            2
        """
        if isinstance(model, KVLayout):
            return model
        if not hasattr(getattr(model, "config", model), "get_text_config"):
            raise InputError(
                f"model: must be a transformers model or configuration, or a KVLayout, got {type(model).__name__}"
            )
        from cuvee.codec.models.measured import describe_model

        return cls._of(**describe_model(model, states))

    @classmethod
    def _of(cls, layers: Sequence[tuple[Any, ...]], **others: Any) -> KVLayout:
        """Make a layout, given the arguments of each `LayerLayout`."""
        return cls(layers=tuple(LayerLayout(*arguments) for arguments in layers), **others)

    def need_layers(self) -> None:
        """Raise InputError for a layout of states alone, which has no keys and values."""
        if not self.layers:
            raise InputError("layout: must have layers with keys and values, got states alone: code them as states")

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
        """`dtype` as a torch dtype."""
        return TORCH_DTYPES[self.dtype]

    @property
    def relocatable(self) -> bool:
        """Whether cached keys can be moved to other positions: False if no layer has RoPE.

        `from_config` and `of` give no layer RoPE if the keys of any layer depend on positions otherwise (GPT-2,
        LongRoPE). Such a cache is bound to its positions, and its keys are coded as they are.
        """
        return any(layer.rope is not None for layer in self.layers)

    def check_positions(self, start: object, tokens: int) -> int:
        """Return `start` if tokens from this position on are among the positions of the model and of a blob.

        Raises:
            InputError: they are not.
        """
        if type(start) is not int or not 0 <= start <= LAST_POSITION - tokens:
            raise InputError(f"start: must be an int of at least 0 and below 2**32 - {tokens}, got {start!r}")
        limit = self.max_positions
        if limit is None or start + tokens <= limit:
            return start
        allowed = f"the {limit} positions of the model ({self.model_type}: KVLayout.max_positions, which from_config "
        allowed += "takes from max_position_embeddings and the factor of scaled RoPE)"
        remedy = "correct the model's configuration if it serves more"
        if start:
            raise InputError(f"start: must leave room for {tokens} tokens among {allowed}, got {start}: {remedy}")
        raise InputError(f"tokens: must be among {allowed}, got {tokens} tokens: {remedy}")

    def check_move(self, encoded_at: int, start: object, tokens: int) -> int:
        """Return `start` if tokens that were encoded at position `encoded_at` can move there.

        Raises:
            InputError: the model has no such positions, or no RoPE.
        """
        checked = self.check_positions(start, tokens)
        if checked != encoded_at and not self.relocatable:
            raise InputError(
                f"start: must be {encoded_at}, where the tokens were encoded, got {checked}: {self.model_type} has "
                "no RoPE, so its cache cannot move"
            )
        return checked

    def shard_heads(self, rank: int, size: int) -> tuple[range, ...]:
        """Return the KV heads of a tensor-parallel rank, a range per layer, as vLLM assigns them.

        Each rank gets an equal number of adjacent heads. With more ranks than heads, adjacent ranks share a head.

        Args:
            rank: rank in the group, 0 … size - 1.
            size: ranks in the group.

        Raises:
            InputError: a rank outside the group, or a layer whose heads cannot be divided evenly.
        """
        check_positive("size", size)
        if type(rank) is not int or not 0 <= rank < size:
            raise InputError(f"rank: must be one of 0 … {size - 1}, got {rank!r}")
        parts = []
        for index, layer in enumerate(self.layers):
            heads = layer.kv_heads
            if heads % size and size % heads:
                raise InputError(
                    f"size: must divide the {heads} KV heads of layer {index} or be a multiple of them, got {size}"
                )
            first = rank * heads // size
            parts.append(range(first, first + max(heads // size, 1)))
        return tuple(parts)

    def shard(self, rank: int, size: int) -> KVLayout:
        """Return the layout of one tensor-parallel rank's part of the cache: fewer heads per layer, all else equal.

        All ranks have the same layout and fingerprint. A store of several ranks' chunks must therefore name the rank.

        Args, Raises: as `shard_heads`.
        """
        parts = self.shard_heads(rank, size)
        layers = (replace(layer, kv_heads=len(heads)) for layer, heads in zip(self.layers, parts, strict=True))
        return replace(self, layers=tuple(layers))

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that identify this layout: BLAKE2b over canonical JSON.

        Frequencies enter with four significant digits, because the last bit of float32 `pow` differs between CPUs
        (baseline x86 and AVX2 disagree in about one frequency in seventy), and a blob must be readable on every machine
        of a fleet. Where they are powers of a base, or these divided by a factor, they are computed from it first, in
        float64: a float32 may lie so close to the middle of two such numbers that its last bit decides. To find out
        whether two caches belong to one model, compare fingerprints, not layouts.
        """
        if self._fingerprint is None:
            data = self.to_dict()
            for kind in data["kinds"]:
                if kind["rope"] is not None:
                    kind["rope"]["inv_freq"] = [f"{value:.3e}" for value in _exact(kind["rope"]["inv_freq"])]
                    kind["rope"]["attention_scaling"] = f"{kind['rope']['attention_scaling']:.6e}"
            # Layers that differ only in a last bit must not count as two kinds here.
            data["layers"] = [_canonical_json(data["kinds"][index]) for index in data["layers"]]
            del data["kinds"]
            digest = hashlib.blake2b(_canonical_json(data).encode(), digest_size=16).digest()
            object.__setattr__(self, "_fingerprint", digest)
            return digest
        return self._fingerprint

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: `kinds` lists each distinct layer once, `layers` indexes into it."""
        kinds = list(dict.fromkeys(self.layers))
        index = {kind: position for position, kind in enumerate(kinds)}
        return {
            "model_type": self.model_type,
            "kinds": [kind.to_dict() for kind in kinds],
            "layers": [index[layer] for layer in self.layers],
            "dtype": self.dtype,
            "max_positions": self.max_positions,
            **({"states": True} if self.states else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVLayout:
        """Invert `to_dict`. Raise InputError for missing, unknown or ill-typed entries."""
        required = ("model_type", "kinds", "layers", "dtype", "max_positions")
        check_keys("KVLayout", data, required=required, optional=("states",))
        kinds = [LayerLayout.from_dict(kind) for kind in checked_list("KVLayout.kinds", data["kinds"])]
        layers = []
        for position, index in enumerate(checked_list("KVLayout.layers", data["layers"])):
            if type(index) is not int or not 0 <= index < len(kinds):
                raise InputError(f"KVLayout.layers[{position}]: must index one of {len(kinds)} kinds, got {index!r}")
            layers.append(kinds[index])
        states = data.get("states", False)
        return cls(data["model_type"], tuple(layers), data["dtype"], data["max_positions"], states)


def _exact(frequencies: Sequence[float]) -> Sequence[float]:
    """Return what these float32 values are roundings of: base^(-2i/d), or that divided by a factor; others as they are.

    Scaled RoPE divides all frequencies (linear), or the low ones only, and mixes the two between (Llama 3, YaRN).
    """
    count = len(frequencies)
    if count < 2 or not 0 < frequencies[-1] < frequencies[0]:
        return frequencies
    first = frequencies[0]
    factor = float(f"{1 / first:.5e}")  # of all frequencies
    for index in (count - 1, count // 2, count // 4, count // 8):  # the high ones tell the base where low ones do not
        if not index or not 0 < frequencies[index] < first:
            continue
        base = float(f"{(first / frequencies[index]) ** (count / index):.5e}")  # bases have few digits
        exact = [base ** (-at / count) / factor for at in range(count)]
        if not all(map(_are_alike, frequencies[: index + 1], exact)):
            continue
        low = float(f"{exact[-1] / frequencies[-1]:.3e}")  # the factor of the low ones
        return [
            value if _are_alike(frequency, value) else value / low if _are_alike(frequency * low, value) else frequency
            for frequency, value in zip(frequencies, exact, strict=True)
        ]
    return frequencies


def _are_alike(frequency: float, exact: float) -> bool:
    """Return whether a float32 value may be a rounding of a number."""
    return abs(frequency - exact) <= 2e-6 * exact


def _canonical_json(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
