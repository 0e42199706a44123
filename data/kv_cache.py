"""RowCache: a key/value cache whose sequences advance, roll back, leave and enter independently of one another.

B sequences, Q new tokens each, S slots, g key/value heads, D head width

    lengths  5  3        `update` writes the Q new keys of every sequence behind its own length
    slots    kkkkk.QQ..
             kkkQQ.....
    then `advance(accepted)` keeps what was accepted: the rest lies behind the length and is overwritten
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 128  # slots added at a time, so that re-allocation is rare


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values [B, g, S, D], contiguous per sequence."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: "RowCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate zeros (not garbage: a masked slot's weight is 0, and 0 * NaN is NaN)."""
        batch, heads, _, width = key_states.shape
        value_width = width if value_states is None else value_states.shape[-1]
        self.keys = key_states.new_zeros(batch, heads, self.owner.num_slots, width)
        self.values = key_states.new_zeros(batch, heads, self.owner.num_slots, value_width)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens of every sequence; return all slots up to the longest end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.grow()
        owner = self.owner
        if owner.same_start is not None:  # all sequences write at one place: a plain copy
            place = slice(owner.same_start, owner.same_start + key_states.shape[2])
            self.keys[:, :, place] = key_states
            self.values[:, :, place] = value_states
        else:
            rows, slots = owner.write_index
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : owner.end], self.values[:, :, : owner.end]

    def grow(self) -> None:
        """Re-allocate when the owner has more slots by now."""
        if self.keys.shape[2] < self.owner.num_slots:
            self.keys, self.values = (_grown(x, self.owner.num_slots) for x in (self.keys, self.values))

    def get_seq_length(self, *args: Any) -> int:
        """See CacheLayerMixin; the longest sequence's."""
        return self.owner.end - self.owner.num_new

    def get_max_length(self) -> int:
        """See CacheLayerMixin; -1 is unbounded."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See CacheLayerMixin: the slots that `update` returns, and that they start at 0."""
        return self.owner.end, 0


class RowCache(Cache):  # type: ignore[misc]
    """A transformers cache for one batch. Call `begin` before every forward pass, and `advance` after it."""

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

        Returns positions int64 [B, Q] and the mask of `mask_BHQS`, None where plain causal attention says the same.
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
        if self.same_start is not None and (num_new == 1 or self.same_start == 0):
            return positions_BQ, None
        return positions_BQ, mask_BHQS(positions_BQ, self.end)

    def advance(self, counts_B: Tensor | int) -> None:
        """Keep so many of the tokens that the last pass wrote; the others are overwritten by the next."""
        self.lengths_B = self.lengths_B + counts_B

    def rollback(self, lengths_B: Tensor) -> None:
        """Forget what lies behind these lengths."""
        assert bool((lengths_B <= self.lengths_B).all()), f"{lengths_B} is not a rollback from {self.lengths_B}"
        self.lengths_B = lengths_B.clone()

    def reset_rows(self, rows: Tensor) -> None:
        """Empty these sequences (indices); they cost nothing but their place in the batch."""
        self.lengths_B = self.lengths_B.index_fill(0, rows, 0)

    def select(self, rows_B: Tensor) -> None:
        """Keep only these sequences, in this order."""
        self.lengths_B = self.lengths_B[rows_B]
        for layer in self._filled():
            layer.keys, layer.values = layer.keys[rows_B], layer.values[rows_B]

    def rows(self, layers: Iterable[int], positions_BR: Tensor) -> Tensor:
        """What these layers hold at these positions, laid out as by `side_by_side`: [B, R, E]."""

        def at(x_BgSD: Tensor) -> Tensor:
            index = positions_BR[:, None, :, None].expand(-1, x_BgSD.shape[1], -1, x_BgSD.shape[3])
            return x_BgSD.gather(2, index)

        return side_by_side([(at(self.layers[j].keys), at(self.layers[j].values)) for j in layers])

    def put(self, rows_R: Tensor, other: "RowCache") -> None:
        """Replace these sequences by those of another cache (slot refill)."""
        longest = int(other.lengths_B.max())
        self.num_slots = max(self.num_slots, longest + _GROWTH)
        self.lengths_B = self.lengths_B.index_copy(0, rows_R, other.lengths_B)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if not mine.is_initialized:
                shape = theirs.keys[:1].expand(len(self.lengths_B), -1, -1, -1)
                mine.lazy_initialization(shape, theirs.values)
            mine.grow()
            mine.keys[rows_R, :, :longest] = theirs.keys[:, :, :longest]
            mine.values[rows_R, :, :longest] = theirs.values[:, :, :longest]

    def _filled(self) -> Iterable[Any]:
        return (layer for layer in self.layers if layer.is_initialized)


def mask_BHQS(positions_BQ: Tensor, end: int, window: int | None = None) -> Tensor:
    """bool [B, 1, Q, S]: a query sees the slots up to its position, as far back as a window reaches."""
    distance_BQS = positions_BQ[:, :, None] - torch.arange(end, device=positions_BQ.device)
    is_seen_BQS = distance_BQS >= 0
    if window is not None:
        is_seen_BQS &= distance_BQS < window
    return is_seen_BQS[:, None]


def attention_masks(
    config: Any, mask: Tensor | None, positions_BQ: Tensor, end: int, dtype: torch.dtype | None = None
) -> Any:
    """What a transformers decoder takes as attention_mask: the mask, or one per layer type where some layers slide.

    With a `dtype`, masks are additive: made once per pass, where a bool mask would be converted in every layer.
    """
    layer_types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    slides = window is not None and end > window and (not layer_types or "sliding_attention" in layer_types)
    full = _additive(mask, dtype)
    if not slides:  # a window that reaches back to the start hides nothing
        return full if layer_types <= {"full_attention"} else {name: full for name in layer_types}
    windowed = _additive(mask_BHQS(positions_BQ, end, window), dtype)
    if not layer_types:
        return windowed
    return {name: windowed if name == "sliding_attention" else full for name in layer_types}


def _additive(mask: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if mask is None or dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def side_by_side(keys_values: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Keys and values [B, g, T, D] of some layers as features of their tokens: [B, T, E].

    E runs over the layers; of each, first the keys of all heads (g*D), then the values.
    """
    return torch.cat([x.transpose(1, 2).flatten(2) for pair in keys_values for x in pair], dim=-1)


def _grown(x: Tensor, slots: int) -> Tensor:
    grown = x.new_zeros(*x.shape[:2], slots, x.shape[3])
    grown[:, :, : x.shape[2]] = x
    return grown
