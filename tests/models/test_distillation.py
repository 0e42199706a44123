"""The chunked loss equals its dense twin, in value and in gradient.

R rows, K steps, H width, V draft vocabulary
"""

import pytest
import torch
from torch import Tensor

from draftsmith.models.ops import distillation
from draftsmith.models.ops.distillation import Lens, distil, eager_distil, greedy_tokens
from draftsmith.models.parts.losses import LossName

LOSSES: list[LossName] = ["kl", "ce", "tv", "lk_hybrid"]


def inputs(
    softcap: float | None, is_trimmed: bool, is_draft_capped: bool = True
) -> tuple[list[Tensor], Tensor, Tensor, Lens]:
    torch.manual_seed(0)
    num_rows, width, vocab, num_steps = 75, 24, 90, 3
    students = [torch.randn(num_rows, width, requires_grad=True) for _ in range(num_steps)]
    weight_KR = (torch.rand(num_steps, num_rows) < 0.7).float()
    teacher_RH, all_VH = torch.randn(num_rows, width), torch.randn(vocab, width) * 0.7
    kept = torch.randperm(vocab)[:40].sort().values if is_trimmed else torch.arange(vocab)
    draft_VH = torch.nn.Parameter(torch.randn(len(kept), width) * 0.7)
    lens = Lens(draft_VH, all_VH[kept], all_VH if is_trimmed else None, softcap, torch.float32, is_draft_capped)
    return students, weight_KR, teacher_RH, lens


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["full", "trimmed"])
@pytest.mark.parametrize(
    "softcap, is_draft_capped", [(None, True), (3.0, True), (3.0, False)], ids=["no cap", "softcap", "target capped"]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_chunked_equals_dense_in_value_and_gradient(
    loss: LossName,
    softcap: float | None,
    is_draft_capped: bool,
    is_trimmed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distillation, "_CHUNK_BYTES", 4 * 90 * 16)  # 16 rows a chunk: the last one is smaller
    results = []
    for function in (distil, eager_distil):
        students, weight_KR, teacher_RH, lens = inputs(softcap, is_trimmed, is_draft_capped)
        result = function(loss, students, weight_KR, teacher_RH, lens)
        torch.autograd.backward((result.loss_K * torch.tensor([1.0, 0.5, 2.0])).sum())
        results.append((result.loss_K, result.top1_K, *[s.grad for s in students], lens.draft_VH.grad))
    for chunked, dense in zip(*results, strict=True):
        torch.testing.assert_close(chunked, dense, rtol=1e-4, atol=1e-5)
        assert dense is not None and dense.abs().sum() > 0


def test_rows_of_weight_zero_get_no_gradient_and_leave_no_trace() -> None:
    students, weight_KR, teacher_RH, lens = inputs(None, False)
    with torch.no_grad():
        for k, student in enumerate(students):
            student[weight_KR[k] == 0] = 1e4
    result = distil("kl", students, weight_KR, teacher_RH, lens)
    torch.autograd.backward(result.loss_K.sum())
    assert torch.isfinite(result.loss_K).all()
    assert all(not s.grad[weight_KR[k] == 0].any() for k, s in enumerate(students) if s.grad is not None)
    assert all(s.grad is not None for s in students)


def test_without_rows_the_loss_is_zero_and_every_input_gets_a_gradient() -> None:
    students = [torch.zeros(0, 8, requires_grad=True)]
    head = torch.nn.Parameter(torch.randn(16, 8))
    lens = Lens(head, head.detach(), None, None, torch.float32)
    result = distil("kl", students, torch.zeros(1, 0), torch.zeros(0, 8), lens)
    torch.autograd.backward(result.loss_K.sum())
    assert float(result.loss_K.sum().detach()) == 0.0
    assert head.grad is not None and not head.grad.any() and students[0].grad is not None


@pytest.mark.parametrize("loss", LOSSES)
def test_a_draft_equal_to_the_target_loses_only_what_the_loss_says(loss: LossName) -> None:
    students, weight_KR, teacher_RH, lens = inputs(None, False)
    equal = Lens(lens.target_VH, lens.target_VH, None, None, torch.float32)
    result = distil(loss, [teacher_RH.clone().requires_grad_() for _ in students], weight_KR, teacher_RH, equal)
    assert torch.equal(result.top1_K, weight_KR.sum(-1))
    if loss != "ce":
        torch.testing.assert_close(result.loss_K, torch.zeros(3), rtol=0, atol=2e-4)


def test_greedy_tokens_in_chunks_are_the_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_CHUNK_BYTES", 4 * 50 * 16)
    hidden, head = torch.randn(45, 12), torch.randn(50, 12)
    assert torch.equal(greedy_tokens(hidden, head), (hidden @ head.T).argmax(-1))
    assert greedy_tokens(hidden[:0], head).shape == (0,)
