"""Real vLLM serves the exported target with its own MTP layer and drafts, round by round, what the head proposes."""

import subprocess
from typing import Any

import pytest
from test_mtp import VARIANTS, Scene, exported
from test_vllm_drafts import PROMPTS, PYTHON, run_vllm
from tiny import tiny_batch

from draftsmith.data.rows import Row

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_TOKENS = 3
# Latent attention with plain RoPE is left out: there vLLM 0.32 on a CPU answers otherwise than transformers even
# without drafts (measured; DeepSeek-V3 itself has YaRN, with which both agree).
SERVED = [variant for variant in VARIANTS if variant != "deepseek v3, plain rope, no query latent"]


def has_torchvision() -> bool:
    """vLLM's Qwen3.5 classes import it, also for text alone; an environment for text models may lack it."""
    return subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, timeout=120).returncode == 0


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Scene, list[dict[str, Any]]]]:
    """For every variant: the head, its target, and per prompt what vLLM generated and proposed."""
    if not PYTHON.is_file():
        pytest.skip(f"no vLLM environment at {PYTHON}; set DRAFTSMITH_VLLM_PYTHON or run make setup-vllm")
    root, heads, jobs = tmp_path_factory.mktemp("vllm"), {}, []
    has_vision = has_torchvision()
    served = [name for name in SERVED if has_vision or not VARIANTS[name][0].startswith("qwen3_5")]
    for number, variant in enumerate(served):
        scene = Scene(variant, root / f"target{number}")
        head = scene.head()
        folder = exported(scene, head, root / f"run{number}")
        speculative = {"method": "mtp", "num_speculative_tokens": NUM_TOKENS}
        engine = {"model": str(folder), "speculative_config": speculative}
        heads[variant] = (head, scene)
        jobs.append({"name": variant, "engine": engine, "prompts": PROMPTS, "max_tokens": 8})
    results = run_vllm(root, jobs)
    return {variant: (*heads[variant], results[variant]) for variant in served}


@pytest.mark.parametrize("variant", SERVED)
def test_vllm_drafts_what_the_head_proposes(variant: str, drafted: dict[str, Any]) -> None:
    if variant not in drafted:
        pytest.skip("the vLLM environment has no torchvision, which vLLM's class of this target imports")
    head, scene, results = drafted[variant]
    seen, num_rounds = set(), 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = prompt + result["generated"]
        row = Row("row", "conversation", "vllm", tuple(ids), (True,) * len(ids))
        batch = tiny_batch(scene.folder, [[row]], head.needs.aux_layers)
        greedy_T = head.target.logits(batch.last_BTH[0]).argmax(-1)
        assert greedy_T[len(prompt) - 1 : -1].tolist() == result["generated"], "speculation changed the output"
        proposals_TN, num_committed = head.propose(batch, NUM_TOKENS)[0], len(prompt)
        for each in result["rounds"]:
            if num_committed >= len(ids):
                break  # vLLM proposes once more when the last token is out
            assert each["bonus"] == ids[num_committed]
            assert each["drafts"] == proposals_TN[num_committed - 1].tolist(), (variant, num_committed)
            seen.update(each["drafts"])
            num_rounds += 1
            is_right = [a == b for a, b in zip(each["drafts"], ids[num_committed + 1 :], strict=False)]
            num_committed += 1 + [*is_right, False].index(False)
    assert num_rounds >= 18, "too few rounds were compared"
    assert len(seen) >= 6, "the drafts hardly vary; this test would prove little"
