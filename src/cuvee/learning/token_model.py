"""Learn to predict the cache from its tokens: ridge regression of the values on the embedding of the token itself.

    gram [K, K]  = sum of e e^T,   cross [K, N] = sum of e x^T     e: a token's embedding, x: its position-free values
    weights [K, N] = (gram + ridge)^-1 cross                       of all sections

Only a forward pass is needed, so this can take far more text than the gradients of `moments`: the map has as many
numbers as 600 tokens of cache, and learned from 5,000 tokens it gains little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.codec.models.frozen import frozen
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.sections import Section, columns_in_cache, partition
from cuvee.codec.profiles.token_prediction import LARGEST_FEATURE, LARGEST_WEIGHT, TokenMap, TokenTable
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.transform import gather
from cuvee.learning.moments import SINKS
from cuvee.learning.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIDGE = 2e-3  # as a share of the features' mean square; 2e-4 and 2e-2 measured equal
FLOOR = 1e-6
# Tokens of text per feature, at least. With fewer, what remains of the text's own tokens is much less than what remains
# of others, and the profile promises too much. SmolLM2-135M's 576 features gain from 20,000 tokens all but 1.5% of
# what they ever gain, from 50,000 all but 0.3%.
TOKENS_PER_FEATURE = 32
CLIPS = (2.2, 2.5, 2.8, 3.2, 3.8, 4.6, 6.0, 9.0)  # largest numbers of a row of the table, in deviations of the row
_ROWS = 8192  # tokens whose features are made at a time
MOST_FEATURES = 1024  # of wider embeddings, the directions that predict most


def token_features(embedding: torch.Tensor) -> torch.Tensor:
    """Return what the regression knows of ids, float32 `[t, K]`, from their rows of the embedding, `[t, K]`."""
    # A model normalizes what enters a layer, so the cache of the first layer is linear in the normalized embedding.
    wide = embedding.float()
    return wide / (wide.square().mean(1, keepdim=True).sqrt() + FLOOR)


class TokenSums:
    """Sums over the tokens of a text, of a model's embeddings and of the values of its cache."""

    def __init__(self, model: PreTrainedModel, layout: KVLayout) -> None:
        # In the model's dtype: the features of a large vocabulary take a gigabyte, so a few are made at a time.
        self.embedding = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.detach().cpu()
        self.layout = layout
        size, values = self.embedding.shape[1], layout.values_per_token
        exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        self.count = torch.zeros(1, **exact)
        self.gram = torch.zeros(size, size, **exact)
        self.cross = torch.zeros(size, values, **exact)
        self.feature_total = torch.zeros(size, **exact)
        self.value_total = torch.zeros(values, **exact)

    def add_text(self, model: PreTrainedModel, batches: Sequence[torch.Tensor], run: Run | None = None) -> None:
        """Add the caches of sequences, `[B, T]` int64 each."""
        run = run or Run(shown=False)
        (whole,) = partition(self.layout, "all")
        with frozen(model), torch.no_grad():
            for batch in run.stage("reading", batches, self):
                for ids, chunk in zip(batch, prefill(model, batch.to(model.device), self.layout), strict=True):
                    unrotation = Rotation(0, chunk.tokens, chunk.device, inverse=True)
                    values = gather(chunk, whole, unrotation, slice(0, chunk.tokens))
                    self._add(ids[SINKS:].cpu(), values[SINKS:])

    def state(self) -> list[torch.Tensor]:
        """See `Run`."""
        return [self.count, self.gram, self.cross, self.feature_total, self.value_total]

    def restore(self, state: list[torch.Tensor]) -> None:
        """See `Run`."""
        self.count, self.gram, self.cross, self.feature_total, self.value_total = state

    def _add(self, token_ids: torch.Tensor, values: torch.Tensor) -> None:
        rows = token_features(self.embedding[token_ids])
        self.count += len(rows)
        self.gram += rows.T @ rows
        self.cross += rows.T @ values
        self.feature_total += rows.sum(0, dtype=torch.float64)
        self.value_total += values.sum(0, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class TokenModel:
    """A profile's token table, the map of each section, and how far predictions spread.

    `spreads` are per section `[K, N]` float32: the covariance of the section's predictions is S^T S.
    """

    table: TokenTable
    maps: tuple[TokenMap, ...]
    spreads: tuple[torch.Tensor, ...]

    def predicted(self, section: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the predicted values `[t, N]` float32 of tokens."""
        return self.maps[section].predict(self.table.rows(token_ids.cpu().numpy())).float()

    def spread(self, section: int, basis: SectionBasis) -> torch.Tensor:
        """Return the spread of a section's predicted components, `[K, R]`."""
        parts = self.spreads[section].split(basis.block_sizes, dim=1)
        return torch.cat([part @ forward.T for part, forward in zip(parts, basis.forward, strict=True)], dim=1)


def learn_token_model(sums: TokenSums, sections: Sequence[Section]) -> TokenModel:
    """Solve the regression, and round it to a profile's numbers. Embeddings count from their mean over the text."""
    mean = sums.feature_total / sums.count
    gram = sums.gram / sums.count - torch.outer(mean, mean)
    cross = sums.cross / sums.count - torch.outer(mean, sums.value_total / sums.count)
    columns = [columns_in_cache(section, sums.layout) for section in sections]
    gram = gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky(gram)
    weights = torch.cholesky_solve(cross, root)
    spread = root.T @ weights
    directions = None
    if len(gram) > MOST_FEATURES:
        directions, weights = _leading(gram, weights)
        spread = weights  # of uncorrelated features of variance one
    deviation, table = _token_table(sums.embedding, mean.float(), directions)
    weights = (weights * deviation.double()[:, None]).float().cpu()
    maps = []
    for at in columns:
        section_weights = weights[:, at]
        scale = section_weights.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_WEIGHT
        maps.append(TokenMap((section_weights / scale).round().to(torch.int8).contiguous(), scale))
    everything = spread.float().cpu()
    return TokenModel(table, tuple(maps), tuple(everything[:, at] for at in columns))


def _token_table(
    embedding: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor | None
) -> tuple[torch.Tensor, TokenTable]:
    """Return the features of all tokens from their mean, along the directions if there are any, over the deviation of
    each; and these deviations.
    """

    def slices() -> Iterator[torch.Tensor]:
        for part in embedding.split(_ROWS):
            features = token_features(part) - mean
            yield features if directions is None else features @ directions.float()

    power = torch.stack([features.square().sum(0, dtype=torch.float64) for features in slices()]).sum(0)
    deviation = (power / len(embedding)).sqrt().float().clamp_min(FLOOR)
    tables, scales = zip(*(_rounded(features / deviation) for features in slices()), strict=True)
    return deviation, TokenTable(torch.cat(tables), torch.cat(scales))


def _rounded(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round embeddings `[V, K]` to int8; return them and the scale of each, the one that rounds it best: outliers are
    not cut off.
    """
    spread = features.square().mean(1, keepdim=True).sqrt().clamp_min(FLOOR)
    best = torch.full((len(features),), float("inf"), dtype=torch.float32)
    table = torch.zeros_like(features, dtype=torch.int8)
    row_scale = torch.ones(len(features), dtype=torch.float32)
    for clip in CLIPS:
        step = spread * clip / LARGEST_FEATURE
        rounded = (features / step).round().clamp(-LARGEST_FEATURE, LARGEST_FEATURE)
        error = (rounded * step - features).square().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        table[better], row_scale[better] = rounded[better].to(torch.int8), step[better, 0]
    return table, row_scale


def _leading(gram: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the directions `[D, K]` of the features that predict most, and the weights `[K, N]` on them.

    This is reduced-rank regression (Izenman, 1975), with values relative to their predicted deviation: of all maps of
    rank K, the one that loses the least of what is predicted.
    """
    spectrum, axes = torch.linalg.eigh(gram)
    root = (axes * spectrum.clamp_min(0).sqrt()) @ axes.T
    inverse_root = (axes * spectrum.clamp_min(1e-300).rsqrt()) @ axes.T
    whitened = root @ weights
    relative = whitened / whitened.square().sum(0).sqrt().clamp_min(1e-300)
    _, turned = torch.linalg.eigh(relative @ relative.T)
    leading = turned.flip(1)[:, :MOST_FEATURES]
    return inverse_root @ leading, leading.T @ whitened
