"""The quality loss of a codec: compare the model's predictions after a decoded cache with those after the exact one.

    tokens [N, T] = cached [N, prefix] | scored [N, T - prefix]

    cached --prefill--> caches --method--> decoded caches, bits
                          |                    |
    scored ------------ score -------------- score -----> KL, difference in NLL, top-1, one number per sequence

The exact side is computed once (`QualityBench`) and serves any number of methods. A method is anything that stores
chunks: the codec (`CodecMethod`) or a baseline (`cuvee.eval.baselines`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.dtypes import value_bits
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import Filled, check_tokens, coded_layout, fill, score
from cuvee.codec.models.frozen import frozen
from cuvee.learning.divergence import compare, stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CHUNK_TOKENS", "CodecMethod", "Method", "PerSequence", "Quality", "QualityBench", "spans"]

CHUNK_TOKENS = 256


class Method(Protocol):
    """One way to store a chunk."""

    @property
    def counts(self) -> str:
        """A description of the bits in a few words."""
        ...

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """Return the stored object and its size in bits."""
        ...

    def decode(self, stored: Any) -> KVChunk:
        """Return the decoded chunk."""
        ...


@dataclass(frozen=True, slots=True)
class CodecMethod:
    """A `Codec` as a method. Its bits are all the bytes of its blobs; the profile is not included."""

    codec: Codec
    counts: str = "every byte of the blob"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        blob = self.codec.encode(chunk)
        return (blob, chunk.device), 8.0 * len(blob)

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`: on the device where the chunk was."""
        blob, device = stored
        return self.codec.decode(blob, device=device)


@dataclass(frozen=True, slots=True)
class PerSequence:
    """The figures of each sequence, in order. Paired comparisons and error bars are made from them."""

    bits_per_value: list[float]
    kl: list[float]
    delta_nll: list[float]
    top1: list[float]


@dataclass(frozen=True, slots=True)
class Quality:
    """The size and loss of one method.

    Attributes:
        name: of the method.
        counts: a description of its bits.
        bits_per_value: everything included.
        ratio: 16 bits over `bits_per_value`; None where nothing is stored.
        kl: KL(after the exact cache ‖ after the decoded one) of the predictions, nats per scored token.
        kl_stderr: standard error over sequences; None for a single sequence, as for the errors below.
        nll: negative log-likelihood of the real next tokens after the decoded cache, nats per token. Its exponential
            is the perplexity.
        delta_nll: how much of that the exact cache would have saved, paired; `delta_nll_stderr` is its error.
        top1: share of scored tokens whose most likely successor stays the same; `top1_stderr` is its error.
        chunk_tokens: tokens coded together.
        sequences, cached_tokens, scored_tokens: what was measured.
        per_sequence: the figures of each sequence.
    """

    name: str
    counts: str
    bits_per_value: float
    ratio: float | None
    kl: float
    kl_stderr: float | None
    nll: float
    delta_nll: float
    delta_nll_stderr: float | None
    top1: float
    top1_stderr: float | None
    chunk_tokens: int
    sequences: int
    cached_tokens: int
    scored_tokens: int
    per_sequence: PerSequence

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)


class QualityBench:
    """A model and sequences to measure many methods on. Their exact caches and predictions are computed once.

    Args:
        model: a transformers causal language model.
        token_ids: int64 `[N, T]`.
        prefix: how many leading tokens of each sequence are cached and coded. Default: three quarters of T.
        dtype: of the cache that the methods get; default: the model's. Predictions are always compared with those
            after the cache in the model's own dtype, so the figures include what a narrower dtype costs.
        batch_size: sequences per forward pass.
        device: where the caches are kept and coded; the model may be on another one.
        progress: called after every batch with how much of this measurement is done, such as "8 of 24 sequences".

    The caches and the log-probabilities `[N, T - prefix - 1, V]` float32 stay in memory.

    Raises:
        InputError: `token_ids` has another shape, dtype or range, or `prefix` leaves nothing to score.
        UnsupportedModelError: see `KVLayout.from_config`.

    Example:
        >>> from cuvee.eval.baselines.quantizers import Float8, Kivi
        >>> from cuvee.calibration.corpus import read_corpus, spread_sequences
        >>> from cuvee.calibration.corpus import load_bundled_model
        >>> from cuvee.eval.quality import QualityBench
        >>> model, _ = load_bundled_model()
        >>> tokens = spread_sequences([read_corpus("orchard", "books-3m")], length=128, count=2)
        >>> bench = QualityBench(model, tokens, dtype="bfloat16")
        >>> fp8, kivi2 = bench.run("FP8", Float8()), bench.run("KIVI, 2 bits", Kivi(2))
        >>> fp8.bits_per_value, fp8.kl < kivi2.kl
        (8.0, True)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        token_ids: torch.Tensor,
        prefix: int | None = None,
        *,
        dtype: str | None = None,
        batch_size: int = 8,
        device: torch.device | str = "cpu",
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model = model
        self._progress = progress
        self.prefix = check_tokens(model, token_ids, prefix)
        exact_layout = coded_layout(model)
        self.layout = exact_layout if dtype is None else replace(exact_layout, dtype=dtype)
        self.caches: list[KVChunk] = []
        # Scored tokens [B, t], log-probabilities, and the cache if it holds more than keys and values.
        self._batches: list[tuple[torch.Tensor, torch.Tensor, Filled | None]] = []
        self.exact_per_sequence: list[float] = []  # negative log-likelihood, nats per scored token
        self._batch_size = batch_size
        with frozen(model), torch.no_grad():
            for batch in token_ids.to(torch.int64).split(batch_size):
                cached, scored = batch.to(model.device).split([self.prefix, batch.shape[1] - self.prefix], dim=1)
                filled = fill(model, cached, exact_layout)
                caches = filled.chunks(cached, device)
                exact = score(model, caches, scored, filled)
                self._batches.append((scored, exact, filled if exact_layout.states else None))
                chosen = scored[:, 1:, None]
                self.exact_per_sequence += (-exact.gather(-1, chosen).squeeze(-1).mean(-1)).tolist()
                self.caches += [_cast(chunk, self.layout) for chunk in caches]
                progress(f"exact caches of {len(self.caches)} of {len(token_ids)} sequences")

    @property
    def exact_nll(self) -> float:
        """Negative log-likelihood after the exact caches, nats per scored token, averaged over the sequences."""
        return float(np.mean(self.exact_per_sequence))

    def run(self, name: str, method: Method, chunk_tokens: int = CHUNK_TOKENS) -> Quality:
        """Measure one method.

        Args:
            name: for the report.
            method: what stores the chunks.
            chunk_tokens: tokens coded together; the last chunk of a sequence may hold fewer.

        Raises:
            InputError: `chunk_tokens` is below one, or the method gives back other chunks than it got.
        """
        if chunk_tokens < 1:
            raise InputError(f"chunk_tokens: must be at least 1, got {chunk_tokens}")
        cut = spans(self.prefix, chunk_tokens)
        values = self.prefix * self.layout.values_per_token
        bits: list[float] = []
        kl: list[float] = []
        loss: list[float] = []
        same: list[float] = []
        # Batch after batch, because what a method makes of all caches may be several times as large as they are.
        for index, (scored, exact, filled) in enumerate(self._batches):
            caches = self.caches[index * self._batch_size :][: len(scored)]
            pieces = [chunk.slice(*span) for chunk in caches for span in cut]
            stored = [method.encode(chunk) for chunk in pieces]
            back = [method.decode(item) for item, _ in stored]
            if [(c.start, c.tokens) for c in back] != [(c.start, c.tokens) for c in pieces]:
                raise InputError(f"method: {name} must return chunks of the same tokens")
            starts = range(0, len(back), len(cut))
            decoded = [KVChunk.concat(back[i : i + len(cut)]) for i in starts]
            bits += [sum(size for _, size in stored[i : i + len(cut)]) / values for i in starts]
            with frozen(self.model), torch.no_grad():
                other = score(self.model, decoded, scored, filled)
                for kept, new in zip((kl, loss, same), compare(exact, other, scored[:, 1:]), strict=True):
                    kept.extend(new)
            self._progress(f"{len(kl)} of {len(self.caches)} sequences")
        bits_per_value = float(np.mean(bits))
        return Quality(
            name=name,
            counts=method.counts,
            bits_per_value=bits_per_value,
            ratio=value_bits() / bits_per_value if bits_per_value else None,
            kl=float(np.mean(kl)),
            kl_stderr=stderr(kl),
            nll=self.exact_nll + float(np.mean(loss)),
            delta_nll=float(np.mean(loss)),
            delta_nll_stderr=stderr(loss),
            top1=float(np.mean(same)),
            top1_stderr=stderr(same),
            chunk_tokens=chunk_tokens,
            sequences=len(self.caches),
            cached_tokens=sum(chunk.tokens for chunk in self.caches),
            scored_tokens=sum(scored.shape[0] * (scored.shape[1] - 1) for scored, _, _ in self._batches),
            per_sequence=PerSequence(bits, kl, loss, same),
        )


def spans(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Return the beginning and end of each chunk of `tokens` tokens."""
    return [(t, min(t + chunk_tokens, tokens)) for t in range(0, tokens, chunk_tokens)]


def _cast(chunk: KVChunk, layout: KVLayout) -> KVChunk:
    dtype = layout.torch_dtype
    keys, values = ([layer.to(dtype) for layer in unit] for unit in (chunk.keys, chunk.values))
    return KVChunk(keys, values, layout, chunk.start, chunk.token_ids, chunk.following)
