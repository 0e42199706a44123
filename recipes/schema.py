"""Recipe: one strict YAML describes a run. Whatever is wrong with it is said before anything heavy starts.

A section per stage, each the Config of that stage; `model.method` names a file in models/, the rest of the section is
that method's Config. Relative paths are relative to the current directory, as on any command line.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError

from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.rows import RowsConfig
from draftsmith.data.target import TargetConfig
from draftsmith.eval.config import EvalConfig
from draftsmith.hidden_states.stream import HiddenStatesConfig
from draftsmith.models.head import available_methods, load_method
from draftsmith.train.config import TrainConfig


class ExportConfig(BaseModel, extra="forbid", frozen=True):
    """How the head is written for serving."""

    layout: Literal["speculators", "plain"] = "speculators"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    num_speculative_tokens: int = Field(3, ge=1, description="N that the exported config proposes to a server")
    target_name: str | None = Field(None, description="what a server resolves as target; default target.model")
    license: str | None = Field(None, description="of the model card")


class Recipe(BaseModel, extra="forbid", frozen=True, arbitrary_types_allowed=True):
    """A run, resolved. Written beside every artefact."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: Path
    target: TargetConfig
    prompts: PromptsConfig
    responses: ResponsesConfig
    rows: RowsConfig = RowsConfig()
    hidden_states: HiddenStatesConfig = HiddenStatesConfig()
    method: str
    model: BaseModel  # the method's Config
    train: TrainConfig
    export: ExportConfig = ExportConfig()
    eval: EvalConfig = EvalConfig()

    def to_yaml(self) -> str:
        """The resolved recipe, readable by load_recipe again."""
        data = self.model_dump(mode="json", exclude={"method", "model"})
        data["model"] = {"method": self.method, **self.model.model_dump(mode="json")}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


class _Unreadable(BaseModel):
    """Stands in for a model section that is wrong, so that the other sections are judged all the same."""


class RecipeError(ValueError):
    """A recipe that cannot be run: names each field, its value and the fix."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate. Raises RecipeError."""
    if not path.is_file():
        raise RecipeError(f"recipe {path} does not exist (looked for in {Path.cwd()})")
    try:
        data = yaml.load(path.read_text(), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader with one more check
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds no settings; a recipe is a mapping with the sections {', '.join(_SECTIONS)}")
    for override in overrides:
        _override(data, override)
    return parse_recipe(data, str(path))


def parse_recipe(data: Mapping[str, Any], source: str) -> Recipe:
    """Validate a mapping as read from YAML. Raises RecipeError listing everything that is wrong at once."""
    raw = dict(data)
    section = raw.pop("model", None)
    problems: list[str] = []
    settings: BaseModel | None = None
    if not isinstance(section, dict) or "method" not in section:
        problems.append(f"model.method is missing; it names the method: {', '.join(available_methods())}")
    else:
        section = dict(section)
        raw["method"] = section.pop("method")
        try:
            config_class = load_method(str(raw["method"])).Config
            settings = config_class(**section)
        except ValidationError as error:
            problems += [_describe(problem, config_class, "model.") for problem in error.errors()]
        except ValueError as error:
            problems.append(_nearest(str(error), str(raw["method"]), available_methods()))
        except TypeError:
            problems.append("model: its keys must be words")
    raw["model"] = settings if settings is not None else _Unreadable()
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        problems += [_describe(problem, Recipe, "") for problem in error.errors()]
    else:
        problems += _contradictions(recipe) if settings is not None else []
    if problems:
        raise RecipeError(f"{source}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return recipe


def _contradictions(recipe: Recipe) -> list[str]:
    """Settings that are fine alone and cannot be meant together."""
    found = []
    longest = recipe.rows.max_row_tokens
    if longest > recipe.train.tokens_per_batch:
        found.append(
            f"rows.max_row_tokens is {longest} but train.tokens_per_batch is {recipe.train.tokens_per_batch}: longer "
            "rows would never be trained on; raise train.tokens_per_batch or lower rows.max_row_tokens"
        )
    if recipe.responses.engine == "transformers" and recipe.responses.endpoints:
        found.append(
            "responses.endpoints is set but responses.engine is transformers, which asks no server; "
            "remove it or set responses.engine: vllm"
        )
    if "replay" in recipe.eval.engines and recipe.responses.temperature > 0:
        found.append(
            f"eval.engines holds replay but responses.temperature is {recipe.responses.temperature}: only greedy "
            "answers can be replayed; remove replay or set responses.temperature: 0"
        )
    if not recipe.prompts.eval_count and not recipe.prompts.eval_sources:
        found.append(
            "prompts.eval_count is 0 and there are no prompts.eval_sources: nothing is held out; set one of them"
        )
    if recipe.responses.engine == "vllm" and not recipe.responses.endpoints:
        room = recipe.hidden_states.server.max_model_len
        if recipe.responses.max_new_tokens >= room:
            found.append(
                f"responses.max_new_tokens is {recipe.responses.max_new_tokens} but the server that is launched holds "
                f"{room} tokens of prompt and answer; raise hidden_states.server.max_model_len"
            )
    return found


_SECTIONS = [name for name in Recipe.model_fields if name != "method"]


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key that is given twice: YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} is given twice, again{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _override(data: dict[str, Any], text: str) -> None:
    """Apply one `--set a.b=c`; c is YAML."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {text!r}: write SECTION.FIELD=VALUE, for example --set train.max_minutes=5")
    node = data
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise RecipeError(f"--set {text!r}: {key} is {child!r}, not a section")
        node = child
    try:
        node[keys[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {text!r}: the value is not valid YAML: {error}") from error


def _describe(problem: Any, model: type[BaseModel], prefix: str) -> str:
    """One pydantic error -> the field, its value, what is wrong and the nearest valid key."""
    path = [str(part) for part in problem["loc"]]
    name = prefix + ".".join(path)
    if problem["type"] == "extra_forbidden":
        return _nearest(
            f"{name}: there is no such setting (value {problem['input']!r})", path[-1], _keys_at(model, path)
        )
    if problem["type"] == "missing":
        return f"{name} is missing; it has no default"
    message = str(problem["msg"]).removeprefix("Value error, ")
    value = problem["input"]
    shown = "" if isinstance(value, dict) and len(value) > 3 else f" is {value!r}"
    return f"{name}{shown}: {message}" if name else message


def _nearest(text: str, wrong: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong, valid, 1, cutoff=0.5)
    if close:
        return f"{text}; did you mean {close[0]}?"
    return f"{text}; the settings here are {', '.join(valid)}" if valid else text


def _keys_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The valid keys of the section that holds the last part of `path`."""
    current: Any = model
    for part in path[:-1]:
        if part.isdigit():
            continue
        is_model = isinstance(current, type) and issubclass(current, BaseModel)
        field = current.model_fields.get(part) if is_model else None
        if field is None:
            return []
        current = _model_in(field.annotation)
    if not (isinstance(current, type) and issubclass(current, BaseModel)):
        return []
    return [name for name in current.model_fields if not (current is Recipe and name == "method")]


def _model_in(annotation: Any) -> Any:
    """The pydantic model inside an annotation such as tuple[PromptSource, ...] or X | None."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple, list, dict):
        models = [_model_in(each) for each in get_args(annotation)]
        return next((m for m in models if isinstance(m, type) and issubclass(m, BaseModel)), None)
    return None
