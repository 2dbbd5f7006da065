"""Whether a codec warns of the chunks that it encodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ADVISES: ContextVar[bool] = ContextVar("ADVISES", default=True)


@contextmanager
def without_advice() -> Iterator[None]:
    """Encode chunks that are no model's, to have loops compiled: nothing that this thread encodes is warned of.

    Such a warning would mislead, and later ones about real chunks would be missing, because each is logged once.
    """
    token = ADVISES.set(False)
    try:
        yield
    finally:
        ADVISES.reset(token)
