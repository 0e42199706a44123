"""Real vLLM loads what we export and drafts, round by round, exactly what the head proposes (fp32, CPU)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafts_of_vllm import NUM_TOKENS, PROMPTS, PYTHON, assert_drafts_equal, run_vllm
from test_rope import ROPES
from tiny import tiny_head, tiny_kept_ids, tiny_target

from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head
from draftsmith.models.target import FrozenTarget

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "qwen3": {"kind": "qwen3"},
    "llama3 rope": {"kind": "llama", "rope_parameters": ROPES["llama3"]},
    "yarn": {"kind": "qwen3", "rope_parameters": ROPES["yarn"]},
}
TRIMMED = tiny_kept_ids(200)
# name -> (target, layout, how the engine is told, settings of the head)
HEADS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "eagle-3.1": ("llama", "speculators", "auto", {}),
    "eagle-3, plain": ("llama", "plain", "explicit", {"fc_norm": False, "norm_output": False}),
    "four layers, trimmed, normed residual": (
        "llama",
        "speculators",
        "explicit",
        {
            "aux_layers": (0, 2, 5, 7),
            "kept_ids": TRIMMED,
            "fc_norm": False,
            "norm_before_fc": True,
            "norm_before_residual": True,
        },
    ),
    "one layer, trimmed, plain": ("llama", "plain", "explicit", {"aux_layers": (7,), "kept_ids": TRIMMED}),
    "two qwen3 layers": (
        "qwen3",
        "speculators",
        "explicit",
        {"layer_type": "qwen3", "num_layers": 2, "aux_layers": (1, 6), "norm_output": False},
    ),
    "qwen3 layer, own lm_head, plain": (
        "qwen3",
        "plain",
        "explicit",
        {"layer_type": "qwen3", "kept_ids": TRIMMED, "train_lm_head": True, "num_attention_heads": 4},
    ),
    "llama3 rope": ("llama3 rope", "speculators", "auto", {}),
    "yarn": ("yarn", "plain", "explicit", {"layer_type": "qwen3"}),
}


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path, list[dict[str, Any]]]]:
    """For every head: the head, its target's folder, and per prompt what vLLM generated and proposed."""
    if not PYTHON.is_file():
        pytest.skip(f"no vLLM environment at {PYTHON}; set DRAFTSMITH_VLLM_PYTHON or run make setup-vllm")
    root = tmp_path_factory.mktemp("vllm")
    targets = {name: tiny_target(root / f"target {name}", **settings) for name, settings in TARGETS.items()}
    heads, jobs = {}, []
    for name, (target, layout, mode, settings) in HEADS.items():
        head = tiny_head("eagle3", FrozenTarget.load(targets[target], torch.float32), **settings)
        folder = root / name
        save_head(head, folder / "head")
        export_head(
            folder / "head",
            folder / "eagle3",
            target=head.target,
            target_name=str(targets[target]),
            num_speculative_tokens=NUM_TOKENS,
            layout=layout,  # type: ignore[arg-type]
            dtype="float32",
        )
        draft = {"method": "eagle3", "model": str(folder / "eagle3"), "num_speculative_tokens": NUM_TOKENS}
        explicit = {"model": str(targets[target]), "speculative_config": draft}
        engine = {"model": str(folder / "eagle3")} if mode == "auto" else explicit
        heads[name] = (head, targets[target])
        jobs.append({"name": name, "engine": engine, "prompts": PROMPTS, "max_tokens": 8})
    results = run_vllm(root, jobs)
    return {name: (*heads[name], results[name]) for name in HEADS}


@pytest.mark.parametrize("name", HEADS)
def test_vllm_drafts_what_the_head_proposes(name: str, drafted: dict[str, Any]) -> None:
    head, target, results = drafted[name]
    assert_drafts_equal(head, target, results, NUM_TOKENS, distinct=6)
