"""What vLLM runs by default on a GPU, on a CPU: its V2 model runner, with Triton's interpreter, and async scheduling.

    CUVEE_VLLM_DEFAULTS=gpu     in the environment of the tests: all engines run so (`make nightly`)

Steps take ten times as long. OpenAI servers, which tests start as programs, keep the defaults of a CPU.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import pytest

_VARIABLE = "CUVEE_VLLM_DEFAULTS"
GPU = {_VARIABLE: "gpu", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # in the environment of a process of engines
PATIENCE = 4  # times as long as otherwise may a process of engines take


def wanted() -> bool:
    """Whether this process is to run engines so.

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", GPU[_VARIABLE]):
        raise ValueError(f"{_VARIABLE}: must be {GPU[_VARIABLE]} or not set, got {value!r}")
    return bool(value)


def need_one_process() -> None:
    """Skip a test of several ranks: vLLM's own worker processes do not get these defaults."""
    if wanted():
        pytest.skip("worker processes of vLLM do not get a GPU's defaults")


@functools.cache
def install() -> None:
    """Give this process the defaults of a GPU. Neither Triton nor vLLM may be imported yet.

    Triton reads its variable when it is imported, or its own functions stay compiled ones; later it would make cuvee's
    kernels run in the interpreter, too.

    Raises:
        RuntimeError: one of them is imported.
    """
    if imported := {"triton", "vllm"} & sys.modules.keys():
        raise RuntimeError(
            f"{' and '.join(sorted(imported))} must not be imported before the defaults of a GPU are set"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.knobs
    from triton.backends import backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]

    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_schedule_ahead(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True  # which it has just switched off

    CpuPlatform.check_and_update_config = classmethod(check_and_schedule_ahead)
