"""Profiles that are made in no time, for collections to hold."""

from __future__ import annotations

from cuvee.codec.entropy.family import default_family
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.steps import OCTAVE

LAYOUT = KVLayout("synthetic", (LayerLayout(2, 8, 8, None),) * 3, "bfloat16", 4096)
OTHER_LAYOUT = KVLayout("synthetic", (LayerLayout(4, 8, 8, None),) * 3, "bfloat16", 4096)
WEIGHTS, OTHER_WEIGHTS = "a1" * 16, "b2" * 16


def small_profile(number: int = 0, weights: str | None = WEIGHTS, layout: KVLayout = LAYOUT) -> Profile:
    """Return a profile of some weights; each number gives one with an id of its own."""
    return Profile(layout, "unit", "calibrated", default_family(), min_step_index=-8 * OCTAVE + number, model=weights)
