"""The prompts that ship with the package: enough of them, of every kind, well-formed, and no two alike."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasketch import MinHash, MinHashLSH

import draftsmith.data

PATH = Path(draftsmith.data.__file__).parent / "shipped_prompts.jsonl"
MINIMUM_OF = {"chat": 150, "math": 150, "code": 100, "languages": 60, "extraction": 50, "tools": 25}


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]


def user_text(prompt: dict[str, Any]) -> str:
    return "\n".join(m["content"] for m in prompt["messages"] if m["role"] == "user")


def test_there_are_at_least_600_prompts_and_a_minimum_of_every_kind(prompts: list[dict[str, Any]]) -> None:
    counts = Counter(prompt["source"] for prompt in prompts)
    assert len(prompts) >= 600
    assert set(counts) == set(MINIMUM_OF)
    assert all(counts[source] >= minimum for source, minimum in MINIMUM_OF.items()), counts


def test_the_file_is_small_enough_to_ship() -> None:
    assert PATH.stat().st_size < 1 << 20


def test_ids_are_unique_and_name_their_source(prompts: list[dict[str, Any]]) -> None:
    ids = [prompt["id"] for prompt in prompts]
    assert len(set(ids)) == len(ids)
    for prompt in prompts:
        assert re.fullmatch(rf"{prompt['source']}-\d{{4}}", prompt["id"])


def test_every_prompt_ends_with_a_user_turn_and_has_no_unknown_field(prompts: list[dict[str, Any]]) -> None:
    for prompt in prompts:
        assert set(prompt) <= {"id", "source", "messages", "followups", "tools"}, prompt["id"]
        roles = [message["role"] for message in prompt["messages"]]
        assert roles in (["user"], ["system", "user"]), prompt["id"]
        for text in [message["content"] for message in prompt["messages"]] + prompt.get("followups", []):
            assert isinstance(text, str) and text and text == text.strip(), prompt["id"]
        assert prompt.get("followups", ["one"]), prompt["id"]


def test_some_prompts_have_a_system_message_and_some_go_on_for_several_turns(prompts: list[dict[str, Any]]) -> None:
    assert sum(prompt["messages"][0]["role"] == "system" for prompt in prompts) >= 10
    assert sum("followups" in prompt for prompt in prompts) >= 30


def test_tool_prompts_list_functions_as_json_schema(prompts: list[dict[str, Any]]) -> None:
    for prompt in prompts:
        assert ("tools" in prompt) == (prompt["source"] == "tools"), prompt["id"]
        for tool in prompt.get("tools", []):
            assert tool["type"] == "function" and set(tool["function"]) == {"name", "description", "parameters"}
            parameters = tool["function"]["parameters"]
            assert parameters["type"] == "object"
            assert set(parameters["required"]) <= set(parameters["properties"]), prompt["id"]
            assert all("type" in schema and schema["description"] for schema in parameters["properties"].values())


def test_no_two_prompts_are_the_same_or_nearly_the_same(prompts: list[dict[str, Any]]) -> None:
    index = MinHashLSH(threshold=0.8, num_perm=128)
    for prompt in prompts:
        text = re.sub(r"\W+", " ", user_text(prompt).lower()).strip()
        sketch = MinHash(num_perm=128)
        sketch.update_batch([text[i : i + 5].encode() for i in range(max(1, len(text) - 4))])
        assert not index.query(sketch), f"{prompt['id']} is nearly the same as {index.query(sketch)}"
        index.insert(prompt["id"], sketch)
