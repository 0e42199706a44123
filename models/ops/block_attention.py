"""Attention of draft blocks: a block sees the context before its anchor and, in both directions, itself.

    M tokens of all packed rows, N blocks, S slots of a block, Q = N*S queries, h query heads, g key/value heads,
    D head width, W sliding window

        context     c0 c1 c2 c3 c4 | d0 d1 d2        two documents
        block a=3   s0 s1 s2 s3                      at positions 3, 4, 5, 6
        it sees     c0 c1 c2  and  s0 s1 s2 s3       never c3: at inference the anchor is a token just sampled

Consecutive blocks of one document share a tile: the hull of what they see, and a mask over it. Tiles are planned once
and serve all layers, so no mask of all blocks x all tokens ever exists. With a window, slot k of anchor a sees the
positions a+k-W+1 .. a+k+W-1 (vLLM's symmetric window of non-causal drafts); it is at least as wide as the block.
`eager_block_attention` is the twin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Blocks per tile. A tile of n blocks computes n-1 blocks of masked keys per query; fewer blocks mean more kernel calls.
_BLOCKS_ON_CPU = 8
_BLOCKS_ON_GPU = 32


@dataclass(frozen=True)
class Tile:
    """Blocks that attend together: which blocks, which context tokens, and which of them each query sees."""

    blocks: slice
    context: slice
    is_visible_QK: Tensor  # bool, over the tile's queries x (context tokens, then the slots of the tile's blocks)


def plan_tiles(
    starts: Sequence[int],
    anchors: Sequence[int],
    num_slots: int,
    window: int | None,
    device: torch.device,
    blocks_per_tile: int | None = None,
) -> list[Tile]:
    """Tiles of ascending anchors (positions among the M tokens); starts[i]: where the document of anchors[i] begins."""
    assert window is None or window >= num_slots, f"a window of {window} is narrower than a block of {num_slots}"
    size = blocks_per_tile or (_BLOCKS_ON_GPU if device.type == "cuda" else _BLOCKS_ON_CPU)
    tiles, first = [], 0
    for index in range(1, len(anchors) + 1):
        is_end = index == len(anchors) or starts[index] != starts[first] or index - first == size
        if is_end:
            tiles.append(_tile(first, list(anchors[first:index]), starts[first], num_slots, window, device))
            first = index
    return tiles


def _tile(first: int, anchors: list[int], start: int, num_slots: int, window: int | None, device: torch.device) -> Tile:
    begin = start if window is None else max(start, anchors[0] - window + 1)
    context = slice(begin, max(anchors[-1], begin))
    anchor_n1 = torch.tensor(anchors)[:, None]
    tokens_K = torch.arange(context.start, context.stop)
    sees_nSK = (tokens_K < anchor_n1)[:, None].expand(-1, num_slots, -1)
    if window is not None:
        query_nS = anchor_n1 + torch.arange(num_slots)
        sees_nSK = sees_nSK & (tokens_K > query_nS[..., None] - window)
    own_nn = torch.eye(len(anchors), dtype=torch.bool)
    own_QQ = own_nn.repeat_interleave(num_slots, 0).repeat_interleave(num_slots, 1)
    is_visible_QK = torch.cat([sees_nSK.flatten(0, 1), own_QQ], dim=1)
    return Tile(slice(first, first + len(anchors)), context, is_visible_QK.to(device))


def block_attention(
    q_NShD: Tensor, k_MgD: Tensor, v_MgD: Tensor, block_k_NSgD: Tensor, block_v_NSgD: Tensor, tiles: list[Tile]
) -> Tensor:
    """Attend. Keys and values of the context are those of all M tokens. Returns [N, S, h, D]."""
    groups, outputs = q_NShD.shape[2] // k_MgD.shape[1], []
    for tile in tiles:
        # One head per query head: kernels that share key heads among query heads have no backward with a mask.
        q = q_NShD[tile.blocks].flatten(0, 1).transpose(0, 1)[None]
        k, v = (
            torch.cat([context[tile.context], own[tile.blocks].flatten(0, 1)])
            .transpose(0, 1)
            .repeat_interleave(groups, 0)[None]
            for context, own in ((k_MgD, block_k_NSgD), (v_MgD, block_v_NSgD))
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=tile.is_visible_QK)
        outputs.append(attended[0].transpose(0, 1).reshape(-1, *q_NShD.shape[1:]))
    return torch.cat(outputs)


def eager_block_attention(
    q_NShD: Tensor,
    k_MgD: Tensor,
    v_MgD: Tensor,
    block_k_NSgD: Tensor,
    block_v_NSgD: Tensor,
    starts: Sequence[int],
    anchors: Sequence[int],
    window: int | None,
) -> Tensor:
    """The plain definition, block by block, one softmax over all that a slot sees."""
    groups, outputs, num_slots = q_NShD.shape[2] // k_MgD.shape[1], [], q_NShD.shape[1]
    slots = torch.arange(num_slots, device=q_NShD.device)
    for block, (start, anchor) in enumerate(zip(starts, anchors, strict=True)):
        k, v = (
            torch.cat([context[start:anchor], own[block]]).float().repeat_interleave(groups, dim=1)
            for context, own in ((k_MgD, block_k_NSgD), (v_MgD, block_v_NSgD))
        )
        scores_hSK = torch.einsum("shd,khd->hsk", q_NShD[block].float(), k) * q_NShD.shape[-1] ** -0.5
        if window is not None:
            tokens_K = torch.cat([torch.arange(start, anchor, device=slots.device), anchor + slots])
            is_far_SK = (tokens_K - (anchor + slots)[:, None]).abs() >= window
            scores_hSK = scores_hSK.masked_fill(is_far_SK, -math.inf)
        outputs.append(torch.einsum("hsk,khd->shd", scores_hSK.softmax(-1), v))
    return torch.stack(outputs).to(q_NShD.dtype)
