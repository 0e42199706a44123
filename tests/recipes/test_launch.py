"""The training of a recipe as it is started for several processes: by accelerate, in a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.data.artefact import read_artefact
from draftsmith.recipes.schema import load_recipe
from draftsmith.recipes.stages import run_stages

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def launch(*words: str) -> str:
    """`accelerate launch` in the checkout; returns everything that it printed."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def test_two_processes_train_a_recipe_and_the_run_goes_on_from_there(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["train.precision=bf16"])
    run_stages(recipe, last="hidden_states")
    words = ["--config_file", "recipes/accelerate/cpu-2.yaml", "-m", "draftsmith.train", str(recipe_file)]
    launch(*words, "--set", "train.precision=bf16")
    trained = read_artefact(recipe.output_dir / "train", "train")
    assert trained.result["steps"] == 6
    run_stages(recipe, first="train")
    assert read_artefact(recipe.output_dir / "train", "train").manifest == trained.manifest
    assert (recipe.output_dir / "eval" / "report.html").is_file()


def test_the_folder_of_a_checkout_can_be_launched_as_it_is(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    run_stages(recipe, last="hidden_states")
    launch(
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "train",
        str(recipe_file),
    )
    assert read_artefact(recipe.output_dir / "train", "train").result["steps"] == 6
