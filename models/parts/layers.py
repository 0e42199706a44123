"""The pieces of a Llama- or Qwen3-type decoder layer, split so that a head can compute keys and values for all rows
and queries only for the rows that need them. Parameter names are those that serving engines load.

    R rows, H width, h query heads, g key/value heads, D head width
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.ops.elementwise import rms_norm, swiglu
from draftsmith.models.parts.rope import rotate
from draftsmith.models.target import norm_eps

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a draft layer, by default those of the target's own layers."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    has_qk_norm: bool
    has_bias: bool = False  # of queries, keys and values, as Qwen2 has them
    is_gated: bool = False  # the attention's output is gated by a sigmoid, as in Qwen3-Next and Qwen3.5
    gain_offset: float = 0.0  # 1 where norms multiply by 1+w, as those of Qwen3-Next and Qwen3.5 do

    @classmethod
    def of_target(cls, config: Any, has_qk_norm: bool, **overrides: int | None) -> "LayerShape":
        """Read a transformers text config; an override that is not None replaces the target's size."""
        # Sizes may differ from layer to layer (Gemma 4's full-attention layers are wider); the first layer's are taken.
        per_layer = getattr(config, "per_layer_config", None)
        first = config if per_layer is None else per_layer[0]
        sizes: dict[str, int | None] = {
            "intermediate_size": getattr(first, "intermediate_size", None),
            "num_heads": first.num_attention_heads,
            "num_kv_heads": getattr(first, "num_key_value_heads", None) or first.num_attention_heads,
            "head_dim": getattr(first, "head_dim", None) or first.hidden_size // first.num_attention_heads,
        }
        sizes |= {name: value for name, value in overrides.items() if value is not None}
        return cls(hidden_size=config.hidden_size, norm_eps=norm_eps(config), has_qk_norm=has_qk_norm, **sizes)  # type: ignore[arg-type]


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, output in the gain's dtype. The gain is `offset` + weight: offset 0 is the norm of
    Llama and Qwen3, offset 1 that of Qwen3-Next and Qwen3.5."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight + self.offset if self.offset else self.weight, self.eps)


class SwiGLU(nn.Module):
    """The gated MLP of Llama and Qwen."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        if not shape.intermediate_size:
            raise ValueError(
                "model.intermediate_size is unset and the target, a mixture of experts, has no such size; give one"
            )
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_RH: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_RH), self.up_proj(x_RH)))  # type: ignore[no-any-return]


class Projections(nn.Module):
    """The four projections of an attention layer, with RoPE, the optional per-head q/k norms of Qwen3, the optional
    biases of Qwen2 and the optional output gate of Qwen3.5, which each head of q_proj holds behind its query."""

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width, bias = shape.num_heads * shape.head_dim * (2 if shape.is_gated else 1), shape.has_bias
        self.q_proj = nn.Linear(input_width, query_width, bias=bias)
        self.k_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_width, shape.num_kv_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        if shape.has_qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, shape.gain_offset)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, shape.gain_offset)
        self.has_qk_norm, self.is_gated = shape.has_qk_norm, shape.is_gated

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """[..., width] -> rotated queries [..., h, D] of a layer without a gate."""
        return self.gated_queries(x, angles)[0]

    def gated_queries(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor | None]:
        """[..., width] -> rotated queries and, where the layer has them, gates before the sigmoid, each [..., h, D]."""
        projected, gate = self.q_proj(x), None
        if self.is_gated:
            heads = projected.shape[-1] // (2 * self.head_dim)
            q, gate = projected.view(*projected.shape[:-1], heads, 2 * self.head_dim).chunk(2, dim=-1)
        else:
            q = self._split(projected)
        return rotate(self.q_norm(q).to(q.dtype) if self.has_qk_norm else q, angles), gate

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[..., width] -> rotated keys and values [..., g, D]."""
        k = self._split(self.k_proj(x))
        return rotate(self.k_norm(k).to(k.dtype) if self.has_qk_norm else k, angles), self._split(self.v_proj(x))

    def output(self, attended: Tensor, gate: Tensor | None = None) -> Tensor:
        """[..., h, D] -> [..., H]."""
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return self.o_proj(attended.flatten(-2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)  # no -1: there may be no rows
