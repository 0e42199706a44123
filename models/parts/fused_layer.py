"""A decoder layer of the EAGLE-3 body: the first one reads [norm(embedding); norm(state)], the others the state alone.

R rows, H width, h query heads, D head width
"""

import torch
from torch import Tensor, nn

from draftsmith.models.parts.layers import LayerShape, Projections, RMSNorm, SwiGLU


class FusedLayer(nn.Module):
    """Parameter names are those that serving engines load."""

    def __init__(self, shape: LayerShape, is_first: bool, norm_before_residual: bool) -> None:
        super().__init__()
        width = shape.hidden_size
        self.self_attn = Projections(shape, 2 * width if is_first else width)
        self.mlp = SwiGLU(shape)
        self.input_layernorm = RMSNorm(width, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(width, shape.norm_eps)
        if is_first:
            self.hidden_norm = RMSNorm(width, shape.norm_eps)
        self.is_first, self.norm_before_residual = is_first, norm_before_residual

    def read(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the projections and the residual that the attention's output is added to."""
        if not self.is_first:
            return self.input_layernorm(state), state
        normed = self.hidden_norm(state)
        residual = normed.to(state.dtype) if self.norm_before_residual else state
        return torch.cat([self.input_layernorm(embedded), normed], dim=-1), residual

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual and attention output [..., h, D] -> the residual stream after this layer."""
        residual = residual + self.self_attn.output(attended)
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]
