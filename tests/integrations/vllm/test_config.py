"""The connector's options: every wrong one is refused by name when the engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.conftest import fitted_profile

from cuvee.codec.errors import FormatError, InputError
from cuvee.codec.format.keys import make_keys
from cuvee.integrations.vllm import check_options
from cuvee.integrations.vllm.connector_config import Options


def test_everything_can_be_set() -> None:
    options = Options.from_dict(
        {
            "store": ["memory://", "file:///x"], "profile": "p.cuvee", "ratio": 8, "chunk_tokens": 32,
            "decide": "always", "store_generated": False, "tenant": "t",
            "model_id": "m", "check_model": False, "threads": 1, "store_niceness": 10,
            "max_pending_gb": 1.5, "lookup_timeout": 1, "load_timeout": 2.5, "close_timeout": 5,
            "key_env": ["SECRET", "OLD_SECRET"],
        }
    )  # fmt: skip
    assert options.store == ("memory://", "file:///x")
    assert options.codec_quality == {"ratio": 8}
    assert options.key_env == ("SECRET", "OLD_SECRET") and options.key_file is None
    assert options.least_tokens == 32 and Options.from_dict({"min_tokens": 512}).least_tokens == 512
    assert hash(options) is not None, "stores are shared by their URLs"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"stores": "x"}, "no option 'stores': did you mean 'store'"),
        ({"zzz": 1}, "no option 'zzz': there are store, profile"),
        ({"store": ""}, "store: must be"),
        ({"store": [1]}, "store: must be"),
        ({"profile": 1}, "profile: must be"),
        ({"quality": ""}, "quality: must be"),
        ({"key_env": ["A", ""]}, "key_env: must be"),
        ({"key_file": [5]}, "key_file: must be"),
        ({"key_env": "A", "key_file": "/b"}, "key_file: must be left out if key_env is given, got both"),
        ({"tenant": None}, "tenant: must be"),
        ({"store_generated": "yes"}, "store_generated: must be true or false"),
        ({"check_model": None}, "check_model: must be true or false"),
        ({"check_model": False}, "check_model: must be left out without a profile"),
        ({"chunk_tokens": 0}, "chunk_tokens: must be a whole number"),
        ({"min_tokens": 0}, "min_tokens: must be a whole number"),
        ({"threads": True}, "threads: must be a whole number"),
        ({"store_niceness": 20}, "store_niceness: must be a whole number from 0 to 19, got 20"),
        ({"max_pending_gb": 0}, "max_pending_gb: must be a number above 0"),
        ({"lookup_timeout": float("nan")}, "lookup_timeout: must be a number above 0"),
        ({"load_timeout": float("inf")}, "load_timeout: must be a number above 0"),
        ({"close_timeout": 0}, "close_timeout: must be a number above 0"),
        ({"deadline_ms": -1}, "deadline_ms: must be milliseconds"),
        ({"refinements": 2}, "refinements: must be a whole number from 0 to 1"),
        ({"deadline_ms": 5, "blend": {}}, "deadline_ms: must be left out with blend"),
        ({"decide": "maybe"}, "decide: must be one of measured, always"),
        (
            {"quality": "high", "kl": 0.1},
            "quality: must be given as exactly one of .*, got quality, kl",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options.from_dict(extra)


def test_the_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().secrets() == Options().key_ids() == ()
    options = Options.from_dict({"key_env": "CUVEE_TEST_KEY"})
    monkeypatch.delenv("CUVEE_TEST_KEY", raising=False)
    with pytest.raises(InputError, match="key_env: the variable it names is not set"):
        Options(key_env="\ud800").secrets()  # type: ignore[arg-type]  # JSON may hold half of a surrogate pair
    with pytest.raises(InputError, match="key_env: the environment variable CUVEE_TEST_KEY is not set"):
        options.secrets()
    monkeypatch.setenv("CUVEE_TEST_KEY", "s" * 20)
    assert options.secrets() == (b"s" * 20,)
    assert "s" * 20 not in repr(options)
    monkeypatch.setenv("CUVEE_TEST_KEY", " \n")
    with pytest.raises(InputError, match="CUVEE_TEST_KEY is empty"):
        options.secrets()
    monkeypatch.setenv("CUVEE_TEST_KEY", "short secret")
    with pytest.raises(InputError, match=r"key_env: key: must be 16 to 64 bytes .* got 12 bytes") as caught:
        options.secrets()
    assert "short secret" not in str(caught.value)


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are logged, and errors sent to whoever asked."""
    options = Options.from_dict(
        {"store": ["memory://", "redis://user:s3cret@host/0", "redis://host?password=s3cret"], "tenant": "s3cret salt"}
    )
    assert "s3cret" not in repr(options) and "s3cret" not in str(options)
    assert "redis://user:***@host/0" in repr(options) and "chunk_tokens=256" in repr(options)
    assert options.store[1] == "redis://user:s3cret@host/0" and options.tenant == "s3cret salt"
    wrongs: list[dict[str, Any]] = [
        {"store": ["redis://user:s3cret@host/0", 5]},
        {"store": ["redis://user:s3cret@host/0", ""]},
        {"store": {"url": "redis://user:s3cret@host/0"}},
        {"tenant": ["s3cret"]},
        {"key_env": ["s3cret", 5]},
        {"key_file": {"s3cret": 1}},
    ]
    for wrong in wrongs:
        with pytest.raises(InputError) as caught:
            Options.from_dict(wrong)
        assert "s3cret" not in str(caught.value)
    for option in ("key_env", "key_file"):  # the secret itself instead of the name of a place
        with pytest.raises(InputError, match=f"{option}: the (variable|file) it names") as caught:
            Options.from_dict({option: "s3cretdeadbeef"}).secrets()
        error: BaseException | None = caught.value
        while error is not None:
            assert "s3cret" not in str(error)
            error = error.__cause__


@pytest.mark.parametrize("form", ["{}\r\n", "  {}\t"])
def test_white_space_around_a_secret_makes_no_other_secret(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replicas whose secrets differ by a line end would not find each other's entries."""
    secret = "s" * 20
    plain = make_keys(secret.encode())[0].id
    monkeypatch.setenv("CUVEE_TEST_KEY", form.format(secret))
    (tmp_path / "key").write_text(form.format(secret), newline="")
    for options in ({"key_env": "CUVEE_TEST_KEY"}, {"key_file": str(tmp_path / "key")}):
        assert Options.from_dict(options).key_ids() == (plain,)


def test_several_secrets_are_accepted_and_the_first_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUVEE_NEW", "n" * 16)
    monkeypatch.setenv("CUVEE_OLD", "o" * 16)
    assert Options.from_dict({"key_env": ["CUVEE_NEW", "CUVEE_OLD"]}).secrets() == (b"n" * 16, b"o" * 16)
    monkeypatch.setenv("CUVEE_OLD", "n" * 16)
    assert len(Options.from_dict({"key_env": ["CUVEE_NEW", "CUVEE_OLD"]}).key_ids()) == 1
    for name in ("new", "old"):
        (tmp_path / name).write_bytes(name[:1].encode() * 16)
    files = [str(tmp_path / "new"), str(tmp_path / "old")]
    assert Options.from_dict({"key_file": files}).secrets() == (b"n" * 16, b"o" * 16)


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    options = Options.from_dict({"key_file": str(path)})
    with pytest.raises(InputError, match=r"key_file: the file .*key cannot be read: No such file"):
        options.secrets()
    path.write_bytes(b"\n")
    with pytest.raises(InputError, match=r"key_file: the file .*key is empty"):
        options.secrets()
    path.write_bytes(b"x" * 70_000)
    with pytest.raises(InputError, match=r"key_file: the file .*key is too large"):
        options.secrets()
    with pytest.raises(InputError, match="key_file: the file /a\0b cannot be read"):
        Options.from_dict({"key_file": "/a\0b"}).secrets()


@pytest.mark.parametrize("tier", [False, True])
def test_wrong_options_are_found_without_a_model(tier: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As vLLM has it done while it reads its own options (`test_docs.py`)."""
    profile, other, text = (str(tmp_path / name) for name in ("profile", "other", "text"))
    fitted_profile("gqa", "layer").save(profile)
    save_file({"one": torch.ones(1)}, other)
    Path(text).write_text("not learned")
    monkeypatch.setenv("CUVEE_SECRET", "s" * 16)
    monkeypatch.setenv("CUVEE_SHORT", "short")
    monkeypatch.delenv("CUVEE_NONE", raising=False)

    def check(**options: Any) -> None:
        entry = {"type": "CuveeTier", "module_path": "cuvee.integrations.vllm_tier", "backpressure": {}, **options}
        check_options(*(("OffloadingConnector", {"secondary_tiers": [entry]}) if tier else ("CuveeConnector", options)))

    for named in (profile, "hf://owner/name#" + "0" * 32, f"{tmp_path}#{'0' * 32}"):
        check(profile=named, store=f"file://{tmp_path}/new?max_gb=1", kl=0.1, key_env=["CUVEE_SECRET"])
    check(quality="lossless")
    check(store=["memory://?max_gb=1", "redis://nowhere.invalid/0"])
    check_options("OffloadingConnector", {"secondary_tiers": [{"type": "fs", "root_dir": "/"}], "quality": "tiny"})
    assert {path.name for path in tmp_path.iterdir()} == {"profile", "other", "text"}, "nothing was opened"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"profile": str(tmp_path / "none")}, "no profile at .*none: name another file, or learn one"),
        ({"profile": other}, ".*other: is a safetensors file but not a cuvee profile"),
        ({"profile": text}, ".*text: is not a safetensors file"),
        ({"profile": f"{tmp_path}#abc"}, "id: must be 32 lower-case hex digits"),
        ({"profile": str(tmp_path)}, "profile: must name a file, or a place and an id"),
        ({"profile": 7}, "profile: must be"),
        (
            {"profile": profile, "quality": "tiny"},
            "quality: must be one of lossless, high, balanced, small, got 'tiny'",
        ),
        ({"profile": profile, "kl": "low"}, "kl: must be a positive number, got 'low'"),
        ({"quality": "small"}, "quality: must be left out without a profile, .* got quality=small: learn a profile"),
        ({"ratio": 8}, "ratio: must be left out without a profile, .* got ratio=8"),
        ({"key_env": ["CUVEE_SECRET", "CUVEE_NONE"]}, "key_env: the environment variable CUVEE_NONE is not set"),
        ({"key_env": "CUVEE_SHORT"}, "key_env: key: must be 16 to 64 bytes"),
        ({"key_file": str(tmp_path / "none")}, "key_file: .* cannot be read"),
        ({"stor": "memory://"}, ".*has no option 'stor'"),
        ({"store": "fle:///var/cache/kv"}, "url: "),
    ]
    for options, message in wrong:
        with pytest.raises((InputError, FormatError, FileNotFoundError), match=f"^{message}"):
            check(**options)
    if not tier:
        with pytest.raises(InputError, match="refinements: must be 0 without a profile, got 1"):
            check(refinements=1)
        with pytest.raises(InputError, match="decide: must be one of"):
            check(decide="alway")
