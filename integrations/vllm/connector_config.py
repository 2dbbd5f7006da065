"""Options of the connector in `kv_connector_extra_config`, checked when the engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cuvee.codec.errors import InputError
from cuvee.integrations.core.niceness import LOWEST_PRIORITY
from cuvee.integrations.options import CodingOptions, limited
from cuvee.integrations.vllm.blending.blend_options import BlendOptions
from cuvee.integrations.vllm.request_params import read_deadline
from cuvee.naming.part_keys import MAX_PARTS

# A request that loads waits for at least one step of the engine, and this many more tokens hardly lengthen a step.
_LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True, repr=False)
class Options(CodingOptions):
    """Options of the connector, by the names of the JSON that sets them: those of `CodingOptions`, and its own.

    Attributes:
        store: a store URL, or a list of them. Default: RAM of the engine's process, which is refused where the workers
            run in processes of their own.
        chunk_tokens: tokens per blob; a multiple of the engine's block size.
        min_tokens: shorter hits are not loaded; default: 64, or one chunk if that is shorter.
        decide: "measured": load if that is expected to be faster than computing; "always": load all that is found.
        store_generated: also store generated tokens: the next turn of a conversation begins with them.
        store_niceness: how far threads that store give way to others, 0 to 19, as the `nice` of Linux: of a core that
            others want all the time, they get a third at 3, a tenth at 10 and 1.4% at 19.
        max_pending_gb: budget of each rank for chunks that wait to be stored, in 10^9 bytes, uncompressed until they
            are encoded; beyond it chunks are not stored. The default holds two full steps of prefill (16,384 tokens)
            of an 8B model.
        lookup_timeout: seconds that a request waits to learn whether it is cached.
        load_timeout: seconds of work after which a load is given up and its tokens are computed.
        close_timeout: seconds that the engine's stop waits for chunks being stored; the rest is lost.
        refinements: 1: chunks are stored as a base and a refinement, which a load with a deadline leaves out first
            (`cuvee.Codec`). Needs a profile. 0: chunks are stored whole.
        deadline_ms: milliseconds from a request's arrival to its first token, which decides how much is loaded;
            None: all that is found. Requests may name another.
        blend: reuse cached segments at any position and recompute some of their tokens, so that answers are
            approximations (`cuvee.integrations.vllm.blending.blend_options.BlendOptions`). None: never.
    """

    SOURCE: ClassVar[str] = "kv_connector_extra_config"

    chunk_tokens: int = 256
    min_tokens: int | None = None
    decide: str = limited("measured", choices=("measured", "always"))
    store_generated: bool = True
    store_niceness: int = limited(19, least=0, most=LOWEST_PRIORITY)
    max_pending_gb: float = 2.2
    close_timeout: float = 30.0
    refinements: int = limited(0, least=0, most=MAX_PARTS - 1)
    deadline_ms: float | None = limited(None, elsewhere=True)
    blend: BlendOptions | None = None

    def __post_init__(self) -> None:
        CodingOptions.__post_init__(self)  # `super()` does not know a class with slots
        if read_deadline("", self.deadline_ms) is not None and self.blend is not None:
            raise InputError(
                "deadline_ms: must be left out with blend, because loads with a deadline are not blended; requests may "
                "name it"
            )
        if self.refinements and self.profile is None:
            raise InputError(
                f"refinements: must be 0 without a profile, got {self.refinements}: learn one (cuvee profile learn), "
                "and name it in option 'profile'"
            )
        blend: Any = self.blend
        if not isinstance(blend, BlendOptions | None):
            object.__setattr__(self, "blend", BlendOptions.from_json(blend))

    @property
    def least_tokens(self) -> int:
        """Fewest tokens worth a load."""
        return min(self.chunk_tokens, _LEAST_TOKENS) if self.min_tokens is None else self.min_tokens
