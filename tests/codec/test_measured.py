"""Layouts as models show them: measured on the model itself, or on a stand-in for a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.conftest import tiny_config, tiny_model

from cuvee.codec.errors import OutOfMemoryError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models import stand_in
from cuvee.codec.models.measured import measured_layers
from cuvee.codec.models.probe import BOUND, measure

THETA = {"rope_theta": 1e4}


def dynamic(tiny: Callable[..., Any]) -> Any:
    return tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, **THETA})


def long_rope(tiny: Callable[..., Any]) -> Any:
    factors = {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
    return tiny(
        "phi3", rope_parameters={"rope_type": "longrope", **factors, **THETA, "partial_rotary_factor": 0.5},
        original_max_position_embeddings=64,
    )  # fmt: skip


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def test_a_stand_in_shows_what_a_small_model_does(family: str) -> None:
    expected = KVLayout.from_config(tiny_config(family), "bfloat16")
    large = tiny_config(family, vocab_size=stand_in._SMALL // 16)  # now it is too large to be measured as it is
    assert KVLayout.from_config(large, "bfloat16") == expected
    assert not any(layer.why.startswith("no small model") for layer in stand_in.measure_config(large))


def test_a_model_shows_what_its_configuration_promises(family: str) -> None:
    model = tiny_model(family, torch.float32)
    assert KVLayout.of(model) == KVLayout.from_config(tiny_config(family), torch.float32)
    assert KVLayout.of(model.to(torch.bfloat16)).layers == KVLayout.of(model).layers, "tables are converted, too"


@pytest.mark.parametrize("make", [dynamic, long_rope])
def test_frequencies_that_change_with_the_length_bind_keys(make: Callable[..., Any]) -> None:
    layout = KVLayout.from_config(make(tiny_config), "float32")
    assert not layout.relocatable
    large = make(lambda family, **changes: tiny_config(family, vocab_size=stand_in._SMALL // 16, **changes))
    assert KVLayout.from_config(large, "float32") == layout


def test_the_rotary_module_is_not_believed(model: Any) -> None:
    rotary = model.model.rotary_emb
    honest = type(rotary).forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return honest(rotary, x, 1.01 * position_ids)

    rotary.forward = forward
    assert {layer.positions for layer in measure(model, "llama")} == {BOUND}


def test_a_rule_must_hold_at_far_positions(model: Any) -> None:
    rotary = model.model.rotary_emb
    honest = type(rotary).forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return honest(rotary, x, position_ids * (2 if int(position_ids.max()) > 5000 else 1))

    rotary.forward = forward
    assert {layer.positions for layer in measure(model, "llama")} == {BOUND}


def test_measuring_leaves_no_trace(model: Any) -> None:
    model.train()
    before = torch.random.get_rng_state()
    KVLayout.of(model)
    assert model.training and all(own.requires_grad for own in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_configuration_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = KVLayout.from_config(tiny_config("llama"), "float32")
    monkeypatch.setattr(stand_in, "measure", None)
    assert KVLayout.from_config(tiny_config("llama"), "float32") == first
    assert KVLayout.from_config(tiny_config("llama", dtype="bfloat16")).layers == first.layers
    with pytest.raises(TypeError):
        KVLayout.from_config(tiny_config("llama", head_dim=20), "float32")


def test_nothing_is_run_of_a_model_without_weights() -> None:
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32)
    assert KVLayout.of(bare) == KVLayout.from_config(tiny_config("llama"), "float32")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_key_value_heads": 3}, UnsupportedModelError, ""),
        ({"head_dim": 7}, UnsupportedModelError, ""),
        ({"num_hidden_layers": 5000}, UnsupportedModelError, "num_hidden_layers must be at most 4096, got 5000"),
        ({"vocab_size": -3}, UnsupportedModelError, "transformers must be able to build the model of hf_config, but "),
        ({"hidden_act": "none such"}, UnsupportedModelError, "transformers must be able to build .*KeyError"),
        ({"head_dim": 1 << 34}, OutOfMemoryError, "building a model: not enough memory: "),  # as no machine has
        ({"intermediate_size": 1 << 62}, OutOfMemoryError, "building a model: not enough memory: "),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = tiny_config("llama")
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(error, match=f"^llama: {message}"):
        KVLayout.from_config(config, "float32")


def test_a_forward_pass_that_fails_is_named(model: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of the kernel\nwith a trace")

    model.model.layers[1].forward = fail
    with pytest.raises(
        UnsupportedModelError, match=r"^llama: its cache must show .*over 6 tokens, .*ZeroDivisionError: of the kernel$"
    ):
        KVLayout.of(model)


def test_a_layout_of_huge_heads_is_measured_without_them() -> None:
    """They are coded where they are, since no small model has such heads."""
    layout = KVLayout.from_config(tiny_config("llama", head_dim=1 << 24), "float32")
    assert layout.layers[0].head_dim == 1 << 24 and not layout.relocatable


def test_a_forward_pass_without_memory_is_named(model: Any) -> None:
    model.model.layers[1].forward = lambda *_, **__: torch.empty(1 << 50)
    with pytest.raises(OutOfMemoryError, match=r"^llama: running 6 tokens: not enough memory: "):
        KVLayout.of(model)


def test_a_model_without_a_cache_is_refused(model: Any) -> None:
    forward = model.forward
    model.forward = lambda **kwargs: forward(**{**kwargs, "use_cache": False})
    with pytest.raises(UnsupportedModelError, match=r"^llama: must return a cache, but returned none"):
        measure(model, "llama")


def test_a_layer_that_is_bound_binds_the_whole_cache(model: Any) -> None:
    attend = model.model.layers[1].self_attn.forward

    def forward(*, position_embeddings: Any, **kwargs: Any) -> Any:
        tables = tuple(table.roll(1, -1) for table in position_embeddings)  # of no module
        return attend(position_embeddings=tables, **kwargs)

    model.model.layers[1].self_attn.forward = forward
    _, layers = measured_layers(model)
    assert [layer.positions for layer in layers] == ["rotated", "bound"]
    assert not KVLayout.of(model).relocatable


def test_a_model_whose_tokens_see_later_ones_is_refused(model: Any) -> None:
    """Layer 0 is no better: its keys see what the hook mixes in."""
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, inputs, output: output + output.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match=r"keys of layer 0 do \(bidirectional attention\)"):
        KVLayout.of(model)


def test_a_model_whose_frequencies_were_edited_is_measured_again() -> None:
    model = tiny_model("llama")
    before = KVLayout.of(model).layers[0].rope
    model.model.rotary_emb.inv_freq[1] *= 1.5
    after = KVLayout.of(model).layers[0].rope
    assert before and after and after.inv_freq[1] == pytest.approx(1.5 * before.inv_freq[1])
