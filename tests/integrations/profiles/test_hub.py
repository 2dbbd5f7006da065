"""Profiles on the hub, as huggingface_hub itself moves them to and from a server of the tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants
from tests.integrations.profiles.fake_hub import REPOSITORY, FakeHub, fake_hub
from tests.integrations.profiles.small_profiles import LAYOUT, WEIGHTS, small_profile
from tests.integrations.stores.fake_http import answer
from tests.integrations.stores.loopback import Said

from cuvee.calibration.bundled import bundled_model_path
from cuvee.calibration.corpus import load_config, load_model, load_tokenizer
from cuvee.codec.errors import FormatError
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.profiles.collection import ProfileCollection
from cuvee.integrations.stores.base import StoreError

WHERE = f"hf://{REPOSITORY}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "cache", monkeypatch) as server:
        yield server


def push(number: int = 0, where: str = WHERE) -> str:
    profile = small_profile(number)
    ProfileCollection(where).push(profile)
    return profile.id.hex()


def pull(where: str = WHERE, number: int = 0) -> Profile:
    return ProfileCollection(f"{where}#{small_profile(number).id.hex()}").pull(LAYOUT)


def refuses(message: str, where: str = WHERE) -> None:
    with pytest.raises(StoreError, match=message):
        pull(where)


def downloads(hub: FakeHub) -> list[str]:
    return [path for method, path in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_push_is_one_commit(hub: FakeHub) -> None:
    before = len(hub.commits)
    pushed = push()
    assert len(hub.commits) == before + 1
    folder = f"cuvee-profiles/{LAYOUT.fingerprint.hex()}"
    assert [*hub.files] == [f"{folder}/{pushed}.safetensors", f"{folder}/{pushed}.md", "README.md"]


def test_the_card_is_one_that_the_hub_reads_and_is_not_replaced(hub: FakeHub) -> None:
    pushed = push()
    shown = hub.files["README.md"].decode()
    card: Any = ModelCard(shown)
    assert card.data.to_dict() == {"library_name": "cuvee", "tags": ["cuvee", "kv-cache", "synthetic"]}
    assert f"cuvee profile pull MODEL {WHERE}#{pushed} -o" in card.text and WEIGHTS in card.text
    hub.commit({"README.md": b"mine"})
    push(1)
    assert hub.files["README.md"] == b"mine"


def test_a_revision_pins_what_is_taken(hub: FakeHub) -> None:
    first = push(0)
    commit = hub.branches["main"]
    hub.branches["v1"] = commit
    push(1)
    assert pull(number=1).id == small_profile(1).id
    for revision in ("v1", commit):
        assert pull(f"{WHERE}@{revision}").id.hex() == first
        with pytest.raises(FileNotFoundError):
            pull(f"{WHERE}@{revision}", 1)
    refuses("RevisionNotFoundError", f"{WHERE}@v2")


def test_the_local_cache_of_the_hub_serves_a_commit_again(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = push()
    commit = hub.branches["main"]
    pull()
    assert len(downloads(hub)) == 1
    pull()
    assert len(downloads(hub)) == 1, "the branch is asked for, the files are here"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert pull(f"{WHERE}@{commit}").id.hex() == pushed
    assert pull().id.hex() == pushed
    assert len(hub.requests) == asked
    refuses("LocalEntryNotFoundError", f"{WHERE}@{'1' * 40}")


def test_a_damaged_file_in_the_local_cache_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    push()
    pull()
    (cached,) = (tmp_path / "cache").rglob("*.safetensors")
    blob = cached.resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"is not a safetensors file.*hf cache rm model/mine/profiles"):
        pull()


@pytest.mark.parametrize("promised", ["10", "1000000"])
def test_a_hub_that_sends_more_or_less_than_it_says_is_refused(hub: FakeHub, promised: str) -> None:
    push()

    def tell(method: str, path: str) -> Said | None:
        if method == "HEAD" and path.endswith(".safetensors"):
            return answer(Content_Length=promised, X_Repo_Commit=hub.branches["main"], ETag='"abc"')
        return None

    hub.tell = tell
    refuses("failed, or cannot be reached")


def test_a_hub_that_is_down_is_no_missing_profile(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that refuses: huggingface_hub then serves what is in its cache."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between its retries
    pushed = push()
    hub.tell = lambda method, path: answer("403 Forbidden")
    refuses(r"^hf://mine/profiles#\w+: failed, or cannot be reached: ")
    hub.tell = lambda method, path: None
    pull()
    hub.close()
    assert pull().id.hex() == pushed
    refuses("failed, or cannot be reached: LocalEntryNotFoundError", f"{WHERE}@v1")
    with pytest.raises(StoreError, match=r"^hf://mine/profiles: failed, or cannot be reached: "):
        push(1)


def test_models_are_asked_for_once_when_the_hub_is_down(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is not on this machine: huggingface_hub would ask six times, and sleep for 23 seconds between."""
    hub.close()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked again"))
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(OSError, match=rf"^mine/model: .*couldn't connect to '{constants.ENDPOINT}'"):
            load("mine/model")


def test_a_model_of_the_hub_is_loaded_from_its_cache_when_it_is_down(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit({"config.json": (bundled_model_path() / "config.json").read_bytes()})
    assert load_config(REPOSITORY).num_hidden_layers == 6
    hub.close()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked again"))
    assert load_config(REPOSITORY).num_hidden_layers == 6


def test_a_repository_that_is_not_there_names_the_remedy(hub: FakeHub) -> None:
    message = r"^hf://your/profiles(#\w+)?: failed, or cannot be reached: RepositoryNotFoundError: .*authenticated"
    refuses(message, "hf://your/profiles")
    with pytest.raises(StoreError, match=message):
        push(where="hf://your/profiles")
    with pytest.raises(OSError, match="your/model is not a local folder and is not a valid model identifier"):
        load_config("your/model")


def test_the_extra_is_named_without_huggingface_hub(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from cuvee.integrations.profiles.collection import ProfileCollection\n"
        f"ProfileCollection({str(tmp_path)!r})\n"
        "ProfileCollection('hf://mine/profiles')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "ImportError: hf:// needs huggingface_hub: pip install 'cuvee[transformers]'"
