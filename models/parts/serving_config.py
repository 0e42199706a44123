"""The fields of config.json that describe a draft's decoder layers to serving engines, and back.

RoPE is written in the new form (`rope_parameters`) and in the old one (`rope_theta`, `rope_scaling`), so that readers
of either find the target's frequencies; a reader that knows both gets the same from each (fault 31).
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.models.parts.layers import LayerShape
from draftsmith.models.parts.rope import Rope, RopeSettings, rope_parameters, rope_source
from draftsmith.models.target import norm_eps


def layer_fields(
    shape: LayerShape, num_layers: int, target_config: Any, vocab_size: int, rope: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The layers' fields in the words of transformers' LlamaConfig and Qwen3Config. `rope`: where it is not the
    target's."""
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
    return fields | rope_fields(rope_source(rope, target_config))


def rope_fields(config: Any) -> dict[str, Any]:
    """RoPE in both forms, of a transformers config or of RopeSettings."""
    parameters = rope_parameters(config)
    fields: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": parameters["rope_theta"]}
    is_default = parameters["rope_type"] == "default"
    apart = ("rope_theta", "partial_rotary_factor")
    fields["rope_scaling"] = None if is_default else {k: v for k, v in parameters.items() if k not in apart}
    if "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return fields


def check_layer_fields(fields: Mapping[str, Any], target_config: Any) -> dict[str, Any] | None:
    """Refuse layers that ours cannot reproduce: biases, another activation or width, a sliding window, two RoPEs.

    Returns the RoPE settings where they are not the target's. Raises ValueError naming the field.
    """
    for name in ("attention_bias", "mlp_bias"):
        if fields.get(name):
            raise ValueError(f"config.json: {name} is true; draft layers with biases are not supported")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act is {fields['hidden_act']!r}; only 'silu' is supported")
    for name, own in (("hidden_size", target_config.hidden_size), ("rms_norm_eps", norm_eps(target_config))):
        if fields[name] != own:
            raise ValueError(f"config.json: {name} is {fields[name]}, the target's is {own}")
    window = fields.get("sliding_window")
    slides = "sliding_attention" in (fields.get("layer_types") or ())
    if slides and window is not None and window < fields["max_position_embeddings"]:
        raise ValueError(
            f"config.json: layer_types holds sliding_attention of {window} tokens; drafts here attend to everything. "
            f"For contexts below {window} tokens the two are the same: set layer_types to full_attention to say so"
        )
    return _own_rope(fields, target_config)


def _own_rope(fields: Mapping[str, Any], target_config: Any) -> dict[str, Any] | None:
    """The RoPE of either form; None where it is the target's. Where both are given they must agree."""
    forms = {"rope_parameters": fields.get("rope_parameters")}
    if "rope_theta" in fields:
        old = dict(fields.get("rope_scaling") or {"rope_type": "default"})
        old.setdefault("rope_type", old.pop("type", "default"))
        partial = {name: fields[name] for name in ("partial_rotary_factor",) if name in fields}
        forms["rope_theta with rope_scaling"] = {**old, "rope_theta": fields["rope_theta"], **partial}
    given = {name: form for name, form in forms.items() if form}
    if not given:
        raise ValueError("config.json: neither rope_parameters nor rope_theta is given")
    head_dim, longest = fields["head_dim"], fields["max_position_embeddings"]
    ropes = {name: Rope.of_target(RopeSettings(form, longest), head_dim) for name, form in given.items()}
    (name, first), *others = ropes.items()
    for other, rope in others:
        if not _is_same(first, rope):
            raise ValueError(f"config.json: {name} and {other} give other frequencies: {given[name]}, {given[other]}")
    own = rope_parameters(RopeSettings(given[name], longest))
    return None if _is_same(first, Rope.of_target(target_config, head_dim)) else own


def _is_same(one: Rope, other: Rope) -> bool:
    has_shape = one.inv_freq.shape == other.inv_freq.shape
    return (
        has_shape
        and torch.allclose(one.inv_freq, other.inv_freq.cpu(), rtol=1e-5, atol=0)
        and abs(one.scaling - other.scaling) <= 1e-5
    )
