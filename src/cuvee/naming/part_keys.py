"""The store keys of the parts of a chunk: its base, and a refinement that is useless without it.

    base             <tenant>/<id>                made by `identity.store_key`, as for a blob without parts
    refinement       <tenant>/<id>706172741

A store thus recognizes a refinement by its key alone. **No other key is the same:** ids spell whole bytes, so they have
an even number of digits, and "706172741" has nine. Like all keys, these are a persistent format.
"""

from __future__ import annotations

import re

from cuvee.codec.errors import InputError

MAX_PARTS = 2  # of a chunk: its base and a refinement
PART_MARK = "70617274"  # "part" in ASCII
_ENDING = re.compile(f"[0-9a-f]{PART_MARK}1")  # of a refinement's key, with one digit of its id


def part_key(key: str, number: int) -> str:
    """Return the key of one part of a chunk. Part 0, the base, has the key of the chunk itself.

    Args:
        key: the key of the chunk, made by `store_key`.
        number: 0 for the base, 1 for its refinement.

    Raises:
        InputError: the number is out of range, or `key` is itself that of a refinement.

    Example:
        >>> part_key("ab/01", 0), part_key("ab/01", 1), part_number(part_key("ab/01", 1))
        ('ab/01', 'ab/01706172741', 1)
    """
    if type(number) is not int or not 0 <= number < MAX_PARTS:
        raise InputError(f"number: must be 0 for the base or 1 for its refinement, got {number!r}")
    if part_number(key):
        raise InputError(f"key: must be that of a chunk, which its base has, got that of a refinement: {key!r}")
    return f"{key}{PART_MARK}{number}" if number else key


def part_number(key: str) -> int:
    """Return which part of a chunk `key` names: 0 for a base or a blob without parts, 1 for a refinement."""
    # Stores ask for every use of every entry, and nearly all of them end here.
    if key[-9:-1] != PART_MARK:
        return 0
    return int(_ENDING.fullmatch(key[-10:]) is not None)
