"""Real vLLM loads an exported P-EAGLE head and drafts, in one pass, exactly what the head proposes (fp32, CPU)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafts_of_vllm import NUM_TOKENS, PROMPTS, PYTHON, assert_drafts_equal, run_vllm
from tiny import tiny_head, tiny_kept_ids, tiny_target

from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head
from draftsmith.models.head import served_as
from draftsmith.models.target import FrozenTarget

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TRIMMED = tiny_kept_ids(200)
# name -> (target, layout, how the engine is told, settings of the head)
HEADS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "four layers": ("llama", "speculators", "auto", {}),
    "plain, trimmed, normed residual": (
        "llama",
        "plain",
        "explicit",
        {"num_layers": 2, "kept_ids": TRIMMED, "fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
    ),
    "frozen embeddings, one auxiliary layer": (
        "llama",
        "speculators",
        "explicit",
        {"num_layers": 1, "train_embeddings": "none", "mask_token_id": 7, "aux_layers": (7,), "fc_norm": False},
    ),
    "qwen3 layers, trimmed": (
        "qwen3",
        "speculators",
        "auto",
        {
            "num_layers": 2,
            "layer_type": "qwen3",
            "kept_ids": TRIMMED,
            "aux_layers": (0, 2, 5, 7),
            "train_lm_head": True,
        },
    ),
}


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path, list[dict[str, Any]]]]:
    """For every head: the head, its target's folder, and per prompt what vLLM generated and proposed."""
    if not PYTHON.is_file():
        pytest.skip(f"no vLLM environment at {PYTHON}; set DRAFTSMITH_VLLM_PYTHON or run make setup-vllm")
    root = tmp_path_factory.mktemp("vllm")
    targets = {kind: tiny_target(root / f"target {kind}", kind) for kind in ("llama", "qwen3")}
    heads, jobs = {}, []
    for name, (target, layout, mode, settings) in HEADS.items():
        head = tiny_head("peagle", FrozenTarget.load(targets[target], torch.float32), **settings)
        with torch.no_grad():  # as after training: no longer the target's own
            for parameter_name, parameter in head.named_parameters():
                if parameter_name in ("mask_embedding", "lm_head.weight"):
                    parameter.add_(0.03 * torch.randn_like(parameter))
        folder = root / name
        save_head(head, folder / "head")
        export_head(
            folder / "head",
            folder / "export",
            target=head.target,
            target_name=str(targets[target]),
            num_speculative_tokens=NUM_TOKENS,
            layout=layout,  # type: ignore[arg-type]
            dtype="float32",
        )
        draft = {**served_as("peagle"), "model": str(folder / "export"), "num_speculative_tokens": NUM_TOKENS}
        explicit = {"model": str(targets[target]), "speculative_config": draft}
        engine = {"model": str(folder / "export")} if mode == "auto" else explicit
        heads[name] = (head, targets[target])
        jobs.append({"name": name, "engine": engine, "prompts": PROMPTS, "max_tokens": 8})
    results = run_vllm(root, jobs)
    return {name: (*heads[name], results[name]) for name in HEADS}


@pytest.mark.parametrize("name", HEADS)
def test_vllm_drafts_what_the_head_proposes(name: str, drafted: dict[str, Any]) -> None:
    head, target, results = drafted[name]
    assert_drafts_equal(head, target, results, NUM_TOKENS, distinct=6)
