"""MTP drafting as a server does it, one sequence, one step at a time, with a real key/value cache.

The decoder layer, its rotary embedding and its cache are transformers' own classes; the rest is written from vLLM 0.32
(model_executor/models/*_mtp.py, llm_base_proposer.py). Shares no code with models/. Differentiable.

T committed tokens, H width, V vocabulary
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    Glm4MoeConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

# model_type -> (config, decoder layer, rotary embedding)
_CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "qwen2": (Qwen2Config, qwen2.Qwen2DecoderLayer, qwen2.Qwen2RotaryEmbedding),
    "qwen3_5_text": (Qwen3_5TextConfig, qwen3_5.Qwen3_5DecoderLayer, qwen3_5.Qwen3_5TextRotaryEmbedding),
    "qwen3_5_moe_text": (
        Qwen3_5MoeTextConfig,
        qwen3_5_moe.Qwen3_5MoeDecoderLayer,
        qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding,
    ),
    "qwen3_next": (Qwen3NextConfig, qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRotaryEmbedding),
    "glm4_moe": (Glm4MoeConfig, glm4_moe.Glm4MoeDecoderLayer, glm4_moe.Glm4MoeRotaryEmbedding),
    "deepseek_v3": (DeepseekV3Config, deepseek_v3.DeepseekV3DecoderLayer, deepseek_v3.DeepseekV3RotaryEmbedding),
}


def draft_logits(
    fields: Mapping[str, Any],
    w: Mapping[str, Tensor],
    ids: Sequence[int],
    last_TH: Tensor,
    forced: Sequence[int],
    num_steps: int,
) -> list[Tensor]:
    """Logits [V] of each step after the committed `ids`, whose pre-norm last states are `last_TH`.

    `forced` holds the bonus and then the tokens that are fed to the later steps; where it ends, the draft feeds its own
    most likely token. `fields` and `w` are the config and all tensors of a target that holds the layer.
    """
    kind, eps, num_layers = fields["model_type"], fields["rms_norm_eps"], fields["num_hidden_layers"]
    is_qwen = kind.startswith("qwen3")
    names = {
        "mtp.": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "model.mtp_layers.0.": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        f"model.layers.{num_layers}.": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    }
    prefix = "mtp." if is_qwen else "model.mtp_layers.0." if kind == "qwen2" else f"model.layers.{num_layers}."
    embedding_norm, state_norm, projection, final_norm = (prefix + name for name in names[prefix])
    layer, rotary = _layer(fields, num_layers - 1)
    layer_weights = _layer_weights(layer, w, prefix + "layers.0." if is_qwen else prefix)
    cache = DynamicCache()

    def rms(x: Tensor, name: str) -> Tensor:
        gain = 1 + w[name + ".weight"] if is_qwen else w[name + ".weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain

    def run(tokens: list[int], state_RH: Tensor, first: int) -> Tensor:
        """Read rows at the positions from `first` on into the cache; the residual stream behind the layer, [1, H]."""
        positions_1R = torch.arange(first, first + len(tokens))[None]
        embedded_RH = w["model.embed_tokens.weight"][torch.tensor(tokens)]
        if not is_qwen:
            embedded_RH = torch.where(positions_1R[0, :, None] == 0, 0.0, embedded_RH)
        joined = [rms(embedded_RH, embedding_norm), rms(state_RH, state_norm)]
        joined = joined[::-1] if kind == "qwen2" else joined
        hidden_RH = torch.cat(joined, dim=-1) @ w[projection + ".weight"].T
        mask = torch.full((len(tokens), first + len(tokens)), -torch.inf).triu(first + 1)[None, None]
        arguments = {
            "attention_mask": mask,
            "position_ids": positions_1R,
            "past_key_values": cache,
            "position_embeddings": rotary(hidden_RH[None], positions_1R),
        }
        return functional_call(layer, layer_weights, (hidden_RH[None],), arguments)[0, -1:]  # type: ignore[no-any-return]

    head_VH = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    residual_1H = run([*ids[1:], forced[0]], last_TH if kind == "qwen2" else rms(last_TH, "model.norm"), 0)
    logits = [rms(residual_1H, final_norm)[0] @ head_VH.T]
    for step in range(1, num_steps):
        token = forced[step] if step < len(forced) else int(logits[-1].argmax())
        fed_1H = residual_1H if kind == "glm4_moe" else rms(residual_1H, final_norm)
        residual_1H = run([token], fed_1H, len(ids) - 1 + step)
        logits.append(rms(residual_1H, final_norm)[0] @ head_VH.T)
    return logits


def _layer(fields: Mapping[str, Any], index: int) -> tuple[nn.Module, nn.Module]:
    """A decoder layer of the family, to be called with other weights, and its rotary embedding."""
    config_class, layer_class, rotary_class = _CLASSES[fields["model_type"]]
    config = config_class(**{k: v for k, v in fields.items() if k not in ("architectures", "model_type", "dtype")})
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    layer = layer_class(config, index)
    layer.self_attn.layer_idx = 0  # in its cache
    return layer, rotary_class(config)


def _layer_weights(layer: nn.Module, w: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The layer's tensors in transformers' names: experts that the checkpoint holds one by one are stacked."""
    found = {}
    for name in (*dict(layer.named_parameters()), *dict(layer.named_buffers())):
        if prefix + name in w:
            found[name] = w[prefix + name]
            continue
        group, _, part = (prefix + name).rpartition(".")
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        num_experts = len({key.split(".experts.")[1].split(".")[0] for key in w if key.startswith(group)})
        stacks = [torch.stack([w[f"{group}.{e}.{each}.weight"] for e in range(num_experts)]) for each in parts]
        found[name] = torch.cat(stacks, dim=1)
    return found
