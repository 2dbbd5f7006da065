"""Opaque pages: bytes with an element size, in an order that nobody has to know, coded without loss.

    regions of a page --joined by element size--> byte planes --lossless coder--> a states blob

A window, a recurrent state, an indexer's keys, a quantized cache with its scales: whatever an engine hands over. Bytes
of one place in their element are alike (exponents, say), and so are those a power of two apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.states import States

LAYOUT = KVLayout("opaque", (LayerLayout(1, 1, 1, None),), "bfloat16", max_positions=None)
# By element size. The coder knows elements of two and four bytes; single bytes are as well coded in pairs.
_CODED_AS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float32}
_EVEN = 512  # elements, of which the coder takes whole multiples


@dataclass(frozen=True, slots=True)
class OpaquePage:
    """A page in an engine's memory.

    Attributes:
        kind: what the engine calls it, for counters.
        regions: contiguous CPU tensors of the engine's dtypes.
    """

    kind: str
    regions: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the page."""
        return sum(each.nbytes for each in self.regions)

    def parts(self) -> list[tuple[str, torch.dtype, list[torch.Tensor]]]:
        """Return each part of the page's blob: its name, what it is coded as, and the bytes that it joins.

        The name tells the dtypes and shapes of the regions, so that bytes of others are never taken for them.
        """
        shapes = repr([(str(each.dtype), tuple(each.shape)) for each in self.regions]).encode()
        digest = hashlib.blake2b(shapes, digest_size=8).hexdigest()
        sizes: dict[int, list[torch.Tensor]] = {}
        for each in self.regions:
            sizes.setdefault(each.element_size(), []).append(each.view(-1).view(torch.uint8))
        found = []
        for size, regions in sorted(sizes.items()):
            coded_as, left = _CODED_AS.get(size, torch.bfloat16), sum(map(len, regions))
            whole: list[torch.Tensor] = []
            rest: list[torch.Tensor] = []
            left -= left % (_EVEN * coded_as.itemsize)
            for each in regions:
                whole.append(each[:left])
                rest.append(each[left:])
                left -= len(whole[-1])
            found += [(f"{size}.{digest}", coded_as, whole), (f"{size}.{digest}.rest", torch.uint8, rest)]
        return found


def encode_opaque(codec: Codec, page: OpaquePage, tokens: int, bound: bytes) -> bytes:
    """Return the blob of a page of `tokens` tokens, bound to its associated data.

    Raises:
        InputError: a page of 2 GiB or more.
    """
    tensors = {
        name: (regions[0] if _alone(regions, coded_as) else torch.cat(regions)).view(coded_as)
        for name, coded_as, regions in page.parts()
    }
    return codec.encode_states(States(tokens, tensors, LAYOUT.dtype), associated_data=bound)


def _alone(regions: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether there is one region of bytes, which begins where a value may."""
    return len(regions) == 1 and regions[0].storage_offset() % dtype.itemsize == 0


def decode_opaque(codec: Codec, blob: bytes, page: OpaquePage, tokens: int, bound: bytes) -> None:
    """Write the page of a blob of `encode_opaque` into the engine's memory.

    Raises:
        FormatError, VersionError, CorruptError, KeyMismatchError, ProfileMismatchError: as `Codec.decode_states`;
            CorruptError also for another page's blob. Damage writes nothing, but a forged blob may have written a part
            of the page by then: callers treat the page as not loaded.
    """
    parts = page.parts()
    into = {name: own[0].view(coded_as) for name, coded_as, own in parts if _alone(own, coded_as)}
    same = read_header(blob).tokens == tokens
    states = codec.decode_states(blob, associated_data=bound, into=into if same else None)
    wanted = {name: (coded_as, [sum(map(len, own)) // coded_as.itemsize]) for name, coded_as, own in parts}
    got = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in states.tensors.items()}
    if (states.tokens, got) != (tokens, wanted):
        raise CorruptError(f"page: must hold {tokens} tokens in {wanted}, got {states.tokens} in {got}")
    for name, _, regions in parts:
        pieces = states.tensors[name].view(torch.uint8).split([len(each) for each in regions])
        for region, piece in zip(regions, pieces, strict=True):
            if piece.data_ptr() != region.data_ptr():
                region.copy_(piece)
