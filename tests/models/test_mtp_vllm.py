"""Real vLLM serves the exported target with its own MTP layer and drafts, round by round, what the head proposes."""

import subprocess
from typing import Any

import pytest
from drafts_of_vllm import PROMPTS, PYTHON, assert_drafts_equal, run_vllm
from test_mtp import VARIANTS, Scene, exported

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
    assert_drafts_equal(head, scene.folder, results, NUM_TOKENS, distinct=6)
