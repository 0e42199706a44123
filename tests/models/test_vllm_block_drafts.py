"""Real vLLM loads exported block heads and drafts, round by round, exactly what they propose (fp32, CPU, our plugin).

The plugin corrects the context's k_norm of all layers but the first, and runs the method with a Markov head on vLLM's
V1 runner. Drafts of fewer tokens than a block holds are compared too: vLLM then runs a shorter block, and so do we.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafts_of_vllm import PROMPTS, PYTHON, assert_drafts_equal, run_vllm
from tiny import tiny_head, tiny_kept_ids, tiny_target

from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head
from draftsmith.models.target import FrozenTarget

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TRIMMED = tiny_kept_ids(200)
# name -> (method, drafted tokens, target, layout, how the engine is told, settings of the head)
HEADS: dict[str, tuple[str, int, str, str, str, dict[str, Any]]] = {
    "dflash, whole block": ("dflash", 4, "llama", "speculators", "auto", {"block_size": 5, "num_layers": 3, "seed": 2}),
    "dflash, part of a block, plain": (
        "dflash",
        3,
        "qwen3",
        "plain",
        "explicit",
        {"block_size": 8, "num_layers": 2, "seed": 6},
    ),
    "dflash, window": (
        "dflash",
        3,
        "llama",
        "speculators",
        "explicit",
        {"block_size": 4, "num_layers": 2, "sliding_window": 9, "seed": 2},
    ),
    "dflash, trimmed": (
        "dflash",
        3,
        "llama",
        "speculators",
        "explicit",
        {"block_size": 4, "num_layers": 2, "kept_ids": TRIMMED, "aux_layers": (2, 6), "mask_token_id": 7},
    ),
    "dspark, whole block": ("dspark", 5, "llama", "speculators", "auto", {"block_size": 5, "num_layers": 2}),
    "dspark, part of a block, trimmed, plain": (
        "dspark",
        3,
        "qwen3",
        "plain",
        "explicit",
        {"num_layers": 2, "kept_ids": TRIMMED, "markov_rank": 32},
    ),
    "dspark, anchor drafts nothing": (
        "dspark",
        3,
        "llama",
        "speculators",
        "explicit",
        {"block_size": 4, "num_layers": 2, "sample_from_anchor": False, "confidence_sees_token": False},
    ),
}


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, int, Path, list[dict[str, Any]]]]:
    """For every head: the head, N, its target's folder, and per prompt what vLLM generated and proposed."""
    if not PYTHON.is_file():
        pytest.skip(f"no vLLM environment at {PYTHON}; set DRAFTSMITH_VLLM_PYTHON or run make setup-vllm")
    root = tmp_path_factory.mktemp("vllm")
    targets = {kind: tiny_target(root / f"target {kind}", kind) for kind in ("llama", "qwen3")}
    heads, jobs = {}, []
    for name, (method, num_tokens, target, layout, mode, settings) in HEADS.items():
        head = tiny_head(method, FrozenTarget.load(targets[target], torch.float32), **settings)
        folder = root / name.replace(",", "")
        save_head(head, folder / "head")
        export_head(
            folder / "head",
            folder / "export",
            target=head.target,
            target_name=str(targets[target]),
            num_speculative_tokens=num_tokens,
            layout=layout,  # type: ignore[arg-type]
            dtype="float32",
        )
        draft = {"method": method, "model": str(folder / "export"), "num_speculative_tokens": num_tokens}
        explicit = {"model": str(targets[target]), "speculative_config": draft}
        engine = {"model": str(folder / "export")} if mode == "auto" else explicit
        heads[name] = (head, num_tokens, targets[target])
        jobs.append({"name": name, "engine": engine, "prompts": PROMPTS, "max_tokens": 8})
    results = run_vllm(root, jobs)
    return {name: (*heads[name], results[name]) for name in HEADS}


@pytest.mark.parametrize("name", HEADS)
def test_vllm_drafts_what_the_head_proposes(name: str, drafted: dict[str, Any]) -> None:
    head, num_tokens, target, results = drafted[name]
    assert_drafts_equal(head, target, results, num_tokens, distinct=5)
