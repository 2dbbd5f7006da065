"""What the connector does about other connectors of its engine, which vLLM's `MultiConnector` makes beside it."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

logger = logging.getLogger(__name__)


def multi_connector() -> MultiConnector | None:
    """Return vLLM's connector that is making the caller's, of which it tells nothing; None: the caller's is alone."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, MultiConnector):
            return maker
        frame = frame.f_back
    return None


def have_failed_loads_computed(vllm_config: Any, outer: MultiConnector | None) -> None:
    """Have vLLM compute the tokens of loads that fail, while its default is to fail their requests. It reads its
    configuration after making the connector. Beside other connectors, whom that concerns as well, it is left to the
    user.

    Args:
        vllm_config: of the engine.
        outer: `multi_connector`.
    """
    transfer = (vllm_config if outer is None else outer._vllm_config).kv_transfer_config
    policy = transfer.kv_load_failure_policy
    if policy != "recompute" and outer is not None:
        logger.warning(
            "cuvee: requests whose loads fail will fail, because kv_load_failure_policy is %r: set it to 'recompute' "
            "beside \"kv_connector\": \"MultiConnector\"", policy,
        )  # fmt: skip
    elif policy != "recompute":
        logger.info("cuvee: kv_load_failure_policy is 'recompute' from here on, not %r", policy)
        transfer.kv_load_failure_policy = "recompute"
