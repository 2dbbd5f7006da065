"""The store keys of the parts of a chunk: its base, and refinements that are useless without the parts before them.

    base             <tenant>/<id>                made by `identity.store_key`, as for a blob without parts
    refinement 1     <tenant>/<id>706172741
    refinement 2     <tenant>/<id>706172742

A store thus recognizes a refinement by its key alone. **No other key is the same:** ids spell whole bytes, so they have
an even number of digits, and "706172741" has nine. Like all keys, these are a persistent format.
"""

from __future__ import annotations

import re

from cuvee.codec.errors import InputError

MAX_PARTS = 3  # of a chunk: its base and two refinements
PART_MARK = "70617274"  # "part" in ASCII
_ENDING = re.compile(f"[0-9a-f]{PART_MARK}([1-{MAX_PARTS - 1}])")  # of a refinement's key, with one digit of its id


def part_key(key: str, number: int) -> str:
    """Return the key of one part of a chunk. Part 0, the base, has the key of the chunk itself.

    Args:
        key: the key of the chunk, made by `store_key`.
        number: 0 for the base, 1 and 2 for the refinements.

    Raises:
        InputError: the number is out of range, or `key` is itself that of a refinement.

    Example:
        >>> part_key("ab/01", 0), part_key("ab/01", 2), part_number(part_key("ab/01", 2))
        ('ab/01', 'ab/01706172742', 2)
    """
    if type(number) is not int or not 0 <= number < MAX_PARTS:
        raise InputError(f"number: must be 0 … {MAX_PARTS - 1}, the base and its refinements, got {number!r}")
    if part_number(key):
        raise InputError(f"key: must be that of a chunk, which its base has, got that of a refinement: {key!r}")
    return f"{key}{PART_MARK}{number}" if number else key


def part_number(key: str) -> int:
    """Return which part of a chunk `key` names: 0 for a base or a blob without parts, 1 or 2 for a refinement."""
    # Stores ask for every use of every entry, and nearly all of them end here.
    if key[-9:-1] != PART_MARK:
        return 0
    match = _ENDING.fullmatch(key[-10:])
    return int(match[1]) if match else 0
