"""Measure a model's cache by running it: what each layer keeps of a token, and how its keys depend on positions.

    tokens at positions 0 …       --model--> cache: tensors per layer, heads, sizes, windows
    the same tokens at D … --model--> k(p + D) = R(D) k(p)?  frequencies: those of the model's rotary modules

A layer whose keys follow one of the model's own rotary tables, near and far, is rotated; one whose keys do not change
is free of positions. Anything else is bound: its keys are valid at their own positions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch

from cuvee.codec.errors import CuveeError, UnsupportedModelError, allocations
from cuvee.codec.models.frozen import frozen
from cuvee.codec.rope import Rope, rotate, unrotate

ROTATED, FREE, BOUND = "rotated", "free", "bound"
MEASURED_TOKENS = 6
_NEAR = 37
_FAR = 3 << 16
# Error of a channel relative to its size. A wrong table errs by about 1.
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
_FAR_TOLERANCE = 0.05  # angles of 10^5 radians differ in their last bits where a model computes them in another order
_ENCODED = 3  # tokens of an encoder
_MIN_POSITIONS = 512  # of a table of positions whose length a configuration does not say
_CACHES = ("cache", "past_key_values", "cache_params")  # of a model's output, the newest name first: old ones warn

_Units = tuple[torch.Tensor, torch.Tensor]


class ProbeError(UnsupportedModelError):
    """A model cannot be built or run, so nothing is known of its cache."""

    blames_blob = False


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """What one layer of a model's cache holds.

    Attributes:
        kind: transformers' class of the layer.
        kv_heads, head_dim, value_dim, sliding_window: as in `LayerLayout`; 0 heads if the layer holds no keys.
        positions: "rotated", "free" or "bound", how keys depend on positions.
        rope: the rotary embedding of rotated keys.
        others: names and shapes of what else the layer holds for the measured tokens.
        why: for a bound layer, what was seen.
    """

    kind: str
    kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    positions: str
    rope: Rope | None
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    why: str = ""

    @property
    def beyond(self) -> str:
        """What the layer holds that a `LayerLayout` cannot describe; empty if there is nothing."""
        if self.others:
            return ", ".join(f"{name} {list(shape)}" for name, shape in self.others)
        return "" if self.kv_heads else "neither keys nor values"


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward pass: the cache's layers, the position of the first token, and layers of cross-attention, if any."""

    layers: list[Any]
    start: int
    cross: list[Any] | None = None

    def units(self, index: int) -> _Units | None:
        """Return keys and values `[B, H, T, D]` of a layer; None if it does not hold both."""
        layer = self.layers[index]
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            return None
        return (keys, values) if keys.ndim == values.ndim == 4 else None

    def heads(self, index: int, unit: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (unit 0) or values of the first of `tokens` tokens, float32 `[rows, H, D]`, and positions."""
        layer = self.layers[index]
        x: torch.Tensor = (layer.values if unit else layer.keys).detach().float().cpu()
        length = x.shape[2]
        positions = (self.start + tokens - length + torch.arange(length, device="cpu")).repeat(len(x))
        return x.transpose(1, 2).flatten(0, 1), positions


def measure(model: Any, name: str) -> tuple[MeasuredLayer, ...]:
    """Run a decoder, in eval mode, on a few random tokens, and return what its cache holds, layer by layer.

    In bfloat16 and float16, positions are judged by passes over single tokens, whose states do not depend on positions:
    over several tokens, rounding may route a token to another expert. In float32, passes over several tokens are
    compared too.

    Raises:
        ProbeError: a forward pass fails.
        UnsupportedModelError: the model returns no cache, or keys depend on later tokens.
        OutOfMemoryError: there is no memory for a forward pass.
    """
    tables = list(rotary_tables(model))
    with frozen(model), torch.no_grad():
        return _measure(_Passes(model, name), tables)


def structure(model: Any, name: str) -> tuple[MeasuredLayer, ...]:
    """Return what the layers hold, as `measure`, for a model on the meta device; all count as bound."""
    with torch.no_grad():
        run = _Passes(model, name).several(0)
    return tuple(_described(run, index, BOUND, None, "") for index in range(len(run.layers)))


class _Passes:
    """Forward passes of a model over the same random tokens at other positions."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        self._encoded: dict[str, torch.Tensor] = {}
        config = model.config
        if getattr(config, "is_encoder_decoder", False):  # a decoder runs alone on what its encoder might have said
            self._model = model = model.get_decoder()
            said = torch.zeros(MEASURED_TOKENS, _ENCODED, config.hidden_size, dtype=model.dtype, device=model.device)
            self._encoded = {"encoder_hidden_states": said}
        parameters = signature(model.forward).parameters
        passed_on = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
        self.takes_positions = "position_ids" in parameters or passed_on
        vocabulary = model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator("cpu").manual_seed(0)
        # The first ids of a vocabulary are padding and other marks.
        first = min(8, vocabulary // 2)
        self._ids = torch.randint(
            first, min(vocabulary, 1000), (MEASURED_TOKENS + 1,), generator=generator, device="cpu"
        )
        self.dtype = model.dtype
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        positions = positions if type(positions) is int and positions > 0 else None
        self.near, self.far = _NEAR, _FAR
        if model.device.type not in ("cpu", "meta"):  # a position behind the end of a table would break the device
            positions = positions or _MIN_POSITIONS
            self.far = min(positions, _FAR) - 1
        if positions is not None:
            self.near = max(min(_NEAR, positions - MEASURED_TOKENS), 0)

    def several(self, start: int, *, other_end: bool = False) -> _Run:
        """Run six tokens from a position on; `other_end` replaces the last one."""
        ids = self._ids[:MEASURED_TOKENS].clone()
        if other_end:
            ids[-1] = self._ids[-1]
        return self._run(ids[None], start)

    def single(self, position: int) -> _Run:
        """Run six sequences of one token each, at a position."""
        return self._run(self._ids[:MEASURED_TOKENS, None], position)

    def _run(self, ids: torch.Tensor, start: int) -> _Run:
        device = self._model.get_input_embeddings().weight.device
        others = {name: said[: len(ids)] for name, said in self._encoded.items()}
        if self.takes_positions:
            each = start + torch.arange(ids.shape[1], device=device)
            others["position_ids"] = each[None].expand(len(ids), -1)
        try:
            with allocations(f"{self._name}: running {ids.numel()} tokens"):
                output = self._model(input_ids=ids.to(device), use_cache=True, **others)
        except CuveeError:
            raise
        except Exception as error:  # whatever a model's code raises
            raise ProbeError(
                f"{self._name}: its cache must show in a forward pass over {ids.shape[1]} tokens, which failed with "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        cache = next((found for each in _CACHES if (found := getattr(output, each, None)) is not None), None)
        if cache is None:
            raise UnsupportedModelError(f"{self._name}: must return a cache, but returned none with use_cache=True")
        cross = None
        if hasattr(cache, "cross_attention_cache"):
            cache, cross = cache.self_attention_cache, cache.cross_attention_cache.layers
        extra = [tensor for key, value in vars(cache).items() if key != "layers" for tensor in _tensors(key, value)]
        if extra or not getattr(cache, "layers", None):
            kept = ", ".join(f"{key} {list(shape)}" for key, shape in extra) or "no layers"
            raise UnsupportedModelError(
                f"{self._name}: must keep its cache in layers, but its {type(cache).__name__} holds {kept}"
            )
        return _Run(cache.layers, start, cross)


def rotary_tables(model: Any) -> Iterator[tuple[Rope, Rope]]:
    """Yield the rotary tables of a model's modules: as they are, and as they were computed, in float32.

    They differ where a model was converted to another dtype with its tables.
    """
    seen = set()
    for module in model.modules():
        fresh = None
        for name, table in list(module.named_buffers(recurse=False)):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq") or table.ndim != 1:
                continue
            scaling = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
            if table.dtype != torch.float32:
                fresh = fresh or _made_again(module)
            computed = table if fresh is None else fresh.get(name, table)
            ropes = [_rope(each, scaling) for each in (table, computed)]
            if None not in ropes and ropes[0] not in seen:
                seen.add(ropes[0])
                yield ropes[0], ropes[1]  # type: ignore[misc]


def _made_again(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a rotary module made anew from its configuration."""
    config = getattr(module, "config", None)
    if config is None:
        return {}
    with torch.device("cpu"):
        made = type(module)(config)
    return dict(made.named_buffers(recurse=False))


def _rope(table: torch.Tensor, scaling: Any) -> Rope | None:
    values = table.float().cpu()
    if not len(values) or table.is_meta or not bool((torch.isfinite(values) & (values >= 0)).all()):
        return None
    return Rope(tuple(values.tolist()), float(scaling))


def _measure(passes: _Passes, tables: list[tuple[Rope, Rope]]) -> tuple[MeasuredLayer, ...]:
    base = passes.several(0)
    indices = range(len(base.layers))
    if not passes.takes_positions:
        _check_causal(passes, base)
        why = "the model takes no position_ids"
        return tuple(_described(base, index, BOUND, None, why) for index in indices)
    tolerance = _TOLERANCES.get(passes.dtype, _TOLERANCES[torch.bfloat16])
    exact = passes.dtype == torch.float32
    single = passes.single(0)
    # A shifted pass ends in another token: keys that follow a rule all the same do not depend on later tokens.
    if exact:
        pairs = [(base, passes.several(passes.near, other_end=True), MEASURED_TOKENS)]
    else:
        pairs = [(single, passes.single(passes.near), 1)]
    far = None
    try:
        far = passes.single(passes.far)
    except ProbeError:  # a table of positions ends
        why = f"there is no position {passes.far}"
    else:
        pairs.append((single, far, 1))
        why = "no rotary table of the model explains how keys change with positions"
    layers = []
    for index in indices:
        rule, rope, swapped = (BOUND, None, False) if far is None else _rule(index, pairs, tables, tolerance)
        layers.append(_described(base, index, rule, rope, why, swapped))
    if any(layer.positions == BOUND for layer in layers):
        _check_causal(passes, base)
    return tuple(layers)


def _check_causal(passes: _Passes, base: _Run) -> None:
    """Refuse a model whose keys depend on tokens that come later."""
    if passes.dtype != torch.float32:
        return
    other = passes.several(0, other_end=True)
    for index in range(len(base.layers)):
        units = base.units(index)
        if units is None or units[0].shape[2] != MEASURED_TOKENS:
            continue
        if not _fits(index, 0, [(base, other, MEASURED_TOKENS)], None, _TOLERANCES[torch.float32]):
            raise UnsupportedModelError(
                f"{passes._name}: a cache must not change with later tokens, but keys of layer {index} do "
                "(bidirectional attention): there is nothing to continue from"
            )


_Pair = tuple[_Run, _Run, int]


def _rule(
    index: int, pairs: list[_Pair], tables: list[tuple[Rope, Rope]], tolerance: float
) -> tuple[str, Rope | None, bool]:
    """Return how the keys of a layer depend on positions, and whether transformers keeps them as its values."""
    units = pairs[0][0].units(index)
    if units is None or pairs[0][1].units(index) is None:
        return BOUND, None, False
    keys, values = units
    may_be_latent = keys.shape[1] == values.shape[1] == 1 and keys.shape[3] > values.shape[3]
    for turned in range(2 if may_be_latent else 1):
        if not _fits(index, 1 - turned, pairs, None, tolerance):
            continue
        if _fits(index, turned, pairs, None, tolerance):
            return FREE, None, False
        size, other = units[turned].shape[3], units[1 - turned].shape[3]
        for actual, computed in tables:
            # A layout tells latents by a key that is rotated as a whole and narrower than its value.
            if actual.rotary_dim > size or (units[0].shape[1] == 1 and actual.rotary_dim == size < other) != turned:
                continue
            for interleaved in (False, True)[: actual.rotary_dim // 2]:
                turning, kept = (replace(each, interleaved=interleaved) for each in (actual, computed))
                if _fits(index, turned, pairs, turning, tolerance):
                    return ROTATED, kept, bool(turned)
    return BOUND, None, False


def _fits(index: int, unit: int, pairs: list[_Pair], rope: Rope | None, tolerance: float) -> bool:
    """Return whether keys or values at other positions are those at the first positions, rotated by `rope`."""
    for number, (before, after, tokens) in enumerate(pairs):
        old, old_positions = before.heads(index, unit, tokens)
        new, new_positions = after.heads(index, unit, tokens)
        if old.shape != new.shape:
            return False
        if tokens > 1:  # the last token is another one
            old, new = old[:-1], new[:-1]
            old_positions, new_positions = old_positions[:-1], new_positions[:-1]
        moved = old if rope is None else rotate(unrotate(old, rope, old_positions), rope, new_positions)
        size = new.square().mean((0, 1)).sqrt()
        error = (moved - new).square().mean((0, 1)).sqrt()
        floor = 0.05 * float(size.square().mean().sqrt()) + 1e-30
        allowed = tolerance if number == 0 else max(tolerance, _FAR_TOLERANCE)
        if not bool((error <= allowed * size.clamp_min(floor)).all()):
            return False
    return True


def _described(run: _Run, index: int, rule: str, rope: Rope | None, why: str, swapped: bool = False) -> MeasuredLayer:
    layer, units = run.layers[index], run.units(index)
    length = 0 if units is None else int(layer.get_seq_length())
    # Entries that do not stand for tokens are kept like whatever else a layer holds.
    kept = ("keys", "values") if length == MEASURED_TOKENS else ()
    others = [tensor for key, value in vars(layer).items() if key not in kept for tensor in _tensors(key, value)]
    if run.cross is not None:
        cross = [tensor for each in run.cross[index : index + 1] for tensor in _tensors("cross", vars(each))]
        others += cross or [("a place for cross-attention", ())]
    window = getattr(layer, "sliding_window", None)
    if units is None or not kept:
        return MeasuredLayer(type(layer).__name__, 0, 0, 0, None, BOUND, None, tuple(others), why)
    keys, values = units
    sizes = keys.shape[3], values.shape[3]
    head_dim, value_dim = sizes[::-1] if swapped else sizes
    return MeasuredLayer(
        type(layer).__name__, keys.shape[1], head_dim, value_dim, None if window is None else int(window), rule, rope,
        tuple(others), why if rule == BOUND else "",
    )  # fmt: skip


def _tensors(name: str, value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor that holds more than a number, also in lists and dicts."""
    if isinstance(value, torch.Tensor):
        if value.ndim and value.numel():
            yield name, tuple(value.shape)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}[{key}]", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(f"{name}[{number}]", each)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, shortened."""
    return (str(error).splitlines() or ["no message"])[0][:200]
