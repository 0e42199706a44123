"""A draft's key/value cache between the rounds of speculative decoding.

B sequences, R rows written at once, g key/value heads, S slots, D head width
"""

import torch
from torch import Tensor

from draftsmith.models.parts.layers import LayerShape


class DraftCache:
    """The draft's key/value cache: [B, g, S, D] per layer, written at absolute positions, so that a round's speculative
    rows are overwritten by the committed rows of the next round."""

    _GROWTH = 256  # slots added at a time

    def __init__(self, shape: LayerShape, num_layers: int, batch_size: int, device: torch.device) -> None:
        self._keys = [
            torch.empty(batch_size, shape.num_kv_heads, 0, shape.head_dim, device=device) for _ in range(num_layers)
        ]
        self._values = list(self._keys)

    def select(self, rows_B: Tensor) -> None:
        """Keep these sequences, in this order."""
        self._keys = [k[rows_B] for k in self._keys]
        self._values = [v[rows_B] for v in self._values]

    def write(self, layer: int, keys_BRgD: Tensor, values_BRgD: Tensor, positions_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Store rows at their positions; return the cache up to the last of them: [B, g, S, D]."""
        end = int(positions_BR.max()) + 1
        if end > self._keys[layer].shape[2]:
            self._grow(layer, end + self._GROWTH, keys_BRgD.dtype)
        index = positions_BR[:, None, :, None].expand(-1, keys_BRgD.shape[2], -1, keys_BRgD.shape[3])
        self._keys[layer].scatter_(2, index, keys_BRgD.transpose(1, 2))
        self._values[layer].scatter_(2, index, values_BRgD.transpose(1, 2))
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def _grow(self, layer: int, size: int, dtype: torch.dtype) -> None:
        for caches in (self._keys, self._values):
            old = caches[layer]
            caches[layer] = torch.zeros(*old.shape[:2], size, old.shape[3], dtype=dtype, device=old.device)
            caches[layer][:, :, : old.shape[2]] = old
