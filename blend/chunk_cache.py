"""Chunks for blending, computed once and found again by content.

    tokens ──> content key ──> store ── hit ──> blob
                                 └───── miss ─> model, codec ─> blob, which is stored

A chunk that is computed alone lacks the context that a prompt puts before it. If it is computed behind several typical
contexts instead, all at the same positions, its keys and values can be averaged. The mean over contexts minimizes the
expected squared error to the keys and values behind the next context.

           context 0 ─┐
           context 1 ─┼─> the chunk behind each: keys, values ──> mean ──> blob that starts at position C
           context N ─┘
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from cuvee.blend.recompute_model import TransformersModel
from cuvee.blend.segments import Segment
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CuveeError, InputError, ProfileMismatchError
from cuvee.codec.models.fingerprint import are_others, function_digest, model_fingerprint, weights_state
from cuvee.codec.models.forward import append_units, cache_argument, empty_cache, layer_units, prefill
from cuvee.codec.support.once import Once
from cuvee.codec.support.torch_modes import without_modes
from cuvee.naming.identity import Identity, Scope, content_digest, store_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens that are taken to follow a chunk in a prompt: other chunks, or a question. Coded so at `balanced`, XQuAD's
# paragraphs add a KL of 0.003 to a blend of SmolLM2-135M, at 0.8 bits per value and whatever is recomputed.
_FOLLOWING = 384
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class ChunkStore(Protocol):
    """A store for `ChunkCache`, used from several threads; all of `cuvee.integrations.stores` fit."""

    def get(self, key: str) -> bytes | None:
        """Return the blob under a key; None: there is none."""
        ...

    def put(self, key: str, blob: bytes) -> bool:
        """Keep a blob in place of an older one; return whether it was kept."""
        ...

    def delete(self, key: str) -> bool:
        """Delete a blob; return whether it was there."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkCounters:
    """Counts of a `ChunkCache` since it was made.

    Attributes:
        hits: chunks from the store, or from another thread that was computing them.
        misses: chunks that were computed.
        stored: computed chunks that the store kept.
        rejected: entries that did not open, so that their chunks were recomputed. Those that are damaged or do not
            match their key were deleted and replaced; those that need another profile were left.
        errors: failed operations of the store.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    rejected: int = 0
    errors: int = 0


class ChunkCache:
    """Blobs of chunks by content, computed if they are missing. Safe to share between threads.

    The model runs one chunk at a time. A chunk that several threads request at once is computed once. If the store
    fails, the chunk is computed and no error is raised. The first failure is logged, and all failures are counted.

    If the codec has a key, each blob is bound to its store key, so a blob copied from another tenant, model or text is
    rejected. `segment` returns the binding along with the blob.

        >>> import cuvee
        >>> from cuvee.integrations.stores.memory import MemoryStore
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> layout = cuvee.KVLayout.from_config(config, "float32")
        >>> codec = cuvee.Codec(cuvee.Profile.unlearned(layout), quality="lossless")
        >>> chunks = ChunkCache(model, codec, MemoryStore(10**6))
        >>> for _ in range(2):
        ...     segment = chunks.segment([1, 2, 3, 4])  # computed, then found
        >>> chunks.counters.misses, chunks.counters.hits
        (1, 1)

    Args:
        model: a causal language model of transformers that can be blended, in eval mode. Its weights, configuration
            and buffers must not change afterwards: their digests are computed now and are part of the key. `segment`
            refuses a model in which torch knows them to have changed; an edit through a parameter's `.data` is not
            seen. No key tells of a forward hook, or of an attribute of a module that was set by hand: give such a model
            a `tenant` of its own.
        codec: encodes the chunks. Its profile and quality are part of the key.
        store: keeps the blobs.
        contexts: `[N, C]` int32 or int64: N runs of text like those that will precede chunks, for example eight other
            chunks. Each chunk then costs N passes of the model instead of one, and N * C tokens of KV stay on the
            model's device once the first chunk is computed. With None, chunks are computed alone.
        tenant: cache salt. Chunks of different tenants never share a key.

    Raises:
        InputError: `store` is not one, but its URL for example; the contexts have the wrong shape or dtype, tokens
            outside the vocabulary, or leave no position for a chunk; the codec's backend does not serve the model's
            device, or it has refinements; the model is in training mode.
        ProfileMismatchError: the codec's profile belongs to another model.
        UnsupportedModelError: the model cannot be blended.
    """

    @without_modes
    def __init__(
        self,
        model: PreTrainedModel,
        codec: Codec,
        store: ChunkStore,
        contexts: torch.Tensor | None = None,
        tenant: str = "",
    ) -> None:
        checked = TransformersModel(model)
        self._layout, self._vocabulary = checked.layout, checked.vocabulary
        # Otherwise each call would fail as if the store were down, and be counted as that.
        if not all(callable(getattr(store, name, None)) for name in ("get", "put", "delete")):
            got = type(store).__name__
            raise InputError(f"store: must have get, put and delete, got {got}: open_store(URL) makes one")
        codec.profile.check_layout(self._layout)
        if are_others(codec.profile.model, model):
            raise ProfileMismatchError(
                "codec: must have a profile calibrated on the model's weights, got one of other weights; calibrate one "
                "for this model"
            )
        if codec.refinements:
            raise InputError(
                "codec: must have no refinements, which only loads with a deadline leave out, got one: make it without "
                "refinements="
            )
        self._model: Any = model
        self._weights = weights_state(model)
        self._device = model.device if codec.on_device(model.device) else torch.device("cpu")
        self._codec = codec
        self._store = store
        self._contexts = None if contexts is None else self._check_contexts(contexts)
        self._identity = Identity(
            model=f"{model_fingerprint(model)} {function_digest(model)}",
            tokenizer="",
            layout=self._layout.fingerprint,
            profile=b"" if codec.lossless else codec.profile.id,
            quality=codec.quality_name,
        )
        self._scope = Scope(tenant=tenant)
        self._context_name = b"" if self._contexts is None else _name(self._contexts)
        self._before: list[KVChunk] = []  # the caches of the contexts, computed when they are first needed
        self._counts = Counter[str]()
        self._once = Once(_log)
        self._computing = threading.Lock()  # held while the model runs; guards `_before`
        self._lock = threading.Lock()  # guards `_running` and `_counts`
        self._running: dict[str, Future[bytes]] = {}

    @property
    def counters(self) -> ChunkCounters:
        """A snapshot of the counts."""
        with self._lock:
            return ChunkCounters(**self._counts)

    @without_modes
    def segment(self, tokens: Sequence[int] | torch.Tensor, *, leading: bool = False) -> Segment:
        """Return a segment of a chunk's tokens with its blob, from the store or newly computed and stored.

        Args:
            tokens: the chunk, `[T]` integers.
            leading: whether the chunk is for the beginning of a prompt. It is then computed alone, even if there are
                contexts, which is exact there.

        Returns:
            The tokens with a blob that starts at position 0 if it was computed alone, else at C, behind the contexts;
            and with the `associated_data` that it only decodes with, if the codec has a key.

        Raises:
            InputError: there are no tokens, they are not a row of integers, they are outside the vocabulary, or (with
                contexts) they go beyond the model's positions; a lossy quality cannot encode the values; the model has
                changed.
        """
        if weights_state(self._model) != self._weights:
            raise InputError(
                "model: must keep its weights, configuration and buffers, because they name what is stored, but they "
                "have changed: make another ChunkCache"
            )
        ids = Segment(tokens).tokens
        self._check_vocabulary("tokens", ids)
        contexts = None if leading else self._contexts
        start, limit = _start(contexts), self._layout.max_positions
        if limit is not None and start + len(ids) > limit:
            raise InputError(
                f"tokens: must end within the model's {limit} positions, got {len(ids)} from position {start}: use "
                "shorter chunks or contexts"
            )
        context = b"" if contexts is None else self._context_name
        digest = content_digest(self._identity, self._scope, ids.tolist(), context=context)
        key = store_key(self._scope.tenant, digest)
        bound_to = key.encode() if self._codec.key_ids else b""
        with self._lock:
            other = self._running.get(key)
            if other is None:
                mine = self._running[key] = Future[bytes]()
        if other is not None:
            blob = other.result()
            self._count("hits")
        else:
            try:
                blob = self._find_or_make(digest, ids, contexts, bound_to)
                mine.set_result(blob)
            except BaseException as error:
                mine.set_exception(error)
                raise
            finally:
                with self._lock:
                    del self._running[key]
        return Segment(tokens, blob, associated_data=bound_to)

    def _find_or_make(
        self, digest: bytes, ids: torch.Tensor, contexts: torch.Tensor | None, associated_data: bytes
    ) -> bytes:
        keys = [store_key(self._scope.tenant, digest, key_id=key_id) for key_id in self._codec.key_ids or (b"",)]
        replace = True
        for key in keys:
            stored = self._ask(partial(self._store.get, key), None)
            if stored is None:
                continue
            expected = Expected(len(ids), _start(contexts), self._layout.dtype)
            try:
                opened = self._codec.open(stored, associated_data=associated_data, expected=expected)
                self._codec.verify(opened)
            except CuveeError as error:
                self._count("rejected")
                if error.blames_blob:
                    _log.info("cuvee: the entry of a chunk is deleted: %s", error)
                    self._ask(partial(self._store.delete, key), False)
                else:  # a reader with its profile, or with more memory, decodes it
                    _log.info("cuvee: the entry of a chunk is left as it is, and the chunk computed: %s", error)
                    replace = False
                continue
            self._count("hits")
            return stored
        with self._computing, torch.no_grad():
            chunk = self._compute(ids, contexts)
        blob = self._codec.encode(chunk, associated_data=associated_data)
        self._count("misses")
        if replace and self._ask(partial(self._store.put, keys[0], blob), False):
            self._count("stored")
        return blob

    def _compute(self, ids: torch.Tensor, contexts: torch.Tensor | None) -> KVChunk:
        """Compute the chunk of tokens `[T]`, alone at position 0 or averaged behind the contexts."""
        inputs = ids[None].to(self._model.device)
        if contexts is None:
            alone = prefill(self._model, inputs, self._layout, self._device)[0]
            return KVChunk.unchecked(alone.keys, alone.values, self._layout, 0, alone.token_ids, _FOLLOWING)
        if not self._before:
            self._before = [
                prefill(self._model, row[None].to(self._model.device), self._layout, self._model.device)[0]
                for row in contexts
            ]
        start = _start(contexts)
        sums: list[torch.Tensor] = []
        for before in self._before:
            cache = empty_cache()
            for index, (keys, values) in enumerate(zip(before.keys, before.values, strict=True)):
                units = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
                append_units(cache, units[0], units[1], index, self._layout.layers[index])
            self._model(input_ids=inputs, **cache_argument(self._model, cache), use_cache=True)
            # The positions are the same behind every context and rotation is linear, so rotated keys can be averaged.
            filled = [layer_units(*pair) for pair in zip(cache.layers, self._layout.layers, strict=True)]
            new = [unit[0, :, start:].float() for pair in filled for unit in pair]
            sums = [one + other for one, other in zip(sums, new, strict=True)] if sums else new
        means = [
            (total / len(self._before)).transpose(0, 1).to(self._device, self._layout.torch_dtype) for total in sums
        ]
        return KVChunk(means[::2], means[1::2], self._layout, start, ids, _FOLLOWING)

    def _ask(self, work: Callable[[], _T], otherwise: _T) -> _T:
        """Return the store's answer, or `otherwise` if it fails in any way: the chunk can still be computed."""
        try:
            return work()
        except Exception as error:
            with self._lock:
                self._counts["errors"] += 1
            self._once("store", "cuvee: the store of chunks failed; chunks are computed anew: %s", error)
            return otherwise

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _check_contexts(self, contexts: object) -> torch.Tensor:
        if not isinstance(contexts, torch.Tensor) or contexts.dtype not in (torch.int32, torch.int64):
            got = contexts.dtype if isinstance(contexts, torch.Tensor) else type(contexts).__name__
            raise InputError(f"contexts: must be an int32 or int64 tensor [N, C], got {got}")
        if contexts.ndim != 2 or not contexts.numel():
            raise InputError(f"contexts: must have shape [N, C], both above 0, got {list(contexts.shape)}")
        self._check_vocabulary("contexts", contexts)
        limit = self._layout.max_positions
        if limit is not None and contexts.shape[1] >= limit:
            raise InputError(
                f"contexts: must have C below the model's {limit} positions, got {contexts.shape[1]}; cut them shorter"
            )
        # A copy, because changes of the caller's tensor must not give other contexts the key of these.
        copied: torch.Tensor = contexts.to("cpu", torch.int64, copy=True)
        return copied

    def _check_vocabulary(self, name: str, ids: torch.Tensor) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocabulary:
            wrong = low if low < 0 else high
            raise InputError(f"{name}: must lie in the model's vocabulary, 0 … {self._vocabulary - 1}, got {wrong}")


def _start(contexts: torch.Tensor | None) -> int:
    """Return the position of a chunk's first token behind the contexts `[N, C]`."""
    return 0 if contexts is None else contexts.shape[1]


def _name(contexts: torch.Tensor) -> bytes:
    """Return 32 bytes that identify the contexts of an averaged chunk."""
    shape = np.array(contexts.shape, "<i8").tobytes()
    data = contexts.numpy().astype("<i8", copy=False).tobytes()
    return hashlib.blake2b(shape + data, digest_size=32, person=b"cuvee-contexts").digest()
