"""Names of a request's blocks that hold approximations.

The engine finds a block by a hash of its tokens and of all before them. A block whose KV is worse than what those
tokens stand for must not be found by that hash, or it would answer for requests that asked for better. The engine names
every later block, answers included, after the block before it, so all later blocks are kept apart as well.
"""

from __future__ import annotations

import hashlib
from typing import Any


def set_apart(request: Any, first: int, recipe: bytes) -> None:
    """Replace the names of a request's blocks from number `first` on by hashes of themselves and a recipe.

    Call it before the engine looks the blocks up or registers them.
    """
    hashes = request.block_hashes
    for at in range(first, len(hashes)):
        hashes[at] = type(hashes[at])(hashlib.sha256(recipe + bytes(hashes[at])).digest())
