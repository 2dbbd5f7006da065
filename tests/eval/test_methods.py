"""Baselines and families by name."""

from __future__ import annotations

import pytest

from cuvee.codec.errors import InputError
from cuvee.eval.baselines.quantizers import Float8, Kivi, Uncompressed
from cuvee.eval.methods import BASELINES, UNCOMPRESSED, baseline, family_label
from cuvee.eval.report.candidates import Candidate


def test_baselines_go_by_name() -> None:
    assert (
        baseline(UNCOMPRESSED) == Uncompressed()
        and baseline("kivi2") == Kivi(2)
        and baseline("fp8-e4m3-head") == Float8("head")
    )
    assert len({repr(baseline(name)) for name in BASELINES}) == len(BASELINES)


@pytest.mark.parametrize(
    ("name", "hint"), [("kivi5", "did you mean 'kivi"), ("fp8_e4m3", "'fp8-e4m3'"), ("", "there are bf16, fp8-e4m3")]
)
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=rf"^method: '{name}' is not known; .*{hint}"):
        baseline(name)


def test_a_key_is_a_family_and_a_setting() -> None:
    dial = Candidate("pca/all@2", "", "curve", Uncompressed)
    assert (dial.family, dial.setting) == ("pca/all", "2")
    point = Candidate("int8", "", "point", Uncompressed)
    assert (point.family, point.setting) == ("int8", "")


@pytest.mark.parametrize(
    ("family", "label"),
    [
        ("kivi2", "KIVI int2"),
        ("cuvee/layer", "cuvee, a basis per layer"),
        ("cuvee/layers:2", "cuvee, a basis per 2 layers"),
        ("cuvee/lossless", "cuvee lossless"),
        ("pca/all", "PCA, one basis for all layers"),
        ("cuvee/my-profile", "cuvee, my-profile"),
    ],
)
def test_families_have_names_for_people(family: str, label: str) -> None:
    assert family_label(family) == label
