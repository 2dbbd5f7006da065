"""How a location of profiles is written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuvee.codec.errors import InputError
from cuvee.integrations.options import CodingOptions
from cuvee.integrations.profiles.location import ProfileLocation, names_collection, shown_profile

ID = "12ab" * 8


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("/srv/a?b", ("folder", "/srv/a?b", None, None)),
        (f"/srv/a#b#{ID}", ("folder", "/srv/a#b", ID, None)),
        (f"file:///srv/p#{ID}", ("folder", "/srv/p", ID, None)),
        ("s3://bucket/p", ("objects", "s3://bucket/p", None, None)),
        (f"https://u:p@host/p#{ID}", ("objects", "https://u:p@host/p", ID, None)),
        ("hf://me/p.x_1", ("hub", "me/p.x_1", None, None)),
        ("HF://me/p/", ("hub", "me/p", None, None)),
        (f"hf://me/p@refs/pr/1#{ID}", ("hub", "me/p", ID, "refs/pr/1")),
        (f"hf://me/p@{'0' * 40}", ("hub", "me/p", None, "0" * 40)),
    ],
)
def test_what_a_location_says(where: str, expected: tuple[str, str, str | None, str | None]) -> None:
    found = ProfileLocation.parse(where)
    assert (found.kind, found.root, found.id, found.revision) == expected


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "profile: must name a folder"),
        ("tiered:s3://a/b,s3://c/d", "profile: must name a folder, object storage"),
        ("s3://b/p?ttl=7d", "profile: must have no options, and may end in #ID"),
        ("file:///srv?max_gb=8", "profile: must have no options"),
        ("s3://b/p#12ab", "id: must be 32 lower-case hex digits, .* got '12ab'"),
        (f"s3://b/p#{ID.upper()}", "id: must be 32 lower-case hex digits"),
        ("s3://b/p#../../../../../../../../etc/passwd", "id: must be 32 lower-case hex digits"),
        ("file://relative", "profile: must be file:///absolute/path"),
        ("file:///a%00b", "profile: must be file:///absolute/path"),
        ("hf://gpt2", "profile: must name a folder, .*hf://owner/name"),
        ("hf://datasets/me/p", "profile: must name a folder, .*hf://owner/name"),
        ("hf://me/p@../../x", "profile: must name a folder, .*hf://owner/name"),
        ("hf://me/p\n", "profile: must name a folder, .*hf://owner/name"),
    ],
)
def test_what_is_refused(where: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        ProfileLocation.parse(where)


def test_an_option_names_a_collection_by_a_url_or_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "p.safetensors").write_bytes(b"")
    assert names_collection("s3://b/p") and names_collection("nonsense://x") and names_collection(str(tmp_path))
    assert names_collection("tiered:s3://a/b") and names_collection(f"missing#{ID}")
    assert not names_collection(str(tmp_path / "p.safetensors")) and not names_collection(str(tmp_path / "missing"))


def test_no_message_shows_a_secret(tmp_path: Path) -> None:
    url = f"https://user:verysecret@host/p#{ID}"
    assert ProfileLocation.parse(url).shown == shown_profile(url) == f"https://user:***@host/p#{ID}"
    assert shown_profile("/srv/a:b@c?d") == "/srv/a:b@c?d", "a path is no URL"
    options = CodingOptions(profile=url)
    assert "verysecret" not in repr(options) and "user:***@host" in repr(options)
    for wrong in ("https://user:verysecret@host/p?ttl=1d", "redis://user:verysecret@host:6379/0"):
        with pytest.raises(InputError) as caught:
            CodingOptions(profile=wrong)
        assert "verysecret" not in str(caught.value)


def test_options_check_a_location_and_leave_a_path_alone() -> None:
    named = f"hf://me/p@v1#{ID}"
    assert CodingOptions(profile=named).profile == named
    assert CodingOptions(profile="missing.safetensors").profile == "missing.safetensors"
    with pytest.raises(InputError, match=r"^profile: must name a folder, .*hf://owner/name"):
        CodingOptions(profile="hf://gpt2")


def test_what_follows_a_folder_is_an_id(tmp_path: Path) -> None:
    """Unless a file or a folder has that name, or nothing has the name before it."""
    with pytest.raises(InputError, match=r"^id: must be 32 lower-case hex digits, .* got 'abc'"):
        ProfileLocation.parse(f"{tmp_path}#abc")
    assert names_collection(f"{tmp_path}#abc")
    assert ProfileLocation.parse(f"{tmp_path}/new#abc").root == f"{tmp_path}/new#abc"
    Path(f"{tmp_path}/a").mkdir()
    Path(f"{tmp_path}/a#1").touch()
    assert ProfileLocation.parse(f"{tmp_path}/a#1").id is None and not names_collection(f"{tmp_path}/a#1")
