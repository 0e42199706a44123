"""The operations that recompute in the backward equal their eager twins, value and gradients."""

import pytest
import torch
from torch import Tensor

from draftsmith.models.ops.elementwise import eager_rms_norm, eager_swiglu, rms_norm, swiglu


def gradients(value: Tensor, *inputs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 2, value.numel()).view_as(value)
    return list(torch.autograd.grad((value.float() * weights).sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 16), (0, 16)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, gain = (3 * torch.randn(shape)).to(dtype).requires_grad_(), torch.rand(16).requires_grad_()
    expected = eager_rms_norm(x, gain, 1e-5)
    found = rms_norm(x, gain, 1e-5)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, x, gain), gradients(expected, x, gain), rtol=1e-4, atol=1e-5)


def test_rms_norm_of_a_frozen_gain_and_of_frozen_states() -> None:
    x, gain = torch.randn(5, 8), torch.rand(8)
    for wanted in (x, gain):
        wanted.requires_grad_()
        found = gradients(rms_norm(x, gain, 1e-6), wanted)
        torch.testing.assert_close(found, gradients(eager_rms_norm(x, gain, 1e-6), wanted))
        wanted.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = (torch.randn(9, 12).to(dtype).requires_grad_() for _ in range(2))
    found, expected = swiglu(gate, up), eager_swiglu(gate, up)
    assert torch.equal(found, expected)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(gradients(found, gate, up), gradients(expected, gate, up), **tolerance)
