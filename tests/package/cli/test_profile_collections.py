"""`cuvee profile push` and `pull`: profiles that travel from the machine that learned them to others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.integrations.profiles.small_profiles import small_profile
from tests.package.cli.running import fails, misused, run

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity.checkpoint import read_layout
from cuvee.integrations.identity.weight_fingerprints import weight_fingerprints
from cuvee.integrations.profiles.card import layout_text

MODEL = "books-3m"


@pytest.fixture(scope="module")
def layout() -> KVLayout:
    return read_layout(str(bundled_model_path()), torch.bfloat16)


@pytest.fixture(scope="module")
def weights() -> str:
    return weight_fingerprints(bundled_model_path()).found[0]


@pytest.fixture
def where(tmp_path: Path) -> str:
    """An empty collection."""
    return f"file://{tmp_path}/collection"


def test_a_profile_travels(where: str, tmp_path: Path, layout: KVLayout, weights: str) -> None:
    profiles = [small_profile(number, weights, layout) for number in range(2)]
    for number, profile in enumerate(profiles):
        profile.save(tmp_path / f"{number}")
        said = run("profile", "push", tmp_path / f"{number}", where)
        identity, size = profile.id.hex(), (tmp_path / f"{number}").stat().st_size
        assert said.stdout == f"pushed {size:,} bytes: engines find it as {where}#{identity}\n"
    ids = [profile.id.hex() for profile in profiles]
    for model in ((), ("--model", MODEL)):
        lines = run("profile", "list", where, *model).stdout.splitlines()
        assert sorted(line.split()[0] for line in lines) == sorted(ids)
        assert {line.split("  ")[-1] for line in lines} == {layout_text(layout)}
    shown = run("profile", "pull", MODEL, f"{where}#{ids[1]}", "-o", tmp_path / "new" / "p").stdout
    assert ids[1] in shown and weights in shown
    assert (tmp_path / "new" / "p").read_bytes() == (tmp_path / "1").read_bytes()
    fails("profile", "pull", MODEL, where, "-o", tmp_path / "q", match="cuvee profile list")


def test_what_fails_leaves_no_file(where: str, tmp_path: Path, layout: KVLayout) -> None:
    pull = ("profile", "pull", MODEL, where, "-o", tmp_path / "p")
    fails(*pull, match="cuvee profile list")
    other = small_profile(0, "c3" * 16, layout)
    other.save(tmp_path / "other")
    run("profile", "push", tmp_path / "other", where)
    named = ("profile", "pull", MODEL, f"{where}#{other.id.hex()}", "-o", tmp_path / "p")
    fails(*named, match="weights: must be ")
    assert not (tmp_path / "p").exists()
    run(*named, "--other-weights")
    assert Profile.load(tmp_path / "p").id == other.id


def test_weights_are_read_last(where: str, tmp_path: Path, layout: KVLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = "cuvee.integrations.identity.weight_fingerprints.weight_fingerprints"
    monkeypatch.setattr(hashed, lambda *_: pytest.fail("the weights were read"))
    small_profile(0, "c3" * 16, layout).save(tmp_path / "p")
    run("profile", "push", tmp_path / "p", where)
    out = ("-o", tmp_path / "q")
    fails("profile", "pull", "no/such/model", where, *out, match="cuvee profile list")
    fails("profile", "pull", MODEL, f"{where}#{'0' * 32}", *out, match="no profile 0000")
    (damaged,) = (tmp_path / "collection").rglob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:100])
    fails("profile", "pull", MODEL, f"{where}#{damaged.stem}", *out, match="is not a safetensors file")


def test_what_is_there_is_replaced_by_force_alone(tmp_path: Path, layout: KVLayout, weights: str) -> None:
    small_profile(0, weights, layout).save(tmp_path / "p")
    run("profile", "push", tmp_path / "p", tmp_path / "collection")
    (tmp_path / "out").write_text("mine")
    there = f"{tmp_path}/collection#{Profile.load(tmp_path / 'p').id.hex()}"
    pull = ("profile", "pull", MODEL, there, "-o", tmp_path / "out")
    fails(*pull, match="--force")
    (damaged,) = (tmp_path / "collection").rglob("*.safetensors")
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    fails(*pull, "--force", match="is not a safetensors file")
    assert (tmp_path / "out").read_text() == "mine"
    damaged.write_bytes(whole)
    run(*pull, "--force")
    assert (tmp_path / "out").read_bytes() == whole


def test_wrong_arguments(tmp_path: Path) -> None:
    small_profile().save(tmp_path / "p")
    out = ("-o", tmp_path / "out")
    identity = "0" * 32
    fails("profile", "push", tmp_path / "missing", tmp_path, match="no profile at")
    fails("profile", "push", tmp_path / "p", f"file://{tmp_path}#{identity}", match="WHERE: must be without an id")
    fails("profile", "push", tmp_path / "p", "memory://", match="must name a folder, object storage")
    fails("profile", "pull", MODEL, "hf://gpt2", *out, match="hf://owner/name@revision, got")
    fails("profile", "pull", "/nowhere", f"{tmp_path}#{identity}", *out, match="nowhere: no such model folder")
    fails("profile", "pull", "/nowhere", tmp_path, *out, match="profile: must name a file, or a place and an id")
    misused("profile", "pull", MODEL, tmp_path)
    # No message shows a password.
    url = "http://user:verysecret@127.0.0.1:1/kv"
    there = f"{url}#{small_profile().id.hex()}"
    for command in (("push", tmp_path / "p", url), ("pull", MODEL, there, "-o", tmp_path / "out")):
        assert "verysecret" not in fails("profile", *command, match="127.0.0.1:1")
    assert not (tmp_path / "out").exists()
