"""Row attention equals its eager twin, in value and in gradient, over blocks of rows, windows and documents.

N tokens, R query rows, h query heads, g key/value heads, D head width
"""

import pytest
import torch
from torch import Tensor

from draftsmith.models.ops import row_attention as module
from draftsmith.models.ops.row_attention import eager_row_attention, row_attention
from draftsmith.models.ops.segments import Segment

SEGMENTS = {
    "whole documents": [Segment(0, 0, 7), Segment(7, 7, 20)],
    "later parts": [Segment(0, 3, 7), Segment(7, 12, 13), Segment(7, 15, 20)],
    "with an empty one": [Segment(0, 2, 2), Segment(7, 9, 12)],
}


def attend(function: object, segments: list[Segment], window: int | None, heads: tuple[int, int]) -> list[Tensor]:
    torch.manual_seed(0)
    (h, g), num_rows, width = heads, sum(s.num_rows for s in segments), 16
    inputs = [torch.randn(num_rows, h, width), torch.randn(20, g, width), torch.randn(20, g, width)]
    for x in inputs:
        x.requires_grad_()
    out = function(*inputs, segments, window)  # type: ignore[operator]
    torch.autograd.backward((out * torch.randn(out.shape)).sum())  # randn_like would follow the memory layout
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("name", SEGMENTS)
def test_row_attention_equals_its_eager_twin(
    name: str, window: int | None, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUERY_ROWS", 4)  # several blocks, the last one smaller
    found = attend(row_attention, SEGMENTS[name], window, heads)
    expected = attend(eager_row_attention, SEGMENTS[name], window, heads)
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_without_rows_there_is_nothing_and_the_queries_still_get_a_gradient() -> None:
    q = torch.randn(0, 2, 16, requires_grad=True)
    out = row_attention(q, torch.randn(20, 1, 16), torch.randn(20, 1, 16), [Segment(0, 0, 0)], None)
    torch.autograd.backward(out.sum())
    assert out.shape == (0, 2, 16) and q.grad is not None
