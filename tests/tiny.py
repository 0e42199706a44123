"""Tiny random targets, rows, batches with really captured states, and heads: what the tests build instead of mocking.

B packed rows, T tokens in a packed row, F = auxiliary layers * target width, H target width
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.data.rows import Row
from draftsmith.models.batch import Batch
from draftsmith.models.head import Needs, load_method
from draftsmith.models.target import FrozenTarget

VOCAB = 512
BOS, EOS = 1, 2  # <|im_start|> and <|im_end|>, as in SmolLM2; 0 is <|endoftext|>
_MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM),
}
# Gemma 4 as its 26B-A4B and 31B are: layer types with heads of their own, keys that are the values before their norm.
_GEMMA4 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
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
    """
    model_class = _MODELS[kind][1]
    torch.manual_seed(seed)
    model = model_class(tiny_config(kind, initializer_range=std, **config))
    with torch.no_grad():  # gains as after training: a norm of exactly one would hide a wrong norm
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_config(kind: str, **config: Any) -> Any:
    """The transformers config of a tiny target."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 7,  # so that the default auxiliary layers 2, 3 and 4 differ
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
    }
    if kind == "gemma4":
        num_layers = config.get("num_hidden_layers", sizes["num_hidden_layers"])
        is_full = [i % 3 == 2 or i == num_layers - 1 for i in range(num_layers)]
        sizes |= _GEMMA4 | {"layer_types": ["full_attention" if each else "sliding_attention" for each in is_full]}
    return _MODELS[kind][0](**sizes | config)


def fitting_kind(method: str, kinds: Sequence[str] = ("qwen3", "gemma4")) -> str:
    """The first of these kinds of targets that the method can serve: its `needs` does not refuse it."""
    module, refusals = load_method(method), []
    for kind in kinds:
        try:
            module.needs(module.Config(), tiny_config(kind))
        except ValueError as error:
            refusals.append(f"{kind}: {error}")
        else:
            return kind
    raise AssertionError(f"no tiny target is one that {method} can serve; {'; '.join(refusals)}")


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
    target: Path, packs: Sequence[Sequence[Row]], needs: Needs | Sequence[int], *, num_tokens: int | None = None
) -> Batch:
    """Pack rows, one list per packed row, with the target's own states; pad to `num_tokens` or the longest pack.

    `needs` is the head's, or its auxiliary layers. Padding holds token 0, document -1 and states of 7.0: a value that
    would be noticed if it were ever read.
    """
    needs = needs if isinstance(needs, Needs) else Needs(tuple(needs))
    width = num_tokens or max(sum(len(row.input_ids) for row in pack) for pack in packs)
    size, hidden = len(packs), _load(target).config.get_text_config().hidden_size
    ids, documents = torch.zeros(size, width, dtype=torch.int64), torch.full((size, width), -1)
    mask, positions = torch.zeros(size, width, dtype=torch.bool), torch.zeros(size, width, dtype=torch.int64)
    aux = torch.full((size, width, len(needs.aux_layers) * hidden), 7.0)
    kv = torch.full((size, width, needs.kv_width), 7.0) if needs.kv_layers else None
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
            aux[packed, span], last[packed, span] = capture(target, row.input_ids, needs.aux_layers)
            if kv is not None:
                kv[packed, span] = keys_and_values(target, row.input_ids, needs.kv_layers)
    return Batch(ids, mask, documents, positions, aux, last, kv)


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


def keys_and_values(target: Path, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """What transformers' own cache holds of these layers after one sequence: keys, then values, of each [T, E]."""
    cache = DynamicCache()  # without a config: sliding layers keep everything
    with torch.no_grad():
        _load(target)(torch.tensor([list(ids)]), use_cache=True, cache=cache)
    found = [x[0].transpose(0, 1).flatten(1) for j in layers for x in (cache.layers[j].keys, cache.layers[j].values)]
    return torch.cat(found, dim=-1).float()


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
