"""Rotary position embedding with the target's own frequencies, so that a draft rotates as its target does (fault 31).

R rows, h heads, d head width, r rotated width (r < d for partial rotary targets)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MULTIMODAL = ("mrope_section", "mrope_interleaved")


class Rope:
    """Inverse frequencies in fp32, outside any module: casting a head to bf16 must not touch them."""

    def __init__(self, inv_freq: Tensor, scaling: float) -> None:
        self.inv_freq = inv_freq
        self.scaling = scaling

    @classmethod
    def of_target(cls, config: Any, head_dim: int, device: torch.device | str = "cpu") -> "Rope":
        """The frequencies of a transformers text config, for heads of `head_dim` (any rope_type transformers knows)."""
        parameters = rope_parameters(config)
        rope_type = parameters.get("rope_type", "default")
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        if rope_type == "default":
            exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
            return cls(1.0 / parameters["rope_theta"] ** exponents, 1.0)
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        stand_in = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](stand_in, torch.device(device))
        return cls(inv_freq.float(), float(scaling))

    def angles(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [...] -> cos and sin [..., r/2] in fp32."""
        if self.inv_freq.device != positions_R.device:
            self.inv_freq = self.inv_freq.to(positions_R.device)
        angles = positions_R.float()[..., None] * self.inv_freq
        return angles.cos() * self.scaling, angles.sin() * self.scaling


class RopeSettings:
    """As much of a transformers config as `Rope.of_target` reads: for drafts with a RoPE of their own."""

    def __init__(self, parameters: Mapping[str, Any], max_position_embeddings: int) -> None:
        self.rope_parameters = dict(parameters)
        self.max_position_embeddings = max_position_embeddings


def rope_source(own: Mapping[str, Any] | None, target_config: Any) -> Any:
    """What a draft's frequencies come from: its own settings, or the config of its target."""
    return target_config if own is None else RopeSettings(own, int(target_config.max_position_embeddings))


def rotate(x_RhD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first r of d channels (the halves layout of Llama and Qwen), in fp32, returned in x's dtype."""
    cos_Rr, sin_Rr = (angle[..., None, :] for angle in angles)
    half = cos_Rr.shape[-1]
    first, second, rest = x_RhD[..., :half].float(), x_RhD[..., half : 2 * half].float(), x_RhD[..., 2 * half :]
    rotated = torch.cat([first * cos_Rr - second * sin_Rr, second * cos_Rr + first * sin_Rr], dim=-1)
    return torch.cat([rotated.to(x_RhD.dtype), rest], dim=-1) if rest.shape[-1] else rotated.to(x_RhD.dtype)


def rope_parameters(config: Any) -> dict[str, Any]:
    """One flat dict of RoPE settings; of targets with a set per layer type, that of the full-attention layers.

    The sections of a multimodal RoPE are left out: on text, where all its positions are equal, it is the plain one, and
    servers draft with the position of the text.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_theta" in value]
    if nested:
        parameters = dict(parameters.get("full_attention") or nested[0])
    parameters = {name: value for name, value in parameters.items() if name not in _MULTIMODAL}
    if parameters.get("rope_type") in (None, "mrope"):
        parameters["rope_type"] = "default"
    parameters.setdefault("rope_theta", float(getattr(config, "rope_theta", None) or 10_000.0))
    return parameters
