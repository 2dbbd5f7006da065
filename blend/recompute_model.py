"""The interface of models for blending (`RecomputeModel`), and its implementation for transformers.

Selected tokens go through unmodified decoder layers. In place of its cache, each layer gets an object that writes the
new keys and values among the cached ones and returns all of them. A mask by position restricts the attention of each
selected token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""The model types whose layers were checked against a full prefill."""

Exchange = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes a layer's new keys and values `[H, S, D]` and returns those of the whole prompt `[H, T, D]`."""


class RecomputeModel(Protocol):
    """A model that can compute S of the T tokens of a prompt. C is the size of a token's hidden state."""

    layout: KVLayout

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[S, C]` of tokens int64 `[S]` before the first layer."""
        ...

    def rows(self, positions: torch.Tensor, visible: torch.Tensor | None) -> Any:
        """Prepare the tokens at `positions` `[S]` for `layer` and `queries`, whose `rows` this returns.

        Args:
            positions: int64, rising.
            visible: bool `[S, T]`: the tokens of the prompt that each token may attend to. None: itself and all tokens
                before it.
        """
        ...

    def layer(self, index: int, hidden: torch.Tensor, rows: Any, exchange: Exchange) -> torch.Tensor:
        """Return the hidden states `[S, C]` after a layer, given those before it."""
        ...

    def queries(self, index: int, hidden: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return the rotated queries `[heads, S, D]`, scaled for the softmax, of hidden states `[S, C]` before a layer.

        `layer` must have been called with the same arguments.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    position_ids: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None


class TransformersModel:
    """An unmodified decoder of transformers, in eval mode, with "sdpa" or "eager" attention.

    Raises:
        UnsupportedModelError: the family was not checked, it has sliding windows, or `KVLayout.from_config` refuses it.
        InputError: not a transformers model, or it is in training mode or has another attention implementation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = getattr(model, "config", None)
        if config is None or getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise InputError(f"model: must be a transformers causal language model, got {type(model).__name__}")
        self.layout = KVLayout.from_config(config, dtype=model.dtype)
        if any(layer.sliding_window is not None for layer in self.layout.layers):
            raise UnsupportedModelError(
                f"{config.model_type}: sliding windows cannot be blended, since a layer lacks the tokens it dropped"
            )
        base: Any = model.base_model
        if config.model_type not in FAMILIES or not hasattr(base, "rotary_emb"):
            raise UnsupportedModelError(
                f"{config.model_type} ({type(model).__name__}): blending was checked with {', '.join(FAMILIES)} only"
            )
        if model.training:
            raise InputError("model: must be in eval mode, got training mode; call model.eval() first")
        self._attention = config._attn_implementation
        if self._attention not in ("sdpa", "eager"):
            raise InputError(
                f"model: must have sdpa or eager attention, got {self._attention!r}, which takes no mask by position: "
                'load it with attn_implementation="sdpa"'
            )
        self._model: Any = model
        self._base = base
        self.vocabulary: int = len(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        device: torch.device = self._model.device
        return device

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `RecomputeModel`, also for the methods below."""
        hidden: torch.Tensor = self._model.get_input_embeddings()(tokens.to(self.device))
        return hidden

    def rows(self, positions: torch.Tensor, visible: torch.Tensor | None) -> _Rows:  # noqa: D102
        position_ids = positions.to(self.device)[None]
        cos, sin = self._base.rotary_emb(torch.empty(0, dtype=self._model.dtype, device=self.device), position_ids)
        mask: torch.Tensor | None = None
        end = int(positions[-1]) + 1
        # For all tokens from the first on, "sdpa" applies the causal mask by itself. Eager attention does not.
        if visible is None and (len(positions) < end or self._attention == "eager"):
            visible = positions[:, None] >= torch.arange(end)
        if visible is not None:
            mask = torch.zeros(visible.shape, dtype=self._model.dtype, device=self.device)
            mask.masked_fill_(~visible.to(self.device), torch.finfo(mask.dtype).min)
            mask = mask[None, None]
        return _Rows(position_ids, (cos, sin), mask)

    def layer(self, index: int, hidden: torch.Tensor, rows: _Rows, exchange: Exchange) -> torch.Tensor:  # noqa: D102
        layer = self._base.layers[index]
        after = layer(
            hidden[None],
            attention_mask=rows.mask,
            position_ids=rows.position_ids,
            **cache_argument(layer, _Cache(exchange)),
            position_embeddings=rows.rotation,
            use_cache=True,
        )
        result: torch.Tensor = (after[0] if isinstance(after, tuple) else after)[0]
        return result

    def queries(self, index: int, hidden: torch.Tensor, rows: _Rows) -> torch.Tensor:  # noqa: D102
        attention, states = self._projected(index, hidden, "q_proj", slice(0, self._query_width(index)))
        if hasattr(attention, "q_norm"):
            states = attention.q_norm(states)
        cos, sin = (table[0, :, None].float() for table in rows.rotation)
        turning = cos.shape[-1]
        turned, tail = states[..., :turning].float(), states[..., turning:].float()
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((-second, first), -1) * sin
        rotated: torch.Tensor = torch.cat((turned, tail), -1).transpose(0, 1) * attention.scaling
        return rotated

    def first_values(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the first layer's values `[H, S, D]` of tokens int64 `[S]`, which depend on the tokens only."""
        layer = self.layout.layers[0]
        start = self._query_width(0) + layer.key_values
        return self._projected(0, self.embed(tokens), "v_proj", slice(start, None))[1].transpose(0, 1)

    def _query_width(self, index: int) -> int:
        heads: int = self._model.config.num_attention_heads
        return heads * self.layout.layers[index].head_dim

    def _projected(self, index: int, hidden: torch.Tensor, name: str, part: slice) -> tuple[Any, torch.Tensor]:
        """Return the attention of a layer and its projection `[S, heads, D]`, a part of a fused one in Phi-3."""
        block = self._base.layers[index]
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        fused = getattr(attention, "qkv_proj", None)
        states: torch.Tensor = getattr(attention, name)(normed) if fused is None else fused(normed)[:, part]
        return attention, states.unflatten(-1, (-1, self.layout.layers[index].head_dim))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[S, V]` of hidden states `[S, C]` after the last layer."""
        result: torch.Tensor = self._model.get_output_embeddings()(self._base.norm(hidden))
        return result.float()


class _Cache:
    """Stands in for a transformers cache during one layer."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange new keys and values `[1, H, S, D]` for those of the whole prompt `[1, H, T, D]`."""
        keys, values = self._exchange(key_states[0], value_states[0])
        return keys[None], values[None]
