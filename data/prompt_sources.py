"""Where prompts come from: the shipped set, JSONL files and Hugging Face datasets -> prompts of one form.

A prompt is {"id", "source", "messages", ["followups"], ["tools"]}: `messages` ends with the turn that the target is to
answer, `followups` are later user turns that it answers one after another.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from draftsmith.data.artefact import fingerprint

Prompt = dict[str, Any]

SHIPPED = Path(__file__).parent / "shipped_prompts.jsonl"
_FORMS = ("messages", "prompt", "conversations")
_MAPPABLE = (*_FORMS, "id", "source", "followups", "tools", "conversation_id")
# The names that ShareGPT files use. Any other role stays what it is: context that the template takes or refuses.
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


class PromptSource(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """One source; exactly one of `shipped`, `jsonl` and `dataset`."""

    shipped: bool = Field(False, description="the prompts that come with draftsmith")
    jsonl: Path | None = Field(None, description="lines with `messages`, `prompt` or ShareGPT `conversations`")
    dataset: str | None = Field(None, description="Hugging Face dataset id, or a folder that `datasets` can load")
    subset: str | None = Field(None, description="configuration of the dataset (gsm8k: main)")
    split: str | None = Field(None, description="split of the dataset, such as train")
    revision: str | None = Field(None, description="commit or tag of the dataset")
    field_map: dict[str, str] = Field(default_factory=dict, description="our field -> the source's field")
    where: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="take only lines whose fields have these values"
    )
    limit: int | None = Field(None, ge=1, description="the first so many prompts that match `where`")
    weight: float | None = Field(None, gt=0, description="share of this source in the mix, relative to the others")
    assistant_turns: Literal["replace", "context"] = Field(
        "replace",
        description="replace: the target answers every user turn itself; context: answers that the source brings "
        "stay as context, never trained on, and the target answers the last turn only",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        given = [name for name in ("shipped", "jsonl", "dataset") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"a prompt source is exactly one of shipped, jsonl and dataset; given: {given or 'none'}")
        if self.dataset and not self.split:
            raise ValueError(f"the source dataset {self.dataset!r} needs a split, such as `split: train`")
        for name in ("subset", "split", "revision"):
            if getattr(self, name) and not self.dataset:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but only a dataset has one; remove it")
        for name in self.field_map:
            if name not in _MAPPABLE:
                raise ValueError(f"field_map names {name!r}; it can map {', '.join(_MAPPABLE)} to the source's fields")
        return self

    @property
    def name(self) -> str:
        """What its prompts are called where they carry no `source` of their own."""
        return self.dataset or (self.jsonl.stem if self.jsonl else "shipped")

    @property
    def file(self) -> Path | None:
        """The file that it reads; None for a dataset."""
        return SHIPPED if self.shipped else self.jsonl


def read_source(source: PromptSource, max_malformed_share: float, counts: Counter[str]) -> list[Prompt]:
    """All prompts of one source, in its order; what is left out is counted.

    Raises ValueError for a malformed line, naming file and line, unless a share of them is allowed and not exceeded.
    """
    prompts: list[Prompt] = []
    num_read = num_malformed = 0
    for place, raw in _lines(source):
        if len(prompts) == source.limit:
            break
        num_read += 1
        try:
            mapped = _mapped(raw, source)
            if any(mapped.get(field) != value for field, value in source.where.items()):
                counts["not_matching_where"] += 1
                continue
            prompts.append(normalise(mapped, source.name, source.assistant_turns, counts))
        except ValueError as error:
            num_malformed += 1
            if max_malformed_share == 0:
                raise ValueError(
                    f"{place}: {error}. Mend the line, or allow a share of such lines by prompts.max_malformed_share"
                ) from error
    counts["malformed_lines"] += num_malformed
    if num_malformed > max_malformed_share * num_read:
        raise ValueError(
            f"{num_malformed} of {num_read} lines of {source.name} are malformed; "
            f"prompts.max_malformed_share is {max_malformed_share}"
        )
    if not prompts:
        raise ValueError(
            f"prompt source {source.name} gave no prompt: {num_read} lines, where: {source.where or 'any'}"
        )
    return prompts


def normalise(
    raw: dict[str, Any], source: str, assistant_turns: Literal["replace", "context"], counts: Counter[str]
) -> Prompt:
    """One line of a source -> a prompt. Raises ValueError that says what is wrong with the line."""
    messages = [_checked(message) for message in _messages(raw)]
    followups = _list_of(raw, "followups", str)
    if messages and messages[-1]["role"] == "assistant":
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]  # the target answers the last turn itself
        counts["final_answers_not_used"] += 1
    if assistant_turns == "replace":
        messages, later = _without_answers(messages)
        followups = [*later, *followups]
        counts["answers_replaced"] += len(later)
    if not messages or messages[-1]["role"] in ("system", "developer"):
        raise ValueError("it holds no turn to answer")
    if messages[-1]["role"] == "user" and not messages[-1]["content"]:
        raise ValueError("its last user turn is empty")
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    if not all(isinstance(call, list) for call in calls):
        raise ValueError("the tool_calls of a message are not a list")
    identity = raw.get("id")
    prompt: Prompt = {"id": str(identity if identity is not None else fingerprint(messages + followups))}
    prompt |= {"source": str(raw.get("source") or source), "messages": messages}
    tools = _list_of(raw, "tools", dict)
    if followups:
        prompt["followups"] = followups
    if tools:
        prompt["tools"] = tools
    if raw.get("conversation_id") is not None:
        prompt["conversation_id"] = str(raw["conversation_id"])
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; no tokenizer reads it
        raise ValueError(f"it holds half of a surrogate pair ({error})") from error
    return prompt


def _lines(source: PromptSource) -> Iterator[tuple[str, Any]]:
    """Places (file:line) and raw lines; a line that cannot be read comes as the ValueError that says why."""
    if source.file is None:
        yield from _dataset_lines(source)
        return
    if not source.file.is_file():
        raise ValueError(f"prompts: {source.file} does not exist (looked for from {Path.cwd()})")
    with source.file.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{source.file}:{number}"
                try:
                    yield place, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except ValueError as error:  # not UTF-8, or not JSON
                    yield place, error


def _dataset_lines(source: PromptSource) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        dataset = load_dataset(source.dataset, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # datasets raises many types; each means that it is not to be had
        raise ValueError(f"prompts: dataset {source.dataset!r} could not be loaded: {error}") from error
    for number, raw in enumerate(dataset):
        yield f"{source.dataset}[{number}]", dict(raw)


def _mapped(raw: Any, source: PromptSource) -> dict[str, Any]:
    if isinstance(raw, ValueError):
        raise raw
    if not isinstance(raw, dict):
        raise ValueError("it is not a JSON object")
    missing = [theirs for theirs in source.field_map.values() if theirs not in raw]
    if missing:
        raise ValueError(f"it has no field {missing[0]!r}, which field_map names; it has {', '.join(map(str, raw))}")
    mapped = dict(raw)
    if any(form in source.field_map for form in _FORMS):
        for form in _FORMS:  # a mapped form is the one that is meant, whatever else the line holds
            mapped.pop(form, None)
    return mapped | {ours: raw[theirs] for ours, theirs in source.field_map.items()}


def _messages(raw: dict[str, Any]) -> list[Any]:
    if raw.get("messages") is not None:
        messages = raw["messages"]
    elif raw.get("prompt") is not None:
        messages = [{"role": "user", "content": raw["prompt"]}]
    elif isinstance(raw.get("conversations"), list):
        messages = [_from_sharegpt(message) for message in raw["conversations"]]
    else:
        raise ValueError(f"it has none of {', '.join(_FORMS)}")
    if not isinstance(messages, list) or not messages:
        raise ValueError("its messages are not a non-empty list")
    return messages


def _from_sharegpt(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("from"), str) or "value" not in message:
        raise ValueError("a ShareGPT message needs `from`, a role's name, and `value`")
    return {"role": _SHAREGPT_ROLES.get(message["from"], message["from"]), "content": message["value"]}


def _checked(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message has no role")
    is_answer = message["role"] == "assistant"  # may be empty, or tool calls alone
    if not isinstance(message.get("content"), str | list) and not (is_answer and message.get("content") is None):
        raise ValueError(f"the content of its {message['role']} message is neither text nor a list of parts")
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _without_answers(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Split user, answer, user, ... into the opening and the later user turns, for the target to answer each.

    A conversation of any other shape (tool results, say, make sense only after the call they answer) stays as it is.
    """
    start = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    turns = messages[start:]
    alternates = all(m["role"] == ("assistant" if i % 2 else "user") for i, m in enumerate(turns))
    later = [message["content"] for message in turns[2::2]]
    if not alternates or any(message.get("tool_calls") for message in turns):
        return messages, []
    if not all(isinstance(text, str) and text for text in later):
        return messages, []
    return messages[: start + 1], later


def _list_of(raw: dict[str, Any], field: str, kind: type) -> list[Any]:
    found = raw.get(field) or []
    if isinstance(found, str):
        found = json.loads(found)  # datasets keep nested lists of varying shape as JSON text
    if not isinstance(found, list) or not all(isinstance(value, kind) and value for value in found):
        raise ValueError(f"its {field} are not a list of {'texts' if kind is str else 'objects'}")
    return found
