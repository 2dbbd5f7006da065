"""Fixtures of the tests of stores."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from tests.integrations.stores.fake_clock import Clock
from tests.integrations.stores.s3_server import BUCKET, s3_server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3_url(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix of a real server, for which the environment is set."""
    for name, text in s3_environment.items():
        monkeypatch.setenv(name, text)
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"
