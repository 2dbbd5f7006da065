"""vLLM's decoder layers behind `cuvee.blend.recompute_model.RecomputeModel`. vLLM is neither patched nor copied.

    recomputed tokens   the engine's layers, attention backend and pages. The backend sees a run of adjacent tokens
                        [s, e) as one request: e - s queries, a context of e tokens, and the block table that all runs
                        of a prompt share
    the query's pass    the same layers, but attention is computed here, over copies of the pages: it attends to cached
                        tokens and not to the text between them, which no backend can express

Hidden states and residual of vLLM's layers travel side by side, as one tensor `[S, 2 C]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from cuvee.blend.recompute_model import Exchange
from cuvee.blend.runs import context_overhead
from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout

_LAYER_ARGUMENTS = ["positions", "hidden_states", "residual"]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The tokens of a pass.

    Attributes:
        positions: on the model's device.
        visible: bool `[S, T]` for the query's pass; None: the backend's metadata define it.
        metadata: of the attention backend.
        slots: of new KV.
        asked: the queries of the layer that ran last.
    """

    positions: torch.Tensor
    visible: torch.Tensor | None
    metadata: Any = None
    slots: torch.Tensor | None = None
    asked: dict[int, torch.Tensor] | None = None


class LoadedModel:
    """The model that an engine has loaded, and access to its layers.

    Args:
        vllm_config: of the engine.
        layout: of this rank.
        attention: the engine's attention modules by name, in layer order.
        spec: of its only KV cache group.
        owners: models that own these modules.

    Raises:
        UnsupportedModelError: its layers take other arguments than those that were checked, or cannot be found.
    """

    def __init__(
        self, vllm_config: Any, layout: KVLayout, attention: dict[str, Any], spec: Any, owners: Sequence[Any]
    ) -> None:
        self.config = vllm_config
        self.layout = layout
        self.names = list(attention)
        self.attention = list(attention.values())
        self.decoder = _owner_with_layers(owners).model
        self.layers = list(self.decoder.layers)
        for index, (layer, module) in enumerate(zip(self.layers, self.attention, strict=True)):
            arguments = list(inspect.signature(layer.forward).parameters)
            if arguments[:3] != _LAYER_ARGUMENTS or not any(module is part for part in layer.modules()):
                raise UnsupportedModelError(
                    f"blend: layer {index} of {type(self.decoder).__name__} takes {', '.join(arguments)} instead of "
                    f"{', '.join(_LAYER_ARGUMENTS)}: this version of vLLM cannot be blended with"
                )
        self.block_tokens: int = spec.block_size
        self.context_overhead = context_overhead(vllm_config.model_config.hf_text_config)
        self.device: torch.device = self.attention[0].kv_cache.device
        backend = self.attention[0].get_attn_backend()
        self.builder = backend.get_builder_cls()(spec, self.names, vllm_config, self.device)

    def open(self, blocks: Sequence[int]) -> EngineModel:
        """Return the model for a prompt with this block table."""
        return EngineModel(self, blocks)


class EngineModel:
    """The engine's layers on the pages of one prompt; see `RecomputeModel`."""

    def __init__(self, loaded: LoadedModel, blocks: Sequence[int]) -> None:
        self.layout = loaded.layout
        self._loaded = loaded
        self._table = torch.tensor([list(blocks)], dtype=torch.int32, device=loaded.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `RecomputeModel`, also for the methods below."""
        return cast(torch.Tensor, self._loaded.decoder.embed_input_ids(tokens.to(self._loaded.device)))

    def rows(self, positions: torch.Tensor, visible: torch.Tensor | None) -> _Rows:  # noqa: D102
        loaded = self._loaded
        at = positions.to(loaded.device)
        if visible is not None:
            return _Rows(at, visible.to(loaded.device), asked={})
        slots = self._table[0, at // loaded.block_tokens].long() * loaded.block_tokens + at % loaded.block_tokens
        breaks = (positions.diff() != 1).nonzero()[:, 0] + 1
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), breaks))
        bounds = torch.cat((starts, torch.tensor([len(positions)]))).to(torch.int32)
        contexts = (positions[bounds[1:].long() - 1] + 1).to(torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=bounds.to(loaded.device),
            query_start_loc_cpu=bounds,
            seq_lens=contexts.to(loaded.device),
            num_reqs=len(starts),
            num_actual_tokens=len(positions),
            max_query_len=int(bounds.diff().max()),
            max_seq_len=int(contexts.max()),
            block_table_tensor=self._table.expand(len(starts), -1).contiguous(),
            slot_mapping=slots,
            causal=True,
            positions=at,
            seq_lens_cpu_upper_bound=contexts,
        )
        return _Rows(at, None, loaded.builder.build(0, common), slots)

    def layer(self, index: int, hidden: torch.Tensor, rows: _Rows, exchange: Exchange) -> torch.Tensor:  # noqa: D102
        loaded = self._loaded
        states, residual = (hidden, None) if index == 0 else hidden.chunk(2, -1)
        # Halves of a wider tensor; norm kernels need rows without gaps.
        states = states.contiguous()
        residual = None if residual is None else residual.contiguous()
        module = loaded.attention[index]
        make = self._writing if rows.visible is None else self._attention_here
        with _replaced(module, make(index, rows, exchange)), self._context(rows):
            after = loaded.layers[index](rows.positions, states, residual)
        return torch.cat(after, -1)

    def queries(self, index: int, hidden: torch.Tensor, rows: _Rows) -> torch.Tensor:  # noqa: D102
        asked = (rows.asked or {})[index]
        return asked * float(self._loaded.attention[index].impl.scale)

    def _writing(self, index: int, rows: _Rows, exchange: Exchange) -> Callable[..., torch.Tensor]:
        """Return the engine's attention, which shows new KV to the exchange before the engine writes it."""
        module = self._loaded.attention[index]
        forward = module.forward

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            exchange(*(part.view(len(part), -1, module.head_size).transpose(0, 1) for part in (k, v)))
            return cast(torch.Tensor, forward(q, k, v, *more, **named))

        return attend

    def _attention_here(self, index: int, rows: _Rows, exchange: Exchange) -> Callable[..., torch.Tensor]:
        module, visible, asked = self._loaded.attention[index], rows.visible, rows.asked

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            q, k, v = (part.view(len(part), -1, module.head_size).transpose(0, 1) for part in (query, key, value))
            keys, values = exchange(k, v)
            if asked is not None:
                asked.clear()  # only the last layer's queries are read, and only once
                asked[index] = q
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q[None], keys[None], values[None], attn_mask=visible, scale=float(module.impl.scale), enable_gqa=True
            )[0]
            return mixed.transpose(0, 1).reshape(len(query), -1)

        return attend

    def _context(self, rows: _Rows) -> Any:
        loaded = self._loaded
        return set_forward_context(
            dict.fromkeys(loaded.names, rows.metadata),
            loaded.config,
            num_tokens=len(rows.positions),
            slot_mapping=None if rows.slots is None else dict.fromkeys(loaded.names, rows.slots),
        )


def total_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all tensor-parallel ranks; bit-for-bit identical on each, because rank 0's result is sent to all."""
    group = get_tp_group()
    if group.world_size == 1:
        return tensor
    device = torch.device(group.device)
    added = tensor_model_parallel_all_reduce(tensor.to(device))
    return cast(torch.Tensor, group.broadcast(added, src=0)).to(tensor.device)


def agree_over_ranks(well: bool) -> bool:
    """Return whether all tensor-parallel ranks can go on. Uses the CPU's group, so it waits for no device."""
    group = get_tp_group()
    if group.world_size == 1:
        return well
    worst = torch.tensor(int(well))
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(worst)


def _owner_with_layers(owners: Sequence[Any]) -> Any:
    decoders = [owner for owner in owners if hasattr(getattr(owner, "model", None), "layers")]
    if len({id(owner.model) for owner in decoders}) != 1:
        raise UnsupportedModelError(
            f"blend: {len(decoders)} models own the engine's attention layers; this version of vLLM cannot be blended "
            "with"
        )
    return decoders[0]


@contextmanager
def _replaced(module: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let a module run `forward` inside the context."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before
