"""Names of images and other media: digests of what the engine's encoder is given.

vLLM has a name of its own for each item (`identifier`), by which it finds the encoder's outputs and its own pages. That
is a hash of the content and of the model's path; or an id that the client chose; or, with prefix caching and the
multimodal cache off, a number that counts the requests of one process; or a hash of one of these two. Nothing tells
which, so no key is made of it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from cuvee.naming.identity import canonical

_new_digest: Any  # blake3 comes with vLLM; only tests do without
try:
    import blake3
except ImportError:
    _new_digest = hashlib.blake2b
else:
    _new_digest = blake3.blake3

_MOST_NAMES = 1 << 16  # names of vLLM's that are remembered, more than its encoder cache and its pages hold images


class MediaNames:
    """Names the media of an engine's requests."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, str] = OrderedDict()  # what each name of vLLM's stands for; "": for several
        self._digests: dict[int, tuple[weakref.ref[Any], str]] = {}  # by the id of the data, while it lives

    def name(self, item: Any) -> str:
        """Return the name of an item, vLLM's `MultiModalFeatureSpec`; empty if it has none.

        It has none if its data is elsewhere, or if vLLM's name for it has stood for other data before: vLLM may then
        use what it computed from the other.
        """
        digest = self._digest(item)
        first = self._by_name.setdefault(item.identifier, digest)
        self._by_name.move_to_end(item.identifier)
        if len(self._by_name) > _MOST_NAMES:
            self._by_name.popitem(last=False)
        if first != digest:
            self._by_name[item.identifier] = ""
            return ""
        return digest

    def _digest(self, item: Any) -> str:
        data, key = item.data, id(item.data)
        if not isinstance(data, Mapping) or "address" in data:  # in the shared memory of vLLM's processes
            return ""
        kept = self._digests.get(key)
        if kept is not None and kept[0]() is data:  # an image that a conversation repeats
            content = kept[1]
        else:
            content = _hexdigest([item.modality, {name: data[name].data for name in data}])
            with suppress(TypeError):  # a kind of mapping that has no weak references
                self._digests[key] = weakref.ref(data, lambda _: self._digests.pop(key, None)), content
        # Which of the placeholders stand for the encoder's outputs; the others are tokens.
        embeds = getattr(item.mm_position, "is_embed", None)
        return content and (content if embeds is None else _hexdigest([content, embeds]))


def _hexdigest(value: Any) -> str:
    """Return the digest of nested tensors, arrays, numbers and texts; empty if there is anything else among them."""
    digest = _new_digest()
    try:
        for part in _parts(value):
            digest.update(part)
    except TypeError:
        return ""
    return str(digest.hexdigest())


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that are different for different values.

    Raises:
        TypeError: a kind of value that is not known.
    """
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous()
        yield canonical(b"tensor", str(raw.dtype).encode(), str(list(raw.shape)).encode())
        yield raw.view(-1).view(torch.uint8).numpy().data if raw.numel() else b""
    elif isinstance(value, np.ndarray) and value.dtype.hasobject is False:
        yield canonical(b"array", value.dtype.str.encode(), str(list(value.shape)).encode())
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield canonical(b"mapping", *(repr(key).encode() for key in sorted(value)))
        for key in sorted(value):
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield canonical(b"list", str(len(value)).encode())
        for each in value:
            yield from _parts(each)
    elif value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        yield canonical(type(value).__name__.encode(), repr(value).encode("utf-8", "surrogatepass"))
    else:
        raise TypeError(type(value).__name__)
