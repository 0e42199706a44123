"""Attention of rows of a packed batch over keys and values that are given from outside: of each document, up to the
row's own position, of which a window may show the last ones only. The scale is 1.

    N tokens of all packed rows, R query rows, h query heads, g key/value heads, D head width

        keys          d0 d1 d2 d3 | e0 e1 e2      two documents
        query rows          q2 q3 |    q1 q2      contiguous segments
        q3 of d sees  d0 d1 d2 d3                 with a window of 2: d2 d3

Masks exist for a block of rows at a time, over the keys that any of them sees. `eager_row_attention` is the twin.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.ops.segments import Segment

_QUERY_ROWS = 512  # in a block: bounds a mask to this times the document's length or twice the window


def row_attention(q_RhD: Tensor, k_NgD: Tensor, v_NgD: Tensor, segments: list[Segment], window: int | None) -> Tensor:
    """[R, h, D] in q's dtype; rows of q are those of the segments, one segment after another."""
    outputs, offset = [], 0
    for segment in segments:
        for first in range(segment.first, segment.last, _QUERY_ROWS):
            last = min(first + _QUERY_ROWS, segment.last)
            start = segment.start if window is None else max(segment.start, first - window + 1)
            mask = _is_seen(torch.arange(first, last), torch.arange(start, last), window).to(q_RhD.device)
            q = q_RhD[offset : offset + last - first].transpose(0, 1)
            k, v = (x[start:last].transpose(0, 1).to(q.dtype) for x in (k_NgD, v_NgD))
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=1.0, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
            offset += last - first
    return torch.cat(outputs) if outputs else q_RhD


def eager_row_attention(
    q_RhD: Tensor, k_NgD: Tensor, v_NgD: Tensor, segments: list[Segment], window: int | None
) -> Tensor:
    """The plain definition: one mask over all tokens."""
    rows_R = torch.cat([torch.arange(s.first, s.last) for s in segments])
    starts_R = torch.cat([torch.full((s.num_rows,), s.start) for s in segments])
    tokens_N, groups = torch.arange(k_NgD.shape[0]), q_RhD.shape[1] // k_NgD.shape[1]
    is_seen_RN = _is_seen(rows_R, tokens_N, window) & (tokens_N >= starts_R[:, None])
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k_NgD, v_NgD))
    scores = torch.einsum("rhd,nhd->hrn", q_RhD.float(), k).masked_fill(~is_seen_RN.to(q_RhD.device), -math.inf)
    return torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v).to(q_RhD.dtype)


def _is_seen(rows_R: Tensor, keys_S: Tensor, window: int | None) -> Tensor:
    distance_RS = rows_R[:, None] - keys_S
    return (distance_RS >= 0) if window is None else (distance_RS >= 0) & (distance_RS < window)
