"""RMS norm and SwiGLU that keep for the backward only what they were given, and compute the rest again.

Autograd's own versions keep every intermediate: on a CPU, where nothing fuses them, that was two thirds of what an
EAGLE-3 step held between forward and backward. On a GPU torch's fused norm is used.

    R rows, H width, I width of the MLP
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain, computed in fp32, in the dtype of the gain. x is [..., H]."""
    if x.device.type == "cpu":
        normed: Tensor = _RMSNorm.apply(x, gain_H, eps)  # type: ignore[no-untyped-call]
        return normed
    return eager_rms_norm(x, gain_H, eps)


def eager_rms_norm(x: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    """The twin of `rms_norm`."""
    return F.rms_norm(x.float(), gain_H.shape, gain_H.float(), eps).to(gain_H.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., I]."""
    product: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The twin of `swiglu`."""
    return F.silu(gate) * up


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain_H, eps):  # type: ignore[no-untyped-def]
        wide = x.float()
        inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, gain_H, inverse)
        return (wide * inverse).mul_(gain_H).to(gain_H.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, gain_H, inverse = ctx.saved_tensors
        grad, normed = grad.float(), x.float() * inverse
        grad_gain = None
        if ctx.needs_input_grad[1]:
            grad_gain = (grad * normed).flatten(0, -2).sum(0).to(gain_H.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            scaled = grad * gain_H
            along = (scaled * normed).mean(-1, keepdim=True)
            grad_x = scaled.sub_(normed.mul_(along)).mul_(inverse).to(x.dtype)
        return grad_x, grad_gain, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad_up
