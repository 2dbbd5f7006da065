"""The loads that policies are compared in: prompts of SmolLM2-135M over a link, with a deadline.

Figures are those of the model on a Xeon with AMX (`eval/results/2026-11-23-engine-smollm2`): prefill of 512 to 7,936
tokens in .21 to 4.6 s, decoding at 300 MB/s of bfloat16 at `balanced`, in the shares of transform and entropy decoding
of `eval/results/2026-11-26-pages`. Sizes are ideal entropies at 512 tokens, with ids. Prompts and hours differ: sizes
by 15 %, prefill by 4 %, decoding by 8 %. Policies know the sizes; of the other two, they know what was measured before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cuvee.codec.support.arrays import F64
from cuvee.eval.bench.loading.traces import Trace, make_trace
from cuvee.integrations.loading import LinearCost, LinkRate, prefill_quantities

__all__ = ["CHUNK_TOKENS", "LEVELS", "QUESTION", "RAW_BYTES", "LoadCase", "Outcome"]

CHUNK_TOKENS = 256
QUESTION = 64  # tokens behind the chunks
_VALUES = 11_520  # per token
RAW_BYTES = 2 * _VALUES  # per token
LEVELS = ("small", "balanced", "high")
KL = np.array([0.02, 0.005, 0.001])
_BITS = np.array([0.25, 0.59, 1.13])  # of the first one, two, three parts
_SINGLE = 0.975  # bits of a blob of one quality, over those of parts
_PREFILL = 0.39e-3, 2.4e-8  # seconds per token, and per token looked at
_DECODE = 35e-6, 53e-9  # seconds per token, and per byte
_COPY = 1 / 3.5e9  # seconds per byte of a raw cache
_HISTORY = 20.0  # seconds of transfers before the load that measured the link
_HISTORY_PIECES = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a load ended.

    Attributes:
        seconds: from the request to the first token.
        kl: nats per token that the prompt loses.
        nbytes: that went over the link.
        computed: share of the chunks' tokens that were computed.
    """

    seconds: float
    kl: float
    nbytes: float
    computed: float


@dataclass(frozen=True)
class LoadCase:
    """One load. Times count from the request.

    Attributes:
        trace: kind of its trace.
        speed: mean bytes per second.
        tokens: of its chunks; a multiple of `CHUNK_TOKENS`.
        deadline: seconds until the first token should be there.
        latency: seconds of a request to the store.
        kl_max: nats per token that an answer may lose.
        seed: of its random numbers.
    """

    trace: str
    speed: float
    tokens: int
    deadline: float
    latency: float
    kl_max: float
    seed: int
    link: Trace = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "link", make_trace(self.trace, self.speed, self.seed))

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return self.tokens // CHUNK_TOKENS

    @cached_property
    def _random(self) -> dict[str, F64]:
        random = np.random.default_rng([self.seed, self.tokens])
        return {
            "sizes": np.exp(0.15 * random.standard_normal(self.chunks)),
            "prefill": np.exp(0.04 * random.standard_normal(33)),
            "decode": np.exp(0.08 * random.standard_normal(33)),
        }

    @cached_property
    def sizes(self) -> F64:
        """Bytes of each chunk's first one, two and three parts, float64 `[chunks, 3]`."""
        nbytes: F64 = np.rint(self._random["sizes"][:, None] * _BITS * (_VALUES * CHUNK_TOKENS / 8))
        return nbytes

    @cached_property
    def single(self) -> F64:
        """Bytes of each chunk in one quality, float64 `[chunks, 3]`."""
        nbytes: F64 = np.rint(_SINGLE * self.sizes)
        return nbytes

    def prefill(self, chunks: int) -> float:
        """Return the seconds to compute everything behind so many loaded chunks."""
        x, y = prefill_quantities(chunks * CHUNK_TOKENS, self.tokens + QUESTION)
        return float(self._random["prefill"][0] * (_PREFILL[0] * x + _PREFILL[1] * y))

    def decode(self, nbytes: float, chunks: int = 1) -> float:
        """Return the seconds to decode so many chunks of so many bytes in all."""
        return float(self._random["decode"][0] * (_DECODE[0] * CHUNK_TOKENS * chunks + _DECODE[1] * nbytes))

    def copy(self, nbytes: float) -> float:
        """Return the seconds to put a raw cache into place."""
        return _COPY * nbytes

    def measured_prefill(self) -> LinearCost:
        """Return what was measured of computing before the load."""
        cost = LinearCost(1e-3, 0.0)
        for number, noise in enumerate(self._random["prefill"][1:]):
            start = 2048 * (number % 4)
            x, y = prefill_quantities(start, start + 512 * (1 + number // 4 % 4))
            cost.observe(x, y, float(noise) * (_PREFILL[0] * x + _PREFILL[1] * y))
        return cost

    def measured_decode(self) -> LinearCost:
        """Return what was measured of decoding before the load."""
        cost = LinearCost(1e-4, 1e-7)
        for number, noise in enumerate(self._random["decode"][1:]):
            nbytes = float(_BITS[number % 3] * _VALUES * CHUNK_TOKENS / 8)
            cost.observe(CHUNK_TOKENS, nbytes, float(noise) * (_DECODE[0] * CHUNK_TOKENS + _DECODE[1] * nbytes))
        return cost

    def measured_link(self) -> LinkRate:
        """Return what the loads of the seconds before measured of the link."""
        rate = LinkRate(self.link.mean, self.latency)
        piece = (self.link.sent(0.0) - self.link.sent(-_HISTORY)) / _HISTORY_PIECES
        begin = -_HISTORY
        for _ in range(_HISTORY_PIECES):
            end = self.link.arrives(begin, piece)
            rate.observe(piece, max(end - begin, 1e-6))
            begin = end
        return rate

    @property
    def last_throughput(self) -> float:
        """Bytes per second of the last load's last chunk, a tenth of a second long."""
        return max((self.link.sent(0.0) - self.link.sent(-0.1)) / 0.1, 1.0)

    def mean_kl(self, levels: F64, chunks: int) -> float:
        """Return the KL of a prompt whose first chunks have these levels, from 0, and the rest of which is computed."""
        return float(KL[levels[:chunks].astype(int)].sum() / self.chunks)
