"""Rows supervise exactly what the target generated, in exactly the context in which it was generated."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.artefact import Artefact, read_artefact
from draftsmith.data.chat import answer_text, prompt_ids
from draftsmith.data.rows import (
    Conversation,
    RowsConfig,
    build_rows,
    load_rows,
    provenance_mismatches,
    rows_of_conversation,
)
from draftsmith.data.target import ResolvedTarget

EOS = 2
PROVENANCE = {"model": "tiny", "weights": "w", "tokenizer": "t", "chat_template": "c", "engine": "transformers"}
TARGET = ResolvedTarget("tiny", Path("/nowhere"), "w", "t", "c", "float32")


def turn(prompt: list[int], response: list[int], finish_reason: str = "stop") -> dict[str, Any]:
    return {"prompt_ids": prompt, "response_ids": response, "finish_reason": finish_reason}


def conversation(identity: str, *turns: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": identity, "source": "chat", "turns": list(turns), "provenance": PROVENANCE} | changes


def responses(folder: Path, train: list[dict[str, Any]], evaluation: list[dict[str, Any]] | None = None) -> Path:
    artefact = Artefact.open(folder, "responses", {"lines": [train, evaluation]})
    for split, lines in (("train", train), ("eval", evaluation or [])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    artefact.finish({})
    return folder


def masks(*turns: dict[str, Any]) -> list[str]:
    rows = rows_of_conversation(Conversation.model_validate(conversation("c", *turns)))
    return ["".join("01"[bit] for bit in row.loss_mask) for row in rows]


def test_exactly_the_generated_tokens_are_supervised_end_of_turn_included() -> None:
    assert masks(turn([5, 6, 7], [8, 9, EOS])) == ["000111"]


def test_a_one_token_answer_supervises_exactly_the_last_position() -> None:
    """So that EAGLE-3, whose rows follow the mask of their input token, trains exactly one row at step 0."""
    assert masks(turn([5, 6, 7], [8])) == ["0001"]


def test_a_prompt_that_continues_the_last_turn_joins_it_as_a_second_island() -> None:
    first = turn([5, 6], [7, EOS])
    assert masks(first, turn([5, 6, 7, EOS, 3, 4], [9, EOS])) == ["00110011"]


def test_a_template_that_strips_earlier_reasoning_gives_a_row_per_turn_each_with_the_context_it_was_served() -> None:
    stripped = turn([5, 6, 8, EOS, 4], [9, EOS])  # the second prompt shows answer 8 without its reasoning 7
    rows = rows_of_conversation(Conversation.model_validate(conversation("c", turn([5, 6], [7, 8, EOS]), stripped)))
    assert [row.row_id for row in rows] == ["c#0", "c#1"]
    assert [row.input_ids for row in rows] == [(5, 6, 7, 8, EOS), (5, 6, 8, EOS, 4, 9, EOS)]
    assert [sum(row.loss_mask) for row in rows] == [3, 2]


def test_only_the_turns_that_continue_each_other_share_a_row() -> None:
    turns = [turn([5], [6]), turn([5, 6, 7], [8]), turn([5, 7, 8, 9], [10])]
    rows = rows_of_conversation(Conversation.model_validate(conversation("c", *turns)))
    assert [row.row_id for row in rows] == ["c#0", "c#2"]


def test_a_second_turn_in_the_targets_own_template_extends_the_first(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "cab"}]
    first = prompt_ids(tokenizer, messages)
    answer = [*tokenizer("dd", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    messages += [{"role": "assistant", "content": answer_text(tokenizer, answer)}, {"role": "user", "content": "e"}]
    second = prompt_ids(tokenizer, messages)
    (mask,) = masks(turn(first, answer), turn(second, answer))
    assert mask.count("1") == 2 * len(answer)


def test_generated_ids_that_the_tokenizer_would_merge_are_kept_as_generated(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer(answer_text(tokenizer, [a, b]), add_special_tokens=False).input_ids != [a, b]
    row = rows_of_conversation(Conversation.model_validate(conversation("c", turn([7], [a, b]))))[0]
    assert row.input_ids == (7, a, b)


def test_an_answer_cut_by_the_token_limit_keeps_its_tokens_gets_no_eos_and_is_flagged(tmp_path: Path) -> None:
    folder = responses(tmp_path / "responses", [conversation("c", turn([5, 6], [7, 8], "length"))])
    artefact = build_rows(RowsConfig(), folder, tmp_path / "rows")
    rows = load_rows(tmp_path / "rows", "train")
    assert rows[0].input_ids == (5, 6, 7, 8)
    assert rows.provenance(0)["finish_reason"] == "length"
    assert artefact.result["train"]["cut_answers"] == 1


def test_a_row_beyond_the_limit_keeps_its_supervised_tokens_and_is_counted(tmp_path: Path) -> None:
    folder = responses(tmp_path / "responses", [conversation("c", turn([5] * 6, [7, 7, 7, EOS]))])
    artefact = build_rows(RowsConfig(max_row_tokens=8), folder, tmp_path / "rows")
    rows = load_rows(tmp_path / "rows", "train")
    assert rows[0].input_ids == (5, 5, 5, 5, 5, 5, 7, 7)
    assert (rows.provenance(0)["is_cut"], rows.provenance(0)["finish_reason"]) == (True, "cut")
    assert artefact.result["train"]["cut_rows"] == 1


def test_a_row_cut_inside_a_later_prompt_ends_with_the_last_supervised_token(tmp_path: Path) -> None:
    turns = turn([5, 5], [7, 7]), turn([5, 5, 7, 7, *[6] * 8], [9])
    folder = responses(tmp_path / "responses", [conversation("c", *turns)])
    build_rows(RowsConfig(max_row_tokens=8), folder, tmp_path / "rows")
    assert load_rows(tmp_path / "rows", "train")[0].input_ids == (5, 5, 7, 7)


def test_a_row_cut_before_the_answer_begins_is_dropped_and_counted(tmp_path: Path) -> None:
    lines = [conversation("long", turn([5] * 8, [7])), conversation("short", turn([5], [7]))]
    folder = responses(tmp_path / "responses", lines)
    artefact = build_rows(RowsConfig(max_row_tokens=8, max_dropped_share=0.5), folder, tmp_path / "rows")
    assert [row.row_id for row in load_rows(tmp_path / "rows", "train")] == ["short"]
    assert artefact.result["train"]["dropped_rows"] == 1
    assert artefact.result["train"]["rows"] == 1


def test_an_empty_answer_is_dropped_and_counted_and_no_text_is_invented(tmp_path: Path) -> None:
    lines = [conversation("empty", turn([5], [])), conversation("eos", turn([5], [EOS]))]
    folder = responses(tmp_path / "responses", lines)
    artefact = build_rows(RowsConfig(max_dropped_share=0.5), folder, tmp_path / "rows")
    (row,) = load_rows(tmp_path / "rows", "train")
    assert (row.input_ids, row.loss_mask) == ((5, EOS), (False, True))
    assert artefact.result["train"]["dropped_rows"] == 1


def test_when_every_row_is_dropped_the_stage_fails_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = responses(tmp_path / "responses", [conversation("c", turn([5] * 8, [7]))])
    with pytest.raises(ValueError, match=r"no train row is left of the 1 conversations .*max_row_tokens = 8"):
        build_rows(RowsConfig(max_row_tokens=8, max_dropped_share=1), folder, tmp_path / "rows")
    build_rows(RowsConfig(max_row_tokens=9), folder, tmp_path / "rows")  # the mended setting is not refused


def test_an_empty_responses_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no train row is left of the 0 conversations"):
        build_rows(RowsConfig(), responses(tmp_path / "responses", []), tmp_path / "rows")


def test_more_dropped_rows_than_the_budget_allows_fail_the_stage(tmp_path: Path) -> None:
    lines = [conversation("long", turn([5] * 8, [7])), conversation("short", turn([5], [7]))]
    folder = responses(tmp_path / "responses", lines)
    with pytest.raises(ValueError, match=r"1 of 2 train rows .*rows\.max_dropped_share"):
        build_rows(RowsConfig(max_row_tokens=8), folder, tmp_path / "rows")


def test_evaluation_rows_may_be_absent_but_not_all_be_dropped(tmp_path: Path) -> None:
    train, long = [conversation("t", turn([5], [7]))], [conversation("e", turn([5] * 8, [7]))]
    build_rows(RowsConfig(), responses(tmp_path / "a", train), tmp_path / "a-rows")
    assert len(load_rows(tmp_path / "a-rows", "eval")) == 0
    with pytest.raises(ValueError, match="no eval row is left"):
        build_rows(RowsConfig(max_row_tokens=8), responses(tmp_path / "b", train, long), tmp_path / "b-rows")


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [(["a", "a"], [], "twice in train"), (["a"], ["a"], "in train and again in eval")],
)
def test_a_conversation_that_appears_again_is_refused(
    tmp_path: Path, train: list[str], evaluation: list[str], message: str
) -> None:
    lines = [[conversation(identity, turn([5], [7])) for identity in split] for split in (train, evaluation)]
    with pytest.raises(ValueError, match=message):
        build_rows(RowsConfig(), responses(tmp_path / "responses", *lines), tmp_path / "rows")


def test_a_malformed_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    bad = conversation("b", {"prompt_ids": [5], "finish_reason": "stop"})
    folder = responses(tmp_path / "responses", [conversation("a", turn([5], [7])), bad])
    with pytest.raises(ValueError, match=r"train\.jsonl:2 .*turns\.0\.response_ids"):
        build_rows(RowsConfig(), folder, tmp_path / "rows")


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    lines = [conversation(str(n), turn([n, n + 1], [n + 2, EOS])) for n in range(5)]
    build_rows(RowsConfig(), responses(tmp_path / "responses", lines), tmp_path / "rows")
    rows = load_rows(tmp_path / "rows", "train")
    expected = [row for line in lines for row in rows_of_conversation(Conversation.model_validate(line))]
    assert list(rows) == expected == rows[:]
    assert rows.lengths == [4] * 5


def test_rows_that_are_done_are_not_built_again_and_other_settings_are_refused(tmp_path: Path) -> None:
    folder = responses(tmp_path / "responses", [conversation("c", turn([5], [7]))])
    artefact = build_rows(RowsConfig(), folder, tmp_path / "rows")
    before = (tmp_path / "rows/train/rows.arrow").stat().st_mtime_ns
    assert build_rows(RowsConfig(), folder, tmp_path / "rows").fingerprint == artefact.fingerprint
    assert (tmp_path / "rows/train/rows.arrow").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="max_row_tokens: was 2048, wanted 64"):
        build_rows(RowsConfig(max_row_tokens=64), folder, tmp_path / "rows")


def test_every_row_records_where_it_came_from(tmp_path: Path) -> None:
    folder = responses(tmp_path / "responses", [conversation("c", turn([5], [7]))])
    artefact = build_rows(RowsConfig(), folder, tmp_path / "rows")
    origin = load_rows(tmp_path / "rows", "train").provenance(0)
    assert origin == PROVENANCE | {"finish_reason": "stop", "is_cut": False}
    assert artefact.result["train"]["provenance"] == [PROVENANCE | {"rows": 1}]
    assert provenance_mismatches(tmp_path / "rows", TARGET) == []


def test_rows_that_the_target_did_not_generate_are_reported(tmp_path: Path) -> None:
    other = conversation("b", turn([5], [7]), provenance=PROVENANCE | {"model": "other", "weights": "x"})
    unknown = conversation("c", turn([5], [7]), provenance={"model": "someone"})
    lines = [conversation("a", turn([5], [7])), other, unknown]
    build_rows(RowsConfig(), responses(tmp_path / "responses", lines), tmp_path / "rows")
    assert provenance_mismatches(tmp_path / "rows", TARGET) == [
        "1 train rows were generated by 'other': their weights is x, the target's is w",
        "1 train rows were generated by 'someone': their weights is unknown, the target's is w",
        "1 train rows were generated by 'someone': their chat_template is unknown, the target's is c",
    ]


def test_other_answers_under_equal_settings_are_noticed(tmp_path: Path) -> None:
    folder = responses(tmp_path / "responses", [conversation("c", turn([5], [7]))])
    build_rows(RowsConfig(), folder, tmp_path / "rows")
    (folder / "train.jsonl").write_text(json.dumps(conversation("c", turn([5], [8]))) + "\n")
    with pytest.raises(ValueError, match="files_sha256"):
        build_rows(RowsConfig(), folder, tmp_path / "rows")


def test_a_finished_stage_whose_file_is_gone_is_an_error(tmp_path: Path) -> None:
    folder = responses(tmp_path / "responses", [conversation("c", turn([5], [7]))])
    (folder / "eval.jsonl").unlink()
    with pytest.raises(ValueError, match=r"eval\.jsonl is missing, though its stage is finished"):
        build_rows(RowsConfig(), folder, tmp_path / "rows")


def test_an_unfinished_responses_stage_is_not_read(tmp_path: Path) -> None:
    Artefact.open(tmp_path / "responses", "responses", {})
    with pytest.raises(ValueError, match="a finished responses stage is needed"):
        build_rows(RowsConfig(), tmp_path / "responses", tmp_path / "rows")
    with pytest.raises(ValueError, match="holds no finished rows stage"):
        read_artefact(tmp_path / "rows", "rows")


def test_a_torn_file_of_rows_is_named_and_never_read_as_fewer_rows(tmp_path: Path) -> None:
    import pyarrow as pa

    train = [conversation(f"c{number}", turn([1, 2], [3])) for number in range(6)]
    build_rows(RowsConfig(), responses(tmp_path / "responses", train), tmp_path / "rows")
    path = tmp_path / "rows" / "train" / "rows.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ValueError, match=r"rows\.arrow .*delete .*rows and run the rows stage again"):
        load_rows(tmp_path / "rows", "train")
    path.write_bytes(whole)
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    with pa.ipc.new_stream(path, table.schema) as shorter:
        shorter.write_table(table.slice(0, 4))
    with pytest.raises(ValueError, match=r"rows\.arrow holds 4 rows, 6 were written"):
        load_rows(tmp_path / "rows", "train")
