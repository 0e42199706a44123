"""P-EAGLE drafting in plain PyTorch, one sequence, one causal pass: what every other implementation must equal.

Written from the equations (arXiv:2602.01469, section 3), sharing no code with models/. Differentiable.

T committed tokens, K drafted tokens, F = auxiliary layers * H, H width, V draft vocabulary
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def draft_logits(
    fields: Mapping[str, Any],
    w: Mapping[str, Tensor],
    table_VH: Tensor,
    head_VH: Tensor,
    ids: Sequence[int],
    aux_TF: Tensor,
    bonus: int,
    num_tokens: int,
) -> Tensor:
    """Logits [K, V] after the committed `ids`, whose states are `aux_TF`, and the `bonus` that the target sampled.

    `fields` and `w` are the config and tensors of an exported head; `table_VH` holds the mask token's embedding too.
    """
    num_masks, eps = num_tokens - 1, fields["rms_norm_eps"]
    tokens = torch.tensor([*ids[1:], bonus] + [fields["mask_token_id"]] * num_masks)
    states = torch.cat([aux_TF, w["mask_hidden"].reshape(1, -1).expand(num_masks, -1)])
    positions = torch.arange(len(tokens))

    def rms(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T

    def heads(x: Tensor, name: str, normed: str, rotates: bool) -> Tensor:
        y = linear(x, name).view(len(x), -1, fields["head_dim"])
        y = rms(y, normed) if normed + ".weight" in w else y
        return _rotated(y, positions, fields["rope_parameters"]["rope_theta"]) if rotates else y

    if fields["fc_norm"]:
        chunks = states.chunk(fields["num_aux_hidden_states"], dim=-1)
        states = torch.cat([rms(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
    if fields["norm_before_fc"]:
        states = rms(states, "input_norm")
    hidden, embedded = linear(states, "fc"), table_VH[tokens]
    for p in (f"layers.{i}." for i in range(fields["num_hidden_layers"])):
        x, residual = rms(hidden, p + "input_layernorm") if p != "layers.0." else hidden, hidden
        if p == "layers.0.":
            normed = rms(hidden, p + "hidden_norm")
            x = torch.cat([rms(embedded, p + "input_layernorm"), normed], dim=-1)
            residual = normed if fields["norm_before_residual"] else hidden
        q = heads(x, p + "self_attn.q_proj", p + "self_attn.q_norm", True)
        k = heads(x, p + "self_attn.k_proj", p + "self_attn.k_norm", True)
        v = heads(x, p + "self_attn.v_proj", "none", False)
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(positions[None, :] > positions[:, None], -math.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = residual + linear(attended, p + "self_attn.o_proj")
        x = rms(residual, p + "post_attention_layernorm")
        hidden = residual + linear(
            F.silu(linear(x, p + "mlp.gate_proj")) * linear(x, p + "mlp.up_proj"), p + "mlp.down_proj"
        )
    return rms(hidden, "norm")[-num_tokens:] @ head_VH.T


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
