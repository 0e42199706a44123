"""The fields of config.json that describe a draft's decoder layers to serving engines, and back.

RoPE is written in the new form (`rope_parameters`) and in the old one (`rope_theta`, `rope_scaling`), so that readers
of either find the target's frequencies; a reader that knows both gets the same from each (fault 31).
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.models.parts.layers import LayerShape
from draftsmith.models.parts.rope import Rope, rope_parameters


def layer_fields(shape: LayerShape, num_layers: int, target_config: Any, vocab_size: int) -> dict[str, Any]:
    """The layers' fields in the words of transformers' LlamaConfig and Qwen3Config."""
    fields: dict[str, Any] = {
        "model_type": "qwen3" if shape.has_qk_norm else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": target_config.max_position_embeddings,
        "vocab_size": vocab_size,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": target_config.bos_token_id,
        "eos_token_id": target_config.eos_token_id,
    }
    if shape.has_qk_norm:  # Qwen3Config would fill these with a sliding window for deep layers
        full_attention = ["full_attention"] * num_layers
        fields |= {"layer_types": full_attention, "sliding_window": None, "use_sliding_window": False}
        fields |= {"max_window_layers": num_layers}
    else:
        fields["mlp_bias"] = False
    return fields | rope_fields(target_config)


def rope_fields(target_config: Any) -> dict[str, Any]:
    """RoPE in both forms."""
    parameters = rope_parameters(target_config)
    fields: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": parameters["rope_theta"]}
    is_default = parameters["rope_type"] == "default"
    apart = ("rope_theta", "partial_rotary_factor")
    fields["rope_scaling"] = None if is_default else {k: v for k, v in parameters.items() if k not in apart}
    if "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return fields


def check_layer_fields(fields: Mapping[str, Any], target_config: Any) -> None:
    """Refuse layers that ours cannot reproduce: biases, another activation or width, a sliding window, another RoPE.

    Each form of RoPE that is present must give the target's frequencies. Raises ValueError naming the field.
    """
    for name in ("attention_bias", "mlp_bias"):
        if fields.get(name):
            raise ValueError(f"config.json: {name} is true; draft layers with biases are not supported")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act is {fields['hidden_act']!r}; only 'silu' is supported")
    for name in ("hidden_size", "rms_norm_eps"):
        if fields[name] != getattr(target_config, name):
            raise ValueError(f"config.json: {name} is {fields[name]}, the target's is {getattr(target_config, name)}")
    window = fields.get("sliding_window")
    slides = "sliding_attention" in (fields.get("layer_types") or ())
    if slides and window is not None and window < fields["max_position_embeddings"]:
        raise ValueError(
            f"config.json: layer_types holds sliding_attention of {window} tokens; drafts here attend to everything. "
            f"For contexts below {window} tokens the two are the same: set layer_types to full_attention to say so"
        )
    _check_rope(fields, Rope.of_target(target_config, fields["head_dim"]))


def _check_rope(fields: Mapping[str, Any], rope: Rope) -> None:
    forms = {"rope_parameters": fields.get("rope_parameters")}
    if "rope_theta" in fields:
        old = dict(fields.get("rope_scaling") or {"rope_type": "default"})
        old.setdefault("rope_type", old.get("type", "default"))
        partial = {name: fields[name] for name in ("partial_rotary_factor",) if name in fields}
        forms["rope_theta with rope_scaling"] = {**old, "rope_theta": fields["rope_theta"], **partial}
    given = {name: form for name, form in forms.items() if form}
    if not given:
        raise ValueError("config.json: neither rope_parameters nor rope_theta is given")
    for name, form in given.items():
        found = Rope.of_target(_RopeOnly(form, fields["max_position_embeddings"]), fields["head_dim"])
        same_shape = found.inv_freq.shape == rope.inv_freq.shape
        if not same_shape or not torch.allclose(found.inv_freq, rope.inv_freq.cpu(), rtol=1e-5, atol=0):
            raise ValueError(f"config.json: {name} gives other frequencies than the target's RoPE: {form}")
        if abs(found.scaling - rope.scaling) > 1e-5:
            raise ValueError(f"config.json: {name} scales by {found.scaling}, the target by {rope.scaling}")


class _RopeOnly:
    """As much of a transformers config as `Rope.of_target` reads."""

    def __init__(self, parameters: Mapping[str, Any], max_position_embeddings: int) -> None:
        self.rope_parameters = dict(parameters)
        self.max_position_embeddings = max_position_embeddings
