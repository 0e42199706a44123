"""vLLM's counters are read right; the real server is in test_run.py."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_target

from draftsmith.data.target import ResolvedTarget
from draftsmith.eval import serve
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.serve import DraftCounters, parse_counters
from draftsmith.eval.workloads import Question

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 12.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="tiny"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="2"} 0.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 22.0
"""


def test_counters_are_parsed_and_subtracted() -> None:
    found = parse_counters(METRICS)
    assert found == DraftCounters(12, 36, 9, (6, 3, 0), 22)
    assert found - DraftCounters(2, 6, 1, (1, 0, 0), 4) == DraftCounters(10, 30, 8, (5, 3, 0), 18)
    assert found - DraftCounters(0, 0, 0, (), 0) == found, "positions appear with the first draft"


def test_engines_of_one_server_are_summed() -> None:
    assert parse_counters(METRICS + METRICS.replace('engine="0"', 'engine="1"')).per_position == (12, 6, 0)


def test_a_server_without_speculation_has_none() -> None:
    assert parse_counters('vllm:generation_tokens_total{engine="0",model_name="x"} 5.0\n') == DraftCounters(
        0, 0, 0, (), 5
    )


def test_unrelated_and_missing_counters_change_nothing() -> None:
    text = METRICS.replace(METRICS.splitlines()[6] + "\n", "") + 'vllm:prompt_tokens_total{engine="0"} NaN\n'
    assert parse_counters(text) == DraftCounters(12, 36, 9, (0, 3, 0), 22), "position 0 was never accepted"


@pytest.mark.parametrize("is_whole", [False, True], ids=["a head alone", "a target that holds its head"])
def test_the_export_is_served_beside_the_target_or_as_the_target(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[Path, Any]] = []

    @contextmanager
    def launch(target: ResolvedTarget, *_: Any, speculative: Any) -> Generator[None]:
        launched.append((target.path, speculative))
        yield

    monkeypatch.setattr(serve, "launch", launch)
    if is_whole:
        tiny_target(tmp_path / "export")
    else:
        (tmp_path / "export").mkdir()
        save_file({"norm.weight": torch.ones(4)}, tmp_path / "export/model.safetensors")
    target = ResolvedTarget("someone/target", tmp_path / "target", "w", "t", "c", "float32")
    workloads = {"chat": [Question("q", (1, 2, 3))]}
    for n in (0, 3):
        with serve._server(EvalConfig(), target, tmp_path / "export", "eagle3", n, workloads, tmp_path):
            pass
    speculative = {"method": "eagle3", "num_speculative_tokens": 3}
    if is_whole:
        assert launched == [(tmp_path / "export", None), (tmp_path / "export", speculative)]
    else:
        speculative["model"] = str(tmp_path / "export")
        assert launched == [(tmp_path / "target", None), (tmp_path / "target", speculative)]
