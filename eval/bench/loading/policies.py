"""What a server may do with a prompt whose cache is behind a link: one function per policy, from a case to its outcome.

All of them drive the same engine: it loads a prefix, decodes chunks one after the other while more arrive, and then
computes what is missing. A policy that asks for everything in order pays the latency once, ours for each request that
finds the link idle.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from cuvee.eval.bench.loading.cases import CHUNK_TOKENS, KL, QUESTION, RAW_BYTES, LoadCase, Outcome
from cuvee.integrations.loading import (
    ChunkParts,
    Compute,
    Decode,
    Fetch,
    LinkRate,
    LoadPlanner,
    LoadRequest,
    Part,
    prefill_quantities,
)

__all__ = ["best_single", "cachegen", "computed", "fixed", "oracle", "raw", "refined"]


def computed(case: LoadCase) -> Outcome:
    """Compute everything."""
    return Outcome(case.prefill(0), 0.0, 0.0, 1.0)


def raw(case: LoadCase) -> Outcome:
    """Load the cache as it is."""
    nbytes = RAW_BYTES * case.tokens
    arrives = case.link.arrives(case.latency, nbytes)
    last = case.copy(RAW_BYTES * CHUNK_TOKENS)  # the others are in place by then
    return Outcome(max(arrives, case.copy(nbytes)) + last + case.prefill(case.chunks), 0.0, nbytes, 0.0)


def fixed(case: LoadCase, level: int) -> Outcome:
    """Load everything in one quality."""
    begin, decoded = case.latency, 0.0
    for nbytes in case.single[:, level]:
        begin = case.link.arrives(begin, nbytes)
        decoded = max(decoded, begin) + case.decode(nbytes)
    seconds = decoded + case.prefill(case.chunks)
    return Outcome(seconds, float(KL[level]), float(case.single[:, level].sum()), 0.0)


def best_single(case: LoadCase, trust: float = 1.0) -> Outcome:
    """Load everything in the best quality that is expected in time at the mean bandwidth, else in the coarsest.

    Args:
        case: the load.
        trust: share of the time to plan for.
    """
    estimate = _Estimate(case)
    fits = [
        level
        for level, nbytes in enumerate(case.single.sum(axis=0))
        if max(case.latency + nbytes / case.link.mean, estimate.decode(nbytes, case.chunks))
        + estimate.compute(case.chunks) <= trust * case.deadline
    ]  # fmt: skip
    return fixed(case, max(fits, default=0))


def cachegen(case: LoadCase, trust: float = 1.0) -> Outcome:
    """Choose each chunk's quality as CacheGen does.

    Before each chunk, the least lossy choice that keeps the deadline for all chunks that remain: to compute them from
    their text, else the finest level that fits the remaining time at the throughput of the last chunk, else the
    coarsest level. Decoding counts as well, in favor of the policy.

    Args:
        case: the load.
        trust: share of the remaining time to plan for.
    """
    estimate = _Estimate(case)
    begin, decoded, sent = case.latency, 0.0, 0.0
    throughput = case.last_throughput
    levels = np.zeros(case.chunks)
    for chunk in range(case.chunks):
        now = begin if chunk else 0.0
        left = trust * (case.deadline - now)
        if max(decoded - now, 0.0) + estimate.compute(chunk) <= left:
            seconds = max(now, decoded) + case.prefill(chunk)
            return Outcome(seconds, case.mean_kl(levels, chunk), sent, 1 - chunk / case.chunks)
        for level in reversed(range(len(KL))):
            nbytes = case.single[chunk:, level].sum()
            work = max(decoded - now, 0.0) + estimate.decode(nbytes, case.chunks - chunk)
            if max(begin - now + nbytes / throughput, work) + estimate.compute(case.chunks) <= left:
                break
        nbytes = float(case.single[chunk, level])
        arrives = case.link.arrives(begin, nbytes)
        throughput = nbytes / max(arrives - begin, 1e-6)
        begin, levels[chunk] = arrives, level
        decoded = max(decoded, begin) + case.decode(nbytes)
        sent += nbytes
    return Outcome(decoded + case.prefill(case.chunks), case.mean_kl(levels, case.chunks), sent, 0.0)


class _Estimate:
    """What a policy expects of computing and decoding, by what was measured before."""

    def __init__(self, case: LoadCase) -> None:
        self._stop = case.tokens + QUESTION
        self._prefill, self._decode = case.measured_prefill(), case.measured_decode()

    def compute(self, chunks: int) -> float:
        """Return the seconds to compute everything behind so many loaded chunks."""
        return self._prefill(*prefill_quantities(chunks * CHUNK_TOKENS, self._stop))

    def decode(self, nbytes: float, chunks: int) -> float:
        """Return the seconds to decode so many chunks of so many bytes in all."""
        return self._decode(float(chunks * CHUNK_TOKENS), nbytes)


def oracle(case: LoadCase) -> Outcome | None:
    """Return a bound for every policy that loads coded chunks: the least KL that meets the deadline on a link that is
    known in advance; None if nothing meets it and keeps the floor. A raw cache may be better where a link is fast.

    For each number of chunks to load, the bytes are bounded twice. The link carries so many until the model has to
    start, less the time to decode one chunk, since the last byte is that of a chunk. The decoder decodes so many from
    the arrival of the smallest chunk on. Within both, bytes are spent where they save most; the last of them may be a
    fraction of a refinement, which no real load can use. Sizes are those of single blobs, which take less than parts.
    """
    best: Outcome | None = None
    gain = CHUNK_TOKENS * -np.diff(KL)
    per_byte = case.decode(1.0, 0)
    for chunks in range(case.chunks + 1):
        until = case.deadline - case.prefill(chunks)
        base = case.single[:chunks, 0].sum()
        if chunks:
            smallest = float(case.single[:chunks, 0].min())
            last = max(until - case.decode(smallest), case.latency)
            carried = case.link.sent(last) - case.link.sent(case.latency)
            working = until - case.link.arrives(case.latency, smallest) - case.decode(0.0, chunks)
            budget = min(carried, working / per_byte) - base
        else:
            budget = 0.0
        if until < 0 or budget < 0:
            continue
        steps = np.diff(case.single[:chunks], axis=1)
        saved = np.broadcast_to(gain, steps.shape).ravel()
        order = np.argsort(-saved / steps.ravel())
        cost, saved = steps.ravel()[order], saved[order]
        share = np.clip((budget - (np.cumsum(cost) - cost)) / cost, 0, 1)
        kl = max(float((chunks * CHUNK_TOKENS * KL[0] - share @ saved) / case.tokens), 0.0)
        if kl <= case.kl_max * (1 + 1e-9) and (best is None or kl < best.kl):
            best = Outcome(case.deadline, kl, float(base + share @ cost), 1 - chunks / case.chunks)
    return best


class _Wire:
    """The transfers over a link, one after the other."""

    def __init__(self, case: LoadCase) -> None:
        self._case = case
        self._requests: deque[tuple[Fetch, float]] = deque()
        self._free = -np.inf
        self.nbytes = 0.0

    def send(self, fetch: Fetch, now: float) -> None:
        self._requests.append((fetch, now))

    def next_arrival(self) -> float:
        """Return when the first request is answered."""
        return self._case.link.arrives(self._begin(), self._requests[0][0].nbytes) if self._requests else np.inf

    def take(self, now: float) -> Fetch:
        """Return the request that is answered now."""
        fetch, _ = self._requests.popleft()
        self._free = now
        self.nbytes += fetch.nbytes
        return fetch

    def cancel(self, fetch: Fetch, now: float) -> None:
        """Stop a request; what it has brought counts."""
        if self._requests[0][0] is fetch:
            self.nbytes += max(self._case.link.sent(now) - self._case.link.sent(self._begin()), 0.0)
            self._free = now
        self._requests = deque(each for each in self._requests if each[0] is not fetch)

    def _begin(self) -> float:
        return max(self._requests[0][1] + self._case.latency, self._free)


def refined(case: LoadCase, link: LinkRate, compute: Compute = Compute.EXACT, confidence: float = 0.95) -> Outcome:
    """Load parts as `LoadPlanner` decides.

    Args:
        case: the load.
        link: what is known of the link; it goes on learning.
        compute: when to compute what could be loaded.
        confidence: see `LoadPlanner`.
    """
    parts = np.diff(case.sizes, axis=1, prepend=0.0).astype(int).tolist()
    chunks = tuple(
        ChunkParts(CHUNK_TOKENS, tuple(Part(n, float(kl), "link") for n, kl in zip(own, KL, strict=True)))
        for own in parts
    )
    request = LoadRequest(chunks, case.deadline, case.kl_max, rest=QUESTION, compute=compute)
    costs = case.measured_prefill(), case.measured_decode()
    planner = LoadPlanner(request, {"link": link}, *costs, now=0.0, confidence=confidence)
    wire = _Wire(case)
    now, decoded_at = 0.0, np.inf
    while True:
        step = planner.next(now)
        for fetch in step.cancel:
            wire.cancel(fetch, now)
        for fetch in step.fetch:
            wire.send(fetch, now)
        if step.decode is not None:
            decoded_at = now + _decode_seconds(case, step.decode)
        if step.start is not None:
            seconds = now + case.prefill(step.start.chunks)
            return Outcome(seconds, step.start.kl, wire.nbytes, 1 - step.start.chunks / case.chunks)
        arrival = wire.next_arrival()
        now = min(arrival, decoded_at, step.wake)
        if now == arrival:
            planner.arrived(wire.take(now), now)
        elif now == decoded_at:
            planner.decoded(now)
            decoded_at = np.inf


def _decode_seconds(case: LoadCase, decode: Decode) -> float:
    return case.decode(float(case.sizes[decode.chunk, decode.parts - 1]))
