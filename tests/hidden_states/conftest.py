"""Tiny targets, rows and sources for the tests of hidden_states/."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget

NUM_LAYERS = 5
VOCAB = 512
# vLLM on a CPU has attention kernels from head size 32 on.
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Large enough that attention and MLP move the residual stream by a visible share at each layer.
    "initializer_range": 0.08,
}


def _model(kind: str) -> PreTrainedModel:
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**_SHAPE, rope_theta=1e6))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, rope_theta=1e6, tie_word_embeddings=False))
    if kind == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**_SHAPE, sliding_window=8, final_logit_softcapping=5.0))
    assert kind == "gpt_oss", kind
    return GptOssForCausalLM(GptOssConfig(**_SHAPE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2))


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ResolvedTarget]:
    """make_target(kind, dtype) -> a tiny random target on disk; the same arguments give the same weights."""
    made: dict[tuple[str, str], ResolvedTarget] = {}

    def make(kind: str = "llama", dtype: str = "float32") -> ResolvedTarget:
        if (kind, dtype) not in made:
            torch.manual_seed(0)
            model = _model(kind)
            with torch.no_grad():  # norms as after training: a gain of exactly one would hide a wrong norm
                for name, parameter in model.named_parameters():
                    if "norm" in name:
                        parameter.add_(0.3 * torch.randn_like(parameter))
            folder: Path = tmp_path_factory.mktemp(f"{kind}-{dtype}")
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            made[kind, dtype] = ResolvedTarget(
                name=f"tiny-{kind}",
                path=folder,
                weights=f"weights-{kind}",
                tokenizer="tokenizer",
                chat_template="template",
                dtype=dtype,  # type: ignore[arg-type]
            )
        return made[kind, dtype]

    return make


@pytest.fixture
def target(make_target: Callable[..., ResolvedTarget]) -> ResolvedTarget:
    return make_target()


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., list[Row]]:
    """make_rows(lengths) -> rows of random tokens, all supervised."""

    def make(lengths: list[int], seed: int = 0) -> list[Row]:
        generator = random.Random(seed)
        return [
            Row(
                row_id=f"row{index}",
                conversation_id=f"conversation{index}",
                source="test",
                input_ids=tuple(generator.randrange(3, VOCAB) for _ in range(length)),
                loss_mask=(True,) * length,
            )
            for index, length in enumerate(lengths)
        ]

    return make


@pytest.fixture
def rows(make_rows: Callable[..., list[Row]]) -> list[Row]:
    return make_rows([17, 40, 9, 33, 1, 64, 40])
