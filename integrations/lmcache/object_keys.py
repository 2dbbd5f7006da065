"""What LMCache's keys of objects tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey

from cuvee.naming.identity import canonical


def page_name(key: ObjectKey) -> bytes:
    """Return the page's name: all that tells an object from others."""
    numbers = (key.kv_rank.to_bytes(8, "little"), key.object_group_id.to_bytes(8, "little"))
    return canonical(key.chunk_hash, key.model_name.encode(), *numbers, key.cache_salt.encode())


def following_tokens(keys: Sequence[ObjectKey], chunk_tokens: int) -> list[int]:
    """Return how many tokens follow each chunk: those of later chunks of the same rank and salt in its task.

    LMCache lists the chunks of a prompt in order. A task may hold several prompts. Then a prompt's last chunk is coded
    as if more followed, which costs a reader who begins right behind it some of its KL.
    """
    seen: Counter[tuple[int, int, str]] = Counter()
    after = []
    for key in reversed(keys):
        kind = key.kv_rank, key.object_group_id, key.cache_salt
        after.append(seen[kind] * chunk_tokens)
        seen[kind] += 1
    return after[::-1]
