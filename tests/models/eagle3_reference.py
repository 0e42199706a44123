"""EAGLE-3 drafting in plain PyTorch, one sequence, one step at a time: what every other implementation must equal.

Written from the equations (arXiv:2503.01840 section 3, arXiv:2605.09992), sharing no code with models/. Differentiable.

T committed tokens, K steps, F = auxiliary layers * H, H width, V draft vocabulary
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
    embedding_VH: Tensor,
    head_VH: Tensor,
    ids: Sequence[int],
    aux_TF: Tensor,
    forced: Sequence[int],
    num_steps: int,
) -> list[Tensor]:
    """Logits [V] of each step after the committed `ids`, whose states are `aux_TF`.

    `forced` holds the bonus and then the tokens that are fed to the later steps; where it ends, the draft feeds its own
    most likely token (mapped by d2t). `fields` and `w` are the config and tensors of an exported head.
    """
    norm_eps, head_dim = fields["rms_norm_eps"], fields["head_dim"]
    layers = [f"layers.{i}." for i in range(fields["num_hidden_layers"])]

    def rms(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm_eps) * w[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T

    def heads(x: Tensor, name: str, positions: Tensor | None, normed: str) -> Tensor:
        y = linear(x, name).view(x.shape[0], -1, head_dim)
        y = rms(y, normed) if normed + ".weight" in w else y
        return y if positions is None else _rope(y, positions, fields["rope_parameters"]["rope_theta"])

    if fields["fc_norm"]:
        chunks = aux_TF.chunk(fields["num_aux_hidden_states"], dim=-1)
        aux_TF = torch.cat([rms(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
    if fields["norm_before_fc"]:
        aux_TF = rms(aux_TF, "input_norm")
    hidden, positions = linear(aux_TF, "fc"), torch.arange(len(ids))
    tokens, logits = torch.tensor([*ids[1:], forced[0]]), []
    keys: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for step in range(num_steps):
        embedded = embedding_VH[tokens]
        for p in layers:
            if p == "layers.0.":
                normed = rms(hidden, p + "hidden_norm")
                x = torch.cat([rms(embedded, p + "input_layernorm"), normed], dim=-1)
                residual = normed if fields["norm_before_residual"] else hidden
            else:
                x, residual = rms(hidden, p + "input_layernorm"), hidden
            q = heads(x, p + "self_attn.q_proj", positions, p + "self_attn.q_norm")
            k = heads(x, p + "self_attn.k_proj", positions, p + "self_attn.k_norm")
            v = heads(x, p + "self_attn.v_proj", None, "none")
            keys[p] = torch.cat([keys[p], k]) if step else k
            values[p] = torch.cat([values[p], v]) if step else v
            residual = residual + linear(_attend(q, keys[p], values[p], positions), p + "self_attn.o_proj")
            x = rms(residual, p + "post_attention_layernorm")
            x = F.silu(linear(x, p + "mlp.gate_proj")) * linear(x, p + "mlp.up_proj")
            hidden = residual + linear(x, p + "mlp.down_proj")
        final = rms(hidden, "norm")
        logits.append(final[-1] @ head_VH.T)
        best = int(logits[-1].argmax())
        own = best + int(w["d2t"][best]) if "d2t" in w else best
        tokens = torch.tensor([forced[step + 1] if step + 1 < len(forced) else own])
        hidden, positions = (final if fields["norm_output"] else hidden)[-1:], positions[-1:] + 1
    return logits


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    is_future = torch.arange(k.shape[0]) > positions[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_future, -math.inf).softmax(-1), v).flatten(1)
