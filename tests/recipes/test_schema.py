"""A recipe that is wrong is refused before anything starts, by an error that names field, value and fix."""

from pathlib import Path

import pytest

from draftsmith.recipes.schema import RecipeError, load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart-eagle3.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses_strictly(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_the_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load_recipe(QUICKSTART)
    copy = tmp_path / "resolved.yaml"
    copy.write_text(recipe.to_yaml())
    assert load_recipe(copy) == recipe


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rat=1", ["train.learning_rat", "did you mean learning_rate"]),
        ("trian.epochs=1", ["trian", "did you mean train"]),
        ("model.ttt_step=2", ["model.ttt_step", "did you mean ttt_steps"]),
        ("hidden_states.server.max_model_length=9", ["hidden_states.server.max_model_length", "max_model_len"]),
        ("train.learning_rate=fast", ["train.learning_rate", "'fast'"]),
        ("train.tokens_per_batch=-3", ["train.tokens_per_batch", "-3"]),
        ("model.method=eagle4", ["model.method", "'eagle4'", "eagle3"]),
        ("model.norm_before_fc=true", ["fc_norm", "norm_before_fc", "exclude each other"]),
        ("rows.max_row_tokens=4096", ["rows.max_row_tokens", "4096", "train.tokens_per_batch"]),
        ("responses.temperature=0.7", ["eval.engines", "replay", "responses.temperature"]),
        ("responses.engine=sglang", ["responses.engine", "'sglang'"]),
        ("prompts.sources=[]", ["prompts.sources"]),
        ("name=../../etc", ["name", "'../../etc'"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_fix(override: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(QUICKSTART, [override])
    for word in words:
        assert word in str(refused.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(QUICKSTART, ["train.learning_rat=1", "model.ttt_step=2", "target.dtype=int8"])
    for word in ("learning_rat", "ttt_step", "target.dtype"):
        assert word in str(refused.value)


def test_overrides_are_yaml_values() -> None:
    recipe = load_recipe(QUICKSTART, ["eval.num_speculative_tokens=[1, 4]", "train.max_minutes=0.5"])
    assert recipe.eval.num_speculative_tokens == (1, 4)
    assert recipe.train.max_minutes == 0.5


@pytest.mark.parametrize("text", ["train.lr", "=3", "train..x=1", "name.x=1", "a=[1"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe(QUICKSTART, [text])


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(QUICKSTART.read_text() + "\nname: again\n")
    with pytest.raises(RecipeError, match="given twice"):
        load_recipe(path)


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "\x00"])
def test_what_is_not_a_recipe_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError):
        load_recipe(path)


def test_a_missing_recipe_names_the_place_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")


def test_yaml_cannot_construct_objects(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text("name: !!python/object/apply:os.system ['echo owned']\n")
    with pytest.raises(RecipeError):
        load_recipe(path)
