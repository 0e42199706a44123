"""Every form in which people keep prompts comes out as one; what is malformed is named, what is left out is counted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.prompt_sources import PromptSource, normalise, read_source

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
LATER = {"role": "user", "content": "and then?"}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(source: PromptSource, allowed: float = 0.0) -> tuple[list[dict[str, Any]], Counter[str]]:
    counts: Counter[str] = Counter()
    return read_source(source, allowed, counts), counts


def normal(raw: dict[str, Any], assistant_turns: Any = "replace") -> dict[str, Any]:
    return normalise(raw, "s", assistant_turns, Counter())


def test_messages_prompt_and_sharegpt_conversations_give_the_same_prompt(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mine.jsonl",
        {"messages": [USER]},
        {"prompt": "q"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    )
    prompts, counts = read(PromptSource(jsonl=path))
    assert [prompt["messages"] for prompt in prompts] == [[USER]] * 3
    assert {prompt["source"] for prompt in prompts} == {"mine"}
    assert counts["final_answers_not_used"] == 1


def test_the_shipped_set_is_read() -> None:
    prompts, _ = read(PromptSource(shipped=True))
    assert len(prompts) >= 600
    assert any("followups" in prompt for prompt in prompts) and any("tools" in prompt for prompt in prompts)


def test_a_dataset_is_read_through_its_field_map(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", {"question": "q", "prompt": "not this", "key": 0, "level": 2}, {"question": "r"})
    source = PromptSource(dataset=str(tmp_path), split="train", field_map={"prompt": "question"}, limit=1)
    (prompt,), _ = read(source)
    assert prompt["messages"] == [USER]


def test_a_dataset_that_cannot_be_had_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="could not be loaded"):
        read(PromptSource(dataset=str(tmp_path / "nothing"), split="train"))


def test_a_mapped_field_that_is_missing_is_named_with_those_that_exist(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"question": "q"})
    with pytest.raises(ValueError, match=r"p\.jsonl:1: it has no field 'ask'.*it has question"):
        read(PromptSource(jsonl=path, field_map={"prompt": "ask"}))


def test_where_and_limit_take_the_first_matching_lines_and_count_the_others(tmp_path: Path) -> None:
    lines = [{"prompt": str(n), "level": n % 2, "hard": n > 3} for n in range(10)]
    path = written(tmp_path / "p.jsonl", *lines)
    prompts, counts = read(PromptSource(jsonl=path, where={"level": 1, "hard": True}, limit=2))
    assert [prompt["messages"][0]["content"] for prompt in prompts] == ["5", "7"]
    assert counts["not_matching_where"] == 6


def test_a_filter_that_nothing_matches_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "q", "level": 1})
    with pytest.raises(ValueError, match=r"gave no prompt: 1 lines, where: \{'level': 2\}"):
        read(PromptSource(jsonl=path, where={"level": 2}))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ({"text": "q"}, "none of messages, prompt, conversations"),
        ({"messages": []}, "not a non-empty list"),
        ({"messages": [{"content": "q"}]}, "no role"),
        ({"messages": [{"role": "user", "content": None}]}, "user message is neither text nor a list"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no turn to answer"),
        ({"messages": [ANSWER]}, "no turn to answer"),
        ({"prompt": ""}, "last user turn is empty"),
        ({"conversations": [{"role": "user"}]}, "`from`, a role.s name, and `value`"),
        ({"conversations": [{"from": ["human"], "value": "q"}]}, "`from`, a role.s name, and `value`"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": 5}, {"role": "tool", "content": "1"}]}, "tool_calls"),
        ('{"prompt": "half \\ud83d of a pair"}', "half of a surrogate pair"),
        ({"prompt": "q", "followups": [""]}, "followups are not a list of texts"),
        ({"prompt": "q", "tools": ["f"]}, "tools are not a list of objects"),
    ],
)
def test_a_malformed_line_is_named_by_file_line_and_reason(tmp_path: Path, line: Any, reason: str) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ValueError, match=rf"p\.jsonl:2: .*{reason}.*prompts\.max_malformed_share"):
        read(PromptSource(jsonl=path))


def test_malformed_lines_within_the_budget_are_counted_and_beyond_it_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", *[{"prompt": str(n)} for n in range(9)], "{broken")
    prompts, counts = read(PromptSource(jsonl=path), allowed=0.1)
    assert (len(prompts), counts["malformed_lines"]) == (9, 1)
    with pytest.raises(ValueError, match="1 of 10 lines of p are malformed"):
        read(PromptSource(jsonl=path), allowed=0.05)


def test_a_line_that_is_not_utf8_is_malformed_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "q"}\n{"prompt": "\xff"}\n')
    prompts, counts = read(PromptSource(jsonl=path), allowed=0.5)
    assert (len(prompts), counts["malformed_lines"]) == (1, 1)


def test_answers_of_others_are_replaced_and_every_user_turn_is_kept() -> None:
    prompt = normal({"messages": [USER, ANSWER, LATER, ANSWER]})
    assert (prompt["messages"], prompt["followups"]) == ([USER], ["and then?"])


def test_answers_of_others_may_stay_as_context_up_to_the_last_turn() -> None:
    prompt = normal({"messages": [USER, ANSWER, LATER, ANSWER]}, "context")
    assert prompt["messages"] == [USER, ANSWER, LATER]
    assert "followups" not in prompt


def test_a_conversation_with_tool_results_stays_context_since_they_fit_only_their_call() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    messages = [USER, call, {"role": "tool", "content": "1"}]
    assert normal({"messages": messages})["messages"] == messages


def test_roles_that_are_unknown_stay_what_they_are() -> None:
    prompt = normal({"conversations": [{"from": "observation", "value": "o"}, {"from": "human", "value": "q"}]})
    assert prompt["messages"] == [{"role": "observation", "content": "o"}, USER]


def test_an_empty_assistant_turn_is_no_error() -> None:
    for content in ("", None):
        empty = {"role": "assistant", "content": content}
        assert normal({"messages": [USER, empty, LATER]}, "context")["messages"] == [USER, empty, LATER]


def test_tools_kept_as_json_text_are_read() -> None:
    assert normal({"prompt": "q", "tools": '[{"type": "function"}]'})["tools"] == [{"type": "function"}]


def test_an_id_of_zero_is_an_id_and_a_missing_one_comes_from_the_text() -> None:
    assert normal({"prompt": "q", "id": 0})["id"] == "0"
    assert normal({"prompt": "q"})["id"] == normal({"prompt": "q"})["id"] != normal({"prompt": "r"})["id"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of shipped, jsonl and dataset"),
        ({"shipped": True, "jsonl": "x"}, "exactly one of shipped, jsonl and dataset"),
        ({"dataset": "a/b"}, "needs a split"),
        ({"jsonl": "x", "subset": "main"}, "only a dataset has one"),
        ({"jsonl": "x", "field_map": {"question": "q"}}, "field_map names 'question'"),
        ({"jsonl": "x", "wait": 1}, "wait"),
    ],
)
def test_a_contradictory_source_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSource(**given)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl does not exist"):
        read(PromptSource(jsonl=tmp_path / "gone.jsonl"))
