"""Products with a frozen matrix: packed copies give what the plain products give, and never go stale."""

import gc
import weakref

import pytest
import torch

from draftsmith.models.ops.frozen_product import FrozenProduct, frozen_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_it_is_the_plain_product(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(96, 32).to(dtype)
    rows, grads = torch.randn(num_rows, 32).to(dtype), torch.randn(num_rows, 96).to(dtype)
    plain, found = FrozenProduct(matrix), frozen_product(matrix, 16)
    torch.testing.assert_close(found.to_logits(rows), plain.to_logits(rows))
    torch.testing.assert_close(found.back(grads), plain.back(grads))


def test_it_is_packed_once_and_again_after_a_change_in_place() -> None:
    matrix, rows = torch.randn(24, 8), torch.randn(3, 8)
    first = frozen_product(matrix, 16)
    assert frozen_product(matrix, 16) is first
    matrix.mul_(2)
    torch.testing.assert_close(frozen_product(matrix, 16).to_logits(rows), rows @ matrix.T)


def test_copies_go_with_the_matrix() -> None:
    matrix = torch.randn(24, 8)
    gone = weakref.ref(frozen_product(matrix, 16))
    del matrix
    gc.collect()
    assert gone() is None


def test_a_trained_matrix_is_never_copied() -> None:
    matrix = torch.randn(24, 8, requires_grad=True)
    assert type(frozen_product(matrix, 16)) is FrozenProduct
    torch.testing.assert_close(frozen_product(matrix, 16).matrix_VH, matrix.detach())
