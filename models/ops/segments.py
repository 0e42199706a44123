"""Attention of contiguous query segments over a packed row, plus extra keys that only their own query sees.

This is the attention of test-time training (EAGLE-3, arXiv:2503.01840 section 3): at step k, row i attends causally to
the step-0 keys of its document and to its own keys of the steps 1..k (the diagonal).

    N tokens of all packed rows, R query rows, S diagonal steps, h query heads, g key/value heads, D head width

        step-0 keys   d0 d1 d2 d3 | e0 e1 e2      two documents
        query rows          q2 q3 |    q1 q2      the rows somebody needs: contiguous segments
        q2 of d sees  d0 d1 d2                    and its own diagonal keys

A segment's keys split into a part before its first row, seen by all its rows, and a causal square: no mask is ever
built. The parts and the diagonal are merged by log-sum-exp. In the backward, every part is given the *merged* output
and log-sum-exp; that makes its gradient the exact gradient of the merged softmax (the identity that ring attention
uses), so any backend that returns a log-sum-exp will do. `eager_segment_attention` is the twin.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Query rows first..last-1 (positions among the N tokens) of the document that begins at start <= first."""

    start: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first


def segment_attention(
    q_RhD: Tensor,
    k_NgD: Tensor,
    v_NgD: Tensor,
    diagonal_k_RSgD: Tensor | None,
    diagonal_v_RSgD: Tensor | None,
    segments: list[Segment],
) -> Tensor:
    """Attend; rows of q are those of the segments, one segment after another. Returns [R, h, D] in q's dtype."""
    if has_fast_backend(q_RhD):
        out: Tensor = _SegmentAttention.apply(  # type: ignore[no-untyped-call]
            q_RhD, k_NgD, v_NgD, diagonal_k_RSgD, diagonal_v_RSgD, segments
        )
        return out
    return eager_segment_attention(q_RhD, k_NgD, v_NgD, diagonal_k_RSgD, diagonal_v_RSgD, segments)


def has_fast_backend(q: Tensor) -> bool:
    """Whether a kernel that returns its log-sum-exp serves this tensor: the CPU's, or flash on CUDA and ROCm."""
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.bfloat16)
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )


def eager_segment_attention(
    q_RhD: Tensor,
    k_NgD: Tensor,
    v_NgD: Tensor,
    diagonal_k_RSgD: Tensor | None,
    diagonal_v_RSgD: Tensor | None,
    segments: list[Segment],
) -> Tensor:
    """The plain definition, differentiable by autograd, one softmax over all that a row sees."""
    groups, scale, outputs, offset = q_RhD.shape[1] // k_NgD.shape[1], q_RhD.shape[-1] ** -0.5, [], 0
    for segment in segments:
        rows = slice(offset, offset + segment.num_rows)
        offset = rows.stop
        q = q_RhD[rows].float()
        k = k_NgD[segment.start : segment.last].float().repeat_interleave(groups, dim=1)
        v = v_NgD[segment.start : segment.last].float().repeat_interleave(groups, dim=1)
        scores_hRK = torch.einsum("rhd,khd->hrk", q, k) * scale
        own_R = torch.arange(segment.first, segment.last, device=q.device)
        hidden_RK = torch.arange(segment.start, segment.last, device=q.device)[None] > own_R[:, None]
        scores_hRK = scores_hRK.masked_fill(hidden_RK, -math.inf)
        if diagonal_k_RSgD is None or diagonal_v_RSgD is None:
            outputs.append(torch.einsum("hrk,khd->rhd", scores_hRK.softmax(-1), v))
            continue
        dk = diagonal_k_RSgD[rows].float().repeat_interleave(groups, dim=2)
        dv = diagonal_v_RSgD[rows].float().repeat_interleave(groups, dim=2)
        own_hRS = torch.einsum("rhd,rshd->hrs", q, dk) * scale
        weights = torch.cat([scores_hRK, own_hRS], dim=-1).softmax(-1)
        width = scores_hRK.shape[-1]
        outputs.append(
            torch.einsum("hrk,khd->rhd", weights[..., :width], v)
            + torch.einsum("hrs,rshd->rhd", weights[..., width:], dv)
        )
    if not outputs:
        return q_RhD
    return torch.cat(outputs).to(q_RhD.dtype)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dk, dv, segments):  # type: ignore[no-untyped-def]
        groups = q.shape[1] // k.shape[1]
        k_h, v_h = _per_query_head(k, groups), _per_query_head(v, groups)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        offset = 0
        for segment in segments:
            rows = slice(offset, offset + segment.num_rows)
            offset = rows.stop
            if segment.num_rows:
                out[rows], lse[rows] = _merged(
                    [_attend(q[rows], k_h[keys], v_h[keys], is_causal) for keys, is_causal in _parts(segment)]
                )
        if dk is not None:
            own = _diagonal_scores(q, dk, groups)
            total = torch.logaddexp(lse, own.logsumexp(-1))
            merged = out.float() * (lse - total).exp()[..., None]
            merged += torch.einsum(
                "rhs,rshd->rhd", (own - total[..., None]).exp(), dv.float().repeat_interleave(groups, dim=2)
            )
            out, lse = merged.to(q.dtype), total
        ctx.save_for_backward(q, k, v, dk, dv, out, lse)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, dk, dv, out, lse = ctx.saved_tensors
        groups = q.shape[1] // k.shape[1]
        k_h, v_h = _per_query_head(k, groups), _per_query_head(v, groups)
        grad = grad.to(q.dtype).contiguous()
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        grad_k, grad_v = torch.zeros_like(k_h, dtype=torch.float32), torch.zeros_like(v_h, dtype=torch.float32)
        offset = 0
        for segment in ctx.segments:
            rows = slice(offset, offset + segment.num_rows)
            offset = rows.stop
            for keys, is_causal in _parts(segment) if segment.num_rows else ():
                part_q, part_k, part_v = _attend_backward(
                    grad[rows], q[rows], k_h[keys], v_h[keys], out[rows], lse[rows], is_causal
                )
                grad_q[rows] += part_q
                grad_k[keys] += part_k
                grad_v[keys] += part_v
        grad_dk = grad_dv = None
        if dk is not None:
            weights = (_diagonal_scores(q, dk, groups) - lse[..., None]).exp()
            grad_f, dv_f, dk_f = grad.float(), dv.float(), dk.float()
            delta = (grad_f * out.float()).sum(-1, keepdim=True)
            grad_dv = _per_kv_head(torch.einsum("rhs,rhd->rshd", weights, grad_f), groups).to(dv.dtype)
            grad_scores = torch.einsum("rhd,rshd->rhs", grad_f, dv_f.repeat_interleave(groups, dim=2)) - delta
            grad_scores *= weights * q.shape[-1] ** -0.5
            grad_q += torch.einsum("rhs,rshd->rhd", grad_scores, dk_f.repeat_interleave(groups, dim=2))
            grad_dk = _per_kv_head(torch.einsum("rhs,rhd->rshd", grad_scores, q.float()), groups).to(dk.dtype)
        grad_k, grad_v = _per_kv_head(grad_k, groups).to(k.dtype), _per_kv_head(grad_v, groups).to(v.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_dk, grad_dv, None


def _parts(segment: Segment) -> list[tuple[slice, bool]]:
    """(key range, is causal): the keys before the first row, then the causal square."""
    square = [(slice(segment.first, segment.last), True)]
    return [(slice(segment.start, segment.first), False), *square] if segment.first > segment.start else square


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    (out_a, lse_a), (out_b, lse_b) = parts
    total = torch.logaddexp(lse_a, lse_b)
    merged: Tensor = out_a * (lse_a - total).exp()[..., None] + out_b * (lse_b - total).exp()[..., None]
    return merged, total


def _diagonal_scores(q_RhD: Tensor, dk_RSgD: Tensor, groups: int) -> Tensor:
    keys = dk_RSgD.float().repeat_interleave(groups, dim=2)
    scale: float = q_RhD.shape[-1] ** -0.5
    return torch.einsum("rhd,rshd->rhs", q_RhD.float(), keys) * scale


def _per_query_head(x_NgD: Tensor, groups: int) -> Tensor:
    return x_NgD if groups == 1 else x_NgD.repeat_interleave(groups, dim=1)


def _per_kv_head(x: Tensor, groups: int) -> Tensor:
    """Sum the heads of a group: [..., h, D] -> [..., g, D]."""
    return x if groups == 1 else x.view(*x.shape[:-2], x.shape[-2] // groups, groups, x.shape[-1]).sum(-2)


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """One kernel call on [rows, h, D]; returns the output and the log-sum-exp [rows, h] in fp32."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's backward with the output and log-sum-exp of the whole, merged softmax."""
    num_queries, num_keys, device = q.shape[0], k.shape[0], q.device
    grad, q, k, v, out = (x.transpose(0, 1)[None] for x in (grad, q, k, v, out))
    lse = lse.transpose(0, 1)[None].contiguous()
    if device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal
        )
    else:
        none, seed = torch.empty(0, dtype=torch.int32, device=device), torch.zeros((), dtype=torch.int64)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, none, none, num_queries, num_keys, 0.0, is_causal, seed, seed
        )
    part_q, part_k, part_v = (x[0].transpose(0, 1) for x in grads)
    return part_q, part_k, part_v
