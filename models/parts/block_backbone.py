"""The backbone of block drafting (DFlash, arXiv:2602.06036): context keys and values injected into every layer.

    B sequences, X any leading dimensions, M tokens of all packed rows, N blocks, S slots of a block, R new rows,
    H width, F = auxiliary layers * H, g key/value heads, D head width, L layers

        context    c = hidden_norm(fc(g))            once per token; its keys and values of all layers in one product
        block      z = [anchor, MASK, .., MASK]      at the positions a, a+1, ..; the same k_proj, v_proj as the context
        layer      z attends to the context before a, and in both directions to its own block

Parameter names are those that serving engines load; layers are of Qwen3's type (norms of queries and keys) whatever the
target. The draft cache holds the context alone: a round's block leaves nothing behind.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.batch import Batch
from draftsmith.models.head import Context
from draftsmith.models.ops.block_attention import block_attention, plan_tiles
from draftsmith.models.parts.anchor_blocks import Blocks
from draftsmith.models.parts.draft_cache import DraftCache
from draftsmith.models.parts.layers import Angles, LayerShape, Projections, RMSNorm, SwiGLU
from draftsmith.models.parts.rope import Rope, rope_source, rotate
from draftsmith.models.parts.serving_config import check_layer_fields, layer_fields
from draftsmith.models.target import FrozenTarget

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class BlockLayer(nn.Module):
    """A decoder layer whose attention is given by the caller."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Projections(shape, shape.hidden_size)
        self.mlp = SwiGLU(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, state: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Residual stream [X, H] -> the same after this layer; `attend` takes queries, keys and values of the block."""
        mixed, attention = self.input_layernorm(state), self.self_attn
        # By their weights, as the context uses them: ZeRO-3 cannot follow a weight that is used in both ways.
        k, v = (F.linear(mixed, p.weight) for p in (attention.k_proj, attention.v_proj))
        k, v = (x.view(*x.shape[:-1], -1, attention.head_dim) for x in (k, v))
        keys = rotate(attention.k_norm(k).to(k.dtype), angles)
        state = state + attention.output(attend(attention.queries(mixed, angles), keys, v))
        return state + self.mlp(self.post_attention_layernorm(state))  # type: ignore[no-any-return]


class BlockBackbone(nn.Module):
    """See the module docstring. Outputs are residual streams; `norm` is for the rows that somebody needs."""

    def __init__(
        self,
        target: FrozenTarget,
        shape: LayerShape,
        num_layers: int,
        num_aux: int,
        mask_token_id: int | None,
        window: int | None,
        rope: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.target, self.window, self.own_rope = shape, target, window, rope
        self.mask_token_id = _default_mask(target.config) if mask_token_id is None else mask_token_id
        if not 0 <= self.mask_token_id < target.embedding_VH.shape[0]:
            last = target.embedding_VH.shape[0] - 1
            raise ValueError(f"model.mask_token_id is {self.mask_token_id}; the target's embedding ends at {last}")
        self.fc = nn.Linear(num_aux * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.rope = Rope.of_target(rope_source(rope, target.config), shape.head_dim, target.embedding_VH.device)
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=0.02)  # the initializer_range of Qwen3 and of all references

    def context(self, aux_XF: Tensor, positions_X: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [X, g, D] of every layer for context rows."""
        context_XH = self.hidden_norm(self.fc(aux_XF.to(self.fc.weight.dtype)))
        attentions = [layer.self_attn for layer in self._layers()]
        projections = [p.weight for attention in attentions for p in (attention.k_proj, attention.v_proj)]
        all_X = F.linear(context_XH, torch.cat(projections))  # k and v of layer 0, k and v of layer 1, ..
        all_XPgD = all_X.view(*positions_X.shape, len(projections), -1, self.shape.head_dim)
        angles, found = self.rope.angles(positions_X), []
        for layer, attention in enumerate(attentions):
            k, v = all_XPgD[..., 2 * layer, :, :], all_XPgD[..., 2 * layer + 1, :, :]
            found.append((rotate(attention.k_norm(k).to(k.dtype), angles), v))
        return found

    def context_of(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """The context rows of a whole packed batch, [M, g, D] per layer."""
        return self.context(batch.aux_BTF.flatten(0, 1), batch.position_ids_BT.flatten())

    def run(self, context: list[tuple[Tensor, Tensor]], batch: Batch, blocks: Blocks, num_slots: int) -> Tensor:
        """Blocks of a packed batch on its context rows: all slots, [N, S, H]."""
        device = batch.input_ids_BT.device
        tiles = plan_tiles(blocks.starts, blocks.anchors, num_slots, self.window, device)
        anchors_N = torch.tensor(blocks.anchors, device=device)

        def attend_of(layer: int) -> Attend:
            keys, values = context[layer]
            return lambda q, k, v: block_attention(q, keys, values, k, v, tiles)

        ids_N, positions_N = batch.input_ids_BT.flatten()[anchors_N], batch.position_ids_BT.flatten()[anchors_N]
        return self._run(ids_N, positions_N, num_slots, attend_of)

    def start(self, batch_size: int, device: torch.device) -> DraftCache:
        """An empty cache of context keys and values."""
        return DraftCache(self.shape, len(self.layers), batch_size, device)

    def draft(self, cache: DraftCache, context: Context, num_slots: int) -> Tensor:
        """Take the newly committed rows into the cache and run one block per sequence: [B, S, H]."""
        device, last_B = context.num_rows_B.device, context.num_rows_B - 1
        anchors_B = context.start_B + context.num_rows_B
        positions_BR = context.start_B[:, None] + torch.arange(context.next_ids_BR.shape[1], device=device)
        cached = [
            cache.write(layer, keys, values, positions_BR)
            for layer, (keys, values) in enumerate(self.context(context.aux_BRF, positions_BR))
        ]
        tokens_K = torch.arange(cached[0][0].shape[2], device=device)
        slots_S = torch.arange(num_slots, device=device)
        is_visible = (tokens_K < anchors_B[:, None])[:, None].expand(-1, num_slots, -1)
        if self.window is not None:
            is_visible = is_visible & (tokens_K > (anchors_B[:, None] + slots_S)[..., None] - self.window)
        is_visible = torch.cat([is_visible, is_visible.new_ones(len(last_B), num_slots, num_slots)], dim=-1)[:, None]

        def attend_of(layer: int) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys, values = (torch.cat([old, x.transpose(1, 2)], dim=2) for old, x in zip(cached[layer], (k, v)))  # noqa: B905
                attended = F.scaled_dot_product_attention(
                    q.transpose(1, 2), keys, values, attn_mask=is_visible, enable_gqa=True
                )
                return attended.transpose(1, 2)

            return attend

        bonus_B = context.next_ids_BR.gather(1, last_B[:, None])[:, 0]
        return self._run(bonus_B, anchors_B, num_slots, attend_of)

    def _run(
        self, anchor_ids_N: Tensor, positions_N: Tensor, num_slots: int, attend_of: Callable[[int], Attend]
    ) -> Tensor:
        ids_NS = torch.full((len(anchor_ids_N), num_slots), self.mask_token_id, device=anchor_ids_N.device)
        ids_NS[:, 0] = anchor_ids_N
        angles = self.rope.angles(positions_N[:, None] + torch.arange(num_slots, device=ids_NS.device))
        state = self.target.embed(ids_NS).to(self.fc.weight.dtype)
        for index, layer in enumerate(self._layers()):
            state = layer(state, angles, attend_of(index))
        return state

    def _layers(self) -> list[BlockLayer]:
        return cast(list[BlockLayer], list(self.layers))

    def serving_fields(self) -> dict[str, Any]:
        """The layers' fields of config.json. `is_causal` is vLLM's first word on blocks, before any other field."""
        config, vocab_size = self.target.config, self.target.vocab_size
        fields = layer_fields(self.shape, len(self.layers), config, vocab_size, self.own_rope)
        if self.window is not None:
            sliding = ["sliding_attention"] * len(self.layers)
            fields |= {"layer_types": sliding, "sliding_window": self.window, "use_sliding_window": True}
        return fields | {"is_causal": False}


def layers_of_export(fields: Mapping[str, Any], target_config: Any) -> tuple[int | None, dict[str, Any] | None]:
    """Check the layers' fields of an exported folder, ours or another trainer's: its window and its RoPE.

    None is full attention, and the RoPE of the target. `fields` are those of the layers joined with those of the
    method. Raises ValueError for what blocks here are not.
    """
    kinds = set(fields.get("layer_types") or ("full_attention",))
    if len(kinds) > 1:
        raise ValueError(f"config.json: layer_types mixes {' and '.join(sorted(kinds))}; give all layers the same")
    rope = check_layer_fields({**fields, "layer_types": None}, target_config)
    if kinds == {"full_attention"}:
        return None, rope
    nested = fields.get("dflash_config") or {}
    is_causal = fields.get("is_causal", nested.get("causal", not fields.get("sliding_window_non_causal", False)))
    if is_causal:
        raise ValueError(
            "config.json: the sliding layers are causal inside a block; blocks here see themselves in both directions. "
            "If the head was trained so, set is_causal to false in config.json"
        )
    return int(nested.get("swa_window_size") or fields["sliding_window"]), rope


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` input-of ids spread from the output of layer 1 to that of layer n-3, as all trainers of DFlash choose."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    if count == 1:
        return (num_layers // 2 + 1,)
    outputs = {round(first + i * (last - first) / (count - 1)) for i in range(count)}
    return tuple(sorted(output + 1 for output in outputs))


def _default_mask(target_config: Any) -> int:
    """The end-of-sequence token: no round starts from it, so inside a block it can mean nothing else."""
    eos = target_config.eos_token_id
    first = eos[0] if isinstance(eos, list) else eos
    if first is None:
        raise ValueError("model.mask_token_id is not set and the target has no eos_token_id; give an unused token id")
    return int(first)
