"""`EntryKeys`: under which store keys an engine's entries are, and what their tags cover.

With a secret, the key of an entry ends in the secret's id. While secrets are rotated, entries are written with the
first one, and found with any. All of that is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from cuvee.naming.identity import store_key

A = TypeVar("A")

_ABSENT = (None, False, ())


class EntryKeys:
    """The keys of entries.

    Args:
        key_ids: ids of the accepted secrets, that of the writing secret first (`Codec.key_ids`); none without secrets.
        shard: tensor-parallel rank, unless a call names another.

    Attributes:
        key_ids: as given; one that is empty without secrets.

    Example:
        >>> keys = EntryKeys([bytes(8), bytes([1] * 8)])
        >>> new, old = keys.all("tenant", bytes(32))
        >>> keys.written("tenant", bytes(32)) == new, new[:-16] == old[:-16]
        (True, True)
        >>> stored = {old: b"blob"}
        >>> keys.find("tenant", [bytes(32)], lambda asked: [stored.get(key) for key in asked]) == [(old, b"blob")]
        True
    """

    def __init__(self, key_ids: Sequence[bytes], shard: int = 0) -> None:
        self.key_ids = tuple(key_ids) or (b"",)
        self._shard = shard

    def written(self, tenant: str, digest: bytes) -> str:
        """Return the key under which an entry is written."""
        return store_key(tenant, digest, self._shard, self.key_ids[0])

    def all(self, tenant: str, digest: bytes) -> list[str]:
        """Return all keys under which an entry may be, that of the writing secret first."""
        return [store_key(tenant, digest, self._shard, key_id) for key_id in self.key_ids]

    def bound_to(self, tenant: str, digest: bytes) -> bytes:
        """Return what the tag of an entry covers besides its blob: tenant, digest and shard; b"" without secrets."""
        return b"" if self.key_ids == (b"",) else store_key(tenant, digest, self._shard).encode()

    def find(
        self,
        tenant: str,
        digests: Sequence[bytes],
        ask: Callable[[list[str]], Sequence[A]],
        shards: Sequence[int] | None = None,
    ) -> list[tuple[str, A]]:
        """Ask for entries under the writing secret, then for those that it does not have under the older ones.

        Args:
            tenant: of the entries.
            digests: of the entries.
            ask: given the keys to ask for; returns None, False or () for what is not there.
            shards: of each entry, if they differ.

        Returns:
            the key and the answer of each; those of the oldest secret where there is none.
        """
        found: dict[int, tuple[str, A]] = {}
        left = list(range(len(digests)))
        for key_id in self.key_ids:
            if not left:
                break
            keys = [
                store_key(tenant, digests[at], self._shard if shards is None else shards[at], key_id) for at in left
            ]
            found.update(zip(left, zip(keys, ask(keys), strict=True), strict=True))
            left = [at for at in left if found[at][1] in _ABSENT]
        return [found[at] for at in range(len(digests))]
