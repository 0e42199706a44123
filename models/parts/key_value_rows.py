"""The target's keys and values of the rows that speculative decoding has committed, for drafts that attend to them.

B sequences, R rows written at once, S slots, E features of keys and values
"""

import torch
from torch import Tensor

_GROWTH = 256  # slots added at a time


class KeyValueRows:
    """[B, S, E], written at absolute positions, so that what was padding in one round is overwritten by a later one."""

    def __init__(self, batch_size: int, width: int, device: torch.device) -> None:
        self._kv_BSE = torch.zeros(batch_size, 0, width, device=device)

    def select(self, rows_B: Tensor) -> None:
        """Keep these sequences, in this order."""
        self._kv_BSE = self._kv_BSE[rows_B]

    def write(self, kv_BRE: Tensor, positions_BR: Tensor) -> Tensor:
        """Store rows at their positions; return everything up to the last of them: [B, S, E]."""
        end, (size, slots, width) = int(positions_BR.max()) + 1, self._kv_BSE.shape
        if end > slots:
            grown = kv_BRE.new_zeros(size, end + _GROWTH, width)
            grown[:, :slots] = self._kv_BSE
            self._kv_BSE = grown
        self._kv_BSE.scatter_(1, positions_BR[..., None].expand(-1, -1, width), kv_BRE)
        return self._kv_BSE[:, :end]
