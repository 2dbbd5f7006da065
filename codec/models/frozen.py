"""`frozen`: a model as it is when it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in eval mode without parameter gradients; restore both afterwards."""
    training = [(module, module.training) for module in model.modules()]
    required = [p.requires_grad for p in model.parameters()]
    try:
        model.eval()
        for p in model.parameters():
            p.requires_grad_(False)
        yield
    finally:
        for module, flag in training:
            module.training = flag
        for p, flag in zip(model.parameters(), required, strict=True):
            p.requires_grad_(flag)
