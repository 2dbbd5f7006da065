"""Real engines whose drafters have layers of their own: a restored prompt is drafted behind as a cached one is.

One process fills a store, another finds it. The drafter of `draft_model` is the model itself. The heads of `eagle` and
`mtp` are the only layer of a model: often right, and hardly ever without what the layer holds of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    distance,
    ids,
    run_engines,
    save_tiny_model,
    transfer,
)

pytestmark = pytest.mark.slow

CHUNK, BLOCK, TOKENS = 64, 32, 30
PROMPTS = [ids(300, seed) for seed in range(4)]
ONCE = Step(PROMPTS, max_tokens=TOKENS)
KINDS = ("eagle", "mtp", "draft_model")
ACCEPTED, DRAFTED = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")


def save_with_head(kind: str, folder: Path) -> None:
    """Save a model of one layer, and a head that predicts with this layer from tokens alone.

    A head norms its layer's input otherwise than the model does, so rows of the table of tokens get a norm of one.
    """
    model = save_tiny_model("qwen2" if kind == "mtp" else "llama", folder / kind, num_hidden_layers=1)
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = table / table.square().mean(-1, keepdim=True).sqrt()
    own = {name.removeprefix("model.layers.0."): each for name, each in weights.items() if ".layers.0." in name}
    size = table.shape[1]
    hidden, token = torch.zeros(size, size), torch.eye(size)
    if kind == "eagle":
        head = {f"layers.0.{name}": each for name, each in own.items() if name != "input_layernorm.weight"}
        (folder / "head").mkdir()
        save_file({**head, "fc.weight": torch.cat([token, hidden], 1)}, folder / "head" / "model.safetensors")
        (folder / "head" / "config.json").write_text(json.dumps(config))
    else:  # MiMo, whose heads are in the model's checkpoint
        norms = {f"{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden", "final")}
        head = {**own, **norms, "input_proj.weight": torch.cat([hidden, token], 1)}
        weights |= {f"model.mtp_layers.0.{name}": each.clone() for name, each in head.items()}
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """With the models, and heads that draft."""
    save_tiny_model("llama", folder / "draft_model")
    for kind in ("eagle", "mtp"):
        save_with_head(kind, folder)
    return folder


def drafting(folder: Path, kind: str) -> dict[str, Any]:
    drafters = {"eagle": {"model": str(folder / "head")}, "draft_model": {"model": str(folder / kind)}}
    return {"speculative_config": {"method": kind, "num_speculative_tokens": 3, **drafters.get(kind, {})}}


@pytest.fixture(scope="module")
def first(folder: Path) -> Mapping[str, Ran]:
    """Engines without us answer twice, from their own prefix cache the second time. Of those that fill a store, some
    draft nothing.
    """
    engines = []
    for kind in KINDS:
        drafts = drafting(folder, kind)
        engines.append(Engine(f"cached {kind}", folder / kind, [ONCE, ONCE], drafts))
        engines.append(Engine(f"stored {kind}", folder / kind, [ONCE], {**drafts, **transfer(folder, kind)}))
        engines.append(Engine(f"plain {kind}", folder / kind, [ONCE], transfer(folder, f"plain {kind}")))
    return run_engines(folder / "first", engines)


@pytest.fixture(scope="module")
def second(folder: Path, first: Mapping[str, Ran]) -> Mapping[str, Ran]:
    engines = []
    for kind in KINDS:
        drafts = drafting(folder, kind)
        engines.append(Engine(f"loaded {kind}", folder / kind, [ONCE], {**drafts, **transfer(folder, kind)}))
        engines.append(
            Engine(f"without {kind}", folder / kind, [ONCE], {**drafts, **transfer(folder, f"plain {kind}")})
        )
    return run_engines(folder / "second", engines)


def accepted(ran: Ran, step: int = 0) -> float:
    """Of the tokens that were drafted in a step."""
    before = step - 1
    counts = [ran.metric(name, step) - (ran.metric(name, before) if step else 0) for name in (ACCEPTED, DRAFTED)]
    return counts[0] / counts[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.serves(drafts="eagle", where="engine")
@pytest.mark.serves(drafts="mtp", where="engine")
def test_as_much_is_accepted_behind_a_restored_prompt_as_behind_a_cached_one(
    kind: str, first: Mapping[str, Ran], second: Mapping[str, Ran]
) -> None:
    cached, loaded, without = first[f"cached {kind}"], second[f"loaded {kind}"], second[f"without {kind}"]
    assert [answer.cached for answer in loaded.steps[0]] == [(len(PROMPTS[0]) - 1) // BLOCK * BLOCK] * len(PROMPTS)
    assert loaded.metric("vllm:cuvee_loaded{kind=drafts}") == loaded.metric("vllm:cuvee_loaded") / 2
    assert accepted(loaded) == pytest.approx(accepted(cached, 1), abs=0.01)
    assert accepted(without) < accepted(loaded) - 0.05, "otherwise nobody would see that drafts are not restored"
    loaded.assert_sound()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_engines_own_with_or_without_a_drafters_layers(
    kind: str, first: Mapping[str, Ran], second: Mapping[str, Ran]
) -> None:
    own = first[f"cached {kind}"].steps[0]
    for ran in (first[f"stored {kind}"], second[f"loaded {kind}"], second[f"without {kind}"]):
        assert max(map(distance, ran.steps[0], own)) < 1e-4
    assert second[f"without {kind}"].metric("vllm:cuvee_loaded{kind=drafts}") == 0
