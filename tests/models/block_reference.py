"""Block drafting in plain PyTorch, one block at a time: what every other implementation must equal.

Written from the equations of the DFlash and DSpark papers, sharing no code with models/. Differentiable.

A context tokens (positions 0..A-1; the anchor is at A), S slots, F = auxiliary layers * H, H width, V draft vocabulary
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def block_states(
    fields: Mapping[str, Any],
    w: Mapping[str, Tensor],
    embedding_VH: Tensor,
    aux_AF: Tensor,
    anchor_id: int,
    num_slots: int,
) -> Tensor:
    """Final-norm outputs [S, H] of one block. `fields` and `w` are the config and tensors of an exported head."""
    eps, head_dim, num_context = fields["rms_norm_eps"], fields["head_dim"], aux_AF.shape[0]
    theta = fields["rope_parameters"]["rope_theta"]
    window = fields["sliding_window"] if "sliding_attention" in fields["layer_types"] else None

    def rms(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T

    def heads(x: Tensor, name: str) -> Tensor:
        return linear(x, name).view(x.shape[0], -1, head_dim)

    context = rms(linear(aux_AF, "fc"), "hidden_norm")
    z = embedding_VH[torch.tensor([anchor_id] + [mask_of(fields)] * (num_slots - 1))]
    positions = torch.arange(num_context + num_slots)
    for i in range(fields["num_hidden_layers"]):
        p = f"layers.{i}.self_attn."
        x = rms(z, f"layers.{i}.input_layernorm")
        both = torch.cat([context, x])
        q = _rope(rms(heads(x, p + "q_proj"), p + "q_norm"), positions[num_context:], theta)
        k = _rope(rms(heads(both, p + "k_proj"), p + "k_norm"), positions, theta)
        attended = _attend(q, k, heads(both, p + "v_proj"), positions[num_context:], positions, window)
        z = z + linear(attended, p + "o_proj")
        x = rms(z, f"layers.{i}.post_attention_layernorm")
        x = F.silu(linear(x, f"layers.{i}.mlp.gate_proj")) * linear(x, f"layers.{i}.mlp.up_proj")
        z = z + linear(x, f"layers.{i}.mlp.down_proj")
    return rms(z, "norm")


def markov_logits(
    fields: Mapping[str, Any], w: Mapping[str, Tensor], head_VH: Tensor, states_JH: Tensor, forced: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """Logits [J, V], confidences [J] and drafts of a walk along a block.

    `forced` are the tokens before the slots, beginning with the anchor; where it ends, the walk goes on along its own
    most likely tokens (mapped by d2t).
    """
    rank, kind = fields["markov_rank"], fields["markov_head_type"]
    state, logits, confidences, drafts = torch.zeros(rank), [], [], []
    for j, h in enumerate(states_JH):
        token = forced[j] if j < len(forced) else drafts[-1]
        e = w["markov_head.markov_w1.weight"][token]
        m = e
        if kind == "gated":
            seen = torch.cat([h, e])
            m = torch.sigmoid(w["markov_head.gate_proj.weight"] @ seen + w["markov_head.gate_proj.bias"]) * e
        if kind == "rnn":
            joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h]) + w["markov_head.joint_proj.bias"]
            gate, candidate, out = torch.sigmoid(joint[:rank]), joint[rank : 2 * rank].tanh(), joint[2 * rank :]
            state, m = gate * state + (1 - gate) * candidate, out.tanh()
        logits.append(head_VH @ h + w["markov_head.markov_w2.weight"] @ m)
        if fields["enable_confidence_head"]:
            seen = torch.cat([h, e]) if fields["confidence_head_with_markov"] else h
            value = w["confidence_head.proj.weight"][0] @ seen + w["confidence_head.proj.bias"][0]
            confidences.append(torch.sigmoid(value))
        best = int(logits[-1].argmax())
        drafts.append(best + int(w["d2t"][best]) if "d2t" in w else best)
    return torch.stack(logits), torch.stack(confidences) if confidences else torch.zeros(0), drafts


def mask_of(fields: Mapping[str, Any]) -> int:
    mask: int = fields["mask_token_id"]
    return mask


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if window is not None:
        scores = scores.masked_fill((queries[:, None] - keys).abs() >= window, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
