"""Decide, while a prompt's cache is loaded, which parts to fetch, what to compute, and when to start the model.

LoadRequest: chunks, parts, deadline, floor --+
LinkRate per tier ----------------------------+--> LoadPlanner --> Step: fetch, decode, cancel, start
LinearCost of prefill and of decoding --------+         ^            |
                                                        +-- events --+
"""

from cuvee.integrations.loading.costs import LinearCost, prefill_quantities
from cuvee.integrations.loading.links import Forecast, LinkRate
from cuvee.integrations.loading.planner import Decode, LoadPlanner, Start, Step
from cuvee.integrations.loading.request import ChunkParts, Compute, LoadRequest, Part
from cuvee.integrations.loading.state import Fetch

__all__ = [
    "ChunkParts",
    "Compute",
    "Decode",
    "Fetch",
    "Forecast",
    "LinearCost",
    "LinkRate",
    "LoadPlanner",
    "LoadRequest",
    "Part",
    "Start",
    "Step",
    "prefill_quantities",
]
