"""Recipe: one strict YAML describes a run. Whatever is wrong with it is said before anything heavy starts.

A section per stage, each the Config of that stage; `model.method` names a file in models/, the rest of the section is
that method's Config. Relative paths are relative to the current directory, as on any command line.
"""

import difflib
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.rows import RowsConfig
from draftsmith.data.target import TargetConfig
from draftsmith.eval.config import EvalConfig
from draftsmith.hidden_states.stream import HiddenStatesConfig
from draftsmith.hidden_states.vllm_server import ServerConfig
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

    @field_validator("model", mode="before")
    @classmethod
    def _keep(cls, value: Any) -> Any:
        return value

    def to_yaml(self) -> str:
        """The resolved recipe, readable by load_recipe again."""
        data = self.model_dump(mode="json", exclude={"method", "model"})
        data["model"] = {"method": self.method, **self.model.model_dump(mode="json")}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


class _NoSettings(BaseModel, frozen=True):
    """Stands in for a faulty `model` section, so that the other sections are checked as well."""


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
    problems: list[str] = [f"{key!r} is not the name of a section" for key in raw if not isinstance(key, str)]
    raw = {key: value for key, value in raw.items() if isinstance(key, str)}
    settings: BaseModel | None = None
    if "method" in raw:
        problems.append(f"method: there is no such setting (value {raw['method']!r}); did you mean model.method?")
    raw["method"] = ""
    if not isinstance(section, dict) or "method" not in section:
        problems.append(f"model.method is missing; it names the method: {', '.join(available_methods())}")
    else:
        section = dict(section)
        raw["method"] = section.pop("method")
        try:
            config_class = load_method(str(raw["method"])).Config
            settings = config_class(**section)
            problems += [f"model.{text}" for text in _converted(section, settings)]
        except ValidationError as error:
            problems += _described(error, config_class, "model.")
        except ValueError as error:
            problems.append(_nearest(str(error), str(raw["method"]), available_methods()))
        except TypeError:
            problems.append("model: its keys must be words")
    raw["model"] = _NoSettings() if settings is None else settings
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        problems += _described(error, Recipe, "")
    else:
        problems += _converted(raw, recipe)
        problems += _contradictions(recipe)
    if problems:
        raise RecipeError(f"{source}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return recipe


def _contradictions(recipe: Recipe) -> list[str]:
    """Settings that are fine alone and cannot be meant together."""
    return [*_lengths_that_contradict(recipe), *_engines_that_contradict(recipe)]


def _lengths_that_contradict(recipe: Recipe) -> list[str]:
    found = []
    longest, answer = recipe.rows.max_row_tokens, recipe.responses.max_new_tokens
    if longest > recipe.train.tokens_per_batch:
        found.append(
            f"rows.max_row_tokens is {longest} but train.tokens_per_batch is {recipe.train.tokens_per_batch}: longer "
            "rows would never be trained on; raise train.tokens_per_batch or lower rows.max_row_tokens"
        )
    if answer >= longest:
        found.append(
            f"responses.max_new_tokens is {answer} but rows.max_row_tokens is {longest}: answers would be cut; "
            "raise rows.max_row_tokens, it counts the prompt too"
        )
    default = ResponsesConfig.model_fields["max_prompt_tokens"].default  # a wide one, meant for no model in particular
    if longest <= recipe.responses.max_prompt_tokens != default:
        found.append(
            f"responses.max_prompt_tokens is {recipe.responses.max_prompt_tokens} but rows.max_row_tokens is "
            f"{longest}: of such a prompt no answer would be left; lower the first or raise the second"
        )
    room = recipe.hidden_states.server.max_model_len
    if recipe.responses.engine == "vllm" and not recipe.responses.endpoints and answer >= room:
        found.append(
            f"responses.max_new_tokens is {answer} but the server that is launched holds {room} tokens of prompt and "
            "answer; raise hidden_states.server.max_model_len"
        )
    # vLLM wants room for one generated token beside the row that it captures.
    if recipe.hidden_states.source == "vllm" and not recipe.hidden_states.endpoints and longest >= room:
        found.append(
            f"rows.max_row_tokens is {longest} but the server that is launched holds {room} tokens, one of which it "
            "generates; raise hidden_states.server.max_model_len above it"
        )
    if "vllm" in recipe.eval.engines and recipe.eval.max_new_tokens >= recipe.eval.server.max_model_len:
        found.append(
            f"eval.max_new_tokens is {recipe.eval.max_new_tokens} but eval.server.max_model_len is "
            f"{recipe.eval.server.max_model_len}, prompt and answer together; raise eval.server.max_model_len"
        )
    return found


def _engines_that_contradict(recipe: Recipe) -> list[str]:
    found = []
    if "replay" in recipe.eval.engines and recipe.responses.temperature > 0:
        found.append(
            f"eval.engines holds replay but responses.temperature is {recipe.responses.temperature}: only greedy "
            "answers can be replayed; remove replay or set responses.temperature: 0"
        )
    launches = recipe.hidden_states.source == "vllm" or (
        recipe.responses.engine == "vllm" and not recipe.responses.endpoints
    )
    if recipe.hidden_states.server != ServerConfig() and not launches:
        found.append(
            "hidden_states.server is set but neither hidden_states.source nor responses.engine is vllm with a server "
            "to launch; remove it or change one of them"
        )
    return found


_SECTIONS = [name for name in Recipe.model_fields if name != "method"]


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key that is given twice (YAML would silently take the last) and reads 1e-3."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.YAMLError(f"key {key!r} is given twice, again{key_node.start_mark}")
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1, which PyYAML reads, takes 1e-3 for text: it wants 1.0e-3. YAML 1.2 and everybody take it for a number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


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
        node[keys[-1]] = yaml.load(value, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {text!r}: the value is not valid YAML: {error}") from error


def _described(error: ValidationError, model: type[BaseModel], prefix: str) -> list[str]:
    problems = error.errors()
    # Of a list whose items are faulty pydantic also says that it is too short.
    faulty = {problem["loc"][:length] for problem in problems for length in range(len(problem["loc"]))}
    real = [problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in faulty]
    return [_describe(problem, model, prefix) for problem in real]


def _describe(problem: Any, model: type[BaseModel], prefix: str) -> str:
    """One pydantic error -> the field, its value, what is wrong and the nearest valid key."""
    path = [str(part) for part in problem["loc"]]
    name = (prefix + ".".join(path)).removesuffix(".")
    if problem["type"] == "extra_forbidden":
        text = f"{name}: there is no such setting (value {_short(problem['input'])})"
        elsewhere = [place for place in _places_of(path[-1], Recipe) if place != path[-1]]
        here = _keys_at(model, path)
        if elsewhere and not difflib.get_close_matches(path[-1], here, 1, cutoff=0.8):
            return f"{text}; there is {' and '.join(elsewhere)}"
        return _nearest(text, path[-1], here)
    if problem["type"] == "missing":
        return f"{name} is missing; it has no default"
    message = str(problem["msg"]).removeprefix("Value error, ").replace("valid tuple", "list")
    message = message.replace("valid path for <class 'pathlib.Path'>", "path")
    if problem["type"] in ("model_type", "model_attributes_type"):
        message = "Input should be a section of settings"
    # A contradiction within a section comes from its own check, which names the fields; its input is the whole section.
    is_whole_section = isinstance(problem["input"], dict) and problem["type"] == "value_error"
    if is_whole_section or not name:
        return message if message.startswith(f"{name}.") or not name else f"{name}: {message}"
    return f"{name} is {_short(problem['input'])}: {message}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _places_of(name: str, model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Where in a recipe there is a setting of this name: people remember it and put it into another section."""
    for field, info in model.model_fields.items():
        if field == name and prefix:
            yield f"{prefix}{field}"
        below = _model_in(info.annotation)
        if isinstance(below, type) and issubclass(below, BaseModel) and below is not BaseModel:
            yield from _places_of(name, below, f"{prefix}{field}.")


def _converted(raw: Any, resolved: Any, name: str = "") -> list[str]:
    """Values that pydantic takes although they are of another type: yes for 1, "3" for 3."""
    if isinstance(raw, dict):
        values = resolved if isinstance(resolved, dict) else vars(resolved)
        found = [_converted(value, values.get(key), f"{name}.{key}" if name else key) for key, value in raw.items()]
        return [text for each in found for text in each]
    if isinstance(raw, list) and isinstance(resolved, tuple):
        pairs = enumerate(zip(raw, resolved, strict=True))
        return [text for index, (value, read) in pairs for text in _converted(value, read, f"{name}.{index}")]
    is_number = isinstance(resolved, int | float) and not isinstance(resolved, bool)
    if (is_number and isinstance(raw, bool | str)) or (isinstance(resolved, bool) and not isinstance(raw, bool)):
        wanted = "a number" if is_number else "true or false"
        return [f"{name} is {raw!r}, which is not {wanted}; write {json.dumps(resolved)} if that is meant"]
    return []


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
