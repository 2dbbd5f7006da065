"""What changes with an engine's weights, and with nothing else."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable

import pytest
import torch

from cuvee.integrations.vllm import weights
from cuvee.integrations.vllm.weights import Weights


class Packed(torch.nn.Module):
    """A linear layer whose weights vLLM has packed into a function."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.input_size_per_partition = values.shape[1]
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=values.dtype))
        self.pack(values)

    def pack(self, values: torch.Tensor) -> None:
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, values, bias)


class Model(torch.nn.Module):
    """Parameters of several dtypes and sizes, one of them transposed, and a part whose weights vLLM has packed."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.attention = torch.nn.Linear(3, 5)
        self.attention.weight.data = torch.randn(5, 3, generator=random)
        torch.nn.init.zeros_(self.attention.bias)
        self.transposed = torch.nn.Parameter(torch.randn(4, 7, generator=random).bfloat16().t())
        self.bytes = torch.nn.Parameter(torch.arange(29, dtype=torch.uint8), requires_grad=False)
        self.values = torch.randn(6, 70, generator=random).bfloat16()
        self.packed = Packed(self.values)

    def compute_logits(self) -> None:
        pass


@pytest.fixture
def model() -> Model:
    return Model()


def of(model: Model) -> Weights:
    time = itertools.count()
    return Weights(model.attention, torch.nn.Module.named_parameters, lambda: float(next(time)))


def looks(of_model: Weights, most: int = 100) -> int:
    """Return how many looks find a change; 0: none does."""
    return next((number for number in range(1, most + 1) if of_model.changed()), 0)


def test_the_same_weights_give_the_same_digest(model: Model) -> None:
    of_model = of(model)
    assert of_model.digest() is not None
    assert of_model.digest() == of_model.digest() == of(model).digest() == of(Model()).digest()
    model.register_buffer("scratch", torch.ones(3))
    assert of_model.digest() == of(model).digest(), "what a step leaves behind is no weight"
    assert not looks(of_model)


@pytest.mark.parametrize("words", [1, 1 << 17])
def test_any_byte_counts(model: Model, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_HOST_WORDS", words)
    of_model, looking = of(model), of(model)
    seen = [of_model.digest()]
    for parameter in filter(torch.numel, model.parameters()):
        at = parameter.data.reshape(-1).view(torch.uint8)
        for index in range(len(at)):
            changed = at.clone()
            changed[index] ^= 1
            looking.digest()
            parameter.data = changed.view(parameter.dtype).view(parameter.shape)
            seen.append(of_model.digest())
            assert looks(looking)
            parameter.data = at.clone().view(parameter.dtype).view(parameter.shape)
    swapped = model.attention.weight.data.clone()
    model.attention.weight.data[:, [0, 2]] = model.attention.weight.data[:, [2, 0]]
    seen.append(of_model.digest())
    model.attention.weight.data = swapped
    model.packed.pack(torch.where(torch.arange(70) == 65, 0.5, model.values).bfloat16())
    seen.append(of_model.digest())
    model.bytes = torch.nn.Parameter(model.bytes.data.view(29, 1), requires_grad=False)
    seen.append(of_model.digest())
    model.more = torch.nn.Parameter(torch.zeros(1))
    seen.append(of_model.digest())
    assert None not in seen and len(set(seen)) == len(seen) > 150


def test_a_look_finds_what_was_replaced(model: Model) -> None:
    """Also by equal weights: their digest tells that they are."""
    of_model = of(model)
    changes: tuple[Callable[[], object], ...] = (
        lambda: model.packed.pack(model.values),
        lambda: setattr(model, "bytes", torch.nn.Parameter(model.bytes.data, requires_grad=False)),
    )
    for change in changes:
        before = of_model.digest()
        change()
        gc.collect()
        assert looks(of_model) and of_model.digest() == before and not looks(of_model)


def test_looks_come_round_to_every_piece_and_cost_little(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of all weights is found at once; that of one value when its piece is read."""
    model.table = torch.nn.Parameter(torch.zeros(1000, 8))
    monkeypatch.setattr(weights, "_HOST_WORDS", 100)
    monkeypatch.setattr(weights, "_HOST_PIECES", 1)
    of_model = of(model)
    read: list[int] = []

    def noted(data: torch.Tensor, first: int, words: int) -> torch.Tensor:
        read.append(words)
        return Weights._sum(of_model, data, first, words)

    monkeypatch.setattr(of_model, "_sum", noted)
    of_model.digest()
    for at in (0, 777, 999):
        read.clear()
        model.table.data[at, 3] = 1
        assert 0 < looks(of_model, 50) == len(read) <= 45, "one piece of 100 words at a look"
        of_model.digest()
    for parameter in model.parameters():
        parameter.data.add_(1)
    assert looks(of_model) == 1
    of_model._clock = lambda: 1e6
    assert of_model.digest() and not of_model.changed()
    model.table.data.add_(1)
    assert not looks(of_model), "no time has passed since the last look"


def test_packed_weights_of_large_layers_are_sampled(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MOST_PRODUCTS", 70 * 6 * 7)
    of_model, columns = of(model), torch.arange(70)
    plain, seen = of_model.digest(), []
    for at in range(70):
        model.packed.pack(torch.where(columns == at, 0.5, model.values).bfloat16())
        seen.append(of_model.digest() != plain)
    assert sum(seen) == 7 and all(seen[::10])


def test_what_cannot_be_told_is_logged_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    of_model = of(model)
    of_model.digest()
    del model.packed.cpu_linear
    assert of_model.digest() is None is of_model.digest() and not looks(of_model)
    assert caplog.text.count("nothing that was stored before a reset is found") == 1 and "packed.weight" in caplog.text
    assert Weights(torch.nn.Linear(1, 1), torch.nn.Module.named_parameters).digest() is None, "nobody's layer"
    gone = of(Model())
    gc.collect()
    assert gone.digest() is None
