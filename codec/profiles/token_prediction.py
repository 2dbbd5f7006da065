"""Prediction from tokens: the part of a token's cache that follows from the token's id.

A cache is a function of its tokens, and whoever keeps a prefix cache has them. A linear map of a token's own embedding
explains all of the first layer of a model, and a fifth to two thirds of the others (SmolLM2-135M). The codec subtracts
what it predicts, and codes the rest.

    prediction [N] of id v  =  bfloat16(scale [N] * (row_scale[v] * (embedding[v] [K] @ weights [K, N])))

`embedding` has 4 bits and `weights` 8: the sums of their products are integers below 2^24, which float32 holds exactly.
So every backend predicts the same bits, whatever the order of its sums, and a run of tokens is restored exactly as in
the whole chunk. Rounding to bfloat16 costs nothing, because the encoder subtracts the rounded prediction. On
SmolLM2-135M 4 bits of the embedding take 0.5% more bits than float32; half of its rank would take 2%.

Either all tokens of a chunk are predicted, except for sinks, or none: components that only predicted tokens can do
without are not coded.

The encoder's class predictor reads the values with their predictions, so it wants the predictions' coefficients, too:
`CoefficientMap` leads from embeddings to them.

`PredictionCache` keeps the predictions of the first ids that it meets, because a few thousand ids make up most text.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.errors import FormatError
from cuvee.codec.format.container import MAX_VOCABULARY
from cuvee.codec.profiles.file_arrays import Arrays, read_array
from cuvee.codec.support.arrays import I64, U8
from cuvee.codec.support.forks import tell_after_fork
from cuvee.codec.support.integer_products import multiply_integers
from cuvee.codec.support.nibbles import LARGEST, pack_nibbles, unpack_nibbles

CACHE_BYTES = 256 << 20  # per profile: the predictions of 11,000 ids of SmolLM2-135M, or of 2,000 of Llama-3.1-8B
COEFFICIENT_CACHE_BYTES = 128 << 20  # per profile that encodes: what the class predictor reads of 14,000 ids
LARGEST_FEATURE = LARGEST  # magnitude of a number of the embedding
LARGEST_WEIGHT = 127
LARGEST_COEFFICIENT = 0x7F7F7F  # magnitude of a number of a `CoefficientMap`: its largest digits
MAX_FEATURES = 1 << 14  # with more, sums of products might exceed 2^24


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Embeddings of a vocabulary of V ids: int8 `[V, K]`, -7 … 7, and what 1 stands for in each row, float32 `[V]`."""

    embedding: torch.Tensor
    row_scale: torch.Tensor

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.embedding)

    @property
    def features(self) -> int:
        """K."""
        return self.embedding.shape[1]

    def rows(self, token_ids: I64) -> TokenTable:
        """Return the table of some ids, in this order."""
        index = torch.from_numpy(token_ids)
        return TokenTable(self.embedding[index], self.row_scale[index])

    def packed(self) -> U8:
        """Return the embedding plus 8, two numbers per byte, the first in the low bits: `[V, ceil(K / 2)]`."""
        return pack_nibbles(self.embedding.numpy())


def read_token_table(features: int, arrays: Arrays) -> TokenTable:
    """Return the table of K features in the arrays of a profile's file."""
    if type(features) is not int or not 1 <= features <= MAX_FEATURES:
        raise FormatError(f"features: must be 1 … {MAX_FEATURES}, got {features!r}")
    packed = read_array(arrays, "tokens.embedding", np.uint8, None, (features + 1) // 2)
    if not 0 < len(packed) <= MAX_VOCABULARY:
        raise FormatError(f"tokens.embedding: must have 1 … {MAX_VOCABULARY} rows, got {len(packed)}")
    row_scale = read_array(arrays, "tokens.row_scale", np.float32, len(packed))
    numbers = unpack_nibbles("tokens.embedding", packed, features)
    return TokenTable(torch.from_numpy(numbers), torch.from_numpy(row_scale))


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The map from embeddings to the values of one section: int8 `[K, N]`, and what 1 stands for in each column,
    float32.
    """

    weights: torch.Tensor
    scale: torch.Tensor

    dtype: ClassVar[torch.dtype] = torch.bfloat16  # of the predictions

    @property
    def size(self) -> int:
        """N."""
        return len(self.scale)

    def predict(self, table: TokenTable) -> torch.Tensor:
        """Return the predictions bfloat16 `[U, N]` for the U ids of a table, on the device of both."""
        exact = multiply_integers(table.embedding, self.weights).float()
        return (exact * table.row_scale[:, None] * self.scale).bfloat16()

    def take(self, columns: torch.Tensor) -> TokenMap:
        """Return the map to some of the values."""
        return TokenMap(self.weights[:, columns].contiguous(), self.scale[columns].contiguous())

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays of a profile's file; `read_token_map` is the inverse."""
        return {"weights": self.weights.numpy(), "scale": self.scale.numpy()}


@dataclass(frozen=True, slots=True)
class CoefficientMap:
    """The map from embeddings to some coefficients of the section's predictions, which the class predictor reads.

    Its integers have 24 bits. So their products' sums are exact, and the classes of a chunk do not depend on the ids
    that came before it.

    Attributes:
        digits: int8 `[K, 3, N]`, the digits of the integers to the base of 256, -128 … 127, the lowest first.
        scale: float64 `[N]`.
    """

    digits: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def rounded(cls, matrix: torch.Tensor) -> CoefficientMap:
        """Return the map of the matrix `[N, K]` float32, from embeddings to coefficients."""
        scale = matrix.abs().amax(1).double().clamp_min(1e-300) / LARGEST_COEFFICIENT
        rest = (matrix.double() / scale[:, None]).round_().long().T
        digits = torch.empty(len(rest), 3, rest.shape[1], dtype=torch.int8)
        for digit in digits.unbind(1):
            digit.copy_((rest + 128) % 256 - 128)
            rest = (rest - digit) // 256
        return cls(digits, scale)

    dtype: ClassVar[torch.dtype] = torch.float32  # of the predictions

    @property
    def size(self) -> int:
        """N."""
        return len(self.scale)

    @property
    def matrix(self) -> torch.Tensor:
        """float64 `[N, K]`: the matrix that was rounded."""
        return (_from_digits(self.digits.double()) * self.scale).T

    def predict(self, table: TokenTable) -> torch.Tensor:
        """Return the coefficients float32 `[U, N]` for the U ids of a table."""
        sums = multiply_integers(table.embedding, self.digits.flatten(1)).unflatten(1, (3, self.size))
        return (_from_digits(sums.double()) * table.row_scale.double()[:, None] * self.scale).float()


def _from_digits(digits: torch.Tensor) -> torch.Tensor:
    """Return the numbers with these digits `[…, 3, N]` to the base of 256, the lowest first."""
    low, middle, high = digits.unbind(-2)
    return low + 256 * (middle + 256 * high)


def read_token_map(prefix: str, values: int, features: int, arrays: Arrays) -> TokenMap:
    """Return the map in the arrays `PREFIX.token_*` of a profile's file, of a section of `values` per token."""
    weights = read_array(arrays, f"{prefix}.token_weights", np.int8, features, values)
    scale = read_array(arrays, f"{prefix}.token_scale", np.float32, values)
    return TokenMap(torch.from_numpy(weights), torch.from_numpy(scale))


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions for a run of tokens in one section.

    Attributes:
        rows: `[U, N]`, bfloat16 of a `TokenMap`, float32 of a `CoefficientMap`. Row 0 is zero.
        index: `[T]`, the row of each token; 0 for a token that is not predicted.
    """

    rows: torch.Tensor
    index: I64


class PredictionCache:
    """The predictions of one section for the first ids that it was asked for; others are computed every time.

    Rows, of at most `limit` bytes, are only added, and none is replaced: threads that decode read them without a lock.
    The first `sinks` positions of a sequence are not predicted: their values depend on the position, and hardly on the
    token.
    """

    def __init__(self, table: TokenTable, embedding_map: TokenMap | CoefficientMap, sinks: int, limit: int) -> None:
        self._table, self._map, self._sinks = table, embedding_map, sinks
        size, dtype = embedding_map.size, embedding_map.dtype
        # Threads outside of inference mode, which is a thread's own, may not write to a tensor that was made in it.
        with torch.inference_mode(mode=False):
            # Pages that were not written take no memory.
            self._rows = torch.empty(1 + min(limit // (dtype.itemsize * size), table.vocabulary), size, dtype=dtype)
            self._rows[0] = 0
        self._used = 1
        self._row_of = np.full(table.vocabulary, -1, np.int64)
        self._lock = threading.Lock()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """See `Forked`. Rows that were being written have no number yet, and are written again."""
        self._lock = threading.Lock()

    def of(self, token_ids: I64, start: int) -> Predictions:
        """Return the predictions for tokens with these ids, `[T]`, from position `start` on."""
        index = self._row_of[token_ids]
        index[: max(self._sinks - start, 0)] = 0
        if (index < 0).any() and self._used < len(self._rows):
            self._add(np.unique(token_ids[index < 0]))
            index = self._row_of[token_ids]
            index[: max(self._sinks - start, 0)] = 0
        missing = index < 0
        if not missing.any():
            return Predictions(self._rows, index)
        # The cache is full: the others' rows are computed for this call, behind those that the cache has.
        cached_rows, of_cached = np.unique(index[~missing], return_inverse=True)
        new_ids, of_new = np.unique(token_ids[missing], return_inverse=True)
        index[~missing], index[missing] = 1 + of_cached, 1 + len(cached_rows) + of_new
        predicted = self._map.predict(self._table.rows(new_ids))
        return Predictions(torch.cat([self._rows[:1], self._rows[torch.from_numpy(cached_rows)], predicted]), index)

    def _add(self, token_ids: I64) -> None:
        with self._lock:
            new = token_ids[self._row_of[token_ids] < 0][: len(self._rows) - self._used]
            if not len(new):
                return
            end = self._used + len(new)
            self._rows[self._used : end] = self._map.predict(self._table.rows(new))
            first, self._used = self._used, end
            # Published last: whoever finds a number finds its row, which no child forked meanwhile writes again.
            self._row_of[new] = np.arange(first, end)
