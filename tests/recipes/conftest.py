"""A tiny run, whole: a random target, shipped prompts, a few steps of training, a few tokens of evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, shared by all runs."""
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints of the tests' targets do not go into the user's cache."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def settings(target_folder: Path) -> Callable[[Path], dict[str, Any]]:
    """settings(output_dir) -> a recipe as read from YAML."""

    def make(output_dir: Path) -> dict[str, Any]:
        return {
            "name": "tiny",
            "output_dir": str(output_dir),
            "target": {"model": str(target_folder), "dtype": "float32"},
            "prompts": {"sources": [{"shipped": True, "limit": 14}], "eval_count": 4},
            "responses": {"max_new_tokens": 12, "temperature": 0, "batch_size": 4},
            "rows": {"max_row_tokens": 512},
            "hidden_states": {"dtype": "float32", "device": "cpu"},
            "model": {"method": "eagle3", "ttt_steps": 2, "draft_vocab_size": 256},
            "train": {
                "max_steps": 6,
                "learning_rate": 1e-3,
                "tokens_per_batch": 512,
                "precision": "fp32",
                "checkpoint_every_steps": 2,
                "probe_every_steps": 3,
            },
            "export": {"dtype": "float32"},
            "eval": {
                "limit": 1,
                "num_speculative_tokens": [1, 3],
                "max_new_tokens": 8,
                "bootstrap_samples": 100,
                "device": "cpu",
            },
        }

    return make


@pytest.fixture
def recipe_file(settings: Callable[[Path], dict[str, Any]], tmp_path: Path) -> Path:
    """The tiny recipe as a file, writing to `run` beside it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path / "run")))
    return path
