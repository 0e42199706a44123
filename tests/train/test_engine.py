"""Launch configurations: the shipped files are sound, contradictions are refused by name."""

import json
from pathlib import Path

import pytest
import yaml
from toy_run import run, toy_config

from draftsmith.train.engine import deepspeed_config, make_accelerator

_RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def use_json(tmp_path, monkeypatch):
    def use(settings):
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))

    return use


@pytest.mark.parametrize("path", sorted((_RECIPES / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_launch_file_is_complete(path, monkeypatch):
    settings = yaml.safe_load(path.read_text())
    assert settings["num_processes"] >= settings["num_machines"] >= 1
    if settings["distributed_type"] == "DEEPSPEED":
        json_file = _RECIPES.parent / settings["deepspeed_config"]["deepspeed_config_file"]
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(json_file))
        deepspeed_config(toy_config(precision="bf16"))


@pytest.mark.parametrize("path", sorted((_RECIPES / "deepspeed").glob("*.json")), ids=lambda path: path.name)
def test_a_shipped_deepspeed_file_follows_the_recipe(path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    settings = deepspeed_config(toy_config(precision="bf16", gradient_accumulation=4, clip_norm=None))
    assert settings["gradient_accumulation_steps"] == 4 and settings["gradient_clipping"] == 0.0
    assert settings["communication_data_type"] == "fp32" and settings["bf16"]["check_grad_overflow"] is True
    with pytest.raises(ValueError, match=r"enabled is True, but train.precision is False"):
        deepspeed_config(toy_config(precision="fp32"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, "stage is 0; use 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}, "remove its `optimizer`"),
        (
            {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5},
            "gradient_clipping is 0.5, but train.clip_norm is 1",
        ),
        (
            {"zero_optimization": {"stage": 2}, "bf16": {"check_grad_overflow": False}},
            "check_grad_overflow must be true",
        ),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_recipe_is_refused(use_json, settings, message):
    use_json(settings)
    with pytest.raises(ValueError, match=message):
        deepspeed_config(toy_config())


def test_offloading_with_muon_is_refused(use_json):
    use_json({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    deepspeed_config(toy_config())
    with pytest.raises(ValueError, match=r"offload_optimizer is not supported with train.optimizer: muon"):
        deepspeed_config(toy_config(optimizer="muon"))


def test_a_missing_deepspeed_file_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "nowhere.json")
    with pytest.raises(ValueError, match=r"nowhere.json does not exist"):
        deepspeed_config(toy_config())


def test_several_processes_without_deepspeed_are_refused(tmp_path, monkeypatch):
    """accelerate would start them without a word, each training alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes but without DeepSpeed"):
        make_accelerator(toy_config(), tmp_path)


def test_one_process_needs_no_launcher(tmp_path):
    assert run(tmp_path, toy_config(max_steps=1)).world_size == 1
