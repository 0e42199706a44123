"""`draftsmith check`: figures before the work, and a refusal when they do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from draftsmith.recipes.estimate import Estimate, estimate
from draftsmith.recipes.schema import Recipe, parse_recipe

GIB = 1 << 30


@pytest.fixture
def recipe(settings: Callable[[Path], dict[str, Any]], tmp_path: Path) -> Callable[..., Recipe]:
    """recipe(section={field: value}) -> the tiny recipe with these settings."""

    def make(**sections: dict[str, Any]) -> Recipe:
        data = settings(tmp_path / "run")
        for name, fields in sections.items():
            data[name] |= fields
        return parse_recipe(data, "tiny")

    return make


def test_tokens_and_disk_follow_from_prompts_and_layers(recipe: Callable[..., Recipe]) -> None:
    found = estimate(recipe())
    tokens = (14 - 4) * (80 + 6)  # prompts that are not held out; half of max_new_tokens
    assert found.train_tokens == tokens
    states = tokens * 4 * 64 * 4  # 3 auxiliary layers and the last, width 64, float32
    assert states < found.cache_bytes < 1.2 * states + 14 * 4096
    assert estimate(recipe(hidden_states={"dtype": "bfloat16"})).cache_bytes < found.cache_bytes
    assert estimate(recipe(hidden_states={"mode": "online"})).cache_bytes == 0
    assert "10 training prompts" in found.render()


def test_the_counts_of_a_finished_rows_stage_are_used(recipe: Callable[..., Recipe]) -> None:
    rows = recipe().output_dir / "rows"
    rows.mkdir(parents=True)
    result = {"train": {"tokens": 12345, "rows": 7}}
    (rows / "manifest.json").write_text(json.dumps({"stage": "rows", "state": "done", "result": result}))
    found = estimate(recipe())
    assert found.train_tokens == 12345 and "finished rows stage" in found.render()


def test_what_is_on_disk_already_is_not_counted_again(recipe: Callable[..., Recipe]) -> None:
    before = estimate(recipe()).cache_bytes
    cache = recipe().output_dir / "hidden_states" / "train"
    cache.mkdir(parents=True)
    (cache / "shard.safetensors").write_bytes(bytes(1000))
    assert estimate(recipe()).cache_bytes == before - 1000


def test_training_time_ends_with_the_first_limit(recipe: Callable[..., Recipe]) -> None:
    minutes = estimate(recipe(train={"max_steps": None, "max_minutes": 7}))
    assert minutes.training_s == 420
    few, many = (estimate(recipe(train={"max_steps": steps})).training_s for steps in (10, 1000))
    assert many == pytest.approx(100 * few)
    assert estimate(recipe(train={"max_steps": 1000, "epochs": 1})).training_s < many


def test_a_cache_that_does_not_fit_is_refused_with_the_figures(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(1.0001 * GIB)))
    with pytest.raises(ValueError, match=r"needs 0\.00 GiB, 1\.00 GiB are free and .*reserve_gib keeps 1\.00 GiB"):
        estimate(recipe()).refuse_what_does_not_fit()
    estimate(recipe(hidden_states={"mode": "online"})).refuse_what_does_not_fit()


def test_a_run_that_needs_more_memory_than_is_free_is_refused_with_the_figures(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB // 2))
    with pytest.raises(ValueError, match=r"needs 1\.\d\d GiB of memory and 0\.50 GiB are free"):
        estimate(recipe()).refuse_what_does_not_fit()


def test_a_dataset_of_unknown_size_is_not_taken_for_an_empty_one(recipe: Callable[..., Recipe]) -> None:
    sources = [{"shipped": True}, {"dataset": "some/dataset", "split": "train"}]
    with pytest.raises(ValueError, match=r"prompts\.sources\.1\.limit is missing"):
        estimate(recipe(prompts={"sources": sources}))
    sources[1]["limit"] = 1000
    assert estimate(recipe(prompts={"sources": sources})).train_tokens > 1000 * 80


def test_a_server_of_its_own_takes_memory_too(recipe: Callable[..., Recipe]) -> None:
    alone: Estimate = estimate(recipe())
    served = estimate(recipe(responses={"engine": "vllm"}))
    assert served.memory_bytes > alone.memory_bytes + GIB
