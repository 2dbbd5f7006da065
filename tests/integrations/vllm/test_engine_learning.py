"""Profiles that real engines learn: from the requests of one, for those that start later.

learning    learns from its requests, alone         publishes a profile, goes on with the generic one
ranks       two ranks learn together                publish one profile of the whole model
using       another process, the same collection    finds the profile of `learning`, and answers as without a connector
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    cuvee,
    need_vllm,
    run_engines,
    save_tiny_model,
)

pytestmark = pytest.mark.slow

TOKENS = 4096  # 32 for each of the model's 128 features
PROMPTS = [random.Random(seed).choices(range(1, 256), k=400) for seed in range(16)]
LEARN = Step(PROMPTS, max_tokens=1, until=("vllm:cuvee_learned_profiles", 1))
ASK = Step(PROMPTS[:2], max_tokens=8, until=("vllm:cuvee_stored_chunks", 6))
AGAIN = Step(PROMPTS[:2], max_tokens=8, forget=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_tiny_model("llama", folder / "model")


@pytest.fixture(scope="module")
def engines(folder: Path, model: Path) -> dict[str, Ran]:
    """What the engines did, the last two in a process of their own."""

    def ours(place: str, **more: object) -> dict[str, object]:
        options = {"quality": "high", "profile": f"learn:{folder / place}", "learn_tokens": TOKENS, "learn_share": 1}
        return {"kv_transfer_config": cuvee(f"file://{folder / place}-store", **options), **more}

    first = run_engines(
        folder / "first",
        [
            Engine("reference", model, [replace(AGAIN, forget=False)]),
            Engine("learning", model, [LEARN], ours("alone")),
            Engine("ranks", model, [LEARN], ours("ranks", tensor_parallel_size=2)),
        ],
    )
    second = run_engines(folder / "second", [Engine("using", model, [ASK, AGAIN], ours("alone"))])
    return {**first, **second}


def test_engine(engines: dict[str, Ran]) -> None:
    print(engines["learning"].metrics[-1])
    print(engines["ranks"].metrics[-1])
    print(engines["using"].metrics[-1], engines["using"].log)
