"""A draft rotates with its target's own frequencies, in fp32 whatever the weights are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_head, tiny_target
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.models.checkpoint import load_head, save_head
from draftsmith.models.parts.rope import Rope, rotate
from draftsmith.models.target import FrozenTarget

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 3e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def config_of(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=1024, rope_parameters=dict(rope)
    )


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_rotation_equal_those_of_transformers(name: str) -> None:
    config = config_of(ROPES[name])
    theirs, ours = LlamaRotaryEmbedding(config), Rope.of_target(config, 32)
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    positions = torch.tensor([0, 1, 17, 900])
    x = torch.randn(4, 2, 32)
    cos, sin = theirs(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(x, ours.angles(positions)), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_a_partial_rotation_leaves_the_rest_of_each_head_as_it_is() -> None:
    config = config_of({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25})
    rope = Rope.of_target(config, 32)
    assert rope.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    x = torch.randn(3, 2, 32)
    rotated = rotate(x, rope.angles(torch.arange(3)))
    assert torch.equal(rotated[..., 8:], x[..., 8:])
    assert not torch.equal(rotated[1:, :, :8], x[1:, :, :8])


def test_old_and_new_forms_of_the_same_rope_give_the_same_frequencies() -> None:
    new = Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    old = Qwen3Config(rope_theta=1e6)
    assert torch.equal(Rope.of_target(new, 32).inv_freq, Rope.of_target(old, 32).inv_freq)


def test_frequencies_stay_fp32_under_bfloat16_and_survive_a_checkpoint(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target", rope_parameters=ROPES["llama3"])
    frozen = FrozenTarget.load(folder, torch.float32)
    head = tiny_head("eagle3", frozen)
    expected = LlamaRotaryEmbedding(config_of(ROPES["llama3"])).inv_freq
    save_head(head.to(torch.bfloat16), tmp_path / "head")
    loaded: Any = load_head(tmp_path / "head", frozen)
    for each in (head, loaded):
        assert each.rope.inv_freq.dtype == torch.float32
        torch.testing.assert_close(each.rope.inv_freq, expected, rtol=1e-6, atol=0)
