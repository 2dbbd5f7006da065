"""The requests that the scheduler's side knows: which of them are cached, for which tenant, and under which names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from cuvee.codec.identity import Identity, Media, PrefixChain, Scope
from cuvee.integrations.vllm.messages import Report
from cuvee.integrations.vllm.request_params import may_store
from cuvee.integrations.vllm.scheduler_state import SchedulerState, Tracked

_MOST_STEPS = 8  # that requests wait for the workers' word after a reset; the engine plans two ahead
_LONGEST_NAME = 4096  # characters of a salt or of an image's id: they are hashed again for every key


class Requests:
    """The engine's requests.

    Args:
        state: of the scheduler's side.
        identity: of the engine's blobs.
        adapter_identity: names the weights of an adapter, by name and path.

    Attributes:
        identity: as given, or with another model name after a reset that was not that of a sleep.
        tracked: requests that are cached, by id.
        uncached: ids of requests that are neither loaded nor stored until they end.
    """

    def __init__(self, state: SchedulerState, identity: Identity, adapter_identity: Callable[[str, str], str]) -> None:
        self._state = state
        self._adapter_identity = adapter_identity
        self.identity = identity
        self._left = identity  # that of the last step before the resets
        self._resets = 0  # since the last step
        self._asked = 0  # step in which the workers are asked about resets; 0: they have answered
        self.tracked: dict[str, Tracked] = {}
        self.uncached: set[str] = set()

    def begin(self, request: Any) -> Tracked:
        """Track a new request."""
        stores = may_store(request.kv_transfer_params)
        tracked = Tracked(request, self.tenant(request), self.chain(request), unstored="" if stores else "asked")
        if not stores:
            self._state.recorder.count("unstored_requests")
        self.tracked[request.request_id] = tracked
        return tracked

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self.tracked.pop(request_id, None)
        self.uncached.discard(request_id)

    def rename(self) -> None:
        """Take another identity, under which nothing is stored yet, unless the workers say that this was a sleep."""
        if not self._resets:
            self._left = self.identity
        self._resets, self._asked = self._resets + 1, 0
        self.identity = replace(self.identity, model=f"{self.identity.model} reset {uuid4().hex}")

    def ask(self, step: int) -> int:
        """Return how many resets since the last step the workers are asked about in this one."""
        resets, self._resets = self._resets, 0
        if resets:
            self._asked = step
        return resets

    def waits(self, step: int) -> bool:
        """Return whether the workers' answer about resets is still to come; `step` is the last planned one."""
        return self._resets > 0 or (self._asked > 0 and step < self._asked + _MOST_STEPS)

    def settle(self, report: Report) -> bool:
        """Return to the identity from before the resets if all ranks say that only the engine slept, and return whether
        that is so.
        """
        if not self._asked or self._asked not in report.steps:
            return False
        slept = report.kept.count(self._asked) == self._state.shards
        self._asked = 0
        if slept:
            self.identity = self._left
        return slept

    def why_uncached(self, request: Any) -> str:
        """Return why a request is not cached; empty: it may be.

        A request is not cached if its tokens do not determine its KV, or its tenant is unclear.
        """
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "embeddings"
        if request.resumable:  # a session with streamed input: tokens that were hashed may be replaced
            return "streamed"
        # Servers take the salt and the names of images from clients unchecked.
        salt = request.cache_salt
        if salt is not None and not (isinstance(salt, str) and len(salt) <= _LONGEST_NAME):
            return "salt"
        for item in request.mm_features:
            start, tokens, name = item.mm_position.offset, item.mm_position.length, item.identifier
            if not (isinstance(start, int) and isinstance(tokens, int) and isinstance(name, str)):
                return "media"
            if not (0 <= start < start + tokens <= request.num_prompt_tokens and 0 < len(name) <= _LONGEST_NAME):
                return "media"
        return ""

    def tenant(self, request: Any) -> str:
        """Return the owner of a request's entries."""
        return request.cache_salt or self._state.options.tenant

    def chain(self, request: Any) -> PrefixChain:
        """Return the chain of digests of a request's prefixes."""
        lora = request.lora_request
        media = tuple(
            Media(item.mm_position.offset, item.mm_position.offset + item.mm_position.length, item.identifier)
            for item in request.mm_features
        )
        adapter = "" if lora is None else self._adapter_identity(lora.lora_name, lora.lora_path)
        return PrefixChain(self.identity, Scope(self.tenant(request), adapter, media), self._state.chunk)
