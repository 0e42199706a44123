"""A whole run on a tiny target: every stage, rerun, refusal, kill, and the three ways to get hidden states."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_target

from draftsmith.recipes.schema import Recipe, load_recipe
from draftsmith.recipes.stages import STAGES, only_writer, read_report, run_stages

WORDS = [
    "red",
    "blue",
    "green",
    "small",
    "large",
    "old",
    "new",
    "warm",
    "cold",
    "bright",
    "river",
    "stone",
    "cloud",
    "garden",
    "window",
    "letter",
    "bridge",
    "train",
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_target(tmp_path_factory.mktemp("target") / "tiny", "llama"))


def recipe_file(folder: Path, target: Path, **changes: Any) -> Path:
    prompts = folder / "prompts.jsonl"
    lines = [
        {
            "id": f"p{i}",
            "source": "tiny",
            "prompt": f"{WORDS[i % 18]} {WORDS[(5 * i + 3) % 18]} number {i * i + 7} and {i}",
        }
        for i in range(24)
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: dict[str, Any] = {
        "name": "tiny",
        "output_dir": str(folder / "run"),
        "target": {"model": str(target), "dtype": "float32"},
        "prompts": {"sources": [{"jsonl": str(prompts)}], "eval_count": 4, "near_duplicate_similarity": 1.0},
        "responses": {"max_new_tokens": 12, "batch_size": 8, "failure_budget": 0.1},
        "rows": {"max_row_tokens": 128},
        "hidden_states": {"mode": "offline", "dtype": "float32", "cache": {"reserve_gib": 0}},
        "model": {"method": "eagle3", "ttt_steps": 2, "draft_vocab_size": 64},
        "train": {"max_steps": 4, "learning_rate": 1e-3, "tokens_per_batch": 128, "precision": "fp32"},
        "export": {"dtype": "float32"},
        "eval": {"num_speculative_tokens": [1, 2], "max_new_tokens": 8, "limit": 2, "bootstrap_samples": 100},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        settings[section] = value if not field else {**settings[section], field: value}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def losses(recipe: Recipe) -> list[float]:
    lines = (recipe.output_dir / "train" / "log.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.glob("*/manifest.json"))}


def test_a_run_goes_from_prompts_to_a_report_and_a_rerun_changes_nothing(tmp_path: Path, target: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, target))
    run_stages(recipe)
    report = read_report(recipe.output_dir)
    assert report["recommended"]["num_speculative_tokens"] in (1, 2)
    engines = {cell["engine"] for cells in report["workloads"].values() for cell in cells}
    assert engines == {"runtime", "replay"}
    exported = recipe.output_dir / "export" / "model"
    assert {path.name for path in exported.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert "Not measured" not in (exported / "README.md").read_text()
    before = stamps(recipe.output_dir)
    run_stages(recipe)
    assert stamps(recipe.output_dir) == before


def test_another_setting_upstream_is_refused_and_named(tmp_path: Path, target: Path) -> None:
    path = recipe_file(tmp_path, target)
    run_stages(load_recipe(path), last="rows")
    with pytest.raises(ValueError, match=r"config\.max_new_tokens: was 12, wanted 9"):
        run_stages(load_recipe(path, ["responses.max_new_tokens=9"]), last="rows")


def test_all_three_modes_of_hidden_states_give_the_same_losses(tmp_path: Path, target: Path) -> None:
    found = {}
    for mode in ("offline", "online", "hybrid"):
        folder = tmp_path / mode
        folder.mkdir()
        recipe = load_recipe(recipe_file(folder, target, hidden_states__mode=mode, train__max_steps=6))
        run_stages(recipe, last="train")
        found[mode] = losses(recipe)
    assert len(found["offline"]) == 6
    assert found["offline"] == found["online"] == found["hybrid"]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_continues_to_the_same_weights(tmp_path: Path, target: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = load_recipe(recipe_file(tmp_path / "whole", target))
    run_stages(whole, last="train")
    path = recipe_file(tmp_path / "killed", target)
    killed = load_recipe(path)
    command = [sys.executable, "-m", "draftsmith.recipes", "run", str(path), "--to", "train"]
    for seconds in (4.0, 7.0):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    run_stages(killed, last="train")
    assert losses(killed) == losses(whole)


def test_only_one_run_writes_to_an_output_dir(tmp_path: Path) -> None:
    with only_writer(tmp_path), pytest.raises(ValueError, match="another run is writing"), only_writer(tmp_path):
        pass


@pytest.mark.parametrize(("first", "last"), [("train", "rows"), ("nothing", "eval"), ("prompts", "nothing")])
def test_wrong_stage_names_and_orders_are_refused(tmp_path: Path, target: Path, first: str, last: str) -> None:
    with pytest.raises(ValueError, match=r"the (stages|order)"):
        run_stages(load_recipe(recipe_file(tmp_path, target)), first, last)


def test_a_stage_without_its_input_says_which_stage_to_run(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ValueError, match="Run that stage first"):
        run_stages(load_recipe(recipe_file(tmp_path, target)), "rows", "rows")


def test_the_stages_are_in_the_order_of_the_data() -> None:
    assert list(STAGES) == ["prompts", "responses", "rows", "hidden_states", "train", "export", "eval"]
