"""The page beside a profile: the figures and kinds that the profile records, and nothing where it records none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from tests.integrations.profiles.small_profiles import LAYOUT, WEIGHTS, small_profile

from cuvee.codec.profiles.quality import CurvePoint
from cuvee.codec.support.steps import OCTAVE
from cuvee.integrations.profiles.card import profile_card, text_of_card

CURVE = (
    CurvePoint(-OCTAVE, 2.5, 0.1, kl=0.00123, top1=0.987),
    CurvePoint(0, 1.25, 0.2),
    CurvePoint(-OCTAVE, 3.0, 0.1, kl=0.5, top1=0.5, kind="prose"),
    CurvePoint(-OCTAVE, 2.0, 0.1, kl=0.5, top1=0.5, kind="code"),
)


def test_the_curve_and_the_kinds_of_text_are_those_of_the_profile() -> None:
    card = profile_card(small_profile().with_curve(CURVE, (512, 1024)), "hf://mine/profiles")
    assert "| step | bits per value | KL | top-1 |\n|---|---|---|---|\n| 0.5 | 2.500 | 0.00123 | 98.7% |\n" in card
    assert "\n| 1 | 1.250 |  |  |\n\n" in card, "what was not measured"
    assert "of 512, 1024 tokens" in card and "0.5000" not in card, "the points of a kind are in the mean"
    kinds = card.partition("\n## Texts\n\n")[2]
    assert kinds.startswith("Kinds: `prose`, `code`. ") and "Apache-2.0" in kinds and "does not record" in kinds
    assert f"| weights | {WEIGHTS} |" in card and "| model | synthetic, 3 layers 2 x 8, bfloat16 |" in card


def test_what_a_profile_does_not_record_is_said() -> None:
    profile = small_profile(weights=None)
    profile.text_tokens = 300
    card = profile_card(profile, "hf://mine/profiles")
    assert "Nothing was measured." in card and "| step |" not in card and "| weights | not recorded |" in card
    assert card.endswith("\nLearned from 300 tokens. Their kinds and licenses are not recorded.\n")
    assert "sequences of" not in profile_card(small_profile().with_curve(CURVE), "hf://mine/profiles")


@pytest.mark.parametrize("name", ["mine", 'a "b": c', "[x]", "true"])
def test_any_model_type_is_a_tag_that_yaml_reads(name: str) -> None:
    layers = (LAYOUT.layers[0], replace(LAYOUT.layers[1], kv_heads=4))
    card = profile_card(small_profile(layout=replace(LAYOUT, model_type=name, layers=layers)), "hf://mine/profiles")
    assert yaml.safe_load(card.split("---\n")[1]) == {"library_name": "cuvee", "tags": ["cuvee", "kv-cache", name]}
    assert f"| model | {name}, 2 layers of 2 shapes, the first 2 x 8, bfloat16 |" in card
    assert text_of_card(card) == f"{name}, 2 layers of 2 shapes, the first 2 x 8, bfloat16"
    assert text_of_card(card.replace(name, "\x1b[2J")) == text_of_card("") == "", "a card may be anybody's"
