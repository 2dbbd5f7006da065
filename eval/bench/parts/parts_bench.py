"""`cuvee bench parts`: what a store that is too small for its working set serves, with chunks in parts and with whole
chunks.

Requests read documents, whose popularity follows Zipf's law, from a `MemoryStore`. A document's chunks are served up to
the first that is missing; those after it are computed and stored. Parts and whole chunks of each preset get the same
requests and the same budget. Chunks are stand-ins of the right size: only their bytes matter to a store.

The sizes and KLs are those of SmolLM2-135M at 512 tokens whose ids are known.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rich.console import Console

from cuvee.codec.errors import InputError
from cuvee.codec.identity import store_key
from cuvee.eval.machine import hardware
from cuvee.eval.progress import timed_lines
from cuvee.integrations.stores.memory import MemoryStore

__all__ = ["EXPONENTS", "PARTS", "PART_BITS", "PART_KL", "PRESETS", "WHOLE_BITS", "run_parts_bench"]

PARTS = "parts"
PRESETS = ("small", "balanced", "high")  # which the first one, two and three parts reach
PART_BITS = (0.25, 0.34, 0.54)  # bits per value of the base and of each refinement
PART_KL = (0.02, 0.005, 0.001)  # nats per token with the parts up to this one
WHOLE_BITS = (0.244, 0.575, 1.10)  # of a whole chunk of each preset: 2.5 % less than its parts
EXPONENTS = (0.4, 0.6, 0.8, 1.0)
NEW = (0.0, 0.05)  # shares of the requests after which a document is replaced by a new one
DOCUMENTS, DOCUMENT_CHUNKS = 400, 8
REQUESTS, QUICK_REQUESTS = 20_000, 4_000
VALUES = 256 * 60 * 3 * 64  # of a chunk: tokens, keys and values of 30 layers, heads, head size
_WARM_UP = 0.25  # of the requests, which are not counted


def run_parts_bench(
    exponents: Sequence[float] = EXPONENTS, budget: float = 0.5, quick: bool = False, progress: Console | None = None
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        exponents: of Zipf's law: document number i is requested in proportion to i^-exponent.
        budget: bytes of the store, as a share of all documents in whole chunks of `high`.
        quick: fewer requests.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON: `cases`, one per exponent and share of new documents. Each has `methods`, with
        the share of tokens served, their mean KL, and the share of tokens by number of parts.

    Raises:
        InputError: an argument is out of range.
    """
    if not exponents or min(exponents) < 0:
        raise InputError(f"exponents: must be numbers of at least 0, got {list(exponents)}")
    if not 0 < budget <= 1:
        raise InputError(f"budget: must be above 0 and at most 1, got {budget}")
    say = timed_lines(progress)
    requests = QUICK_REQUESTS if quick else REQUESTS
    max_bytes = round(budget * DOCUMENTS * DOCUMENT_CHUNKS * _bytes(WHOLE_BITS[-1]))
    cases = []
    for exponent in exponents:
        for new in NEW:
            say(f"exponent {exponent}, {new:.0%} new")
            trace = _requests(exponent, new, requests)
            sizes = {PARTS: PART_BITS, **{name: (bits,) for name, bits in zip(PRESETS, WHOLE_BITS, strict=True)}}
            kls = {PARTS: PART_KL, **{name: (kl,) for name, kl in zip(PRESETS, PART_KL, strict=True)}}
            methods = [{"method": name, **_serve(trace, max_bytes, sizes[name], kls[name])} for name in sizes]
            cases.append({"exponent": exponent, "new": new, "methods": methods})
    return {"hardware": hardware(), "quick": quick, "budget": budget, "requests": requests, "cases": cases}


def _requests(exponent: float, new: float, count: int) -> list[int]:
    """Return the numbers of the documents that are requested; after a share `new` of them, a document is replaced."""
    random_ = random.Random(0)
    limits = list(accumulate((rank + 1) ** -exponent for rank in range(DOCUMENTS)))
    ranked = random_.sample(range(DOCUMENTS), DOCUMENTS)
    documents, trace = DOCUMENTS, []
    for _ in range(count):
        trace.append(ranked[bisect_left(limits, random_.random() * limits[-1])])
        if random_.random() < new:
            ranked[random_.randrange(DOCUMENTS)] = documents
            documents += 1
    return trace


def _serve(trace: Sequence[int], max_bytes: int, bits: Sequence[float], kls: Sequence[float]) -> dict[str, Any]:
    store = MemoryStore(max_bytes)
    parts = [bytes(_bytes(each)) for each in bits]
    served = [0] * (len(parts) + 1)  # chunks by number of parts
    for at, document in enumerate(trace):
        keys = [
            store_key("", document.to_bytes(16, "little") + chunk.to_bytes(16, "little"))
            for chunk in range(DOCUMENT_CHUNKS)
        ]
        found = [len(each) for each in store.get_parts(keys, len(parts))]
        usable = found.index(0) if 0 in found else len(found)
        for key, count in zip(keys[usable:], found[usable:], strict=True):
            if not count:
                store.put_parts(key, parts)
        if at >= _WARM_UP * len(trace):
            for count in [*found[:usable], *[0] * (len(found) - usable)]:
                served[count] += 1
    store.close()
    hits, total = sum(served[1:]), sum(served)
    kl = sum(count * each for count, each in zip(served[1:], kls, strict=True)) / hits if hits else None
    return {"served": hits / total, "kl": kl, "by_parts": [count / total for count in served]}


def _bytes(bits: float) -> int:
    return round(bits * VALUES / 8)
