"""The mixture of experts of a target's own decoder layer, under the names of its checkpoint.

    R rows, H width, E experts, K of them chosen per row, I an expert's inner width

    family                    scores      chosen by                         shared expert
    Qwen3-Next, Qwen3.5       softmax     score                             times a sigmoid gate
    GLM-4-MoE, DeepSeek-V3    sigmoid     score + bias, in the best groups  as it is

Checkpoints hold experts one by one or all in one tensor; ours are held as the target's are, so that what is written
back replaces what was read. Every expert runs in every step, if on no row: ranks that shard parameters stay in step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.parts.layers import LayerShape, SwiGLU


class MixtureOfExperts(nn.Module):
    """Routed experts and the shared one, of a transformers text config."""

    def __init__(self, config: Any, shape: LayerShape, is_fused: bool) -> None:
        super().__init__()
        inner = replace(shape, intermediate_size=config.moe_intermediate_size)
        self.is_sigmoid = hasattr(config, "n_routed_experts")
        num_experts = config.n_routed_experts if self.is_sigmoid else config.num_experts
        self.gate = GroupRouter(config) if self.is_sigmoid else SoftmaxRouter(config)
        self.experts = FusedExperts(num_experts, inner) if is_fused else Experts(num_experts, inner)
        if self.is_sigmoid:
            width = config.moe_intermediate_size * config.n_shared_experts
            self.shared_experts = SwiGLU(replace(shape, intermediate_size=width))
        else:
            width = config.shared_expert_intermediate_size
            self.shared_expert = SwiGLU(replace(shape, intermediate_size=width))
            self.shared_expert_gate = nn.Linear(shape.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        x_RH = x.reshape(-1, x.shape[-1])
        weight_RK, chosen_RK = self.gate(x_RH)
        if self.is_sigmoid:
            shared_RH = self.shared_experts(x_RH)
        else:
            shared_RH = torch.sigmoid(self.shared_expert_gate(x_RH)) * self.shared_expert(x_RH)
        # Summed in fp32: rounding after each expert would make the sum depend on the order of experts.
        total_RH = shared_RH.float()
        for expert, run in enumerate(self.experts.functions()):
            rows, places = (chosen_RK == expert).nonzero(as_tuple=True)
            weighted = run(x_RH[rows]).float() * weight_RK[rows, places, None]
            total_RH = total_RH.index_add(0, rows, weighted)
        return total_RH.to(x.dtype).view(x.shape)  # type: ignore[no-any-return]


class SoftmaxRouter(nn.Module):
    """The K experts of the highest probability."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.num_chosen, self.renormalises = config.num_experts_per_tok, getattr(config, "norm_topk_prob", True)

    def forward(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the chosen experts, each [R, K]."""
        probs_RE = F.linear(x_RH, self.weight).softmax(-1, dtype=torch.float32)
        weight_RK, chosen_RK = probs_RE.topk(self.num_chosen, dim=-1)
        return weight_RK / weight_RK.sum(-1, keepdim=True) if self.renormalises else weight_RK, chosen_RK


class GroupRouter(nn.Module):
    """The K experts of the highest score with bias, within the best groups (arXiv:2412.19437, section 2.1.2)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        # Balances the load in pre-training; no gradient reaches it, and the target keeps its own.
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts), persistent=False)
        self.num_chosen, self.num_groups, self.num_chosen_groups = (
            config.num_experts_per_tok,
            config.n_group,
            config.topk_group,
        )
        self.renormalises, self.scale = config.norm_topk_prob, config.routed_scaling_factor

    def forward(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the chosen experts, each [R, K]; computed in fp32."""
        with torch.autocast(x_RH.device.type, enabled=False):
            score_RE = F.linear(x_RH.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            biased_RGE = (score_RE + self.e_score_correction_bias).unflatten(-1, (self.num_groups, -1))  # type: ignore[no-untyped-call]
            best_RG = biased_RGE.topk(2, dim=-1).values.sum(-1).topk(self.num_chosen_groups, dim=-1).indices
            is_left_out_RG = torch.ones_like(biased_RGE[..., 0], dtype=torch.bool).scatter(1, best_RG, False)
            allowed_RE = biased_RGE.masked_fill(is_left_out_RG[..., None], -torch.inf).flatten(1)
            chosen_RK = allowed_RE.topk(self.num_chosen, dim=-1).indices
        weight_RK = score_RE.gather(1, chosen_RK)
        if self.renormalises:
            weight_RK = weight_RK / (weight_RK.sum(-1, keepdim=True) + 1e-20)
        return weight_RK * self.scale, chosen_RK


class Experts(nn.ModuleList):
    """Experts one by one: `0.gate_proj.weight` and so on."""

    def __init__(self, num_experts: int, shape: LayerShape) -> None:
        super().__init__(SwiGLU(shape) for _ in range(num_experts))

    def functions(self) -> Iterator[Any]:
        """Each expert, from [rows, H] to [rows, H]."""
        return iter(self)


class FusedExperts(nn.Module):
    """All experts in one tensor: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""

    def __init__(self, num_experts: int, shape: LayerShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, width, inner))

    def functions(self) -> Iterator[Any]:
        """Each expert, from [rows, H] to [rows, H]."""
        # Unbound once: an index per expert would make backward write a gradient of all experts for each of them.
        for gate_up, down in zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True):

            def run(x: Tensor, gate_up: Tensor = gate_up, down: Tensor = down) -> Tensor:
                gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
                return F.linear(F.silu(gate) * up, down)

            yield run
