"""Blobs whose header and tag were verified: what all decoding starts from."""

from __future__ import annotations

from dataclasses import dataclass

from cuvee.codec.format.container import Header
from cuvee.codec.layout import KVLayout

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Expected:
    """What a blob must hold that came from a store by its key, which stands for the codec's quality, too.

    Attributes:
        start: position of the first token; None: any.
        dtype: dtype that the values had.
    """

    tokens: int
    start: int | None
    dtype: str


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """A blob whose header and tag were verified by a codec: see `Codec.open`.

    Attributes:
        blob: its bytes.
        header: the parsed header.
        layout: of the chunk, with the dtype that its values had.
        opened_by: identity of the codec that verified the blob; other codecs refuse it.
        refinements: bytes and header of the refinement that is decoded with a base; empty without one.
    """

    blob: Bytes
    header: Header
    layout: KVLayout
    opened_by: object
    refinements: tuple[tuple[Bytes, Header], ...] = ()

    @property
    def parts(self) -> tuple[tuple[Bytes, Header], ...]:
        """Bytes and header of the blob, and of its refinement if there is one."""
        return (self.blob, self.header), *self.refinements

    @property
    def tokens(self) -> int:
        """Tokens in the chunk."""
        return self.header.tokens

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.header.start

    @property
    def dtype(self) -> str:
        """Name of the dtype that the values had."""
        return self.header.dtype
