"""The README: the commands, files and recipes that it names exist."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from draftsmith.recipes.run import app
from draftsmith.recipes.schema import Recipe, load_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
YAML_BLOCKS = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
COMMAND_LINES = [
    line.split(" #")[0] for block in re.findall(r"```\n(.*?)```", README, re.DOTALL) for line in block.splitlines()
]


def draftsmith_lines() -> list[list[str]]:
    """The words after `draftsmith` of every command line that is shown."""
    found = [re.match(r"(?:\.venv/bin/)?draftsmith (.*)", line) for line in COMMAND_LINES]
    inline = re.findall(r"`draftsmith ([^`]+)`", README)
    return [text.split() for text in [*(match[1] for match in found if match), *inline]]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", README, re.MULTILINE))))
def test_every_make_target_that_is_named_exists(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_two_commands_are_shown_and_the_second_is_what_a_change_must_pass() -> None:
    assert "make demo" in COMMAND_LINES and "make test" in COMMAND_LINES
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", draftsmith_lines(), ids=" ".join)
def test_every_draftsmith_command_and_option_that_is_shown_exists(words: list[str]) -> None:
    command = get_command(app)
    while (commands := getattr(command, "commands", None)) is not None:
        assert words[0] in commands, f"draftsmith has no command {words[0]}"
        command, words = commands[words[0]], words[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_every_file_of_the_repository_that_is_named_exists() -> None:
    named = set(
        re.findall(r"(?<![\w/])(?:data|hidden_states|models|train|eval|recipes|tests|requirements)/[\w./-]*\w", README)
    )
    invented = {"models/foo.py", "recipes/foo-quickstart.yaml"}  # the method that a reader is told how to add
    assert "recipes/accelerate/mi300x-8.yaml" in named
    assert [name for name in sorted(named - invented) if not (ROOT / name).exists()] == []


def test_the_explained_recipe_is_valid_and_agrees_with_the_shipped_one() -> None:
    explained = yaml.safe_load(YAML_BLOCKS[0])
    parse_recipe(explained, "README.md")
    shipped = yaml.safe_load((ROOT / "recipes" / "quickstart-eagle3.yaml").read_text(encoding="utf-8"))
    for section, settings in explained.items():
        if isinstance(settings, dict):
            assert {key: shipped[section].get(key) for key in settings} == settings
        else:
            assert shipped[section] == settings


def test_the_changes_for_an_own_model_make_a_valid_recipe() -> None:
    recipe = yaml.safe_load(YAML_BLOCKS[0]) | yaml.safe_load(YAML_BLOCKS[1])
    assert parse_recipe(recipe, "README.md").hidden_states.server.max_model_len == 8192


def test_the_settings_of_the_vllm_demo_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    shown = subprocess.run(["make", "-n", "demo", "ENGINE=vllm"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    command = next(line for line in shown.stdout.splitlines() if "draftsmith run" in line)
    overrides = [setting.strip("'") for setting in re.findall(r"--set (\S+)", command)]
    recipe: Recipe = load_recipe(ROOT / "recipes" / "quickstart-eagle3.yaml", overrides)
    assert recipe.responses.engine == recipe.hidden_states.source == "vllm"
    assert recipe.eval.engines == ("runtime", "vllm")


def test_an_unknown_engine_of_the_demo_is_refused_with_the_names_of_the_known() -> None:
    done = subprocess.run(["make", "demo", "ENGINE=sglang"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "ENGINE is sglang; give transformers or vllm" in done.stderr
