"""MTP drafting as a server does it, one sequence, one step at a time, with a real key/value cache.

The decoder layer, its rotary embedding and its cache are transformers' own classes; the rest is written from vLLM 0.32
(mimo_mtp.py, qwen3_5_mtp.py, llm_base_proposer.py). Shares no code with models/. Differentiable.

T committed tokens, H width, V vocabulary
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, Qwen2Config, Qwen3_5TextConfig
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5


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
    is_mimo, eps = fields["architectures"] == ["MiMoForCausalLM"], fields["rms_norm_eps"]
    prefix = "model.mtp_layers.0." if is_mimo else "mtp.layers.0."
    layer, rotary = _layer(fields, is_mimo)
    layer_weights = {name: w[prefix + name] for name, _ in layer.named_parameters()}
    cache = DynamicCache()

    def rms(x: Tensor, name: str) -> Tensor:
        gain = w[name + ".weight"] if is_mimo else 1 + w[name + ".weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain

    def run(tokens: list[int], state_RH: Tensor, first: int) -> Tensor:
        """Read rows at the positions from `first` on into the cache; the final norm's output of the last."""
        positions_1R = torch.arange(first, first + len(tokens))[None]
        embedded_RH = w["model.embed_tokens.weight"][torch.tensor(tokens)]
        if is_mimo:
            embedded_RH = torch.where(positions_1R[0, :, None] == 0, 0.0, embedded_RH)
            joined = [rms(state_RH, prefix + "hidden_layernorm"), rms(embedded_RH, prefix + "token_layernorm")]
            hidden_RH = torch.cat(joined, dim=-1) @ w[prefix + "input_proj.weight"].T
        else:
            joined = [rms(embedded_RH, "mtp.pre_fc_norm_embedding"), rms(state_RH, "mtp.pre_fc_norm_hidden")]
            hidden_RH = torch.cat(joined, dim=-1) @ w["mtp.fc.weight"].T
        mask = torch.full((len(tokens), first + len(tokens)), -torch.inf).triu(first + 1)[None, None]
        arguments = {
            "attention_mask": mask,
            "position_ids": positions_1R,
            "past_key_values": cache,
            "position_embeddings": rotary(hidden_RH[None], positions_1R),
        }
        output = functional_call(layer, layer_weights, (hidden_RH[None],), arguments)
        return rms(output[0, -1:], prefix + "final_layernorm" if is_mimo else "mtp.norm")

    head_VH = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    output_1H = run([*ids[1:], forced[0]], last_TH if is_mimo else rms(last_TH, "model.norm"), 0)
    logits = [output_1H[0] @ head_VH.T]
    for step in range(1, num_steps):
        token = forced[step] if step < len(forced) else int(logits[-1].argmax())
        output_1H = run([token], output_1H, len(ids) - 1 + step)
        logits.append(output_1H[0] @ head_VH.T)
    return logits


def _layer(fields: Mapping[str, Any], is_mimo: bool) -> tuple[nn.Module, nn.Module]:
    """A decoder layer of the family, to be called with other weights, and its rotary embedding."""
    known = {name: value for name, value in fields.items() if name not in ("architectures", "model_type", "dtype")}
    config: Any = (Qwen2Config if is_mimo else Qwen3_5TextConfig)(**known)
    config._attn_implementation = "eager"
    if is_mimo:
        return qwen2.Qwen2DecoderLayer(config, 0), qwen2.Qwen2RotaryEmbedding(config)
    return qwen3_5.Qwen3_5DecoderLayer(config, 0), qwen3_5.Qwen3_5TextRotaryEmbedding(config)
