"""Centers of tokens on the device: their means, plus what their ids predict (`codec/profiles/token_prediction.py`).

    host    ids and positions of a batch --unique--> embedding [U, K] int8, row of each token's center [tokens] int32
    device  embedding @ weights, scaled, bfloat16 --> predictions [U, M] --> plus means --> centers [U, M]

All positions but the first few have one mean, so an id is predicted once per batch, and a few hundred ids make up most
batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.token_prediction import TokenMap, TokenTable
from cuvee.codec.support.arrays import I64
from cuvee.kernels.tiles import TileLayout

BLOCK_COLUMNS = 4096  # predicted at once: bounds the copy of the weights in float32, to 16 MB with 1,024 features
CENTER_BYTES = 6  # of scratch per value of a center: the center, and its prediction


@dataclass(frozen=True, slots=True)
class Centers:
    """Centers of a batch on the device: U rows, each of an id at a position; all positions beyond the sinks are one.

    Attributes:
        table: float32 `[U, M]`.
        rows: int32 `[tokens]`, the row of each token.
        position: int64 `[U]`: row of the means.
    """

    table: torch.Tensor
    rows: torch.Tensor
    position: torch.Tensor
    embeddings: TokenTable


class TokenCenters:
    """Computes the centers of batches for one profile with a token table, from means float32 `[S + 1, M]`."""

    def __init__(self, profile: Profile, table: TokenTable, tiles: TileLayout, means: torch.Tensor) -> None:
        self._table, self._means, self._bounds = table, means, tiles.bounds
        weights, scale = [], []
        for index, section in enumerate(profile.learned):
            if section.token_map is not None:
                weights.append(tiles.pack(section.token_map.weights, index))
                scale.append(tiles.pack(section.token_map.scale, index))
        self._weights, self._scale = torch.cat(weights, dim=1).to(means.device), torch.cat(scale).to(means.device)
        # Sections may differ in the number of sinks, which are not predicted.
        sinks = torch.zeros(means.shape, dtype=torch.bool, device="cpu")
        for index, section in enumerate(profile.learned):
            sinks[: len(section.basis.sinks), tiles.bounds[index] : tiles.bounds[index + 1]] = True
        self._sinks = sinks.to(means.device)

    def lay_out(self, token_ids: Sequence[I64 | None], starts: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return what goes to the device, by name, for chunks that follow each other.

        Raises:
            InputError: a chunk has no ids.
        """
        count, pairs = len(self._means), []
        for ids, start in zip(token_ids, starts, strict=True):
            if ids is None:
                raise InputError("token_ids: must be known in all chunks of a batch with predictions, got none")
            pairs.append(ids * count + np.minimum(start + np.arange(len(ids)), count - 1))
        unique, rows = np.unique(np.concatenate(pairs), return_inverse=True)
        unique_ids, position = np.divmod(unique, count)
        token_table = self._table.rows(unique_ids)
        return {
            "embedding": token_table.embedding.numpy(), "row_scale": token_table.row_scale.numpy(),
            "position": position, "rows": rows.astype(np.int32),
        }  # fmt: skip

    def centers(self, sent: Mapping[str, torch.Tensor], sections: range) -> Centers:
        """Return a batch's centers, of `lay_out`'s arrays on the device; only columns of `sections` are predicted."""
        token_table, position = TokenTable(sent["embedding"], sent["row_scale"]), sent["position"]
        shape = (len(position), self._means.shape[1])
        predictions = torch.zeros(shape, dtype=torch.bfloat16, device=self._means.device)
        end = int(self._bounds[sections.stop])
        for first in range(int(self._bounds[sections.start]), end, BLOCK_COLUMNS):
            at = slice(first, min(first + BLOCK_COLUMNS, end))
            predictions[:, at] = TokenMap(self._weights[:, at], self._scale[at]).predict(token_table)
        predictions.masked_fill_(self._sinks[position], 0)
        table = self._means[position]
        table += predictions
        return Centers(table, sent["rows"], position, token_table)
