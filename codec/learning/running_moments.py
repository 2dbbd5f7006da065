"""`RunningMoments`: what a profile is learned from without gradients: sums over KV that somebody computes anyway.

    chunks --un-rotate--> x [t, N]        --> mean, covariance         per section, of a fixed size
    token ids --> features e [t, K]       --> gram, cross-covariance with x
                                              |
                     what ids predict, and the covariance of the rest --> bases and scales --> Profile

Only sums are kept: no token, no id and no row of the cache can be read from them, as long as they are over many texts.
Their size depends on the model alone. Sums of several processes add up (`merge`), and those of tensor-parallel ranks
are put side by side (`join`).

**What stands in for gradients.** K and V of a layer count alike, and a layer counts as the variance of its keys: where
keys vary, attention selects, and an error moves it. On SmolLM2-135M the variance of keys and the true loss of a layer
correlate by 0.75, and 4 to 6 % fewer bits are taken at equal KL than with the same weight for all layers. The true
weights, which differ a hundredfold between layers, would take 13 to 22 % fewer. Weights that fall with the distance
from the end of the cache, as `calibrate` learns them, took more bits. Entropy tables are the built-in ones,
because fitting them would take a sample of the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.family import default_family
from cuvee.codec.errors import FormatError, InputError, ProfileError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.learned_sections import MIN_STEP_INDEX, base_section, with_tokens
from cuvee.codec.learning.moments import SINKS, TOKENS_PER_VALUE, Moments, need_tokens
from cuvee.codec.learning.token_model import (
    TOKENS_PER_FEATURE,
    TokenModel,
    solve_token_model,
    token_features,
    with_ridge,
)
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.section_basis import eigenbasis
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.sections import partition
from cuvee.codec.stages.reference.transform import gather, require_finite
from cuvee.codec.stages.rotation import Rotation

# Deviations of a unit that become step 1. With it, the fixed steps of presets (`PRESET_STEP_INDEX`) keep the presets'
# KL on SmolLM2-135M.
UNIT = 2.8
_LEAST_WEIGHT = 1e-6  # of a layer, relative to the mean: keys may be constant
_FORMAT, _VERSION = "cuvee-moments", 1
_SUMS = ("origin", "total", "sink_total", "sink_count")


class RunningMoments:
    """Sums over the KV of a model's tokens. Not thread-safe.

    Args:
        layout: of the cache, or of one tensor-parallel rank's share of it.
        group: the values of one basis, within one layer: `"head"`, `"unit"`, `"layer"` or `"heads:1"`.
        features: number of the embedding's dimensions, to learn what ids predict; 0: blobs are not predicted.

    Attributes:
        tokens: number of tokens summed, leading positions of sequences apart.

    Example:
        >>> from cuvee import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> sums = RunningMoments(layout)
        >>> for _ in range(8):
        ...     sums.add(KVChunk(torch.randn(3, 64, 2, 8), torch.randn(3, 64, 2, 8), layout))
        >>> sums.profile().source
        'fitted'
    """

    def __init__(self, layout: KVLayout, group: str = "layer", features: int = 0) -> None:
        if type(features) is not int or features < 0:
            raise InputError(f"features: must be a whole number of at least 0, got {features!r}")
        if any(len(section.layers(layout)) > 1 for section in partition(layout, group)):
            raise InputError(f"group: must span one layer (head, unit, layer, heads:1), got {group!r}")
        self.layout, self.group, self.features = layout, group, features
        self._sections = [Moments(own, layout, 0, gradients=False) for own in partition(layout, group)]
        self._gram = torch.zeros(features, features, dtype=torch.float64)
        self._feature_total = torch.zeros(features, dtype=torch.float64)
        self._crosses = [torch.zeros(features, own.section.values, dtype=torch.float64) for own in self._sections]

    @staticmethod
    def size(layout: KVLayout, group: str, features: int = 0) -> int:
        """Return how many bytes the sums take."""
        sections = partition(layout, group)
        products = sum(size * size for section in sections for size in section.blocks)
        return 8 * (products + features * features + features * layout.values_per_token)

    @property
    def tokens(self) -> int:
        """Number of tokens summed, leading positions of sequences apart."""
        return self._sections[0].count

    @property
    def needed(self) -> int:
        """Number of tokens from which `profile` gives one that serves other text as well."""
        largest = max(size for own in self._sections for size in own.section.blocks)
        return max(TOKENS_PER_VALUE * largest, TOKENS_PER_FEATURE * self.features)

    def add(self, chunk: KVChunk, embedded: torch.Tensor | None = None) -> None:
        """Add a chunk.

        Args:
            chunk: of the layout, in any dtype.
            embedded: `[t, features]`, the model's embedding of the chunk's tokens, of any floating dtype; None if
                nothing is predicted.

        Raises:
            ProfileMismatchError: the chunk has another layout.
            InputError: `embedded` is missing or has another shape, or the chunk holds infinite values or NaN. Nothing
                of it is added.
        """
        if replace(chunk.layout, dtype=self.layout.dtype).fingerprint != self.layout.fingerprint:
            raise ProfileMismatchError("chunk: must have the layout of the sums, got another one")
        shape = None if embedded is None else tuple(embedded.shape)
        if shape != ((chunk.tokens, self.features) if self.features else None):
            raise InputError(f"embedded: must be [{chunk.tokens}, {self.features}], got {shape}")
        rotation = Rotation(chunk.start, chunk.tokens, chunk.device, inverse=True)
        values = []
        for own in self._sections:
            values.append(gather(chunk, own.section, rotation, slice(0, chunk.tokens)).cpu())
            require_finite(values[-1], own.section)
        for own, x in zip(self._sections, values, strict=True):
            own.add(x, chunk.start, sampled=False)
        ordinary = max(SINKS - chunk.start, 0)
        if embedded is None or ordinary >= chunk.tokens:
            return
        rows = token_features(embedded[ordinary:].cpu())
        self._gram += rows.T @ rows
        self._feature_total += rows.sum(0, dtype=torch.float64)
        for index, (own, x) in enumerate(zip(self._sections, values, strict=True)):
            self._crosses[index] += rows.T @ (x[ordinary:] - own.origin)

    def merge(self, other: RunningMoments) -> None:
        """Add the sums of another process over other tokens.

        Raises:
            ProfileMismatchError: they are of another layout, group or number of features.
        """
        if (other.layout.fingerprint, other.group, other.features) != (
            self.layout.fingerprint, self.group, self.features,
        ):  # fmt: skip
            raise ProfileMismatchError("other: must be sums of the same layout, group and features, got others")
        if not other.tokens:
            return
        for index, (own, theirs) in enumerate(zip(self._sections, other._sections, strict=True)):
            self._move_origin(index, theirs.origin)
            own.count += theirs.count
            own.total += theirs.total
            own.sink_total += theirs.sink_total
            own.sink_count += theirs.sink_count
            own.products = [ours + more for ours, more in zip(own.products, theirs.products, strict=True)]
            self._crosses[index] += other._crosses[index]
        self._gram += other._gram
        self._feature_total += other._feature_total

    def _move_origin(self, index: int, origin: torch.Tensor) -> None:
        own = self._sections[index]
        self._crosses[index] += torch.outer(self._feature_total, own.origin.double() - origin.double())
        own.move_origin(origin)

    @classmethod
    def join(cls, layout: KVLayout, shards: Sequence[RunningMoments]) -> Self:
        """Put the sums of all tensor-parallel ranks side by side, as if each were over the tokens of rank 0.

        Args:
            layout: of the whole model.
            shards: of each rank's heads, in the order of ranks, in a group `"heads:n"`. Ranks may have summed different
                tokens.

        Raises:
            InputError: they are not of this layout, in several groups or in one that crosses ranks, or over no tokens.
        """
        first = shards[0]
        for rank, shard in enumerate(shards):
            if shard.layout.fingerprint != layout.shard(rank, len(shards)).fingerprint:
                raise InputError(f"shards[{rank}]: must be of the heads of rank {rank} of {len(shards)}, got others")
            if (shard.group, shard.features) != (first.group, first.features) or not shard.tokens:
                raise InputError(
                    f"shards[{rank}]: must be of group {first.group!r} and {first.features} features, over some "
                    f"tokens, got {shard.group!r}, {shard.features} and {shard.tokens} tokens"
                )
        joined = cls(layout, first.group, first.features)
        joined._gram, joined._feature_total = first._gram.clone(), first._feature_total.clone()
        alike = [first, *(shard._over_tokens_of(first) for shard in shards[1:])]
        for index, own in enumerate(joined._sections):
            if not own.section.by_head:
                raise InputError(f"group: must be 'heads:n' for several ranks, got {first.group!r}")
            # Several ranks hold the same head where there are fewer heads than ranks.
            places: dict[int, tuple[Moments, torch.Tensor, int]] = {}
            for rank, shard in enumerate(alike):
                for at, head in enumerate(layout.shard_heads(rank, len(shards))[own.section.first_layer]):
                    places.setdefault(head, (shard._sections[index], shard._crosses[index], at))
            order = [places[head] for head in sorted(places)]
            size = own.section.blocks[0]
            own.count, own.sink_count = first.tokens, first._sections[index].sink_count.clone()
            for name in ("origin", "total", "sink_total"):
                parts = [getattr(sums, name)[..., at * size : (at + 1) * size] for sums, _, at in order]
                setattr(own, name, torch.cat(parts, dim=-1))
            own.products = [sums.products[at].clone() for sums, _, at in order]
            joined._crosses[index] = torch.cat([cross[:, at * size : (at + 1) * size] for _, cross, at in order], dim=1)
        return joined

    def _over_tokens_of(self, first: RunningMoments) -> RunningMoments:
        """Return sums that stand for these beside those of another rank: with its number of tokens and its sums of
        features, and such that ids predict what they predict here, and leave what they leave here.
        """
        if self.tokens == first.tokens and torch.equal(self._gram, first._gram):
            return self
        like = RunningMoments(self.layout, self.group, self.features)
        ours, theirs = self._ridged_gram(), first._ridged_gram()
        mean = first._feature_total / first.tokens
        scale = first.tokens / self.tokens
        for index, own in enumerate(self._sections):
            other = like._sections[index]
            other.origin, other.count = own.origin, first.tokens
            other.total, other.sink_total = own.total * scale, own.sink_total
            other.sink_count = own.sink_count
            weights = torch.linalg.solve(ours, self._centered_cross(index))
            more = weights.T @ (theirs - ours) @ weights * first.tokens
            column = 0
            for block, products in enumerate(own.products):
                at = slice(column, column + len(products))
                other.products[block] = products * scale + more[at, at]
                column = at.stop
            like._crosses[index] = (theirs @ weights) * first.tokens + torch.outer(mean, other.total)
        return like

    def _ridged_gram(self) -> torch.Tensor:
        return with_ridge(self._centered_gram())

    def _centered_gram(self) -> torch.Tensor:
        mean = self._feature_total / self.tokens
        return self._gram / self.tokens - torch.outer(mean, mean)

    def _centered_cross(self, index: int) -> torch.Tensor:
        mean = self._feature_total / self.tokens
        return self._crosses[index] / self.tokens - torch.outer(mean, self._sections[index].total / self.tokens)

    # A profile --------------------------------------------------------------------------------------------------

    def profile(self, embedding: torch.Tensor | None = None, model: str | None = None) -> Profile:
        """Make a profile of what was summed.

        Args:
            embedding: `[V, features]`, that of all ids; None if nothing is predicted.
            model: fingerprint of the model's weights, which the profile then names.

        Raises:
            InputError: `embedding` is missing or has another width.
            ProfileError: too few tokens (`needed`), or all of them are alike.
        """
        width = 0 if embedding is None else embedding.shape[1]
        if width != self.features:
            raise InputError(f"embedding: must have {self.features} columns, as `features` says, got {width}")
        need_tokens(self.layout, self.group, self.tokens)
        if self.tokens < TOKENS_PER_FEATURE * self.features:
            raise ProfileError(
                f"tokens: must be at least {TOKENS_PER_FEATURE * self.features} to learn what {self.features} features "
                f"predict, got {self.tokens}: add more chunks, or take features=0"
            )
        tokens = None if embedding is None else self._token_model(embedding)
        variances = torch.stack([self._key_variance(own) for own in self._sections])
        weights = (variances / variances.mean().clamp_min(1e-300)).clamp_min(_LEAST_WEIGHT)
        built = [
            _section(own, float(weights[index]), None if tokens is None else tokens.spreads[index])
            for index, own in enumerate(self._sections)
        ]
        if not any(len(section.scale) for section in built):
            raise ProfileError("chunks: must vary, or there is nothing to learn, got the same values at every token")
        if tokens is not None:
            built = [with_tokens(section, tokens, index) for index, section in enumerate(built)]
        return Profile(
            self.layout, self.group, "fitted", default_family(), tuple(built), min_step_index=MIN_STEP_INDEX,
            model=model, token_table=None if tokens is None else tokens.table, text_tokens=self.tokens,
        )  # fmt: skip

    def _token_model(self, embedding: torch.Tensor) -> TokenModel:
        crosses = [self._centered_cross(index) for index in range(len(self._sections))]
        columns = torch.arange(self.layout.values_per_token).split([cross.shape[1] for cross in crosses])
        return solve_token_model(
            token_features(embedding.cpu()), self._feature_total / self.tokens, self._centered_gram(),
            torch.cat(crosses, dim=1), columns,
        )  # fmt: skip

    def _key_variance(self, own: Moments) -> torch.Tensor:
        """Return the mean variance of a layer's keys."""
        variance = torch.cat([covariance.diagonal() for covariance in own.covariances()])[None]
        keys = next(unit for unit in own.section.units(self.layout) if not unit.is_value)
        return keys.of(variance).mean()

    # Bytes ------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return the sums for another process; `from_bytes` is the inverse. Rounded to float32."""
        tensors = {"gram": self._gram, "feature_total": self._feature_total}
        for index, (own, cross) in enumerate(zip(self._sections, self._crosses, strict=True)):
            tensors |= {f"{index}.{name}": getattr(own, name) for name in _SUMS} | {f"{index}.cross": cross}
            tensors |= {f"{index}.products.{block}": products for block, products in enumerate(own.products)}
        about = {
            "format": _FORMAT, "version": _VERSION, "layout": self.layout.fingerprint.hex(), "group": self.group,
            "features": self.features, "tokens": self.tokens,
        }  # fmt: skip
        rounded = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
        return bytes(save_tensors(rounded, {"cuvee": json.dumps(about)}))

    @classmethod
    def from_bytes(cls, data: bytes, layout: KVLayout) -> Self:
        """Return the sums in `to_bytes`' bytes.

        Args:
            data: the bytes.
            layout: that the sums must be of.

        Raises:
            FormatError: they are damaged, or of another layout.
        """
        try:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            about = json.loads(header["__metadata__"]["cuvee"])
            tensors = load_tensors(data)
            found = {name: about[name] for name in ("format", "version", "layout")}
            expected = {"format": _FORMAT, "version": _VERSION, "layout": layout.fingerprint.hex()}
            if found != expected:
                raise FormatError(f"sums: must be {expected}, got {found!r:.200}")
            sums = cls(layout, about["group"], about["features"])
            sums._gram.copy_(tensors["gram"])
            sums._feature_total.copy_(tensors["feature_total"])
            for index, own in enumerate(sums._sections):
                own.count = _tokens(about["tokens"])
                for name in _SUMS:
                    getattr(own, name).copy_(tensors[f"{index}.{name}"])
                for block, products in enumerate(own.products):
                    products.copy_(tensors[f"{index}.products.{block}"])
                sums._crosses[index].copy_(tensors[f"{index}.cross"])
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, InputError) as error:
            raise FormatError(f"sums: are damaged: {error}") from error
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise FormatError("sums: must be finite")
        return sums


def _section(own: Moments, weight: float, spread: torch.Tensor | None) -> SectionProfile:
    """Return the section of a layer whose loss has this weight; `spread` is that of what ids predict."""
    maps, column = [], 0
    for covariance, metric in zip(own.covariances(), own.variance_metrics(), strict=True):
        rest = covariance
        if spread is not None:  # what is predicted and what is not are uncorrelated
            predicted = spread[:, column : column + len(covariance)].double()
            rest = covariance - predicted.T @ predicted
        maps.append(eigenbasis(rest, weight * metric))
        column += len(covariance)
    return base_section(own, maps, UNIT)


def _tokens(value: object) -> int:
    if type(value) is not int or value < 0:
        raise FormatError(f"sums: tokens: must be a whole number of at least 0, got {value!r:.80}")
    return value
