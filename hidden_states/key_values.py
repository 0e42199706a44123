"""The target's keys and values of chosen layers, in a pass of transformers: what a head reads that attends to them.

    B rows, T tokens, g key/value heads, D head width, E features of all chosen layers (data/kv_cache.py `side_by_side`)

A cache that stores nothing stands in for the target's own: each layer hands it its keys and values, normed and
rotated, and attends to what it gets back. No hook on a projection could know which norms and rotations follow it.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.data.kv_cache import side_by_side


def kv_width(config: Any, layers: Sequence[int]) -> int:
    """E: how many features the keys and values of these layers are per token, by the target's text config.

    Raises ValueError naming a layer that the target does not have, or that has no keys and values of its own.
    """
    num_own = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    wrong = [layer for layer in layers if not 0 <= layer < num_own]
    if wrong:
        raise ValueError(f"layer {wrong[0]} has no keys and values of its own; layers 0 to {num_own - 1} have")
    return sum(2 * heads * width for heads, width in (_heads(config, layer) for layer in layers))


def _heads(config: Any, layer: int) -> tuple[int, int]:
    """(key/value heads, head width) of a layer; some targets give each layer its own."""
    own = config.per_layer_config[layer] if getattr(config, "per_layer_config", None) else config
    heads = int(getattr(own, "num_key_value_heads", None) or own.num_attention_heads)
    return heads, int(getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads)


class KeyValueTap(Cache):  # type: ignore[misc]
    """The cache of one pass over whole rows. Give `arguments(decoder)` to the decoder, then take `features`."""

    def __init__(self, num_layers: int, wanted: Sequence[int]) -> None:
        super().__init__(layers=[_TapLayer(layer in wanted) for layer in range(num_layers)])
        self._wanted = tuple(wanted)

    def arguments(self, decoder: Any) -> dict[str, Any]:
        """What the decoder is called with; transformers 5.24 renamed the argument."""
        name = "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"
        return {"use_cache": True, name: self}

    def features(self) -> Tensor:
        """[B, T, E], after the pass. Raises ValueError naming a layer that has shown no keys and values."""
        silent = [layer for layer in self._wanted if self.layers[layer].found is None]
        if silent:
            raise ValueError(f"layer {silent[0]} attends without keys and values that could be captured")
        return side_by_side([self.layers[layer].found for layer in self._wanted])


class _TapLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: gives back what it is shown, and remembers it where it is wanted."""

    is_compileable = False
    is_sliding = False

    def __init__(self, is_wanted: bool) -> None:
        super().__init__()
        self.is_wanted = is_wanted
        self.found: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing is stored; see CacheLayerMixin."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See CacheLayerMixin."""
        if self.is_wanted:
            self.found = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """See CacheLayerMixin; nothing comes before the pass."""
        return 0

    def get_max_length(self) -> int:
        """See CacheLayerMixin; -1 is unbounded."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See CacheLayerMixin."""
        return query_length, 0


def whole_pass(decoder: Any, tokens_BT: Tensor, kv_layers: Sequence[int]) -> Tensor | None:
    """Run the decoder over whole rows, without gradients; the features of `kv_layers`, None where there are none."""
    with torch.no_grad():
        if not kv_layers:
            decoder(input_ids=tokens_BT, use_cache=False)
            return None
        tap = KeyValueTap(len(decoder.layers), kv_layers)
        decoder(input_ids=tokens_BT, **tap.arguments(decoder))
        return tap.features()
