"""The command line: exit codes and words."""

import os
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart-eagle3.yaml"


def draftsmith(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "DRAFTSMITH_DEBUG": ""}
    command = [sys.executable, "-m", "draftsmith.recipes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_help_names_every_command() -> None:
    done = draftsmith("--help")
    assert done.returncode == 0
    for name in ("run", "check", "doctor", "hidden-states", "export", "eval", "prompts", "responses", "rows", "train"):
        assert name in done.stdout


def test_a_wrong_recipe_exits_with_1_and_without_a_traceback() -> None:
    done = draftsmith("run", str(QUICKSTART), "--set", "train.learning_rat=1")
    assert done.returncode == 1
    assert "did you mean learning_rate" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_usage_exits_with_2() -> None:
    assert draftsmith("run").returncode == 2
    assert draftsmith("nothing").returncode == 2


def test_an_output_dir_without_a_cache_is_an_error_in_words(tmp_path: Path) -> None:
    done = draftsmith("hidden-states", "verify", str(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
