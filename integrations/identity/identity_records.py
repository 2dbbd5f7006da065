"""`IdentityRecords`: keeps the record of an engine's identity in its store, and counts whose entries are there.

A thread of its own does all of that, every minute: the engine's loop only notes which entries are to be stored.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from cuvee.codec.support.once import Once
from cuvee.integrations.core.entry_keys import EntryKeys
from cuvee.integrations.core.guard import Recorder as Counters
from cuvee.integrations.core.niceness import LOWEST_PRIORITY, give_way
from cuvee.integrations.identity.records import (
    SAMPLE,
    EntrySample,
    IdentityRecord,
    RecordStore,
    differences,
)
from cuvee.integrations.stores import Store
from cuvee.naming.identity import Identity

logger = logging.getLogger(__name__)

_SECONDS = 60.0  # between counts; entries that are noted are stored long before the second one
_CLOSE_SECONDS = 5.0
_MOST_NOTED = 8 * SAMPLE
_MOST_NAMED = 8  # fields in the log


class Recorder(Counters, Protocol):
    """Counts events, and keeps figures that go up and down."""

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a figure."""
        ...


class IdentityRecords:
    """The record of an engine's identity. Only `close` waits.

    Args:
        make: returns the record of an identity, without entries. May read files.
        store: of the entries.
        key_ids: of the secrets, as in `EntryKeys`.
        recorder: takes the gauge `identity_entries`, and counts `failures` of kind "records".
    """

    def __init__(
        self, make: Callable[[Identity], IdentityRecord], store: Store, key_ids: Sequence[bytes], recorder: Recorder
    ) -> None:
        self._make, self._recorder = make, recorder
        self._records = RecordStore(store)
        self._keys = EntryKeys(key_ids)
        self._changed = threading.Condition()
        self._identity: Identity | None = None
        self._noted: list[tuple[str, bytes]] = []
        self._bound = EntrySample().bound
        self._record: IdentityRecord | None = None  # used by the thread
        self._thread: threading.Thread | None = None
        self._closed = False
        self._once = Once(logger)

    def use(self, identity: Identity) -> None:
        """Keep the record of this identity from now on: the engine's, once its weights have a name."""
        if not self._records.shared:
            return
        with self._changed:
            self._identity, self._noted, self._bound = identity, [], EntrySample().bound
            self._changed.notify_all()
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="cuvee-records", daemon=True)
                thread.start()  # where the system starts no more threads, there is none to join
                self._thread = thread

    def note(self, tenant: str, digest: bytes) -> None:
        """Note that an entry is to be stored. It need not be: what is not there is not counted."""
        if self._thread is not None and int.from_bytes(digest[:8]) < self._bound and len(self._noted) < _MOST_NOTED:
            self._noted.append((tenant, digest))

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Count once more, for at most five seconds, or fewer, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(min(timeout, _CLOSE_SECONDS))

    def _run(self) -> None:
        give_way(LOWEST_PRIORITY)
        counted: Identity | None = None
        while True:
            with self._changed:
                identity, noted, closed = self._identity, self._noted, self._closed
                self._noted = []
            if identity is not None:
                try:
                    self._refresh(identity, noted, first=counted is not identity)
                    counted = identity
                except Exception as error:
                    self._recorder.count("failures", label="records")
                    self._once("failed", "cuvee: entries of this identity and of others cannot be counted: %s", error)
            if closed:
                return
            with self._changed:
                self._changed.wait_for(partial(self._news_since, identity), _SECONDS)

    def _news_since(self, last: Identity | None) -> bool:
        """Whether there is another identity than this one, or an end. Called with the lock held."""
        return self._closed or self._identity is not last

    def _refresh(self, identity: Identity, noted: Sequence[tuple[str, bytes]], first: bool) -> None:
        """Count the entries of all identities, and write this one's record if it says something new."""
        record = self._record
        if first or record is None:
            record = self._record = self._make(identity)
        found, problems = self._records.read()
        for line in problems:
            self._once("bad", "cuvee: identities in the store are passed over: %s", line)
        others = [each for each in found if each.id != record.id]
        stored = next((each for each in found if each.id == record.id), None)
        if stored is not None:
            record.sample.merge(stored.sample)
        record.sample.keys = self._records.present(record.sample.keys)
        entries = record.sample.count(len(record.sample.keys))
        counts = {each.id: self._records.count(each) for each in others}
        strange = [each for each in others if differences(record, each)]
        lost = sum(counts[each.id] for each in strange)
        older = sum(counts.values()) - lost
        self._recorder.gauge("identity_entries", entries + older, "same")
        self._recorder.gauge("identity_entries", lost, "other")
        if first:
            self._tell(record, entries, older, strange, lost)
        for tenant, digest in noted:
            record.sample.add(self._keys.written(tenant, digest))
        self._bound = record.sample.bound
        known = None if first or stored is None else (stored.sample.keys, stored.sample.bound)
        if known != (record.sample.keys, record.sample.bound):  # at a start also for what helps to recognize it
            self._records.write(record, others)

    @staticmethod
    def _tell(record: IdentityRecord, entries: int, older: int, others: Sequence[IdentityRecord], lost: int) -> None:
        own = f"{entries} entries of this identity ({record.id[:8]})"
        if older:
            own += f", {older} that another accepted secret has signed"
        if not others:
            logger.info("cuvee: the store has %s, and no others are known", own)
            return
        names = Counter(name for other in others for name in differences(record, other))
        named = ", ".join(f"{name} ({count})" for name, count in names.most_common(_MOST_NAMED))
        logger.info(
            "cuvee: the store has %s, and %d of others (%d), which differ in: %s; `cuvee store explain` shows the "
            "values", own, lost, len(others), named,
        )  # fmt: skip
