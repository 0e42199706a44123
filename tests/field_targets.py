"""Tiny random models of the architectures that the shipped recipes are for, and of others with rarer conventions.

Each keeps what makes its architecture special: layer types, experts, latent or linear attention, a multimodal wrapper,
scales of embeddings and logits, shared keys. Names of the first group are those of the recipes, up to the method.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import BOS, EOS, VOCAB, tiny_tokenizer
from transformers import PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_GEMMA4 = {
    "layer_types": _SLIDING,
    "sliding_window": 8,
    "global_head_dim": 48,  # of the full-attention layers, whose keys are also their values
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_LATENTS = {
    "num_key_value_heads": 2,
    "head_dim": 16,  # the rotated width, as DeepSeek's config has it
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "rope_parameters": {**_YARN, "rope_theta": 5e4, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_MINIMAX_M3 = {
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 16,
    "index_n_heads": 1,
    "index_head_dim": 32,
    "index_block_size": 4,  # small enough that rows of a few blocks are attended to sparsely
    "index_topk_blocks": 2,
    "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 3,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 1, "out_hidden_size": 64}


def _text(name: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    """A causal LM of the family `name`, as transformers spells its classes."""
    return lambda: getattr(transformers, f"{name}ForCausalLM")(_text_config(name, **settings))


def _text_config(name: str, **settings: Any) -> Any:
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return config_class(**_SIZES | settings)


def _multimodal(
    name: str, text: str, settings: dict[str, Any], vision: dict[str, Any], model: str | None = None, **more: Any
) -> Callable[[], PreTrainedModel]:
    """A wrapper of the family `name` around a text model of the family `text`."""

    def make() -> PreTrainedModel:
        config_class = getattr(transformers, f"{name}Config")
        config = config_class(text_config=_text_config(text, **settings).to_dict(), vision_config=vision, **more)
        made: PreTrainedModel = getattr(transformers, model or f"{name}ForConditionalGeneration")(config)
        return made

    return make


_QWEN3_5 = _multimodal("Qwen3_5", "Qwen3_5", _DELTA_NET, {**_QWEN_VISION, "num_position_embeddings": 16})
_QWEN3_5_MOE = _multimodal(
    "Qwen3_5Moe", "Qwen3_5Moe", _DELTA_NET | _SHARED_EXPERT, {**_QWEN_VISION, "num_position_embeddings": 16}
)
_GEMMA4_VISION = {**_VISION, "num_key_value_heads": 1, "head_dim": 32, "position_embedding_size": 64}

FIELD: dict[str, Callable[[], PreTrainedModel]] = {
    "llama3.1-8b": _text("Llama", rope_parameters=_LLAMA3),
    "qwen3-8b": _text("Qwen3"),
    "gemma4-26b-a4b": _multimodal(
        "Gemma4", "Gemma4", _GEMMA4 | _GEMMA4_EXPERTS, _GEMMA4_VISION, audio_config=None, tie_word_embeddings=True
    ),
    "gemma4-31b": _multimodal("Gemma4", "Gemma4", _GEMMA4, _GEMMA4_VISION, audio_config=None, tie_word_embeddings=True),
    "qwen3.5-27b": _QWEN3_5,
    "qwen3.5-122b-a10b": _QWEN3_5_MOE,
    "qwen3.6-27b": _QWEN3_5,  # the architectures of Qwen3.5
    "qwen3.6-35b-a3b": _QWEN3_5_MOE,
    "kimi-k2.5": _multimodal(
        "Kimi_K25",
        "DeepseekV3",
        _LATENTS,
        {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=32,
        tie_word_embeddings=False,
    ),
    "minimax-m3": _multimodal(
        "MiniMaxM3VL",
        "MiniMaxM3VL",
        _MINIMAX_M3,
        {**_VISION, "image_size": 28, "patch_size": 14},
        model="MiniMaxM3SparseForConditionalGeneration",
        projector_hidden_size=64,
    ),
    "gpt-oss-20b": _text(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={**_YARN, "rope_theta": 15e4, "truncate": False},
    ),
}

OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma4-e4b": _text(  # layers that read the keys of earlier ones, and an embedding per layer
        "Gemma4",
        **_GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "attention_k_eq_v": False,
        },
    ),
    "qwen3-next": _text("Qwen3Next", **_DELTA_NET | _SHARED_EXPERT),
    "deepseek-v3": _text("DeepseekV3", **_LATENTS),
    "glm4-moe": _text(
        "Glm4Moe",
        use_qk_norm=True,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        num_experts_per_tok=2,
    ),
    "minimax-m2": _text("MiniMaxM2", num_local_experts=4, num_experts_per_tok=2, rotary_dim=16),
    "granite": _text(
        "Granite",
        embedding_multiplier=12.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
    ),
    "cohere2": _text("Cohere2", logit_scale=0.5, sliding_window=8, layer_types=_SLIDING),
}


def field_target(folder: Path, name: str) -> Path:
    """Save the tiny model `name` with a tokenizer into `folder` and return it."""
    torch.manual_seed(0)
    model = (FIELD | OTHERS)[name]()
    with torch.no_grad():  # gains as after training: a norm of exactly one would hide a wrong norm
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.float().save_pretrained(folder)
    if name.startswith(("qwen3.5", "qwen3.6")):
        _add_mtp_layer(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _add_mtp_layer(folder: Path) -> None:
    """Give a saved Qwen3.5 a random MTP layer, shaped as its last layer, in the names of its checkpoints."""
    tensors, path = load_file(folder / "model.safetensors"), folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(config, indent=1))
    last = re.compile(rf".*\blayers\.{_SIZES['num_hidden_layers'] - 1}\.")
    width = _SIZES["hidden_size"]
    layer = {last.sub("mtp.layers.0.", name): x for name, x in tensors.items() if last.match(name)}
    layer |= {
        f"mtp.{name}.weight": torch.zeros(width) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    layer["mtp.fc.weight"] = torch.zeros(width, 2 * width)
    generator = torch.Generator().manual_seed(1)
    for name, x in layer.items():
        tensors[name] = x + 0.1 * torch.randn(x.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
