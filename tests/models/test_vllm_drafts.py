"""Real vLLM loads what we export and drafts, round by round, exactly what the head proposes (fp32, CPU)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rope import ROPES
from tiny import tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target

from draftsmith.data.rows import Row
from draftsmith.hidden_states.vllm_server import write_plugin
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head
from draftsmith.models.target import FrozenTarget

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("DRAFTSMITH_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))
NUM_TOKENS = 3
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
PROMPTS = [list(row.input_ids) for row in tiny_rows([10, 38, 141], seed=5)]


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


def run_vllm(root: Path, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        **os.environ,
        "PYTHONPATH": str(write_plugin(root / "site", PYTHON)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(PYTHON), str(Path(__file__).with_name("vllm_drafts.py")), "jobs.json", "results.json"]
    with (root / "log.txt").open("w") as log:
        done = subprocess.run(command, cwd=root, env=environment, stdout=log, stderr=log, timeout=900)
    assert done.returncode == 0, (root / "log.txt").read_text()[-4000:]
    results: dict[str, Any] = json.loads((root / "results.json").read_text())
    return results


@pytest.mark.parametrize("name", HEADS)
def test_vllm_drafts_what_the_head_proposes(name: str, drafted: dict[str, Any]) -> None:
    head, target, results = drafted[name]
    seen, num_rounds = set(), 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = prompt + result["generated"]
        row = Row("row", "conversation", "vllm", tuple(ids), (True,) * len(ids))
        batch = tiny_batch(target, [[row]], head.needs.aux_layers)
        greedy_T = head.target.logits(batch.last_BTH[0]).argmax(-1)
        assert greedy_T[len(prompt) - 1 : -1].tolist() == result["generated"], "speculation changed the output"
        proposals_TN, num_committed = head.propose(batch, NUM_TOKENS)[0], len(prompt)
        for each in result["rounds"]:
            if num_committed >= len(ids):
                break  # vLLM proposes once more when the last token is out
            assert each["bonus"] == ids[num_committed]
            assert each["drafts"] == proposals_TN[num_committed - 1].tolist(), (name, num_committed)
            seen.update(each["drafts"])
            num_rounds += 1
            is_right = [a == b for a, b in zip(each["drafts"], ids[num_committed + 1 :], strict=False)]
            num_committed += 1 + [*is_right, False].index(False)
    assert num_rounds >= 18, "too few rounds were compared"
    assert len(seen) >= 6, "the drafts hardly vary; this test would prove little"
