"""Which requests are cached, for which tenant, and under which names."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

from cuvee.codec.errors import InputError
from cuvee.codec.support.once import Once
from cuvee.integrations.identity.lora_files import Adapters
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.messages import Report
from cuvee.integrations.vllm.request_params import misplaced_field, request_fields
from cuvee.integrations.vllm.scheduler.media_names import MediaNames
from cuvee.integrations.vllm.scheduler.request_record import Names, Naming, RequestRecord
from cuvee.integrations.vllm.scheduler.state import SchedulerState
from cuvee.naming.identity import Identity, Media, PrefixChain, Scope

logger = logging.getLogger(__name__)

_MOST_STEPS = 8  # that requests wait for the workers' word about weights; the engine plans two ahead
_LONGEST_NAME = 4096  # characters of a salt or of an image's id, which servers take from clients


class Requests:
    """Names the engine's requests and its weights.

    Args:
        state: of the scheduler's side.
        identity: of the engine's blobs.
        adapters: of the engine.

    Attributes:
        identity: as given; of other weights if the engine has changed them: their name is then the given one and a
            digest of what all ranks hold.
        changed: whether the weights that were read last are others than those before.
    """

    def __init__(self, state: SchedulerState, identity: Identity, adapters: Adapters) -> None:
        self._state = state
        self._adapters = adapters
        self.identity = identity
        self._first = identity
        self.changed = False
        self._live = ""  # digest of the weights that were read last; empty: the first ones
        self._unread = False  # the workers are to be asked which weights they have
        self._asked = 0  # step in which they are asked; 0: they have answered
        self._media_names = MediaNames()
        # One thread hashes images and reads the files of adapters: megabytes, from disks that may hang.
        self._thread = ThreadPool(1, "cuvee-names", state.options.lookup_timeout)
        self._once = Once(logger)

    def close(self) -> None:
        """Name no more requests. Waits for nothing."""
        self._thread.dismiss(0, cancel=True)

    def is_named(self, record: RequestRecord) -> bool:
        """Return whether a request's images and adapter have names, and begin to make them if not. What takes longer
        than `lookup_timeout` stays without.
        """
        request = record.request
        if not (request.mm_features or request.lora_request):
            return True
        if record.naming is None:
            changes, names = self._adapters.changes, self._thread.submit(self._names, request, time.monotonic())
            record.naming = Naming(self._state.clock(), changes, names)
        overdue = self._state.clock() - record.naming.begun > self._state.options.lookup_timeout
        return record.naming.names.done() or overdue

    def _names(self, request: Any, since: float) -> Names:
        """Return the names of a request's images, and the files of its adapter. Used by the thread."""
        media, lora = [self._media(request, item) for item in request.mm_features], request.lora_request
        if lora is None:
            return media, None
        return media, self._adapters.find(lora.lora_int_id, lora.lora_name, lora.lora_path, since)

    def _take_names(self, record: RequestRecord) -> Names:
        """Return and forget what `_names` has returned; no names if it has not ended in time, and none of an adapter
        if the engine has loaded one meanwhile.
        """
        request, naming, record.naming = record.request, record.naming, None
        none: Names = [None] * len(request.mm_features), None
        if naming is None:
            return none
        same, lora = naming.changes == self._adapters.changes, request.lora_request
        if lora is not None and not (same and naming.names.done()):
            self._adapters.overdue(lora.lora_int_id)
        if naming.names.done():
            media, adapter = naming.names.result()
            return media, adapter if same else None
        naming.names.cancel()
        return none

    def name(self, model: str) -> None:
        """Take the name of the weights that the engine has read, unless it has changed them since."""
        if self.identity is self._first:
            self.identity = replace(self._first, model=model)
            self._first = self.identity
        else:
            self._first = replace(self._first, model=model)

    def rename(self) -> None:
        """Take another identity, under which nothing is stored yet, until the workers have read their weights."""
        self._unread, self._asked = True, 0
        self.identity = replace(self._first, model=f"{self._first.model} unread {uuid4().hex}")

    def ask(self, step: int) -> bool:
        """Return whether the workers are asked in this step which weights they have."""
        unread, self._unread = self._unread, False
        if unread:
            self._asked = step
        return unread

    @property
    def unnamed(self) -> bool:
        """Whether the workers' answer is still to come."""
        return self._unread or self._asked > 0

    def waits(self, step: int) -> bool:
        """Return whether requests wait for the workers' answer; `step` is the last planned one."""
        return self._unread or (self._asked > 0 and step < self._asked + _MOST_STEPS)

    def settle(self, report: Report) -> bool:
        """Take the identity of the weights that all ranks say they have, and return whether they said so."""
        if not self._asked or self._asked not in report.steps:
            return False
        seen = sorted((each for each in report.seen if each.step == self._asked), key=lambda each: each.rank)
        self._asked = 0
        if [each.rank for each in seen] != [*range(self._state.shards)] or any(each.now is None for each in seen):
            return False  # the name of before stays, which no other engine has
        self.identity, live = self._first, ""
        if any(each.now != each.first for each in seen):
            digest = hashlib.blake2b(digest_size=16, person=b"cuvee-live-name")
            digest.update(b"".join(each.now or b"" for each in seen))
            live = digest.hexdigest()
            self.identity = replace(self._first, model=f"{self._first.model} live {live}")
        self.changed, self._live = live != self._live, live
        return True

    def begin(self, record: RequestRecord) -> str:
        """Have a request cached, or return why not: its tokens do not determine its KV, or its tenant is unclear."""
        request = record.request
        # Of every request: vLLM keeps the encoder's outputs and an adapter's weights for later ones.
        (media, adapter), lora = self._take_names(record), request.lora_request
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "embeddings"
        if request.resumable:  # a session with streamed input: tokens that were hashed may be replaced
            return "streamed"
        # Servers take the salt from clients unchecked.
        salt = request.cache_salt
        if salt is not None and not (isinstance(salt, str) and len(salt) <= _LONGEST_NAME):
            return "salt"
        named = [item for item in media if item is not None]
        if len(named) < len(media):
            return "media"
        if lora is not None and adapter is None:
            return "adapter"
        name = "" if adapter is None else adapter.identity(lora.lora_name)
        record.scope = Scope(salt or self._state.options.tenant, name, tuple(named))
        record.chain, record.adapter = self.chain(record.scope), adapter
        try:
            stored = request_fields(request.kv_transfer_params).get("store", True)
            record.error = misplaced_field(request.kv_transfer_params)
        except InputError as error:  # a field that is misspelt may have been `store`
            record.error, stored = str(error), False
            self._once("parameters", "cuvee: request %s is not stored: %s", request.request_id, error)
        if stored and record.error:
            self._once("misplaced", "cuvee: request %s: %s", request.request_id, record.error)
        record.unstored = "" if stored else "asked"
        record.cached = True
        return ""

    def chain(self, scope: Scope) -> PrefixChain:
        """Return a new chain of digests of the prefixes of requests of this scope."""
        return PrefixChain(self.identity, scope, self._state.chunk)

    def _media(self, request: Any, item: Any) -> Media | None:
        """Return an item of a request; None: it has no place in the prompt, or no name that tells its content."""
        start, tokens, name = item.mm_position.offset, item.mm_position.length, item.identifier
        if not (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME):
            return None
        content = self._media_names.name(item)
        if not (isinstance(start, int) and isinstance(tokens, int)):
            return None
        if not 0 <= start < start + tokens <= request.num_prompt_tokens:
            return None
        if not content or not self._state.encodes:
            self._once(
                "media",
                "cuvee: a request is not cached, because what its images hold is not known here: a client gave two "
                "images one name, another engine encoded them, or they are in shared memory "
                "(--mm-processor-cache-type shm)",
            )
            return None
        return Media(start, start + tokens, content)
