"""Blend a prompt of cached chunks and text into a cache from which generation continues.

    segments --place--> keys, values [H, T, D] per layer     chunks decoded, or rotated to their new positions
             --select-> positions                            the tokens to recompute (selectors.py)
             --compute> text and selected tokens only,       each token attends to all KV before it, cached or new,
                        layer by layer                       and its new KV replaces the cached KV

After Yao et al., CacheBlend (arXiv:2405.16444), with positions restored by RoPE as in EPIC (arXiv:2410.15332).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from cuvee.blend.recompute import KVExchange, Observer, Placed, PromptKV, Recompute, Recomputed
from cuvee.blend.recompute_model import Exchange, TransformersModel
from cuvee.blend.segments import Segment
from cuvee.blend.selectors import Guided, Selector
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding.id_coding import read_token_ids
from cuvee.codec.coding.open_blob import OpenBlob
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.models.fingerprint import are_others
from cuvee.codec.paged import PagedCache
from cuvee.codec.rope import rotate, unrotate
from cuvee.codec.support.arrays import I64
from cuvee.codec.support.torch_modes import without_modes
from cuvee.codec.token_ids import NO_TOKEN

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

# Errors of the first layer's values are shares of the mean distance between tokens. A chunk is refused above this mean.
# Measured: 0.2 at quality "small", 0.73 if only the mean is left, and 0.96 to 1.05 for wrong tokens.
_MISMATCH = 0.85
_FEWEST_TOKENS = 4  # of a chunk: the mean of fewer is high by chance
# A chunk whose median is below this was not quantized, so that one token with a larger error is another token.
_EXACT, _OTHER_TOKEN = 0.02, 0.2
_SCALE_TOKENS = 64  # whose distances from each other are the scale


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """The record of one segment.

    Attributes:
        start, end: its positions, `start <= position < end`.
        cached: whether it came with a chunk.
        leading: whether its chunk is exact at its position.
        computed: number of its tokens that were computed.
    """

    start: int
    end: int
    cached: bool
    leading: bool
    computed: int


@dataclass(frozen=True, slots=True, eq=False)
class BlendRecord:
    """The tokens that were recomputed, and their cost.

    Attributes:
        tokens: number of tokens of the prompt, T.
        cached: number of tokens that came with a chunk.
        layers: number of layers of the model.
        computed: tokens that were computed, bool `[T]`.
        query_token_layers: token-layers that the selector spent on passes of the query.
        text: tokens that were computed because they were not cached, bool `[T]`. The selector chose all other computed
            tokens.
        segments: the record of each segment.
        selector: `repr` of the selector.
    """

    tokens: int
    cached: int
    layers: int
    computed: torch.Tensor
    query_token_layers: int
    text: torch.Tensor
    segments: tuple[SegmentRecord, ...]
    selector: str

    def __repr__(self) -> str:
        return (
            f"BlendRecord({self.tokens} tokens, {self.cached} cached in {len(self.segments)} segments, recomputed "
            f"{100 * self.cost:.1f} %; {self.selector})"
        )

    @property
    def cost(self) -> float:
        """Token-layers spent, as a share of those for recomputing all cached tokens; 0 if none were cached."""
        whole = self.cached * self.layers
        return (self.recomputed * self.layers + self.query_token_layers) / whole if whole else 0.0

    @property
    def recomputed(self) -> int:
        """Number of cached tokens that were computed."""
        return int((self.computed & ~self.text).sum())


@dataclass(frozen=True, slots=True, eq=False)
class BlendResult:
    """A blended prompt.

    Generation continues from the likeliest next token (`generate` takes all tokens, and changes the cache):

        seen = torch.cat([result.tokens, result.logits[-1:].argmax(-1).cpu()])[None]
        model.generate(seen.to(model.device), past_key_values=result.cache)

    Attributes:
        tokens: the tokens of all segments, int64 `[T]`.
        cache: keys and values `[1, H, T, D]` per layer, in the model's dtype.
        logits: float32 `[n, V]`, after the last n tokens.
        record: the tokens that were recomputed.
    """

    tokens: torch.Tensor
    cache: DynamicCache
    logits: torch.Tensor
    record: BlendRecord

    def __repr__(self) -> str:
        return f"BlendResult({len(self.logits)} logits of {self.logits.shape[1]}; {self.record!r})"


class Blender:
    """Composes prompts from cached chunks and text.

        >>> from cuvee.blend import Boundary
        >>> from cuvee.codec.layout import KVLayout
        >>> from cuvee.codec.models.forward import prefill
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> layout = KVLayout.from_config(config, dtype=model.dtype)
        >>> (chunk,) = prefill(model, torch.tensor([[1, 2, 3, 4]]), layout, "cpu")  # a document, computed once
        >>> blender = Blender(model, selector=Boundary(0.25))
        >>> result = blender.blend([Segment([9, 8]), Segment([1, 2, 3, 4], chunk), Segment([5])])
        >>> result.record.computed.int()  # three of the chunk's four tokens came from its cache
        tensor([1, 1, 1, 0, 0, 0, 1], dtype=torch.int32)
        >>> result.record.cost, tuple(result.logits.shape)
        (0.25, (1, 64))

    Args:
        model: a causal language model of transformers in eval mode, with "sdpa" or "eager" attention (Llama, Mistral,
            Mixtral, Phi-3, Qwen2, Qwen3 …).
        codec: decodes blobs. Without it, chunks must be `KVChunk`s.
        selector: chooses the tokens to recompute; default: `Guided()`, at a cost of 15%.
        correct: correct the other cached tokens by how the recomputed ones changed (`cuvee.blend.correction`).
            Without, they keep their cached KV, as in CacheBlend.

    Raises:
        UnsupportedModelError: the model has sliding windows, MLA or M-RoPE, or its family was not checked.
        ProfileMismatchError: the codec's profile belongs to another model.
        InputError: not a transformers model, or it is in training mode or has another attention implementation.
    """

    @without_modes
    def __init__(
        self,
        model: PreTrainedModel,
        codec: Codec | None = None,
        selector: Selector | None = None,
        *,
        correct: bool = True,
    ) -> None:
        self._model = TransformersModel(model)
        self._codec = codec
        self._correct = correct
        self.selector: Selector = Guided() if selector is None else selector
        _check_selector(self.selector)
        if codec is not None:
            codec.profile.check_layout(self._model.layout)
            if are_others(codec.profile.model, model):
                raise ProfileMismatchError(
                    "codec: must have a profile calibrated on the model's weights, got one of other weights"
                )

    @torch.no_grad()
    @without_modes
    def blend(
        self, segments: Sequence[Segment], *, logits_to_keep: int = 1, selector: Selector | None = None
    ) -> BlendResult:
        """Blend a prompt.

        Text is always computed, and so is the last token, even if a chunk holds it, for its logits.

        Args:
            segments: the prompt, in order; at least one.
            logits_to_keep: number of last tokens to return logits for. They must all be text, unless it is 1.
            selector: used instead of the blender's selector.

        Raises:
            InputError: there are no segments; tokens are outside the vocabulary or exceed the model's positions; a
                chunk belongs to other tokens (its ids and the first layer's values are compared); `logits_to_keep`
                includes cached tokens; there is a blob but no codec.
            ProfileMismatchError: a chunk belongs to another model or profile.
            FormatError, VersionError, CorruptError: a blob is damaged.
        """
        chosen = self.selector if selector is None else selector
        _check_selector(chosen)
        return _Run(self._model, self._codec, chosen, segments, logits_to_keep, self._correct).run()


def _check_selector(selector: Selector) -> None:
    if not hasattr(selector, "select"):
        raise InputError(f"selector: must have select(), like the selectors of cuvee.blend, got {selector!r}")


class _DenseKV(PromptKV):
    """The KV of a prompt in one block, into which the exchange writes."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.keys[index][0].transpose(0, 1), self.cache.values[index][0].transpose(0, 1)

    def exchange(self, index: int, positions: torch.Tensor, end: int, observer: Observer | None) -> Exchange:
        keys, values = self.layer(index)
        return KVExchange(keys[:, :end], values[:, :end], positions, observer)


class _Run:
    """Blends one prompt."""

    def __init__(
        self,
        model: TransformersModel,
        codec: Codec | None,
        selector: Selector,
        segments: Sequence[Segment],
        logits_to_keep: int,
        correct: bool,
    ) -> None:
        self.correct = correct
        self.model = model
        self.codec = codec
        self.selector = selector
        self.layers = model.layout.num_layers
        given: object = segments
        if not isinstance(given, Sequence) or not given or not all(isinstance(s, Segment) for s in given):
            raise InputError("segments: must be a list of at least one Segment")
        self.segments = segments
        self.tokens = torch.cat([segment.tokens for segment in segments])
        lengths = torch.tensor([len(segment.tokens) for segment in segments])
        self.ends = lengths.cumsum(0).tolist()
        self.starts = [0, *self.ends[:-1]]
        self._check()
        self.segment = torch.repeat_interleave(torch.arange(len(segments)), lengths)
        self.cached = torch.tensor([segment.chunk is not None for segment in segments])[self.segment]
        # If a chunk ends the prompt, its last token is computed for its logits.
        self.cached[-1] = False
        text = int((~self.cached).flip(0).long().cumprod(0).sum())
        if type(logits_to_keep) is not int or not 1 <= logits_to_keep <= text:
            raise InputError(
                f"logits_to_keep: must be 1 … {text}, the tokens of text at the end of this prompt, got "
                f"{logits_to_keep!r}"
            )
        self.logits_to_keep = logits_to_keep

    def _check(self) -> None:
        low, high = (int(bound) for bound in torch.aminmax(self.tokens))
        if low < 0 or high >= self.model.vocabulary:
            raise InputError(
                f"segments: must hold tokens of the vocabulary, 0 … {self.model.vocabulary - 1}, got "
                f"{low if low < 0 else high}"
            )
        limit = self.model.layout.max_positions
        if limit is not None and self.ends[-1] > limit:
            raise InputError(
                f"segments: must be at most {limit} tokens, the model's positions, got {self.ends[-1]}: omit chunks"
            )

    def run(self) -> BlendResult:
        leading = self._write_chunks()
        offset = torch.arange(len(self.tokens)) - torch.tensor(self.starts)[self.segment]
        nothing = torch.zeros_like(self.cached)
        leading_tokens = self.cached & (self.segment == 0) if leading else nothing
        self._check_tokens()
        placed = Placed(
            self.tokens, self.segment, offset, self.cached, leading_tokens, exact=nothing, end=len(self.tokens)
        )
        kv = _DenseKV(self.pages, torch.arange(len(self.tokens), device=self.model.device), self.cached)
        done = Recompute(self.model, kv, placed, correct=self.correct).run(self.selector)
        logits = self.model.logits(done.hidden[-self.logits_to_keep :])
        return BlendResult(self.tokens, self._cache(), logits, self._record(done, leading))

    # Cached KV -----------------------------------------------------------------------------------------------------

    def _write_chunks(self) -> bool:
        """Put every chunk at its segment's position; return whether the first chunk is exact there."""
        layout, device, total = self.model.layout, self.model.device, len(self.tokens)

        def zeros(heads: int, size: int) -> torch.Tensor:
            # Zeros, because masked values still enter the product, and 0 * NaN is NaN.
            return torch.zeros(heads, total, size, dtype=layout.torch_dtype, device=device)

        self.keys = [zeros(layer.kv_heads, layer.head_dim) for layer in layout.layers]
        self.values = [zeros(layer.kv_heads, layer.value_dim) for layer in layout.layers]
        self.pages = PagedCache.dense(layout, *([x.transpose(0, 1) for x in kv] for kv in (self.keys, self.values)))
        blobs: list[OpenBlob] = []
        slots: list[torch.Tensor] = []
        starts: list[int] = []
        made_at: list[int] = []
        for index, (segment, start, end) in enumerate(zip(self.segments, self.starts, self.ends, strict=True)):
            if isinstance(segment.chunk, KVChunk):
                self._check_ids(index, segment.chunk.token_ids)
                self._move(index, segment.chunk, start)
                made_at.append(segment.chunk.start)
            elif segment.chunk is not None:
                if self.codec is None:
                    raise InputError(
                        f"segments[{index}]: must be text or a KVChunk for a Blender without codec=, got a blob"
                    )
                blob = self.codec.open(segment.chunk, associated_data=segment.associated_data)
                if blob.tokens != end - start:
                    raise InputError(
                        f"segments[{index}]: must have the {blob.tokens} tokens of its blob, got {end - start}"
                    )
                if (table := self.codec.profile.token_table) is not None:
                    self._check_ids(index, read_token_ids(blob.blob, blob.header, table.vocabulary))
                blobs.append(blob)
                slots.append(torch.arange(start, end, device=device))
                starts.append(start)
                made_at.append(blob.start)
        if self.codec is not None and blobs:
            self.codec.decode_paged(blobs, self.pages, slots, starts).check()
        return self.segments[0].chunk is not None and made_at[0] == 0

    def _check_ids(self, index: int, own: I64 | None) -> None:
        """Refuse a chunk that holds the ids of other tokens, which its values may be too coarse to show."""
        if own is None:
            return
        others = (self.segments[index].tokens.numpy() != own) & (own != NO_TOKEN)
        if others.any():
            raise InputError(
                f"segments[{index}]: must have the chunk of its tokens, got one in which token {int(others.argmax())} "
                "is another (it holds other ids)"
            )

    def _move(self, index: int, chunk: KVChunk, start: int) -> None:
        layout = self.model.layout
        if replace(chunk.layout, dtype=layout.dtype).fingerprint != layout.fingerprint:
            raise ProfileMismatchError(f"segments[{index}]: must have a chunk of this model, got one of another model")
        at = torch.arange(chunk.tokens, device=chunk.device)
        for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            rope, moved = layout.layers[layer].rope, keys
            if start != chunk.start:
                # Via the model's angles at both positions: the angle of their distance would be rounded differently.
                moved = rotate(unrotate(keys, rope, at + chunk.start), rope, at + start)
            self.keys[layer][:, start : start + chunk.tokens] = moved.transpose(0, 1).to(self.keys[layer])
            self.values[layer][:, start : start + chunk.tokens] = values.transpose(0, 1).to(self.values[layer])

    def _check_tokens(self) -> None:
        """Refuse chunks of other tokens, found by the first layer's values, which depend on the token alone."""
        chunks = [index for index, segment in enumerate(self.segments) if segment.chunk is not None]
        if not chunks:
            return
        lengths = [self.ends[index] - self.starts[index] for index in chunks]
        positions = torch.cat([torch.arange(self.starts[index], self.ends[index]) for index in chunks])
        expected = self.model.first_values(self.tokens[positions]).transpose(0, 1).flatten(1).float()
        actual = self.values[0][:, positions.to(self.model.device)].transpose(0, 1).flatten(1).float()
        some = expected[:: -(-len(positions) // _SCALE_TOKENS)]
        apart = torch.cdist(some, some)
        distances = apart[apart > 0]
        if not len(distances):
            return  # all of them are the same token, so there is nothing to compare
        errors = ((expected - actual).norm(dim=1) / distances.mean()).cpu()
        for index, error in zip(chunks, errors.split(lengths), strict=True):
            if len(error) >= _FEWEST_TOKENS and error.mean() > _MISMATCH:
                raise InputError(
                    f"segments[{index}]: must have the chunk of its tokens, got one of other tokens (the first layer's "
                    "values differ)"
                )
            if error.median() < _EXACT and error.max() > _OTHER_TOKEN:
                raise InputError(
                    f"segments[{index}]: must have the chunk of its tokens, got one in which token "
                    f"{int(error.argmax())} is another (the first layer's values differ)"
                )

    # Results -------------------------------------------------------------------------------------------------------

    def _cache(self) -> DynamicCache:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys[None], values[None], layer)
        return cache

    def _record(self, done: Recomputed, leading: bool) -> BlendRecord:
        counts = torch.bincount(self.segment[done.computed], minlength=len(self.segments)).tolist()
        return BlendRecord(
            tokens=len(self.tokens),
            cached=int(self.cached.sum()),
            layers=self.layers,
            computed=done.computed,
            query_token_layers=done.query_token_layers,
            text=~self.cached,
            segments=tuple(
                SegmentRecord(start, end, segment.chunk is not None, leading and start == 0, count)
                for segment, start, end, count in zip(self.segments, self.starts, self.ends, counts, strict=True)
            ),
            selector=repr(self.selector),
        )
