"""Losses by name, each as value and gradient over one chunk of rows: what the fused linear+loss and its twin share.

    R rows, V draft vocabulary; z draft logits, q = softmax(z), p the teacher's distribution

    name        value                                         dz
    kl          sum p (log p - log q)                         q - p             p renormalised on the draft vocabulary
    ce          -log q[argmax p]                              q - onehot
    tv          1 - sum min(p, q) = 1 - alpha                 -q (1[q<=p] - s), s = sum q 1[q<=p]     p as it is
    lk_hybrid   lam kl + (1-lam) tv, lam = exp(-3 alpha)      the mix, lam detached

alpha = sum min(p, q) is the probability that the draft token is accepted; for it p is not renormalised: what the target
puts outside the draft vocabulary is lost. `tv` alone has almost no gradient where q and p barely overlap, so it is for
fine-tuning. eta = 3 in lk_hybrid is the value of the LK paper's experiments.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossName = Literal["kl", "ce", "tv", "lk_hybrid"]
LK_ETA = 3.0


@dataclass(frozen=True)
class Teacher:
    """The target's distribution of one chunk, on the draft vocabulary. `mass_R1` is what it puts there (1 if full)."""

    probs_RV: Tensor  # renormalised on the draft vocabulary
    entropy_R: Tensor  # of probs
    top_R: Tensor  # argmax, a draft id
    mass_R1: Tensor | None  # None: the draft vocabulary is the whole vocabulary

    @classmethod
    def of_logits(cls, logits_RV: Tensor, lse_all_R: Tensor | None) -> "Teacher":
        """From logits on the draft vocabulary and, if that is trimmed, the log-sum-exp over the whole vocabulary."""
        logits_RV = logits_RV.float()
        lse_R = logsumexp(logits_RV)
        probs_RV = torch.softmax(logits_RV, dim=-1)
        mass_R1 = None if lse_all_R is None else (lse_R - lse_all_R).exp()[:, None]
        return cls(probs_RV, lse_R - _rowwise_dot(probs_RV, logits_RV), logits_RV.argmax(-1), mass_R1)

    def expand(self, index_R: Tensor) -> "Teacher":
        """Row index_R[i] of this chunk for each i: several draft rows may learn from one state."""
        mass_R1 = None if self.mass_R1 is None else self.mass_R1[index_R]
        return Teacher(self.probs_RV[index_R], self.entropy_R[index_R], self.top_R[index_R], mass_R1)


@dataclass(frozen=True)
class ChunkLoss:
    """Value, gradient with respect to the draft logits, and what the metrics need; none of it has a graph."""

    value_R: Tensor
    grad_RV: Tensor
    alpha_R: Tensor | None  # None when the loss does not need it
    is_top_R: Tensor  # bool: the draft's most likely token is the target's


def loss_and_gradient(name: LossName, logits_RV: Tensor, teacher: Teacher) -> ChunkLoss:
    """The loss of each row and its gradient. Works in place: at most three temporaries of R x V at a time."""
    logits_RV = logits_RV.float()
    best_R = logits_RV.amax(-1)
    top_R1 = teacher.top_R[:, None]
    at_top_R = logits_RV.gather(-1, top_R1)[:, 0]
    is_top_R = at_top_R >= best_R
    q_RV = torch.softmax(logits_RV, dim=-1)
    lse_R = best_R - q_RV.amax(-1).log()  # the largest probability is at least 1/V, so its logarithm is exact
    if name == "ce":
        grad_RV = q_RV.scatter_add_(-1, top_R1, torch.full_like(top_R1, -1.0, dtype=q_RV.dtype))
        return ChunkLoss(lse_R - at_top_R, grad_RV, None, is_top_R)
    kl_R = None
    if name in ("kl", "lk_hybrid"):
        kl_R = lse_R - _rowwise_dot(teacher.probs_RV, logits_RV) - teacher.entropy_R
    if name == "kl":
        assert kl_R is not None
        return ChunkLoss(kl_R, q_RV.sub_(teacher.probs_RV), None, is_top_R)
    p_RV = teacher.probs_RV if teacher.mass_R1 is None else teacher.probs_RV * teacher.mass_R1
    alpha_R = torch.minimum(p_RV, q_RV).sum(-1)
    below_RV = (q_RV <= p_RV).to(q_RV.dtype)
    share_R1 = _rowwise_dot(q_RV, below_RV)[:, None]
    tv_grad_RV = (share_R1 - below_RV).mul_(q_RV)
    if name == "tv":
        return ChunkLoss(1 - alpha_R, tv_grad_RV, alpha_R, is_top_R)
    assert kl_R is not None
    lam_R = torch.exp(-LK_ETA * alpha_R)
    grad_RV = q_RV.sub_(teacher.probs_RV).mul_(lam_R[:, None]).addcmul_(tv_grad_RV, (1 - lam_R)[:, None])
    return ChunkLoss(lam_R * kl_R + (1 - lam_R) * (1 - alpha_R), grad_RV, alpha_R, is_top_R)


def mix_and_gradient(ce: float, l1: float, logits_RV: Tensor, label_R: Tensor, teacher: Teacher | None) -> ChunkLoss:
    """ce * (-log q[label]) + l1 * sum |p - q| over the whole vocabulary; `teacher` may be None where l1 is 0.

    sum |p - q| is 2 (1 - alpha), also where the draft vocabulary is trimmed and p as it is. `is_top_R` is of the label.
    """
    is_top_R = logits_RV.gather(-1, label_R[:, None])[:, 0] >= logits_RV.amax(-1)
    log_q_RV = torch.log_softmax(logits_RV, dim=-1, dtype=torch.float32)
    value_R = -ce * log_q_RV.gather(-1, label_R[:, None])[:, 0]
    q_RV, alpha_R, tv_grad_RV = log_q_RV.exp_(), None, None
    if teacher is not None:
        p_RV = teacher.probs_RV if teacher.mass_R1 is None else teacher.probs_RV * teacher.mass_R1
        alpha_R = torch.minimum(p_RV, q_RV).sum(-1)
        below_RV = (q_RV <= p_RV).to(q_RV.dtype)
        tv_grad_RV = (_rowwise_dot(q_RV, below_RV)[:, None] - below_RV).mul_(q_RV)
        value_R = value_R + 2 * l1 * (1 - alpha_R)
    grad_RV = q_RV.mul_(ce)
    grad_RV.scatter_add_(-1, label_R[:, None], torch.full_like(value_R, -ce)[:, None])
    if tv_grad_RV is not None:
        grad_RV.add_(tv_grad_RV, alpha=2 * l1)
    return ChunkLoss(value_R, grad_RV, alpha_R, is_top_R)


def dense_loss(name: LossName, logits_RV: Tensor, teacher_logits_RV: Tensor, lse_all_R: Tensor | None) -> Tensor:
    """The eager twin: the same definitions for autograd, row by row [R]. For tests and tiny inputs."""
    log_q = torch.log_softmax(logits_RV.float(), dim=-1)
    log_p = torch.log_softmax(teacher_logits_RV.float(), dim=-1)
    p, q = log_p.exp(), log_q.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    if name == "kl":
        return kl
    if name == "ce":
        return -log_q.gather(-1, teacher_logits_RV.argmax(-1, keepdim=True))[:, 0]
    mass = 1.0 if lse_all_R is None else (teacher_logits_RV.float().logsumexp(-1) - lse_all_R).exp()[:, None]
    alpha = torch.minimum(p * mass, q).sum(-1)
    if name == "tv":
        return 1 - alpha
    lam = torch.exp(-LK_ETA * alpha).detach()
    return lam * kl + (1 - lam) * (1 - alpha)


def logsumexp(logits_RV: Tensor) -> Tensor:
    """log sum exp over V in fp32 [R]. torch's own takes 15 times as long on a CPU (V = 49,152, two cores)."""
    best_R1 = logits_RV.amax(-1, keepdim=True).float()
    lse_R: Tensor = (logits_RV.float() - best_R1).exp_().sum(-1).log_() + best_R1[:, 0]
    return lse_R


def _rowwise_dot(a_RV: Tensor, b_RV: Tensor) -> Tensor:
    """sum over V. On a CPU faster than vecdot and than a batched product of single rows (measured at V = 49,152)."""
    return (a_RV * b_RV).sum(-1)
