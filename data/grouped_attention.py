"""Attention of a few queries over shared key/value heads without copying the keys once per query head.

B sequences, Q queries, S slots, g key/value heads, n query heads per key/value head, D head width

    transformers     q [B, g*n, Q, D]   keys repeated to [B, g*n, S, D]
    here             q [B, g, n*Q, D]   keys [B, g, S, D] as they lie in the cache

A decoding step is bound by reading the cache, so that the copies would cost n times as much as the attention itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries per sequence up to which this is used; above it, the blocked kernels of sdpa win.
_MAX_QUERIES = 32
_NAME = "draftsmith_grouped"


def use_grouped_attention(model: Any) -> None:
    """Let a model that attends with sdpa use grouped attention for few queries. Repeatable."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_NAME, _grouped_attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_NAME)


def _grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature is that of transformers' AttentionInterface. A mask of None is causal."""
    if query.shape[2] > _MAX_QUERIES or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return out
    batch, heads, num_queries, width = query.shape
    num_groups, slots = key.shape[1], key.shape[2]
    shared = heads // num_groups
    if attention_mask is None and num_queries > 1:
        attention_mask = torch.ones(num_queries, slots, dtype=torch.bool, device=query.device).tril(slots - num_queries)
        attention_mask = attention_mask[None, None]
    if attention_mask is not None:  # one query needs no copy of its mask
        attention_mask = (
            attention_mask.expand(-1, -1, shared, -1) if num_queries == 1 else (attention_mask.repeat(1, 1, shared, 1))
        )
    attended = F.scaled_dot_product_attention(
        query.reshape(batch, num_groups, shared * num_queries, width), key, value, attention_mask, scale=scaling
    )
    return attended.view(batch, heads, num_queries, -1).transpose(1, 2), None
