"""The stores that an engine's processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuvee.codec.errors import InputError
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.shared_stores import borrow_store, return_store


def test_both_roles_of_a_process_have_one_store_until_the_second_gives_it_back(tmp_path: Path) -> None:
    urls = (f"file://{tmp_path}/kv?max_gb=1",)
    first, second = (borrow_store(urls, "mp") for _ in range(2))
    assert first is second and first.put("ab/01", b"x")
    return_store(urls)
    assert first.get("ab/01") == b"x"
    return_store(urls)
    again = borrow_store(urls, "mp")
    assert again is not first and again.get("ab/01") == b"x"
    return_store(urls)


@pytest.mark.parametrize("executor", ["mp", "ray", None])
def test_ram_of_one_process_is_refused_where_workers_have_their_own(executor: str | None) -> None:
    """It is the default."""
    urls = Options().store
    with pytest.raises(InputError, match=r"^store: must be one that processes share, .* got memory: name a folder"):
        borrow_store(urls, executor)
    assert borrow_store(urls, "uni").name == "memory"
    return_store(urls)
