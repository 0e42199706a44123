"""bf16 linear layers on a CPU with their weights in oneDNN's own layout, made once instead of at every call.

A decoding step multiplies few rows by all weights, so re-ordering the weights costs as much as the product: with 48
rows of SmolLM2-135M on one AMX core, F.linear reached 280 GFLOP/s and the packed product 500. Costs a second copy of
the weights.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MAX_PACKED_BYTES = 4 * 2**30  # a larger model would not leave room for the copy on the machines that we aim at


def pack_linears(module: nn.Module, rows: int) -> int:
    """Let every bf16 linear layer on the CPU use a packed copy of its weight; returns how many do. Repeatable.

    `rows` is the usual number of rows of a call; others are computed rightly, with another layout's speed. The weights
    must not change any more: the copy would not follow.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _can_pack(layer)]
    if sum(layer.weight.nbytes for layer in layers) > _MAX_PACKED_BYTES:
        return 0
    for layer in layers:
        if not hasattr(layer, "packed_rows"):
            layer.forward = _packed_forward(layer.weight.detach(), layer.bias, rows)  # type: ignore[assignment,method-assign]
            layer.packed_rows = rows  # type: ignore[assignment]
    return len(layers)


def _can_pack(layer: nn.Linear) -> bool:
    return (
        layer.weight.dtype == torch.bfloat16
        and layer.weight.device.type == "cpu"
        and not layer.weight.requires_grad
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed_forward(weight_OI: Tensor, bias_O: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """The same calls that torch.compile's freezing makes (torch/_inductor/mkldnn_lowerings.py)."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, rows)

    def forward(input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:  # the packed product has no derivative
            return F.linear(input, weight_OI, bias_O)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias_O, "none", [], "")
        return output

    return forward
