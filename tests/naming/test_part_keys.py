"""Keys of parts: golden values, no collisions, and what is no part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cuvee.codec.entropy.residuals import MAX_REFINEMENTS
from cuvee.codec.errors import InputError
from cuvee.naming.identity import store_key
from cuvee.naming.part_keys import MAX_PARTS, part_key, part_number


@pytest.mark.parametrize("key_id", [b"", bytes(range(0xA0, 0xA8))])
def test_golden_keys_of_parts(key_id: bytes) -> None:
    """Stores outlive processes: a change of these values orphans every stored refinement."""
    key = store_key("acme", bytes(range(32)), 258, key_id)
    assert [part_key(key, number) for number in range(2)] == [key, key + "706172741"]
    for number in range(2):
        assert part_number(part_key(key, number)) == number


def test_the_codec_makes_as_many_parts_as_have_keys() -> None:
    assert MAX_PARTS == MAX_REFINEMENTS + 1


def test_no_other_key_is_that_of_a_part() -> None:
    """Not even if a digest ends as a refinement does. Odd lengths are left to refinements."""
    digest = bytes.fromhex("70617274" * 8)
    keys = [store_key("", digest, shard, key_id) for shard in (0, 0x7061) for key_id in (b"", digest[:8])]
    parts = [part_key(key, 1) for key in keys]
    assert not set(keys) & set(parts) and len(set(parts)) == 4
    assert [part_number(key) for key in keys] == [0] * 4


@pytest.mark.parametrize("key", ["ab/706172741", "ab/0706172740", "ab/0706172742", "", "ab/0706172741\n"])
def test_what_is_no_part_is_not_taken_for_one(key: str) -> None:
    assert part_number(key) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: part_key("ab/01", 2), "number: must be 0 for the base or 1 for its refinement, got 2"),
        (lambda: part_key("ab/01", -1), "number: "),
        (lambda: part_key("ab/01", True), "number: must be 0 for the base .*, got True"),
        (lambda: part_key(part_key("ab/01", 1), 1), "key: must be that of a chunk"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        call()
