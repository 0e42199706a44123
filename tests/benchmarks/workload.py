"""The work that both sides of the benchmark do: one packed row of SmolLM2's shape, with weights to start from.

Written once by compare.py and read by both processes, so that equal work is checked and not assumed. Needs only torch
and safetensors, as the peer's environment has nothing of ours. The states are random: time and memory do not depend on
their values, and the logits are spread about as widely as a real target's.

    T tokens, H target width, F = 3*H, V target and Vd draft vocabulary
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# The shape of SmolLM2-135M (its config.json); the draft layer has the sizes of a target layer.
WIDTH, MLP_WIDTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 576, 1536, 9, 3, 64, 49_152
NUM_LAYERS, AUX_LAYERS, NORM_EPS, ROPE_THETA = 30, (2, 15, 27), 1e-5, 100_000.0
TTT_STEPS = 3
DOCUMENT_LENGTHS = (320, 256, 240, 208)  # 1024 tokens in all
RESPONSE_SHARE = 0.6
LEARNING_RATE, CLIP_NORM = 1e-4, 1.0


@dataclass(frozen=True)
class Mode:
    """One setting of the comparison."""

    name: str
    draft_vocab_size: int  # VOCAB_SIZE: nothing is trimmed
    is_bf16: bool  # bf16 autocast and bf16 states; else fp32 throughout

    @property
    def is_trimmed(self) -> bool:
        return self.draft_vocab_size < VOCAB_SIZE

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_bf16 else torch.float32


MODES = {
    mode.name: mode
    for mode in (
        Mode("full-fp32", VOCAB_SIZE, is_bf16=False),
        Mode("trimmed-bf16", 16_384, is_bf16=True),
    )
}


def write_workload(path: Path, seed: int = 0) -> None:
    """Draw tokens, states, the tied embedding, the kept ids and the head's first weights, and save them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    num_tokens = sum(DOCUMENT_LENGTHS)
    kept_ids = torch.randperm(VOCAB_SIZE, generator=generator)[: MODES["trimmed-bf16"].draft_vocab_size].sort().values
    tensors = {
        "input_ids_T": torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator),
        "aux_TF": normal(num_tokens, len(AUX_LAYERS) * WIDTH),
        "last_TH": normal(num_tokens, WIDTH),
        "embedding_VH": normal(VOCAB_SIZE, WIDTH, std=0.1),  # logits of a normed state spread by 0.1 * sqrt(576) = 2.4
        "kept_ids": kept_ids,
    }
    shapes = {
        "fc": (WIDTH, len(AUX_LAYERS) * WIDTH),
        "layers.0.self_attn.q_proj": (NUM_HEADS * HEAD_DIM, 2 * WIDTH),
        "layers.0.self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, 2 * WIDTH),
        "layers.0.self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, 2 * WIDTH),
        "layers.0.self_attn.o_proj": (WIDTH, NUM_HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj": (MLP_WIDTH, WIDTH),
        "layers.0.mlp.up_proj": (MLP_WIDTH, WIDTH),
        "layers.0.mlp.down_proj": (WIDTH, MLP_WIDTH),
    }
    tensors |= {f"head.{name}.weight": normal(*shape, std=0.02) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"head.layers.0.{name}.weight"] = torch.ones(WIDTH)
    tensors["head.norm.weight"] = torch.ones(WIDTH)
    save_file(tensors, path)


def read_workload(path: Path) -> dict[str, Tensor]:
    """The saved tensors, copied out of the memory map, so that no page is first touched inside a measured step."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def head_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's first weights, by the names that both implementations give them."""
    return {name.removeprefix("head."): tensor for name, tensor in tensors.items() if name.startswith("head.")}


def loss_mask_of(length: int) -> Tensor:
    """bool [length]: the last 60 % of a document are the response."""
    return torch.arange(length) >= length - round(RESPONSE_SHARE * length)
