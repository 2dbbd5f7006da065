"""What changes with an engine's weights, and with nothing else."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch

from cuvee.integrations.vllm import weights
from cuvee.integrations.vllm.weights import Weights


class Model(torch.nn.Module):
    """Parameters of several dtypes and sizes, one of them transposed, and a part whose weights vLLM has packed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(3, 5)
        self.transposed = torch.nn.Parameter(torch.randn(4, 7).bfloat16().t())
        self.bytes = torch.nn.Parameter(torch.arange(29, dtype=torch.uint8), requires_grad=False)
        self.packed = torch.nn.ParameterDict({"weight": torch.empty(0)})
        vars(self.packed)["cpu_linear"] = lambda x: x

    def compute_logits(self) -> None:
        pass


@pytest.fixture
def model() -> Model:
    return Model()


def of(model: Model) -> Weights:
    return Weights(model.attention, torch.nn.Module.named_parameters)


def test_the_same_weights_give_the_same_digest(model: Model) -> None:
    of_model = of(model)
    assert of_model.digest() is not None
    assert of_model.digest() == of_model.digest() == of(model).digest()
    model.register_buffer("scratch", torch.ones(3))
    assert of_model.digest() == of(model).digest(), "what a step leaves behind is no weight"


@pytest.mark.parametrize("words", [1, 2, 1 << 20])
def test_any_byte_counts(model: Model, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_WORDS", words)
    of_model = of(model)
    seen = [of_model.digest()]
    for parameter in model.parameters():
        at = parameter.data.reshape(-1).view(torch.uint8)
        for index in range(len(at)):
            changed = at.clone()
            changed[index] ^= 1
            parameter.data = changed.view(parameter.dtype).view(parameter.shape)
            seen.append(of_model.digest())
            parameter.data = at.clone().view(parameter.dtype).view(parameter.shape)
    swapped = model.attention.weight.data.clone()
    model.attention.weight.data[:, [0, 2]] = model.attention.weight.data[:, [2, 0]]
    seen.append(of_model.digest())
    model.attention.weight.data = swapped
    assert None not in seen and len(set(seen)) == len(seen) > 150


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.packed, "cpu_linear", lambda x: x),
        lambda model: setattr(model, "bytes", torch.nn.Parameter(model.bytes.data.view(29, 1), requires_grad=False)),
        lambda model: setattr(model, "more", torch.nn.Parameter(torch.zeros(1))),
    ],
)
def test_other_weights_of_another_kind_count(model: Model, change: Callable[[Model], None]) -> None:
    of_model = of(model)
    before = of_model.digest()
    change(model)
    assert before != of_model.digest() is not None


def test_packed_weights_that_were_replaced_are_not_kept(model: Model) -> None:
    before = of(model).digest()
    old = weakref.ref(vars(model.packed)["cpu_linear"])
    vars(model.packed)["cpu_linear"] = lambda x: x
    gc.collect()
    assert old() is None and before != of(model).digest()


def test_what_cannot_be_told_is_logged_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    of_model = of(model)
    del model.packed.cpu_linear
    assert of_model.digest() is None is of_model.digest()
    assert caplog.text.count("nothing that was stored before a sleep is found") == 1 and "packed.weight" in caplog.text
    assert Weights(torch.nn.Linear(1, 1), torch.nn.Module.named_parameters).digest() is None, "nobody's layer"
    gone = of(Model())
    gc.collect()
    assert gone.digest() is None
