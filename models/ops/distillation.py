"""lm_head and loss in chunks of rows: the logits of a batch never exist, for the draft or for the target.

The target's logits of a chunk are computed once, from its stored last state, and shared by all K steps; each step's
gradient with respect to its hidden rows is finished inside the chunk, so backward only scales it.

    R rows, K steps, H width, V draft vocabulary, C rows in a chunk

    Row t of step k pairs the draft's state student[k, t] with the target's state teacher[t]; weight 0 leaves it out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.ops.frozen_product import FrozenProduct, frozen_product
from draftsmith.models.parts.losses import LossName, Teacher, dense_loss, logsumexp, loss_and_gradient
from draftsmith.models.target import softcap

# Rows per chunk so that one fp32 temporary of C x V stays near 16 MiB: in a last-level cache on a CPU, small beside the
# weights on a GPU (where _ROWS_ON_GPU keeps the matrix products busy instead).
_CHUNK_BYTES = 16 << 20
_ROWS_ON_CPU = 128  # more rows make no product faster (measured from 64 to 614), only the temporaries larger
_ROWS_ON_GPU = 1024


@dataclass(frozen=True)
class Lens:
    """The matrices through which states become logits: the draft's and the target's, and the target's softcap."""

    draft_VH: Tensor  # a Parameter when the draft's lm_head is trained
    target_VH: Tensor  # the target's rows on the draft vocabulary
    target_all_VH: Tensor | None  # the whole target head, where the loss needs the mass outside the draft vocabulary
    softcap: float | None
    dtype: torch.dtype  # of the matrix products
    is_draft_capped: bool = True  # whether the softcap is on the draft's logits too

    @property
    def draft_softcap(self) -> float | None:
        return self.softcap if self.is_draft_capped else None


@dataclass(frozen=True)
class Distilled:
    """Sums over the weighted rows of each step [K]; only `loss_K` carries a graph."""

    loss_K: Tensor
    top1_K: Tensor  # rows whose most likely draft token is the target's


def distil(name: LossName, student_KRH: list[Tensor], weight_KR: Tensor, teacher_RH: Tensor, lens: Lens) -> Distilled:
    """The chunked loss. `student_KRH` is a list of K tensors [R, H]; `teacher_RH` is post-norm."""
    # Every dtype below is chosen on purpose; autocast would round the fp32 sums of the loss to bf16.
    with torch.autocast(teacher_RH.device.type, enabled=False):
        loss_K, top1_K = _Distillation.apply(  # type: ignore[no-untyped-call]
            name, weight_KR, teacher_RH, lens, lens.draft_VH, *student_KRH
        )
    return Distilled(loss_K, top1_K)


def eager_distil(
    name: LossName, student_KRH: list[Tensor], weight_KR: Tensor, teacher_RH: Tensor, lens: Lens
) -> Distilled:
    """The dense twin of `distil`."""
    target = softcap(F.linear(teacher_RH.to(lens.dtype), lens.target_VH.to(lens.dtype)).float(), lens.softcap)
    lse = None
    if lens.target_all_VH is not None:
        lse = softcap(
            F.linear(teacher_RH.to(lens.dtype), lens.target_all_VH.to(lens.dtype)).float(), lens.softcap
        ).logsumexp(-1)
    losses, tops = [], []
    for student_RH, weight_R in zip(student_KRH, weight_KR, strict=True):
        logits = F.linear(student_RH.to(lens.dtype), lens.draft_VH.to(lens.dtype)).float()
        logits = softcap(logits, lens.draft_softcap)
        losses.append((dense_loss(name, logits, target, lse) * weight_R).sum())
        tops.append(((logits.argmax(-1) == target.argmax(-1)) * weight_R).sum())
    return Distilled(torch.stack(losses), torch.stack(tops).detach())


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, weight_KR, teacher_RH, lens, draft_VH, *student_KRH):  # type: ignore[no-untyped-def]
        draft, target, target_all = _products(lens)
        loss_K = torch.zeros(len(student_KRH), device=draft_VH.device)
        top1_K = torch.zeros_like(loss_K)
        grads = [torch.zeros_like(student) for student in student_KRH]
        trains_head = draft_VH.requires_grad
        head_grads = [torch.zeros_like(draft_VH, dtype=torch.float32) for _ in student_KRH] if trains_head else []
        for rows in _chunks(teacher_RH.shape[0], draft_VH):
            teacher = _teacher(teacher_RH[rows].to(lens.dtype), target, target_all, lens.softcap)
            for k, student_RH in enumerate(student_KRH):
                weight_R = weight_KR[k, rows]
                if not weight_R.any():
                    continue
                hidden = student_RH[rows].to(lens.dtype)
                logits = softcap(draft.to_logits(hidden), lens.draft_softcap)
                chunk = loss_and_gradient(name, logits, teacher)
                loss_K[k] += chunk.value_R @ weight_R
                top1_K[k] += chunk.is_top_R.float() @ weight_R
                grad_RV = chunk.grad_RV
                if lens.draft_softcap is not None:
                    grad_RV = grad_RV * (1 - (logits.float() / lens.draft_softcap) ** 2)
                grad_RV = grad_RV.to(lens.dtype)
                grads[k][rows] = draft.back(grad_RV).to(student_RH.dtype) * weight_R[:, None].to(student_RH.dtype)
                if trains_head:
                    weighted = hidden * weight_R[:, None].to(hidden.dtype)
                    head_grads[k] += (grad_RV.T @ weighted).float()
        ctx.save_for_backward(*grads, *head_grads)
        ctx.num_steps = len(student_KRH)
        ctx.mark_non_differentiable(top1_K)
        return loss_K, top1_K

    @staticmethod
    def backward(ctx, grad_K, _):  # type: ignore[no-untyped-def]
        grads, head_grads = ctx.saved_tensors[: ctx.num_steps], ctx.saved_tensors[ctx.num_steps :]
        grad_head = None
        if head_grads:
            grad_head = sum(scale * grad for scale, grad in zip(grad_K, head_grads, strict=True))
        return (
            None,
            None,
            None,
            None,
            grad_head,
            *(grad * scale.to(grad.dtype) for grad, scale in zip(grads, grad_K, strict=True)),
        )


def _products(lens: Lens) -> tuple[FrozenProduct, FrozenProduct, FrozenProduct | None]:
    """Of the draft's matrix, the target's, and the whole of the target's."""
    size = _rows_per_chunk(lens.draft_VH)
    target = frozen_product(lens.target_VH.to(lens.dtype), size)
    everything = lens.target_all_VH
    target_all = None if everything is None else frozen_product(everything.to(lens.dtype), size)
    if lens.draft_VH is lens.target_VH:
        return target, target, target_all
    if lens.draft_VH.requires_grad:
        return FrozenProduct(lens.draft_VH.detach().to(lens.dtype)), target, target_all
    return frozen_product(lens.draft_VH.to(lens.dtype), size), target, target_all


def _teacher(states_RH: Tensor, target: FrozenProduct, target_all: FrozenProduct | None, cap: float | None) -> Teacher:
    lse_R = None
    if target_all is not None:
        lse_R = logsumexp(softcap(target_all.to_logits(states_RH), cap))
    return Teacher.of_logits(softcap(target.to_logits(states_RH), cap), lse_R)


def greedy_tokens(hidden_RH: Tensor, head_VH: Tensor) -> Tensor:
    """argmax over V of hidden @ head^T in chunks: int64 [R] draft ids. A softcap is monotonous: it changes nothing."""
    product = frozen_product(head_VH, _rows_per_chunk(head_VH))
    tokens = [
        product.to_logits(hidden_RH[rows].to(head_VH.dtype)).argmax(-1) for rows in _chunks(hidden_RH.shape[0], head_VH)
    ]
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=hidden_RH.device)


def _chunks(num_rows: int, head_VH: Tensor) -> Iterable[slice]:
    size = _rows_per_chunk(head_VH)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _rows_per_chunk(head_VH: Tensor) -> int:
    if head_VH.device.type == "cuda":
        return _ROWS_ON_GPU
    return min(_ROWS_ON_CPU, max(16, _CHUNK_BYTES // (4 * head_VH.shape[0])))
