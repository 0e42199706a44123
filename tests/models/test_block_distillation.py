"""The chunked loss of blocks equals its dense twin, in value and in gradient; D-PACE is the derivative it claims to be.

R rows, U teacher rows, H width, r rank, V draft vocabulary
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.models.ops import distillation
from draftsmith.models.ops.block_distillation import (
    Mix,
    Rows,
    _whole_blocks,
    distil_blocks,
    dpace_weights,
    eager_distil_blocks,
)
from draftsmith.models.ops.distillation import Lens

LENGTHS = [5, 0, 1, 7, 3, 7, 7, 2]
VOCAB, WIDTH, RANK = 90, 24, 6
CASES: dict[str, tuple[Any, bool, float | None]] = {  # loss, low rank, D-PACE
    "ce": (Mix(1.0, 0.0), False, None),
    "ce with D-PACE": (Mix(1.0, 0.0), False, 0.5),
    "ce with D-PACE and a low-rank part": (Mix(1.0, 0.0), True, 0.3),
    "ce and L1": (Mix(0.1, 0.9), True, None),
    "ce and L1 without a low-rank part": (Mix(0.1, 0.9), False, None),
    "L1": (Mix(0.0, 1.0), True, None),
    "kl": ("kl", False, None),
    "tv": ("tv", False, None),
    "lk_hybrid": ("lk_hybrid", True, None),
}


def inputs(softcap: float | None, is_trimmed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Rows, Lens]:
    torch.manual_seed(0)
    num_rows = sum(LENGTHS)
    student = torch.randn(num_rows, WIDTH, requires_grad=True)
    teacher_UH, all_VH = torch.randn(11, WIDTH), torch.randn(VOCAB, WIDTH) * 0.7
    kept = torch.randperm(VOCAB)[:40].sort().values if is_trimmed else torch.arange(VOCAB)
    factor = torch.randn(num_rows, RANK, requires_grad=True)
    table = torch.randn(len(kept), RANK, requires_grad=True)
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    labels = torch.randint(0, len(kept), (num_rows,))
    rows = Rows(labels, torch.randint(0, 11, (num_rows,)), place, torch.exp(-place / 4), LENGTHS)
    return student, factor, table, teacher_UH, rows, Lens(all_VH[kept], all_VH[kept], None, softcap, torch.float32)


def lens_for(loss: Any, lens: Lens, is_trimmed: bool) -> Lens:
    if not is_trimmed or loss == "kl":
        return lens
    torch.manual_seed(7)
    others = torch.randn(VOCAB - 40, WIDTH) * 0.7
    return Lens(lens.draft_VH, lens.target_VH, torch.cat([lens.target_VH, others]), lens.softcap, lens.dtype)


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["full", "trimmed"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["no cap", "softcap"])
@pytest.mark.parametrize("case", CASES)
def test_chunked_equals_dense_in_value_and_gradient(
    case: str, softcap: float | None, is_trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_CHUNK_BYTES", 0)  # 16 rows a chunk
    loss, has_low_rank, dpace = CASES[case]
    results = []
    for function in (distil_blocks, eager_distil_blocks):
        student, factor, table, teacher_UH, rows, lens = inputs(softcap, is_trimmed)
        low_rank = (factor, table) if has_low_rank else None
        lens = lens_for(loss, lens, is_trimmed)
        found = function(loss, student, low_rank, teacher_UH, rows, lens, dpace)
        (2.5 * found.loss).backward()
        trained = [student, factor, table] if has_low_rank else [student]
        assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in trained)
        results.append([found.loss, found.is_top_R, found.alpha_R, *[x.grad for x in trained]])
    for chunked, dense in zip(*results, strict=True):
        if dense is None:
            assert chunked is None
        else:
            torch.testing.assert_close(chunked, dense, rtol=1e-4, atol=1e-5)


def test_l1_is_the_full_norm_over_the_whole_vocabulary() -> None:
    student, _, _, teacher_UH, rows, lens = inputs(None, True)
    lens = lens_for("tv", lens, True)
    found = distil_blocks(Mix(0.0, 1.0), student, None, teacher_UH, rows, lens)
    p = (teacher_UH @ lens.target_all_VH.T).softmax(-1)[rows.teacher_R]  # type: ignore[union-attr]
    q = torch.zeros_like(p)
    q[:, :40] = (student @ lens.draft_VH.T).softmax(-1)
    torch.testing.assert_close(found.loss, ((p - q).abs().sum(-1) * rows.weight_R).sum())
    torch.testing.assert_close(found.alpha_R, 1 - 0.5 * (p - q).abs().sum(-1))


def test_logits_of_more_than_one_chunk_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_CHUNK_BYTES", 0)
    widest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal widest
            out = function(*args, **(kwargs or {}))
            is_transposed_weight = isinstance(out, Tensor) and out.ndim == 2 and out.shape[0] in (WIDTH, RANK)
            if isinstance(out, Tensor) and out.ndim == 2 and out.shape[1] == VOCAB and not is_transposed_weight:
                widest = max(widest, out.shape[0])
            return out

    student, factor, table, teacher_UH, rows, lens = inputs(None, False)
    with Watch():
        distil_blocks(Mix(0.1, 0.9), student, (factor, table), teacher_UH, rows, lens).loss.backward()
    assert 0 < widest <= 16 < sum(LENGTHS)


def test_chunks_cut_no_block() -> None:
    chunks = list(_whole_blocks([3, 3, 0, 5, 9, 1], 6))
    assert [(c.start, c.stop, list(lengths)) for c, lengths in chunks] == [
        (0, 6, [3, 3, 0]),
        (6, 11, [5]),
        (11, 20, [9]),
        (20, 21, [1]),
    ]


def test_dpace_weights_are_the_derivative_of_the_expected_length_by_log_survival() -> None:
    ce, alpha, lengths = torch.rand(9) * 3, 0.4, [4, 0, 2, 3]
    expected = []
    for block in ce.split(lengths):
        log_s = torch.log((1 - alpha) * torch.exp(-block) + alpha).requires_grad_()
        log_s.cumsum(0).exp().sum().backward()
        assert log_s.grad is not None
        expected.append(log_s.grad)
    place = torch.cat([torch.arange(length) for length in lengths])
    torch.testing.assert_close(dpace_weights(ce, place, lengths, alpha), torch.cat(expected))


def test_no_rows_give_a_zero_loss_with_a_graph() -> None:
    student, none = torch.zeros(0, WIDTH, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    rows = Rows(none, none, none, torch.zeros(0), [0])
    _, _, _, _, _, lens = inputs(None, False)
    found = distil_blocks(Mix(1.0, 0.0), student, None, torch.zeros(0, WIDTH), rows, lens, 0.5)
    found.loss.backward()
    assert float(found.loss.detach()) == 0 and student.grad is not None
