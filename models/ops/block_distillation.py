"""lm_head and loss of draft blocks in chunks of whole blocks: logits never exist whole, weights may depend on losses.

    R rows (a drafted position that is supervised), U teacher rows, S drafted positions of a block, H width, r rank,
    V draft vocabulary

        logits[R]   student[R] @ head^T  +  factor[R] @ table^T        the low-rank part is optional, and trained;
                                                                       with it, vLLM applies no softcap to drafts
        teacher     row R learns from the target's state teacher[index[R]]; neighbouring blocks share most of them
        rows        ascending by block, then by place inside it; a block's rows are its places 0, 1, .., without gaps

Every row's gradient is finished inside its chunk, so backward only scales it. A chunk's teacher rows are computed once.
`eager_distil_blocks` is the twin.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.ops.distillation import Lens, products, rows_per_chunk, teacher_of
from draftsmith.models.parts.losses import LossName, dense_loss, loss_and_gradient, mix_and_gradient
from draftsmith.models.target import softcap


class Mix(NamedTuple):
    """ce * cross-entropy with the data's token + l1 * sum |p - q|, the full norm (twice the total variation)."""

    ce: float
    l1: float


@dataclass(frozen=True)
class Rows:
    """The supervised rows, and how the chunks may cut them."""

    label_R: Tensor  # int64 draft id of the data's token
    teacher_R: Tensor  # int64 row of the teacher's states
    place_R: Tensor  # int64 place in the block, 0 is the first drafted token
    weight_R: Tensor  # float32
    lengths: Sequence[int]  # rows of each block


@dataclass(frozen=True)
class BlockLoss:
    """Only `loss` carries a graph."""

    loss: Tensor
    is_top_R: Tensor  # bool: the draft's most likely token is the data's (mixes) or the target's (named losses)
    alpha_R: Tensor | None  # probability that the draft is accepted; None where the loss does not need it


def distil_blocks(
    loss: Mix | LossName,
    student_RH: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    teacher_UH: Tensor,
    rows: Rows,
    lens: Lens,
    dpace_alpha: float | None = None,
) -> BlockLoss:
    """The chunked loss. `low_rank` is (factor_Rr, table_Vr); `teacher_UH` is post-norm; lens.draft_VH is frozen.

    With `dpace_alpha` a row's weight is multiplied by its D-PACE weight, see `dpace_weights`; only for Mix(ce, 0).
    """
    assert not lens.draft_VH.requires_grad and (dpace_alpha is None or (isinstance(loss, Mix) and loss.l1 == 0))
    factor_Rr, table_Vr = low_rank or (None, None)
    with torch.autocast(student_RH.device.type, enabled=False):
        value, is_top_R, alpha_R = _BlockDistillation.apply(  # type: ignore[no-untyped-call]
            loss, student_RH, factor_Rr, table_Vr, teacher_UH, rows, lens, dpace_alpha
        )
    return BlockLoss(value, is_top_R, alpha_R if _gives_alpha(loss) else None)


def eager_distil_blocks(
    loss: Mix | LossName,
    student_RH: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    teacher_UH: Tensor,
    rows: Rows,
    lens: Lens,
    dpace_alpha: float | None = None,
) -> BlockLoss:
    """The dense twin of `distil_blocks`."""

    def logits_of(states: Tensor, head_VH: Tensor, cap: float | None = lens.softcap) -> Tensor:
        return softcap(F.linear(states.to(lens.dtype), head_VH.to(lens.dtype)).float(), cap)

    logits = logits_of(student_RH, lens.draft_VH, lens.softcap if low_rank is None else None)
    if low_rank is not None:
        logits = logits + F.linear(low_rank[0].to(lens.dtype), low_rank[1].to(lens.dtype)).float()
    target = logits_of(teacher_UH, lens.target_VH)[rows.teacher_R]
    everything = lens.target_VH if lens.target_all_VH is None else lens.target_all_VH
    lse = logits_of(teacher_UH, everything).logsumexp(-1)[rows.teacher_R]
    p, q = (target - lse[:, None]).exp(), logits.softmax(-1)
    alpha_R = torch.minimum(p, q).sum(-1)
    if isinstance(loss, Mix):
        ce_R = F.cross_entropy(logits, rows.label_R, reduction="none")
        outside_R = 1 - p.sum(-1)  # where the draft vocabulary is trimmed, q is 0 and |p - q| is p
        value_R = loss.ce * ce_R + loss.l1 * ((p - q).abs().sum(-1) + outside_R)
        is_top_R = logits.argmax(-1) == rows.label_R
    else:
        value_R = dense_loss(loss, logits, target, None if lens.target_all_VH is None else lse)
        is_top_R = logits.argmax(-1) == target.argmax(-1)
    weight_R = rows.weight_R
    if dpace_alpha is not None:
        weight_R = weight_R * dpace_weights(value_R.detach(), rows.place_R, rows.lengths, dpace_alpha)
    return BlockLoss((value_R * weight_R).sum(), is_top_R, alpha_R.detach() if _gives_alpha(loss) else None)


def dpace_weights(ce_R: Tensor, place_R: Tensor, lengths: Sequence[int], alpha: float) -> Tensor:
    """D-PACE's weight of each row: how much the expected accepted length of its block depends on it.

    s_k = (1 - alpha) exp(-ce_k) + alpha,  c_k = s_1 .. s_k,  w_k = c_k + c_{k+1} + .. = d(sum c) / d(log s_k)
    """
    if not len(place_R):
        return torch.zeros_like(ce_R)
    block_R = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(ce_R.device)
    survival = ce_R.new_zeros(len(lengths), int(max(lengths)))  # 0 where a block has no row: c is 0 from there on
    survival[block_R, place_R] = (1 - alpha) * torch.exp(-ce_R) + alpha
    reach = survival.cumprod(1)
    return reach.flip(1).cumsum(1).flip(1)[block_R, place_R]


def _needs_teacher(loss: Mix | LossName) -> bool:
    return not isinstance(loss, Mix) or loss.l1 != 0


def _gives_alpha(loss: Mix | LossName) -> bool:
    return loss.l1 != 0 if isinstance(loss, Mix) else loss in ("tv", "lk_hybrid")


class _BlockDistillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, student_RH, factor_Rr, table_Vr, teacher_UH, rows, lens, dpace_alpha):  # type: ignore[no-untyped-def]
        draft, target, target_all = products(lens)
        table = None if table_Vr is None else table_Vr.to(lens.dtype)
        total = torch.zeros((), device=student_RH.device)
        is_top_R = torch.zeros(student_RH.shape[0], dtype=torch.bool, device=student_RH.device)
        alpha_R = torch.zeros(student_RH.shape[0], device=student_RH.device)
        grad_student = torch.zeros_like(student_RH)
        grad_factor = None if factor_Rr is None else torch.zeros_like(factor_Rr)
        grad_table = None if table_Vr is None else torch.zeros_like(table_Vr, dtype=torch.float32)
        for chunk, lengths in _whole_blocks(rows.lengths, rows_per_chunk(lens.draft_VH)):
            logits_RV, slope_RV = draft.to_logits(student_RH[chunk].to(lens.dtype)), None
            if table is None and lens.softcap is not None:
                logits_RV = softcap(logits_RV, lens.softcap)
                slope_RV = 1 - (logits_RV.float() / lens.softcap) ** 2
            if table is not None:
                logits_RV = logits_RV.float() + F.linear(factor_Rr[chunk].to(lens.dtype), table).float()
            teacher = None
            if _needs_teacher(loss):
                used_U, local_R = torch.unique(rows.teacher_R[chunk], return_inverse=True)
                states_UH = teacher_UH[used_U].to(lens.dtype)
                teacher = teacher_of(states_UH, target, target_all, lens.softcap).expand(local_R)
            label_R = rows.label_R[chunk]
            if isinstance(loss, Mix):
                found = mix_and_gradient(loss.ce, loss.l1, logits_RV, label_R, teacher)
            else:
                assert teacher is not None
                found = loss_and_gradient(loss, logits_RV, teacher)
            weight_R = rows.weight_R[chunk]
            if dpace_alpha is not None:
                weight_R = weight_R * dpace_weights(found.value_R, rows.place_R[chunk], lengths, dpace_alpha)
            total += found.value_R @ weight_R
            is_top_R[chunk] = found.is_top_R
            if found.alpha_R is not None:
                alpha_R[chunk] = found.alpha_R
            grad_RV = found.grad_RV
            if table is not None and grad_factor is not None:
                grad = grad_RV.to(lens.dtype)
                grad_factor[chunk] = (grad @ table).to(factor_Rr.dtype) * weight_R[:, None].to(factor_Rr.dtype)
                grad_table += (grad.T @ (factor_Rr[chunk] * weight_R[:, None]).to(lens.dtype)).float()
            grad_RV = grad_RV if slope_RV is None else grad_RV * slope_RV
            grad_RH = draft.back(grad_RV.to(lens.dtype)).to(student_RH.dtype)
            grad_student[chunk] = grad_RH * weight_R[:, None].to(student_RH.dtype)
        ctx.save_for_backward(grad_student, grad_factor, grad_table)
        ctx.mark_non_differentiable(is_top_R, alpha_R)
        return total, is_top_R, alpha_R

    @staticmethod
    def backward(ctx, scale, *_):  # type: ignore[no-untyped-def]
        scaled = [None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors]
        return (None, *scaled, None, None, None, None)


def _whole_blocks(lengths: Sequence[int], max_rows: int) -> Iterator[tuple[slice, Sequence[int]]]:
    """Row ranges of at most `max_rows` rows (or one block) that cut no block, with the lengths of their blocks."""
    start, first, size = 0, 0, 0
    for index, length in enumerate(lengths):
        if size and size + length > max_rows:
            yield slice(start, start + size), lengths[first:index]
            start, first, size = start + size, index, 0
        size += length
    if size:
        yield slice(start, start + size), lengths[first:]
