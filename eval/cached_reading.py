"""Reading tokens after a cache that went through a method, many contexts and continuations at a time.

    context --prefill--> cache --method--> decoded cache --forward with what follows--> log-probabilities

Contexts that are alike share a prefill, also with the methods before if their caches are kept. Those that begin alike
share that of the beginning, with the methods before too, and continuations that are read alike share a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import Filled, empty_cache
from cuvee.eval.quality import Method, spans

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CachedLayers", "CachedReader", "ExactCaches", "Read", "Statistics", "TokenIds", "rows_of"]

TokenIds = tuple[int, ...]
"""Token ids of a text or of a part of one."""

_PASS_TOKENS = 8192  # of a forward pass; long rows go through one by one
_SHARED_TOKENS = 64  # a shorter beginning saves less than a second forward pass costs


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """The decoded cache of one sequence.

    Attributes:
        units: keys and values `[H, T, D]` of each layer, in the dtype and on the device of the model's cache.
        filled: what it was decoded from, for what the layers hold beside.
    """

    units: list[tuple[torch.Tensor, torch.Tensor]]
    filled: Filled


@dataclass(slots=True)
class Statistics:
    """Counts of the caches that went through the method since it was set.

    Attributes:
        contexts: coded caches; all continuations of a context share one.
        cached_tokens: tokens in these caches.
        bits: everything included, as the method counts them.
        uncached_requests: requests that were scored exactly because they have no two context tokens. The last one is
            never cached.
        truncated_requests: requests whose left end was cut off to fit the model.
    """

    contexts: int = 0
    cached_tokens: int = 0
    bits: float = 0.0
    uncached_requests: int = 0
    truncated_requests: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """One thing to score: the last `len(targets)` predictions of a model that reads `tokens`.

    Attributes:
        tokens: everything the model reads, without the last target.
        split: the cache of `tokens[:split]` goes through the method. Earlier predictions come from the exact cache,
            later ones from the decoded one.
        targets: the real tokens.
    """

    tokens: TokenIds
    split: int
    targets: TokenIds

    @property
    def cached(self) -> TokenIds:
        """The tokens whose cache goes through the method."""
        return self.tokens[: self.split]

    @property
    def tail(self) -> TokenIds:
        """The tokens that the model reads after the decoded cache."""
        return self.tokens[self.split :]

    @property
    def exact_targets(self) -> TokenIds:
        """The targets that the prefill itself predicts."""
        return self.targets[: max(0, len(self.targets) - len(self.tail))]


class ExactCaches:
    """The exact caches of contexts, for further methods on the same ones: the first that fit.

    Args:
        limit: bytes of all.

    Attributes:
        begun: token ids that contexts begin with, and their cache. It does not count towards `limit`.
    """

    def __init__(self, limit: int = 0) -> None:
        self.begun: tuple[TokenIds, Filled] | None = None
        self._room = limit
        self._filled: dict[TokenIds, Filled] = {}

    def get(self, tokens: TokenIds) -> Filled | None:
        """Return the cache of these tokens, if it is kept."""
        return self._filled.get(tokens)

    def keep(self, tokens: TokenIds, filled: Filled, row: int) -> None:
        """Keep a row of a cache if there is room. None makes room: methods come to the contexts in the same order."""
        rows = slice(row, row + 1)
        units = [tuple(side[rows, :, : len(tokens)] for side in unit) for unit in filled.units]
        size = sum(side.nbytes for unit in units for side in unit)
        if size <= self._room:
            self._room -= size
            keys_and_values = tuple((keys.clone(), values.clone()) for keys, values in units)
            self._filled[tokens] = replace(filled, units=keys_and_values)


class CachedReader:
    """A model that remembers its contexts through a method.

    Args:
        forward: calls the model with token ids `[B, T]`, a transformers cache as `cache`, and keyword arguments, for
            log-probabilities `[B, T, V]`.
        model: the model.
        layout: of the chunks that the method gets.
        method: what the caches go through.
        chunk_tokens: tokens coded together.
        statistics: counts what is done.
        exact: keeps the caches of contexts for the next method.
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        model: PreTrainedModel,
        layout: KVLayout,
        method: Method,
        chunk_tokens: int,
        statistics: Statistics,
        exact: ExactCaches,
    ) -> None:
        self._forward = forward
        self._model, self._device = model, model.device
        self._layout = layout
        self._method = method
        self._chunk_tokens = chunk_tokens
        self._statistics = statistics
        self._exact = exact

    def score(self, reads: Sequence[Read], rows: int, bar: Any) -> list[tuple[float, bool]]:
        """For each read, the log-likelihood of its targets, and whether each of them is the likeliest token.

        Args:
            reads: in any order.
            rows: how many go through the model together.
            bar: a progress bar.
        """
        contexts: dict[TokenIds, list[int]] = {}
        for index, read in enumerate(reads):
            contexts.setdefault(read.cached, []).append(index)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(reads)
        # The longest first, as in HFLM: memory runs out immediately or never, and time left is never underestimated.
        ordered = sorted(contexts, key=lambda c: (len(c), max(len(reads[i].tail) for i in contexts[c])), reverse=True)
        batches = [ordered[first : first + rows] for first in range(0, len(ordered), rows)]
        for batch in batches:
            members = [index for context in batch for index in contexts[context]]
            self._statistics.uncached_requests += sum(not reads[index].split for index in members)
            exact = {index: reads[index] for index in members if reads[index].exact_targets}
            decoded, predictions = self.round_trip([c for c in batch if c], logits=bool(exact))
            for index, read in exact.items():
                targets = read.exact_targets
                answers[index] = _likelihood(predictions[read.cached][read.split - len(targets) : read.split], targets)
            # One row for all continuations that look the same to the model, such as those of a single token.
            alike: dict[tuple[TokenIds, TokenIds], list[int]] = {}
            for index in sorted(members, key=lambda i: len(reads[i].tail), reverse=True):
                alike.setdefault((reads[index].cached, reads[index].tail), []).append(index)
            pairs = list(alike)
            for start in range(0, len(pairs), rows):
                part = pairs[start : start + rows]
                logits = self._read_tails([decoded.get(cached) for cached, _ in part], [tail for _, tail in part])
                for pair, row in zip(part, logits, strict=True):
                    end = len(pair[1])
                    for index in alike[pair]:
                        targets = reads[index].targets[len(reads[index].exact_targets) :]
                        value, likeliest = _likelihood(row[end - len(targets) : end], targets)
                        answers[index] = (answers[index][0] + value, answers[index][1] and likeliest)
                        bar.update(1)
        return answers

    def round_trip(
        self, contexts: Sequence[TokenIds], logits: bool = False
    ) -> tuple[dict[TokenIds, CachedLayers], dict[TokenIds, torch.Tensor]]:
        """Prefill contexts, at most a batch of them, and send the cache of each through the method.

        Returns:
            By context: the decoded caches, and with `logits` the log-probabilities `[T, V]` of the prefill.
        """
        kept = {} if logits else {c: filled for c in contexts if (filled := self._exact.get(c)) is not None}
        decoded = {tokens: self._code(filled, 0, tokens) for tokens, filled in kept.items()}
        contexts = [tokens for tokens in contexts if tokens not in kept]
        if not contexts:
            return decoded, {}
        # Many kernels cannot read several tokens after a recurrent state.
        sharing = not logits and not self._layout.states
        held = self._beginning(contexts) if sharing else 0
        filled, predictions = self._prefill(contexts, held, logits)
        if sharing and not held and len(contexts) == 1:
            self._exact.begun = contexts[0], filled
        for row, tokens in enumerate(contexts):
            decoded[tokens] = self._code(filled, row, tokens)
            if not logits:
                self._exact.keep(tokens, filled, row)
        return decoded, dict(zip(contexts, predictions, strict=True)) if logits else {}

    def _beginning(self, contexts: Sequence[TokenIds]) -> int:
        """How many tokens of `begun` all contexts begin with. It is filled first, if that saves work."""
        starts = [context[:-1] for context in contexts]  # a forward pass needs a token to read
        held = _in_common([self._exact.begun[0], *starts]) if self._exact.begun else 0
        if held >= _SHARED_TOKENS:
            return held
        self._exact.begun = None  # frees its memory first
        common = starts[0][: _in_common(starts)]
        if len(contexts) == 1 or len(common) < _SHARED_TOKENS:
            return 0
        self._exact.begun = common, self._prefill([common], 0)[0]
        return len(common)

    def _prefill(self, contexts: Sequence[TokenIds], held: int, logits: bool = False) -> tuple[Filled, torch.Tensor]:
        """The exact cache of contexts, whose first `held` tokens are in `begun`, and the predictions of the others."""
        cache = empty_cache(self._model, self._layout)
        if held and self._exact.begun:
            begun = self._exact.begun[1]
            rows = [[x[:, :, :held].expand(len(contexts), -1, -1, -1) for x in unit] for unit in begun.units]
            cache = begun.cache([(keys, values) for keys, values in rows])
        tokens = _padded([context[held:] for context in contexts], self._device)
        # There is no mask: padding is on the right, where no real token sees it. The head is skipped if not needed.
        predictions = self._forward(tokens, cache=cache, logits_to_keep=0 if logits else 1)
        return Filled.of(cache, self._layout, held + tokens.shape[1]), predictions

    def _code(self, filled: Filled, row: int, token_ids: TokenIds) -> CachedLayers:
        """The first tokens in a row of a cache, which have these ids, as they come back from the method."""
        tokens = len(token_ids)
        device, dtype = self._device, self._layout.torch_dtype

        def tensors(side: int) -> list[torch.Tensor]:
            return [unit[side][row, :, :tokens].transpose(0, 1).to(device, dtype) for unit in filled.units]

        chunk = KVChunk(tensors(0), tensors(1), self._layout, token_ids=token_ids)
        back = []
        for span in spans(tokens, self._chunk_tokens):
            piece = chunk.slice(*span)
            stored, bits = self._method.encode(piece)
            back.append(self._method.decode(stored))
            if (back[-1].start, back[-1].tokens) != (piece.start, piece.tokens):
                raise InputError(f"method: {type(self._method).__name__} must return a chunk of the same tokens")
            self._statistics.bits += bits
        self._statistics.contexts += 1
        self._statistics.cached_tokens += tokens
        whole = KVChunk.concat(back)
        units = [
            (keys.transpose(0, 1).to(of_keys), values.transpose(0, 1).to(of_values))
            for keys, values, (of_keys, of_values) in zip(whole.keys, whole.values, filled.units, strict=True)
        ]
        return CachedLayers(units, filled)

    def _read_tails(self, caches: Sequence[CachedLayers | None], tails: Sequence[TokenIds]) -> torch.Tensor:
        """Log-probabilities `[B, T, V]` of the model as it reads each tail after its cache. None means no cache."""
        tokens = _padded(tails, self._device)
        lengths = torch.tensor([0 if cache is None else cache.units[0][0].shape[1] for cache in caches])
        width = int(lengths.max())
        cache = self.build_cache(caches, width)
        if cache is None:
            return self._forward(tokens)
        # The caches of all rows end in the same column, so all tails begin in the same one. Positions count from each
        # row's first real token. Those of the padding after a short tail could pass the model's last position.
        last = lengths + torch.tensor([len(tail) for tail in tails]) - 1
        positions = (lengths[:, None] + torch.arange(tokens.shape[1])).minimum(last[:, None])
        mask = None
        if int(lengths.min()) < width:
            mask = (torch.arange(width + tokens.shape[1]) >= width - lengths[:, None]).long().to(tokens.device)
        return self._forward(tokens, cache=cache, attention_mask=mask, position_ids=positions.to(tokens.device))

    def build_cache(self, rows: Sequence[CachedLayers | None], width: int) -> Any:
        """Build a transformers cache from rows, padded on the left to `width` tokens; None if all of them are None."""
        some = next((row for row in rows if row is not None), None)
        if some is None:
            return None
        batches = []
        for index, pair in enumerate(some.units):
            filled = []
            for side, like in enumerate(pair):
                batch = like.new_zeros(len(rows), like.shape[0], width, like.shape[2])
                for to, row in zip(batch, rows, strict=True):
                    if row is not None:
                        to[:, width - row.units[index][side].shape[1] :] = row.units[index][side]
                filled.append(batch)
            batches.append((filled[0], filled[1]))
        return some.filled.cache(batches)


def rows_of(tokens: int, most: int) -> int:
    """Return how many rows of this length go through a model together."""
    return max(1, min(most, _PASS_TOKENS // max(tokens, 1)))


def _likelihood(log_probabilities: torch.Tensor, targets: TokenIds) -> tuple[float, bool]:
    """Sum up `[T, V]` over T targets, and tell whether each of them is the likeliest token."""
    chosen = torch.tensor(targets, device=log_probabilities.device)
    likeliest = bool((log_probabilities.argmax(-1) == chosen).all())
    return float(log_probabilities.gather(-1, chosen[:, None]).sum(dtype=torch.float64)), likeliest


def _in_common(rows: Sequence[TokenIds]) -> int:
    """The number of tokens that all rows begin with."""
    return next((at for at, ids in enumerate(zip(*rows, strict=False)) if len({*ids}) > 1), min(map(len, rows)))


def _padded(rows: Sequence[TokenIds], device: torch.device) -> torch.Tensor:
    """Token ids `[B, T]`, padded on the right."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for to, row in zip(tokens, rows, strict=True):
        to[: len(row)] = torch.tensor(row)
    return tokens.to(device)
