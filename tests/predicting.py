"""Profiles that predict from tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.token_prediction import TokenMap, TokenTable

VOCABULARY = 64
_FEATURES = 4


def predicting(profile: Profile, vocabulary: int = VOCABULARY) -> Profile:
    """A learned profile with a token table, whose predictions are small and arbitrary."""
    noise = torch.Generator().manual_seed(3)

    def integers(largest: int, *shape: int) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=noise, dtype=torch.int8)

    learned = []
    for section in profile.learned:
        values = len(section.basis.mean)
        token_map = TokenMap(integers(127, _FEATURES, values), torch.full((values,), 1e-4))
        learned.append(replace(section, token_map=token_map, plain_scale=section.scale.copy()))
    return Profile(
        profile.layout, profile.group, profile.source, profile.family, tuple(learned),
        min_step_index=profile.min_step_index, model=profile.model, curve=profile.points,
        token_table=TokenTable(integers(7, vocabulary, _FEATURES), torch.ones(vocabulary)),
    )  # fmt: skip


def with_sinks(profile: Profile) -> Profile:
    """A learned profile whose sections differ in the number of sinks; profiles fitted to late positions have none."""
    learned = []
    for index, section in enumerate(profile.learned):
        mean, noise = section.basis.mean, torch.Generator().manual_seed(index)
        sinks = mean + torch.randn(1 + index % 4, len(mean), generator=noise)
        learned.append(replace(section, basis=replace(section.basis, sinks=sinks)))
    return Profile(
        profile.layout, profile.group, profile.source, profile.family, tuple(learned),
        min_step_index=profile.min_step_index, model=profile.model, curve=profile.points,
        token_table=profile.token_table,
    )  # fmt: skip
