"""A real vLLM answers as the engine in this process does: the same ids, stop token included."""

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target
from tiny_prompts import lines, prompt, prompts_folder

from draftsmith.data.responses import ResponsesConfig, generate_responses
from draftsmith.data.target import TargetConfig, resolve_target
from draftsmith.hidden_states.vllm_server import ServerConfig, launch, vllm_python

SERVER = ServerConfig(max_model_len=256, max_num_batched_tokens=256, kv_cache_gib=1)


def _has_vllm() -> bool:
    try:
        vllm_python(SERVER)
    except ValueError:
        return False
    return True


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _has_vllm(), reason="no vLLM environment")
def test_both_engines_give_the_same_turns_in_fp32(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target", num_hidden_layers=3, eos_token_id=list(range(2, 512, 9)))
    target = resolve_target(TargetConfig(model=str(folder), dtype="float32"), tmp_path / "cache")
    conversations = [prompt(number, followups=["and then"] * (number % 2)) for number in range(8)]
    prompts = prompts_folder(tmp_path / "prompts", conversations)
    settings: dict[str, Any] = {"max_new_tokens": 40}
    generate_responses(ResponsesConfig(**settings), target, prompts, tmp_path / "ours")
    with launch(target, SERVER, tmp_path / "log") as server:
        config = ResponsesConfig(engine="vllm", **settings)
        generate_responses(config, target, prompts, tmp_path / "vllm", [server.url])
    ours, theirs = lines(tmp_path / "ours" / "train.jsonl"), lines(tmp_path / "vllm" / "train.jsonl")
    assert {name: line["turns"] for name, line in theirs.items()} == {n: line["turns"] for n, line in ours.items()}
    reasons = [turn["finish_reason"] for line in theirs.values() for turn in line["turns"]]
    assert "stop" in reasons
    assert theirs["p0"]["provenance"]["engine_version"].startswith("0.")
