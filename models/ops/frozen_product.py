"""Products with a frozen matrix, from packed copies of it on a CPU.

A frozen lm_head is multiplied by chunk after chunk of rows, to logits and back. oneDNN with the matrix in its own
layout, made once, is up to twice as fast as F.linear, which re-orders the matrix at every call (AMD Zen 4, two cores,
85 rows, 49,152 x 576 in fp32: 197 against 96 GFLOP/s to logits, 190 against 128 back; 16-bit 340 against 270).

    R rows, V rows of the matrix, H its width
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_MAX_PACKED_BYTES = 2 * 2**30  # both copies of a larger matrix would be missed elsewhere
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class FrozenProduct:
    """rows [R, H] -> rows @ matrix^T [R, V], and gradients [R, V] -> gradients @ matrix [R, H]. Without a graph."""

    def __init__(self, matrix_VH: Tensor) -> None:
        self.matrix_VH = matrix_VH.detach()

    def to_logits(self, rows_RH: Tensor) -> Tensor:
        """[R, H] -> [R, V]."""
        return F.linear(rows_RH, self.matrix_VH)

    def back(self, grad_RV: Tensor) -> Tensor:
        """[R, V] -> [R, H]."""
        return grad_RV @ self.matrix_VH


class _PackedProduct(FrozenProduct):
    """The same from oneDNN's layouts (the calls of torch/_inductor/mkldnn_lowerings.py)."""

    def __init__(self, matrix_VH: Tensor, num_rows: int) -> None:
        super().__init__(matrix_VH)
        self._forth = torch.ops.mkldnn._reorder_linear_weight(self.matrix_VH, num_rows)
        self._back = torch.ops.mkldnn._reorder_linear_weight(self.matrix_VH.T, num_rows)

    def to_logits(self, rows_RH: Tensor) -> Tensor:
        logits_RV: Tensor = torch.ops.mkldnn._linear_pointwise(rows_RH, self._forth, None, "none", [], "")
        return logits_RV

    def back(self, grad_RV: Tensor) -> Tensor:
        grad_RH: Tensor = torch.ops.mkldnn._linear_pointwise(grad_RV, self._back, None, "none", [], "")
        return grad_RH


@dataclass(frozen=True)
class _Kept:
    product: FrozenProduct
    version: int  # of the tensor when it was packed: a later change in place makes the copy stale


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def frozen_product(matrix_VH: Tensor, num_rows: int) -> FrozenProduct:
    """The products with this matrix, packed where that pays; packed once for as long as the tensor lives.

    `num_rows` is the usual number of rows of a call: a hint for the layout, others are computed as rightly.
    """
    if not _can_pack(matrix_VH):
        return FrozenProduct(matrix_VH)
    found: _Kept | None = _kept.get(matrix_VH)  # type: ignore[no-untyped-call]
    if found is None or found.version != matrix_VH._version:
        found = _Kept(_PackedProduct(matrix_VH, num_rows), matrix_VH._version)
        _kept[matrix_VH] = found
    return found.product


def _can_pack(matrix_VH: Tensor) -> bool:
    """A trained matrix changes at every step; the copy would have to be made anew each time."""
    return (
        matrix_VH.device.type == "cpu"
        and not matrix_VH.requires_grad
        and matrix_VH.dtype in _PACKED_DTYPES
        and 2 * matrix_VH.nbytes <= _MAX_PACKED_BYTES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (matrix_VH.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )
