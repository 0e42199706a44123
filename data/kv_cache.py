"""RowCache: a key/value cache whose sequences advance, roll back, leave and enter independently of one another.

B sequences, Q new tokens each, S slots, g key/value heads, D head width

lengths  5  3        `update` writes the Q new keys of every sequence behind its own length
slots    kkkkk.QQ..
         kkkQQ.....
then `lengths_B += accepted` keeps what was accepted: a rollback is a length that did not grow
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 128  # slots added at a time, so that re-allocation is rare


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values [B, g, S, D], contiguous per sequence."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: "RowCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        batch, heads, _, width = key_states.shape
        value_width = width if value_states is None else value_states.shape[-1]
        slots = self.owner.num_slots
        self.keys = torch.zeros(batch, heads, slots, width, dtype=key_states.dtype, device=key_states.device)
        self.values = torch.zeros(batch, heads, slots, value_width, dtype=key_states.dtype, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens of every sequence; return all slots up to the longest end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        if self.keys.shape[2] < owner.num_slots:
            self.keys, self.values = (_grown(x, owner.num_slots) for x in (self.keys, self.values))
        if owner.same_start is not None:  # all sequences write at one place: a plain copy
            place = slice(owner.same_start, owner.same_start + key_states.shape[2])
            self.keys[:, :, place] = key_states
            self.values[:, :, place] = value_states
        else:
            rows, slots = owner.write_index
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : owner.end], self.values[:, :, : owner.end]

    def get_seq_length(self, *args: Any) -> int:
        return self.owner.end - self.owner.num_new

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.end, 0


class RowCache(Cache):
    """A transformers cache for one batch. Call `begin` before every forward pass, then change `lengths_B` as you like."""

    def __init__(self, num_layers: int, batch_size: int, device: torch.device | str = "cpu") -> None:
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.num_slots = 0
        self.end = 0  # one past the last slot that the current pass may see
        self.num_new = 0
        self.same_start: int | None = 0
        self.write_index: tuple[Tensor, Tensor] = (self.lengths_B, self.lengths_B)
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    def begin(self, num_new: int) -> tuple[Tensor, Tensor | None]:
        """Prepare a pass over `num_new` tokens of every sequence.

        Returns positions int64 [B, Q] and the mask bool [B, 1, Q, S] that lets query q of sequence b see the slots up
        to lengths_B[b] + q (None where that is all of them).
        """
        starts = self.lengths_B.tolist()
        self.num_new, self.end = num_new, max(starts) + num_new
        self.same_start = starts[0] if len(set(starts)) == 1 else None
        if self.end > self.num_slots:
            self.num_slots = self.end + _GROWTH
        positions_BQ = self.lengths_B[:, None] + torch.arange(num_new, device=self.lengths_B.device)
        if self.same_start is None:
            rows_B1 = torch.arange(len(starts), device=self.lengths_B.device)[:, None]
            self.write_index = (rows_B1, positions_BQ)
        if self.same_start is not None and num_new == 1:
            return positions_BQ, None
        slots_S = torch.arange(self.end, device=self.lengths_B.device)
        return positions_BQ, (slots_S <= positions_BQ[:, :, None])[:, None]

    def select(self, rows_B: Tensor) -> None:
        """Keep only these sequences, in this order."""
        self.lengths_B = self.lengths_B[rows_B]
        for layer in self._filled():
            layer.keys, layer.values = layer.keys[rows_B], layer.values[rows_B]

    def put(self, rows_B: Tensor, other: "RowCache") -> None:
        """Replace these sequences by those of another cache (slot refill)."""
        longest = int(other.lengths_B.max())
        self.num_slots = max(self.num_slots, longest + _GROWTH)
        self.lengths_B[rows_B] = other.lengths_B
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(
                    theirs.keys.new_empty(len(self.lengths_B), *theirs.keys.shape[1:]), theirs.values
                )
            if mine.keys.shape[2] < self.num_slots:
                mine.keys, mine.values = (_grown(x, self.num_slots) for x in (mine.keys, mine.values))
            mine.keys[rows_B, :, :longest] = theirs.keys[:, :, :longest]
            mine.values[rows_B, :, :longest] = theirs.values[:, :, :longest]

    def _filled(self) -> Iterable[Any]:
        return (layer for layer in self.layers if layer.is_initialized)


def attention_masks(config: Any, mask_BHQS: Tensor | None, positions_BQ: Tensor, end: int) -> Any:
    """What a transformers decoder takes as attention_mask: the mask, or one per layer type where some layers slide."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    slides = window is not None and (layer_types & {"sliding_attention"} or not layer_types)
    if not slides:
        return (
            mask_BHQS
            if not layer_types or layer_types == {"full_attention"} or mask_BHQS is None
            else {name: mask_BHQS for name in layer_types}
        )
    slots_S = torch.arange(end, device=positions_BQ.device)
    causal = (slots_S <= positions_BQ[:, :, None])[:, None] if mask_BHQS is None else mask_BHQS
    windowed = causal & (slots_S > positions_BQ[:, :, None] - window)[:, None]
    if not layer_types:
        return windowed
    return {name: windowed if name == "sliding_attention" else causal for name in layer_types}


def _grown(x: Tensor, slots: int) -> Tensor:
    grown = torch.zeros(*x.shape[:2], slots, x.shape[3], dtype=x.dtype, device=x.device)
    grown[:, :, : x.shape[2]] = x
    return grown
