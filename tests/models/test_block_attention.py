"""Tiled attention of draft blocks equals the plain definition, in value and gradient, and no mask is ever large."""

import pytest
import torch
from torch import Tensor

from draftsmith.models.ops.block_attention import block_attention, eager_block_attention, plan_tiles

CPU = torch.device("cpu")
# Two documents (tokens 0..19 and 20..29), a packed row's end between them; anchors overlap, one has no context.
STARTS, ANCHORS = [0, 0, 0, 0, 20, 20], [3, 4, 5, 17, 20, 28]


def inputs(num_slots: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(6, num_slots, 4, 8), (30, 2, 8), (30, 2, 8), (6, num_slots, 2, 8), (6, num_slots, 2, 8)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("blocks_per_tile", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 5, 9, 64])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_tiles_equal_the_plain_definition(num_slots: int, window: int | None, blocks_per_tile: int) -> None:
    tiles = plan_tiles(STARTS, ANCHORS, num_slots, window, CPU, blocks_per_tile)
    results = []
    for attend, more in ((block_attention, (tiles,)), (eager_block_attention, (STARTS, ANCHORS, window))):
        tensors = inputs(num_slots)
        out = attend(*tensors, *more)  # type: ignore[operator]
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        results.append([out, *(x.grad for x in tensors)])
    for tiled, plain in zip(*results, strict=True):
        torch.testing.assert_close(tiled, plain, rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_close() -> None:
    exact = eager_block_attention(*inputs(3), STARTS, ANCHORS, None)
    found = block_attention(*inputs(3, torch.bfloat16), plan_tiles(STARTS, ANCHORS, 3, None, CPU))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)


def test_a_tile_covers_the_hull_of_one_document_only() -> None:
    tiles = plan_tiles(STARTS, ANCHORS, 2, None, CPU, 8)
    assert [(t.blocks, t.context) for t in tiles] == [
        (slice(0, 4), slice(0, 17)),
        (slice(4, 6), slice(20, 28)),
    ]
    near = plan_tiles([0], [900], 4, 16, CPU)
    assert near[0].context == slice(885, 900) and near[0].is_visible_QK.shape == (4, 15 + 4)


def test_masks_stay_small_where_a_dense_one_would_be_large() -> None:
    anchors = list(range(1, 2049, 4))
    tiles = plan_tiles([0] * len(anchors), anchors, 8, None, CPU)
    assert max(tile.is_visible_QK.numel() for tile in tiles) < len(anchors) * 8 * 2048 / 50


def test_a_window_narrower_than_a_block_is_refused() -> None:
    with pytest.raises(AssertionError, match="window of 3 is narrower than a block of 4"):
        plan_tiles([0], [5], 4, 3, CPU)
