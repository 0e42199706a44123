"""The recipe: strict, and what it says when something is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.models.head import available_methods
from draftsmith.recipes.schema import RecipeError, load_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart-eagle3.yaml"


def refusal(*overrides: str, recipe: Path = QUICKSTART) -> str:
    """What is said about the quickstart recipe with these settings."""
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, overrides)
    return str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid_and_survives_being_resolved(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem and recipe.output_dir == Path("runs") / path.stem
    assert parse_recipe(yaml.safe_load(recipe.to_yaml()), "resolved") == recipe


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.max_minute=4", "train.max_minute: there is no such setting (value 4); did you mean max_minutes?"),
        ("model.ttt_step=4", "model.ttt_step: there is no such setting (value 4); did you mean ttt_steps?"),
        ("hidden_states.cache.reserve_gb=1", "hidden_states.cache.reserve_gb: there is no such setting (value 1)"),
        ("eval.server.max_model_le=1", "did you mean max_model_len?"),
        ("rowz.max_row_tokens=9", "rowz: there is no such setting (value {'max_row_tokens': 9}); did you mean rows?"),
        ("method=eagle3", "did you mean model.method?"),
        ("model.method=eagel3", f"is 'eagel3'; the methods are {', '.join(available_methods())}; did you mean eagle3?"),
        ("prompts.sources=[{shiped: true}]", "prompts.sources.0.shiped: there is no such setting (value True)"),
        ("export.quantisation=fp8", "the settings here are layout, dtype, num_speculative_tokens"),
    ],
)
def test_an_unknown_setting_is_named_with_its_value_and_the_nearest_valid_one(override: str, words: str) -> None:
    assert words in refusal(override)


def test_a_setting_in_the_wrong_section_is_told_where_it_belongs() -> None:
    assert "train.max_row_tokens: there is no such setting (value 9); there is rows.max_row_tokens" in refusal(
        "train.max_row_tokens=9"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.tokens_per_batch=many", "train.tokens_per_batch is 'many': Input should be a valid integer"),
        ("train.tokens_per_batch='2048'", "train.tokens_per_batch is '2048', which is not a number; write 2048 if"),
        ("model.ttt_steps=yes", "model.ttt_steps is True, which is not a number; write 1 if that is meant"),
        ("prompts.sources=[{shipped: 1}]", "prompts.sources.0.shipped is 1, which is not true or false; write true"),
        ("prompts.sources=all", "prompts.sources is 'all': Input should be a list"),
        ("target=smollm2", "target is 'smollm2': Input should be a section of settings"),
        ("output_dir=null", "output_dir is None: Input is not a path"),
        ("responses.engine=sglang", "responses.engine is 'sglang': Input should be 'transformers' or 'vllm'"),
        ("train.learning_rate=-1", "train.learning_rate is -1: Input should be greater than 0"),
        ("name=a b", "name is 'a b'"),
        ("model=3", "model.method is missing"),
    ],
)
def test_a_wrong_type_or_value_is_named_with_the_field(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.tokens_per_batch=512"], "raise train.tokens_per_batch or lower rows.max_row_tokens"),
        (["responses.max_new_tokens=1024"], "responses.max_new_tokens is 1024 but rows.max_row_tokens is 1024"),
        (["responses.max_prompt_tokens=2000"], "of such a prompt no answer would be left"),
        (["responses.endpoints=[http://a]"], "responses: endpoints is ('http://a',), but engine is transformers"),
        (["responses.temperature=0.7"], "remove replay or set responses.temperature: 0"),
        (["prompts.eval_count=0"], "prompts.eval_count is 0 and there are no prompts.eval_sources"),
        (["model.fc_norm=true", "model.norm_before_fc=true"], "  - model.fc_norm and model.norm_before_fc are both"),
        (["train.max_minutes=null"], "  - train.epochs, train.max_steps and train.max_minutes are all unset"),
        (
            ["hidden_states.source=vllm", "hidden_states.server.max_model_len=1024"],
            "raise hidden_states.server.max_model_len above it",
        ),
        (
            ["responses.engine=vllm", "hidden_states.source=vllm", "hidden_states.server.max_model_len=80"],
            "responses.max_new_tokens is 96 but the server that is launched holds 80 tokens",
        ),
        (["eval.engines=[vllm]", "eval.server.max_model_len=90"], "raise eval.server.max_model_len"),
        (
            ["hidden_states.server.max_model_len=800"],
            "hidden_states.server is set but neither hidden_states.source nor",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], words: str) -> None:
    assert words in refusal(*overrides)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    text = refusal("model.ttt_step=4", "train.max_minute=4", "responses.max_new_tokens=x", "prompt.a=1")
    assert text.count("\n  - ") == 4


def test_a_setting_is_overridden_with_a_yaml_value() -> None:
    overrides = ["train.learning_rate=1e-4", "eval.engines=[replay]", "train.trackers=[]", "hidden_states.mode=online"]
    overrides += ["train.max_minutes=null", "train.max_steps=3", "responses.chat_template_args.enable_thinking=false"]
    recipe = load_recipe(QUICKSTART, overrides)
    assert recipe.train.learning_rate == 1e-4 and recipe.train.trackers == () and recipe.train.max_minutes is None
    assert recipe.eval.engines == ("replay",) and recipe.hidden_states.mode == "online"
    assert recipe.responses.chat_template_args == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.max_minutes", "write SECTION.FIELD=VALUE"),
        ("=3", "write SECTION.FIELD=VALUE"),
        ("train..x=3", "write SECTION.FIELD=VALUE"),
        ("name.x=3", "name is 'quickstart-eagle3', not a section"),
        ("eval.engines=[replay", "the value is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nname: b\n", "key 'name' is given twice"),
        ("train: {epochs: 1, epochs: 2}\n", "key 'epochs' is given twice"),
        ("train: [1\n", "is not valid YAML"),
        ("? [a]\n: 1\n", "is not valid YAML"),
        ("", "holds no settings; a recipe is a mapping with the sections name, output_dir, target"),
        ("- a\n", "holds no settings"),
        ("1: 2\n", "1 is not the name of a section"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert words in refusal(recipe=path)


def test_a_missing_file_and_missing_sections_are_named(tmp_path: Path) -> None:
    assert "does not exist (looked for in" in refusal(recipe=tmp_path / "none.yaml")
    with pytest.raises(RecipeError) as error:
        parse_recipe({"name": "a"}, "x.yaml")
    missing = ["model.method", "output_dir", "target", "prompts", "responses", "train"]
    assert all(f"{name} is missing" in str(error.value) for name in missing)


def test_a_number_with_an_exponent_is_a_number(tmp_path: Path) -> None:
    data: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    data["train"].pop("learning_rate")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data).replace("train:", "train:\n  learning_rate: 1e-3"))
    assert load_recipe(path).train.learning_rate == 1e-3
