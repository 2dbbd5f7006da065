"""The layout probe against writers of known layouts, and of layouts that no strides describe."""

from __future__ import annotations

import pytest
import torch

from cuvee.codec.errors import UnsupportedModel
from cuvee.integrations.vllm.probe import Writer, find_page_layout, verify_page_layout

BLOCKS, TOKENS, HEADS, DIM = 5, 6, 3, 4


def _beside(tensor: torch.Tensor) -> Writer:
    """K beside V for each token, `[B, H, N, 2D]`: vLLM's GPU backends."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            tensor[slot // TOKENS, :, slot % TOKENS, :DIM] = keys[token]
            tensor[slot // TOKENS, :, slot % TOKENS, DIM:] = values[token]

    return write


def _transposed(tensor: torch.Tensor) -> Writer:
    """Each (block, head) page is K^T `[D, N]`, then V `[N, D]`: vLLM's CPU backend."""
    pages = tensor.view(BLOCKS, HEADS, 2 * TOKENS * DIM)
    keys_at = pages[..., : TOKENS * DIM].view(BLOCKS, HEADS, DIM, TOKENS)
    values_at = pages[..., TOKENS * DIM :].view(BLOCKS, HEADS, TOKENS, DIM)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            keys_at[slot // TOKENS, :, :, slot % TOKENS] = keys[token]
            values_at[slot // TOKENS, :, slot % TOKENS] = values[token]

    return write


def _paired(tensor: torch.Tensor) -> Writer:
    """Dimensions in pairs across tokens, as matrix units want them: no strides describe it."""
    pages = tensor.view(BLOCKS, HEADS, 2, DIM // 2, TOKENS, 2)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            for part, source in enumerate((keys, values)):
                pages[slot // TOKENS, :, part, :, slot % TOKENS] = source[token].view(HEADS, DIM // 2, 2)

    return write


def _cache(order: str = "BHNC", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A cache `[B, H, N, 2D]` whose memory is in another order, between other data."""
    sizes = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
    flat = torch.randn(17 + BLOCKS * HEADS * TOKENS * 2 * DIM).to(dtype)[17:]
    return flat.view([sizes[axis] for axis in order]).permute([order.index(axis) for axis in "BHNC"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("order", ["BHNC", "BNHC"])
def test_views_show_what_the_engine_writes(order: str, dtype: torch.dtype) -> None:
    tensor = _cache(order, dtype)
    before = tensor.clone()
    write = _beside(tensor)
    layout = find_page_layout(tensor, write, HEADS, DIM)
    assert torch.equal(tensor, before), "the probe must restore what it wrote over"
    assert (layout.block_tokens, layout.heads, layout.dim) == (TOKENS, HEADS, DIM)
    _roundtrip(tensor, write, layout.views(tensor))
    verify_page_layout(tensor, write, layout)


def test_views_of_a_transposed_cache() -> None:
    tensor = _cache()
    before = tensor.clone()
    write = _transposed(tensor)
    layout = find_page_layout(tensor, write, HEADS, DIM)
    assert torch.equal(tensor, before)
    assert layout.key_strides == (1, 2 * TOKENS * DIM, TOKENS)
    assert layout.value_strides == (DIM, 2 * TOKENS * DIM, 1)
    _roundtrip(tensor, write, layout.views(tensor))


def _roundtrip(tensor: torch.Tensor, write: Writer, views: tuple[torch.Tensor, torch.Tensor]) -> None:
    keys, values = torch.randn(2, 7, HEADS, DIM).to(tensor.dtype)
    slots = torch.tensor([0, 29, 13, 7, 8, 21, 2])
    write(keys, values, slots)
    for view, wrote in zip(views, (keys, values), strict=True):
        assert torch.equal(view[slots // TOKENS, slots % TOKENS], wrote)


def test_a_single_head_and_dimension_have_no_stride() -> None:
    tensor = torch.zeros(BLOCKS, 1, TOKENS, 2, dtype=torch.float32)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        tensor[slots // TOKENS, 0, slots % TOKENS, 0] = keys[:, 0, 0]
        tensor[slots // TOKENS, 0, slots % TOKENS, 1] = values[:, 0, 0]

    keys, values = find_page_layout(tensor, write, 1, 1).views(tensor)
    write(torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.tensor([9]))
    assert keys[1, 3] == 1 and values[1, 3] == 2


def test_pages_in_tiles_are_refused() -> None:
    tensor = _cache()
    before = tensor.clone()
    with pytest.raises(UnsupportedModel, match="keys in tiles"):
        find_page_layout(tensor, _paired(tensor), HEADS, DIM)
    assert torch.equal(tensor, before), "a refusal must leave the cache as it was"


def test_a_writer_that_changes_values_is_refused() -> None:
    tensor = _cache()
    plain = _beside(tensor)
    with pytest.raises(UnsupportedModel, match="changes values"):
        find_page_layout(tensor, lambda k, v, s: plain(k / 2, v, s), HEADS, DIM)


def test_a_writer_that_drops_a_token_is_refused() -> None:
    tensor = _cache()
    plain = _beside(tensor)
    with pytest.raises(UnsupportedModel, match="leaves holes"):
        find_page_layout(tensor, lambda k, v, s: plain(k[1:], v[1:], s[1:]), HEADS, DIM)


def test_a_writer_that_mixes_tokens_between_calls_is_refused() -> None:
    tensor = _cache()
    plain = _beside(tensor)
    calls = 0

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        plain(keys, values, slots.flip(0) if calls == 2 else slots)

    with pytest.raises(UnsupportedModel, match="no permutation"):
        find_page_layout(tensor, write, HEADS, DIM)


def test_blocks_of_another_layout_are_refused() -> None:
    tensor = _cache()
    plain = _beside(tensor)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        plain(keys, values, torch.where(slots >= TOKENS, slots - TOKENS, slots))

    with pytest.raises(UnsupportedModel, match="not where its first block says"):
        find_page_layout(tensor, write, HEADS, DIM)


def test_check_notices_a_layer_that_differs() -> None:
    tensor = _cache()
    layout = find_page_layout(tensor, _beside(tensor), HEADS, DIM)
    before = tensor.clone()
    with pytest.raises(UnsupportedModel, match="keys are not where"):
        verify_page_layout(tensor, _transposed(tensor), layout)
    assert torch.equal(tensor, before)


def test_a_page_that_holds_more_than_keys_and_values_is_refused() -> None:
    tensor = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM + 1)
    with pytest.raises(UnsupportedModel, match="not a multiple"):
        find_page_layout(tensor, _beside(tensor), HEADS, DIM)
