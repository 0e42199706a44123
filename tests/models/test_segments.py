"""Segment attention equals its eager twin, in value and in gradient.

N tokens, R query rows, S diagonal steps, h query heads, g key/value heads, D head width
"""

import pytest
import torch
from torch import Tensor

from draftsmith.models.ops.segments import Segment, eager_segment_attention, segment_attention

SEGMENTS = {
    "whole documents": [Segment(0, 0, 7), Segment(7, 7, 20)],
    "later parts": [Segment(0, 3, 7), Segment(7, 12, 13), Segment(7, 15, 20)],
    "with an empty one": [Segment(0, 2, 2), Segment(7, 9, 12)],
    "nothing": [Segment(0, 0, 0)],
}


def attend(function: object, segments: list[Segment], num_steps: int, heads: tuple[int, int]) -> list[Tensor | None]:
    torch.manual_seed(0)
    (h, g), num_rows, width = heads, sum(s.num_rows for s in segments), 16
    inputs = [torch.randn(num_rows, h, width), torch.randn(20, g, width), torch.randn(20, g, width)]
    diagonal = [torch.randn(num_rows, num_steps, g, width) for _ in range(2)] if num_steps else [None, None]
    for x in (*inputs, *diagonal):
        if x is not None:
            x.requires_grad_()
    out = function(*inputs, *diagonal, segments)  # type: ignore[operator]
    (out * torch.randn_like(out)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs), *(x.grad if x is not None else None for x in diagonal)]


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("name", SEGMENTS)
def test_segment_attention_equals_its_eager_twin(name: str, num_steps: int, heads: tuple[int, int]) -> None:
    found = attend(segment_attention, SEGMENTS[name], num_steps, heads)
    expected = attend(eager_segment_attention, SEGMENTS[name], num_steps, heads)
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_close_to_float32() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(13, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    segments = [Segment(7, 7, 20)]
    exact = segment_attention(q, k, v, None, None, segments)
    rounded = segment_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, None, segments)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.03)
