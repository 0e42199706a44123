"""Batch: the one contract between the data and the heads: B packed rows of T tokens with the target's states.

    B rows, T tokens in a packed row, A auxiliary layers, H target width, F = A*H, E key/value features

A packed row holds several documents one after another; `document_ids_BT` tells them apart (-1 is padding) and
`position_ids_BT` restarts at 0 in each. No head may let one document see another.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What a head trains on. Every tensor is on the same device; states have the capture's dtype."""

    input_ids_BT: Tensor  # int64, target vocabulary
    loss_mask_BT: Tensor  # bool, True where the target generated the token
    document_ids_BT: Tensor  # int64, -1 = padding; ids differ between the documents of a row
    position_ids_BT: Tensor  # int64, position inside the document
    aux_BTF: Tensor  # the captured auxiliary layers, concatenated in ascending layer order
    last_BTH: Tensor  # the residual stream after the last layer, before the final norm ("pre-norm")
    kv_BTE: Tensor | None = None  # of each layer of needs.kv_layers, ascending: its keys, then its values; see there

    def __post_init__(self) -> None:
        rows = self.input_ids_BT.shape
        for name, tensor in self._tensors():
            shape = tuple(tensor.shape)
            assert shape[:2] == rows, f"{name} has shape {shape}, input_ids_BT {tuple(rows)}"

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        return Batch(**{name: tensor.to(device) for name, tensor in self._tensors()})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def same_document(self, offset: int) -> Tensor:
        """bool [B, T]: token t+offset exists and is of the same document as token t (padding: False)."""
        documents_BT = self.document_ids_BT
        if offset >= documents_BT.shape[1]:
            return torch.zeros_like(documents_BT, dtype=torch.bool)
        shifted_BT = torch.full_like(documents_BT, -2)
        shifted_BT[:, : documents_BT.shape[1] - offset] = documents_BT[:, offset:]
        return (documents_BT >= 0) & (documents_BT == shifted_BT)


def shift_left(values_BT: Tensor, offset: int) -> Tensor:
    """values[t] := values[t+offset], zeros behind the end; for tokens, masks and states along dimension 1."""
    if offset == 0:
        return values_BT
    shifted = torch.zeros_like(values_BT)
    if offset < values_BT.shape[1]:
        shifted[:, :-offset] = values_BT[:, offset:]
    return shifted
