"""Tiny random targets, rows, batches with really captured states, and heads: what the tests build instead of mocking.

B packed rows, T tokens in a packed row, F = auxiliary layers * target width, H target width
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from draftsmith.data.rows import Row
from draftsmith.models.batch import Batch
from draftsmith.models.head import load_method
from draftsmith.models.target import FrozenTarget

VOCAB = 512
BOS, EOS = 1, 2  # <|im_start|> and <|im_end|>, as in SmolLM2; 0 is <|endoftext|>
_MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "mimo": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
_LAYERS = 7  # so that the default auxiliary layers 2, 3 and 4 differ
_FULL_ATTENTION = {"layer_types": ["full_attention"] * _LAYERS}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {**_FULL_ATTENTION, **_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 48}
_GROUPS = {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2}
_GROUPS |= {"routed_scaling_factor": 1.8, "first_k_dense_replace": 2}
_LATENTS: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_LATENTS |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # vLLM reads them
# What a kind needs beside the sizes that all have.
_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_5": _FULL_ATTENTION,
    "qwen3_5_moe": _QWEN_EXPERTS,
    "qwen3_next": _QWEN_EXPERTS,
    "glm4_moe": _GROUPS | {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    "deepseek_v3": _GROUPS | _LATENTS | {"num_key_value_heads": 2, "head_dim": 64},  # the rotated width
}
# Kinds that bring an MTP layer: what config.json says of it, the prefix of its tensors and of its decoder layer, and
# the names of its norms (embedding, state, final) and of its projection.
_MTP_FIELDS = {"num_nextn_predict_layers": 1}
_QWEN_MTP = ("mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc")
_DEEPSEEK_MTP = (f"model.layers.{_LAYERS}.", "", ("enorm", "hnorm", "shared_head.norm"), "eh_proj")
_MTP: dict[str, tuple[dict[str, Any], str, str, tuple[str, str, str], str]] = {
    "mimo": (
        _MTP_FIELDS | {"architectures": ["MiMoForCausalLM"]},
        "model.mtp_layers.0.",
        "",
        ("token_layernorm", "hidden_layernorm", "final_layernorm"),
        "input_proj",
    ),
    "qwen3_5": ({"mtp_num_hidden_layers": 1}, *_QWEN_MTP),
    "qwen3_5_moe": ({"mtp_num_hidden_layers": 1}, *_QWEN_MTP),
    "qwen3_next": ({}, *_QWEN_MTP),
    "glm4_moe": (_MTP_FIELDS, *_DEEPSEEK_MTP),
    "deepseek_v3": (_MTP_FIELDS, *_DEEPSEEK_MTP),
}
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_target(
    folder: Path,
    kind: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    std: float = 0.08,
    **config: Any,
) -> Path:
    """Save a random target with a tokenizer into `folder` and return it. `config` overrides the transformers config.

    head_dim is 32, the smallest that vLLM serves on a CPU. `std` is large enough that the greedy continuations vary.
    The kinds mimo, qwen3_5, qwen3_5_moe, qwen3_next, glm4_moe and deepseek_v3 bring an MTP layer.
    """
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
        "initializer_range": std,
    }
    config_class, model_class = _MODELS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**sizes | _SETTINGS.get(kind, {}) | config))
    with torch.no_grad():  # gains as after training: a norm of exactly one would hide a wrong norm
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    if kind in _MTP:
        _add_mtp_layer(folder, kind, std)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _add_mtp_layer(folder: Path, kind: str, std: float) -> None:
    """Give a saved target a random MTP layer, in its family's names, shaped as the target's last layer."""
    fields, prefix, layer, norms, projection = _MTP[kind]
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | fields
    width, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    like = {f"{layer}{name.removeprefix(last)}": x for name, x in tensors.items() if name.startswith(last)}
    like |= {f"{norm}.weight": tensors["model.norm.weight"] for norm in norms}
    like[f"{projection}.weight"] = torch.empty(width, 2 * width, dtype=tensors["model.norm.weight"].dtype)
    for name, x in like.items():
        random = torch.randn_like(x)
        tensors[prefix + name] = x + 0.3 * random if "norm" in name else (0.3 if x.ndim == 1 else 2 * std) * random
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most VOCAB ids with the ChatML template; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    text = ["system user assistant tool the a of and to in is it that for you was with on are this be have from or"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2], pad_token=special[2]
    )
    fast.chat_template = _CHATML
    return fast


def tiny_rows(
    lengths: Sequence[int], *, prompt: int | Sequence[int] = 3, vocab_size: int = VOCAB, seed: int = 0
) -> list[Row]:
    """Rows of random tokens; the first `prompt` tokens of each (one number, or one per row) are unsupervised."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [prompt] * len(lengths) if isinstance(prompt, int) else list(prompt)
    rows = []
    for index, (length, size) in enumerate(zip(lengths, prompts, strict=True)):
        ids = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        mask = tuple(position >= size for position in range(length))
        rows.append(Row(f"row{index}", f"conversation{index}", "tiny", tuple(ids), mask))
    return rows


def tiny_batch(
    target: Path, packs: Sequence[Sequence[Row]], aux_layers: Sequence[int], *, num_tokens: int | None = None
) -> Batch:
    """Pack rows, one list per packed row, with the target's own states; pad to `num_tokens` or the longest pack.

    Padding holds token 0, document -1 and states of 7.0: a value that would be noticed if it were ever read.
    """
    width = num_tokens or max(sum(len(row.input_ids) for row in pack) for pack in packs)
    size, hidden = len(packs), _load(target).config.get_text_config().hidden_size
    ids, documents = torch.zeros(size, width, dtype=torch.int64), torch.full((size, width), -1)
    mask, positions = torch.zeros(size, width, dtype=torch.bool), torch.zeros(size, width, dtype=torch.int64)
    aux = torch.full((size, width, len(aux_layers) * hidden), 7.0)
    last = torch.full((size, width, hidden), 7.0)
    for packed, pack in enumerate(packs):
        start = 0
        for document, row in enumerate(pack):
            span = slice(start, start + len(row.input_ids))
            start = span.stop
            ids[packed, span] = torch.tensor(row.input_ids)
            mask[packed, span] = torch.tensor(row.loss_mask)
            documents[packed, span] = document
            positions[packed, span] = torch.arange(len(row.input_ids))
            aux[packed, span], last[packed, span] = capture(target, row.input_ids, aux_layers)
    return Batch(ids, mask, documents, positions, aux, last)


def capture(target: Path, ids: Sequence[int], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The auxiliary states [T, F] and the pre-norm last state [T, H] of one sequence, in fp32."""
    if not ids:
        raise ValueError("a target cannot read an empty sequence")
    model, found = _load(target), {}
    layers = model.get_decoder().layers

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found[layer] = (args[0] if args else kwargs["hidden_states"])[0].float()
            found[layer + 1] = (output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1).float()

        return hook

    hooks = [module.register_forward_hook(keep(i), with_kwargs=True) for i, module in enumerate(layers)]
    try:
        with torch.no_grad():
            model(torch.tensor([list(ids)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[layer] for layer in aux_layers], dim=-1), found[len(layers)]


def greedy_next(target: Path, ids: Sequence[int]) -> int:
    """The target's own most likely next token: the bonus of a greedy round after these ids."""
    with torch.no_grad():
        return int(_load(target)(torch.tensor([list(ids)])).logits[0, -1].argmax())


def tiny_head(
    method: str, frozen: FrozenTarget, *, kept_ids: Tensor | None = None, seed: int = 0, **config: Any
) -> Any:
    """A head of `method` whose random weights are large enough that its drafts vary."""
    module = load_method(method)
    torch.manual_seed(seed)
    if kept_ids is not None:
        config["draft_vocab_size"] = kept_ids.numel()
    head = module.Head(module.Config(**config), frozen, kept_ids)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and name != "lm_head.weight":
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return head


def tiny_kept_ids(size: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    """A random draft vocabulary: ascending target ids."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:size].sort().values


@lru_cache(maxsize=8)
def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa").eval()
    return model.requires_grad_(False)
