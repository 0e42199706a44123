"""The frozen parts of a target: its own logits from its own last states, whatever the family and the file layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import capture, tiny_rows, tiny_target
from transformers import AutoModelForCausalLM

from draftsmith.models.target import FrozenTarget

IDS = tiny_rows([24])[0].input_ids


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([list(IDS)])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_last_states_reproduce_the_targets_logits(kind: str, is_tied: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"final_logit_softcapping": 3.0} if kind == "gemma3" else {}
    folder = tiny_target(tmp_path, kind, tie_word_embeddings=is_tied, **options)
    frozen = FrozenTarget.load(folder, torch.float32)
    assert (frozen.head_VH is frozen.embedding_VH) == is_tied
    _, last_TH = capture(folder, IDS, (2,))
    torch.testing.assert_close(frozen.logits(last_TH), logits_of(folder), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_embeddings_are_scaled_as_the_target_scales_them(kind: str, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, kind)
    layer_zero, _ = capture(folder, IDS, (0,))
    embedded = FrozenTarget.load(folder, torch.float32).embed(torch.tensor(IDS))
    torch.testing.assert_close(embedded, layer_zero, rtol=1e-5, atol=1e-6)


def test_a_sharded_checkpoint_gives_the_same_tensors(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "single")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    one, other = (FrozenTarget.load(tmp_path / name, torch.float32) for name in ("single", "sharded"))
    assert torch.equal(one.head_VH, other.head_VH) and torch.equal(one.embedding_VH, other.embedding_VH)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named_and_never_left_random(name: str, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=name):
        FrozenTarget.load(folder, torch.float32)
