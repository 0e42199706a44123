"""The four projections of DeepSeek-V3's latent attention, split as `layers.Projections` is (arXiv:2412.19437, 2.1.1).

    R rows, H width, h heads, n unrotated and r rotated width of a head's query and key, v width of its value

Keys and values are expanded from their latent for every head, and values are padded to the width of keys: what a
server computes with the latent itself, on the attention that the other layers use.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.parts.layers import Angles, RMSNorm
from draftsmith.models.parts.rope import rope_parameters, rotate


class LatentProjections(nn.Module):
    """Queries, keys and values of width n+r for h heads, from a transformers DeepseekV3Config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        self.num_heads, self.latent_width = heads, config.kv_lora_rank
        self.plain_width, self.rotated_width = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.head_dim, self.value_width = self.plain_width + self.rotated_width, config.v_head_dim
        self.is_interleaved, self.has_query_latent = config.rope_interleave, config.q_lora_rank is not None
        if self.has_query_latent:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=config.attention_bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.latent_width + self.rotated_width, bias=config.attention_bias)
        self.kv_a_layernorm = RMSNorm(self.latent_width, eps)
        self.kv_b_proj = nn.Linear(self.latent_width, heads * (self.plain_width + self.value_width), bias=False)
        self.o_proj = nn.Linear(heads * self.value_width, width, bias=config.attention_bias)
        self.query_scale = _query_scale(rope_parameters(config))

    def gated_queries(self, x: Tensor, angles: Angles) -> tuple[Tensor, None]:
        """[..., H] -> queries [..., h, n+r]; there is no gate."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.has_query_latent else self.q_proj(x)
        plain, rotated = q.unflatten(-1, (self.num_heads, self.head_dim)).split(
            [self.plain_width, self.rotated_width], dim=-1
        )
        return torch.cat([plain, self._rotate(rotated, angles)], dim=-1) * self.query_scale, None

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[..., H] -> keys and padded values [..., h, n+r]."""
        latent, rotated = self.kv_a_proj_with_mqa(x).split([self.latent_width, self.rotated_width], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        plain, values = expanded.split([self.plain_width, self.value_width], dim=-1)
        shared = self._rotate(rotated[..., None, :], angles).expand(*plain.shape[:-1], -1)
        return torch.cat([plain, shared.to(plain.dtype)], dim=-1), F.pad(values, (0, self.head_dim - self.value_width))

    def output(self, attended: Tensor, gate: None = None) -> Tensor:
        """[..., h, n+r] -> [..., H]."""
        return self.o_proj(attended[..., : self.value_width].flatten(-2))  # type: ignore[no-any-return]

    def _rotate(self, x: Tensor, angles: Angles) -> Tensor:
        if self.is_interleaved:  # pairs lie side by side; scores are the same in any order that q and k share
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return rotate(x, angles)


def _query_scale(parameters: dict[str, Any]) -> float:
    """YaRN's temperature of the scores, beside the usual 1/sqrt(n+r) (transformers, modeling_deepseek_v3.py)."""
    weight, factor = parameters.get("mscale_all_dim", 0), parameters.get("factor", 1.0)
    if parameters["rope_type"] == "default" or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)
