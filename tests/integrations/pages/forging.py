"""Forged entries of opaque pages, as whoever may write to a store without a secret can make them."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.integrations.stores.dict_store import DictStore

from cuvee.codec.codec import Codec
from cuvee.integrations.pages.opaque import LAYOUT
from cuvee.integrations.stores.base import is_record


def forge(store: DictStore) -> list[str]:
    """Put other bytes into all entries of a store, and leave out what follows them: a decoder has written these bytes
    where they belong before it finds that the rest is missing. Return the keys.
    """
    codec, keys = Codec.without_profile(LAYOUT, threads=1), [key for key in store.entries if not is_record(key)]
    for key in keys:
        states = codec.decode_states(store.entries[key])
        others = {
            name: (tensor.view(torch.uint8) ^ 1).view(tensor.dtype)
            for name, tensor in states.tensors.items()
            if not name.endswith(".rest")
        }
        store.entries[key] = codec.encode_states(replace(states, tensors=others))
    return keys
