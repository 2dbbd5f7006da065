"""What a codec costs in quality: the model's predictions after a decoded cache against those after the exact one.

    tokens [N, T] = cached [N, prefix] | scored [N, T - prefix]

    cached --prefill--> caches --method--> decoded caches, bits
                          |                    |
    scored ------------ score -------------- score -----> KL, difference in NLL, top-1, one number a sequence

The exact side is computed once (`QualityBench`) and serves any number of methods. Anything that stores chunks is a
method: the codec (`CodecMethod`), the baselines (`cuvee.eval.baselines`), or a plain function.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVChunk, KVLayout
from cuvee.codec.model import check_tokens, compare, frozen, prefill, score, stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CodecMethod", "Method", "Quality", "QualityBench", "RoundTrip", "measure_quality"]

CHUNK_TOKENS = 256

RoundTrip = Callable[[list[KVChunk]], tuple[list[KVChunk], float]]
"""Chunks -> the chunks as they come back, and how many bits all of them took."""


class Method(Protocol):
    """One way to store a chunk."""

    @property
    def counts(self) -> str:
        """What its bits include, in a few words."""
        ...

    @property
    def timed(self) -> bool:
        """Whether `encode` and `decode` do the real work, so that their speed means something."""
        ...

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """What is stored, and its size in bits."""
        ...

    def decode(self, stored: Any) -> KVChunk:
        """The chunk as it comes back."""
        ...


@dataclass(frozen=True, slots=True)
class CodecMethod:
    """A `Codec` as a method: its bits are all bytes of its blobs (the profile apart)."""

    codec: Codec
    counts: str = "every byte of the blob"
    timed: bool = True

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        blob = self.codec.encode(chunk)
        return blob, 8.0 * len(blob)

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`."""
        return self.codec.decode(stored)


@dataclass(frozen=True, slots=True)
class Quality:
    """What one method costs.

    Attributes:
        name: of the method.
        counts: what its bits include.
        bits_per_value: all-in.
        ratio: 16 bits over `bits_per_value`.
        kl: nats a scored token, of the predictions after the decoded cache against those after the exact one.
        kl_stderr: standard error over sequences; None with a single sequence, as below.
        delta_nll: nats a token lost on the real next tokens, paired; `delta_nll_stderr` as above.
        top1: share of scored tokens whose most likely successor stays the same; `top1_stderr` as above.
        encode_seconds, decode_seconds: for all sequences; None where the method does not do the real work.
        encode_gb_per_s, decode_gb_per_s: 10**9 bytes of the cache, counted at 16 bits a value, a second.
        chunk_tokens: tokens coded together.
        sequences, cached_tokens, scored_tokens: what was measured.
    """

    name: str
    counts: str
    bits_per_value: float
    ratio: float
    kl: float
    kl_stderr: float | None
    delta_nll: float
    delta_nll_stderr: float | None
    top1: float
    top1_stderr: float | None
    encode_seconds: float | None
    decode_seconds: float | None
    encode_gb_per_s: float | None
    decode_gb_per_s: float | None
    chunk_tokens: int
    sequences: int
    cached_tokens: int
    scored_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return asdict(self)


class QualityBench:
    """A model and sequences whose exact caches and predictions are computed once, to measure many methods on.

    Args:
        model: a transformers causal language model.
        token_ids: int64 `[N, T]`.
        prefix: leading tokens of a sequence that are cached and coded. Default: three quarters of T.
        dtype: of the cache that the methods get; default: the model's. Predictions are always compared with those
            after the cache in the model's own dtype, so what a narrower cache costs is part of the figures.
        batch_size: sequences a forward pass.

    Keeps the caches and the log-probabilities `[N, T - prefix - 1, V]` float32 in memory.

    Raises:
        InputError: `token_ids` of another shape, dtype or range, or `prefix` that leaves nothing to score.
        UnsupportedModel: see `KVLayout.from_config`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        token_ids: torch.Tensor,
        prefix: int | None = None,
        *,
        dtype: str | None = None,
        batch_size: int = 8,
    ) -> None:
        self.model = model
        self.prefix = check_tokens(model, token_ids, prefix)
        exact_layout = KVLayout.from_config(model.config, dtype=model.dtype)
        self.layout = exact_layout if dtype is None else replace(exact_layout, dtype=dtype)
        self.caches: list[KVChunk] = []
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []  # scored tokens [B, t], log-probabilities
        with frozen(model), torch.no_grad():
            for batch in token_ids.to(torch.int64).split(batch_size):
                cached, scored = batch.to(model.device).split([self.prefix, batch.shape[1] - self.prefix], dim=1)
                caches = prefill(model, cached, exact_layout)
                self._batches.append((scored, score(model, caches, scored)))
                self.caches += [_cast(chunk, self.layout) for chunk in caches]

    @property
    def raw_bytes(self) -> int:
        """Size of all caches at 16 bits a value."""
        return 2 * self._values

    @property
    def _values(self) -> int:
        return sum(chunk.tokens for chunk in self.caches) * self.layout.values_per_token

    def run(self, name: str, method: Method | RoundTrip, chunk_tokens: int = CHUNK_TOKENS) -> Quality:
        """Measure one method.

        Args:
            name: for the report.
            method: a `Method`, or a function `chunks -> (chunks, bits)`.
            chunk_tokens: tokens coded together; the last chunk of a sequence may hold fewer.

        Raises:
            InputError: `chunk_tokens` below one, or a method that gives back something else than it got.
        """
        if chunk_tokens < 1:
            raise InputError(f"chunk_tokens: must be at least 1, got {chunk_tokens}")
        pieces = [
            chunk.slice(t, min(t + chunk_tokens, chunk.tokens))
            for chunk in self.caches
            for t in range(0, chunk.tokens, chunk_tokens)
        ]
        back, bits, encode_seconds, decode_seconds = _round_trip(method, pieces)
        if [(c.start, c.tokens) for c in back] != [(c.start, c.tokens) for c in pieces]:
            raise InputError(f"method: {name} gave back other chunks than it got")
        per_sequence = math.ceil(self.prefix / chunk_tokens)
        decoded = [KVChunk.concat(back[i : i + per_sequence]) for i in range(0, len(back), per_sequence)]
        kl, loss, same = self._compare(decoded)
        bits_per_value = bits / self._values
        return Quality(
            name=name,
            counts=getattr(method, "counts", ""),
            bits_per_value=bits_per_value,
            ratio=16 / bits_per_value if bits_per_value else math.inf,
            kl=float(np.mean(kl)),
            kl_stderr=stderr(kl),
            delta_nll=float(np.mean(loss)),
            delta_nll_stderr=stderr(loss),
            top1=float(np.mean(same)),
            top1_stderr=stderr(same),
            encode_seconds=encode_seconds,
            decode_seconds=decode_seconds,
            encode_gb_per_s=self.raw_bytes / encode_seconds / 1e9 if encode_seconds else None,
            decode_gb_per_s=self.raw_bytes / decode_seconds / 1e9 if decode_seconds else None,
            chunk_tokens=chunk_tokens,
            sequences=len(self.caches),
            cached_tokens=sum(chunk.tokens for chunk in self.caches),
            scored_tokens=sum(scored.shape[0] * (scored.shape[1] - 1) for scored, _ in self._batches),
        )

    def _compare(self, decoded: list[KVChunk]) -> tuple[list[float], list[float], list[float]]:
        """KL, loss on the true tokens and top-1 agreement, one entry a sequence."""
        kl: list[float] = []
        loss: list[float] = []
        same: list[float] = []
        row = 0
        with frozen(self.model), torch.no_grad():
            for scored, exact in self._batches:
                other = score(self.model, decoded[row : row + len(scored)], scored)
                row += len(scored)
                for kept, new in zip((kl, loss, same), compare(exact, other, scored[:, 1:]), strict=True):
                    kept.extend(new)
        return kl, loss, same


def measure_quality(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    prefix: int | None,
    round_trip: Method | RoundTrip,
    *,
    name: str = "",
    chunk_tokens: int = CHUNK_TOKENS,
    dtype: str | None = None,
) -> Quality:
    """Measure one method once; `QualityBench` is the same for several. Arguments and errors as there."""
    return QualityBench(model, token_ids, prefix, dtype=dtype).run(name, round_trip, chunk_tokens)


def _round_trip(
    method: Method | RoundTrip, pieces: list[KVChunk]
) -> tuple[list[KVChunk], float, float | None, float | None]:
    """Chunks as they come back, bits, seconds to encode and to decode (None: not known)."""
    if callable(method):
        back, bits = method(pieces)
        return back, bits, None, None
    began = time.perf_counter()
    stored = [method.encode(chunk) for chunk in pieces]
    encoded = time.perf_counter()
    back = [method.decode(item) for item, _ in stored]
    decoded = time.perf_counter()
    bits = sum(size for _, size in stored)
    if not method.timed:
        return back, bits, None, None
    return back, bits, encoded - began, decoded - encoded


def _cast(chunk: KVChunk, layout: KVLayout) -> KVChunk:
    dtype = layout.torch_dtype
    return KVChunk([k.to(dtype) for k in chunk.keys], [v.to(dtype) for v in chunk.values], layout, chunk.start)
