"""Runs vllm_drafts.py in vLLM's environment, and compares what vLLM drafted with what our heads propose."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tiny import tiny_batch, tiny_rows

from draftsmith.data.rows import Row
from draftsmith.hidden_states.vllm_server import write_plugin

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("DRAFTSMITH_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))
PROMPTS = [list(row.input_ids) for row in tiny_rows([10, 38, 141], seed=5)]
NUM_TOKENS = 3


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


def assert_drafts_equal(
    head: Any, target: Path, results: list[dict[str, Any]], num_tokens: int, *, distinct: int
) -> None:
    """Every round that vLLM drafted is what `head.propose` says there, and its output is the target's own.

    At least 18 rounds and `distinct` different tokens must have been compared.
    """
    seen, num_rounds = set(), 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = prompt + result["generated"]
        row = Row("row", "conversation", "vllm", tuple(ids), (True,) * len(ids))
        batch = tiny_batch(target, [[row]], head.needs.aux_layers)
        greedy_T = head.target.logits(batch.last_BTH[0]).argmax(-1)
        assert greedy_T[len(prompt) - 1 : -1].tolist() == result["generated"], "speculation changed the output"
        proposals_TN, num_committed = head.propose(batch, num_tokens)[0], len(prompt)
        for each in result["rounds"]:
            if num_committed >= len(ids):
                break  # vLLM proposes once more when the last token is out
            assert each["bonus"] == ids[num_committed]
            assert each["drafts"] == proposals_TN[num_committed - 1].tolist(), num_committed
            seen.update(each["drafts"])
            num_rounds += 1
            is_right = [a == b for a, b in zip(each["drafts"], ids[num_committed + 1 :], strict=False)]
            num_committed += 1 + [*is_right, False].index(False)
    assert num_rounds >= 18, "too few rounds were compared"
    assert len(seen) >= distinct, "the drafts hardly vary; this test would prove little"
