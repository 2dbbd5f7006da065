"""Learning a profile from what an engine stores: what is summed, and what becomes of it.

    start       a profile of the model in the collection? --yes--> used, nothing is learned
                                                         --no---> lossless, and:
    workers     a chunk that was encoded --> its KV, on an idle thread --> sums of a fixed size    worker_learn
    scheduler   sums of all ranks, in pieces, with the steps' reports --> profile --> collection   scheduler_learn
    next start  the profile is found, here and by every replica that looks in the same collection

The engine that has learned goes on without loss. The keys of entries hold the profile's id, so a new
profile starts an empty cache, and both roles and all ranks must change at one moment. A restart is that moment, and the
only one at which all replicas can be known to use the same profile.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.running_moments import RunningMoments
from cuvee.integrations.checkpoint import input_embedding, weight_fingerprints
from cuvee.integrations.profile_collection.location import shown_profile

logger = logging.getLogger(__name__)

_LARGEST_READ = (1 << 31) - 4096  # bytes that Linux reads at once


@dataclass(frozen=True, slots=True, eq=False)
class Learning:
    """What an engine that has no profile learns.

    Attributes:
        place: the collection that the profile is for.
        layout: of the whole model.
        shards: tensor-parallel ranks.
        group: the values of one basis.
        embedding: `[V, K]`, of all token ids; None: nothing is predicted from ids.
        weights: fingerprint of the model's weights.
    """

    place: str
    layout: KVLayout
    shards: int
    group: str
    embedding: torch.Tensor | None
    weights: str

    @classmethod
    def plan(
        cls, place: str, layout: KVLayout, shards: int, checkpoint: str, revision: str | None, most_bytes: int
    ) -> Learning:
        """Choose the largest group, and prediction from ids, whose sums and embedding take at most `most_bytes` per
        rank.

        Raises:
            InputError: nothing fits, or the weights' fingerprint cannot be known, so no engine would find the profile.
        """
        weights = weight_fingerprints(checkpoint, revision=revision)
        if not weights.found:
            raise InputError(
                f"profile: cannot be learned, because the fingerprint of the model's weights is not known "
                f"({weights.unknown}), got {shown_profile(f'learn:{place}')}: learn one of the original model (cuvee "
                "profile learn), push it, and name its id"
            )
        embedding, why = input_embedding(checkpoint, min(most_bytes // 2, _LARGEST_READ), revision=revision)
        groups = ("layer", "unit", "head") if shards == 1 else ("heads:1",)
        own = layout.shard(0, shards)
        options = [(group, predicted) for group in groups for predicted in (True, False)]
        for group, predicted in options:
            if predicted and embedding is None:
                continue
            taken = RunningMoments.size(own, group, embedding.shape[1] if predicted and embedding is not None else 0)
            if predicted and embedding is not None:
                taken += embedding.nbytes
            if taken <= most_bytes:
                break
            why = f"its sums take {taken} bytes" if predicted else why
        else:
            raise InputError(
                f"learn_max_mb: must be at least {taken / 1e6:.0f} to learn a profile of this model, got "
                f"{most_bytes / 1e6:.0f}"
            )
        logger.info(
            "cuvee: no profile of this model in %s: stored without loss, from which one of group %s is learned%s",
            shown_profile(place), group, "" if predicted else f", without prediction from token ids ({why})",
        )  # fmt: skip
        return cls(place, layout, shards, group, embedding if predicted else None, weights.found[0])

    @property
    def features(self) -> int:
        """Width of the embedding; 0 without prediction."""
        return 0 if self.embedding is None else self.embedding.shape[1]

    def new_sums(self, rank: int) -> RunningMoments:
        """Return empty sums of one rank."""
        return RunningMoments(self.layout.shard(rank, self.shards), self.group, self.features)
