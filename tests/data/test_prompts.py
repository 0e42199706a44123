"""Prompts are mixed, cleaned and split so that nothing of the evaluation can be learnt by heart."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.prompts import PromptsConfig, build_prompts, read_prompts

NOUNS = ("bridge", "whale", "clock", "lemon", "castle", "violin", "desert", "engine", "glacier", "puzzle", "kettle")


def text(number: int, topic: str = "story") -> str:
    """Texts of which no two are alike."""
    words = [NOUNS[(number * k + k * k) % len(NOUNS)] + str(number * 31 + k) for k in range(1, 31)]
    return f"{topic} {number}: " + " ".join(words)


def jsonl(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "stories.jsonl", [{"id": f"s{n}", "prompt": text(n)} for n in range(40)])


def build(folder: Path, **config: Any) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    artefact = build_prompts(PromptsConfig(**config), folder)
    return artefact.result, read_prompts(folder / "train.jsonl"), read_prompts(folder / "eval.jsonl")


def ids(prompts: list[dict[str, Any]]) -> set[str]:
    return {prompt["id"] for prompt in prompts}


def test_the_split_is_exact_and_a_partition(tmp_path: Path, source: Path) -> None:
    result, train, evaluation = build(tmp_path / "out", sources=[{"jsonl": source}], eval_count=7)
    assert (result["train"], result["eval"]) == (33, 7) == (len(train), len(evaluation))
    assert ids(train) | ids(evaluation) == {f"s{n}" for n in range(40)}
    assert not ids(train) & ids(evaluation)


def test_the_seed_alone_decides_the_split_and_the_order(tmp_path: Path, source: Path) -> None:
    first = build(tmp_path / "a", sources=[{"jsonl": source}], eval_count=7)
    assert build(tmp_path / "b", sources=[{"jsonl": source}], eval_count=7) == first
    other = build(tmp_path / "c", sources=[{"jsonl": source}], eval_count=7, seed=1)
    assert ids(other[2]) != ids(first[2])
    assert [prompt["id"] for prompt in first[1]] != sorted((p["id"] for p in first[1]), key=lambda i: int(i[1:]))


def test_exact_and_near_duplicates_are_dropped_counted_and_listed(tmp_path: Path, source: Path) -> None:
    copies = [{"id": "exact", "prompt": text(0)}, {"id": "near", "prompt": text(1) + " please"}]
    more = jsonl(tmp_path / "copies.jsonl", copies)
    result, train, evaluation = build(tmp_path / "out", sources=[{"jsonl": source}, {"jsonl": more}], eval_count=1)
    assert (result["left_out"]["exact_duplicates"], result["left_out"]["near_duplicates"]) == (1, 1)
    assert ids(train) | ids(evaluation) == {f"s{n}" for n in range(40)}
    assert read_prompts(tmp_path / "out/left_out.jsonl") == [
        {"id": "exact", "source": "copies", "reason": "exact_duplicates", "because_of": "s0"},
        {"id": "near", "source": "copies", "reason": "near_duplicates", "because_of": "s1"},
    ]


@pytest.mark.parametrize("seed", range(5))
def test_near_duplicates_that_are_kept_never_straddle_the_split(tmp_path: Path, source: Path, seed: int) -> None:
    twins = jsonl(tmp_path / "twins.jsonl", [{"id": f"t{n}", "prompt": text(n) + " please"} for n in range(20)])
    _, train, evaluation = build(
        tmp_path / "out",
        sources=[{"jsonl": source}, {"jsonl": twins}],
        eval_count=15,
        near_duplicates="group",
        seed=seed,
    )
    assert (len(train), len(evaluation)) == (45, 15)
    for n in range(20):
        assert (f"s{n}" in ids(train)) == (f"t{n}" in ids(train))


@pytest.mark.parametrize("seed", range(5))
def test_prompts_cut_from_one_conversation_never_straddle_the_split(tmp_path: Path, seed: int) -> None:
    answer = {"role": "assistant", "content": "yes"}
    lines = []
    for n in range(12):
        opening = [{"role": "user", "content": text(n)}]
        longer = [*opening, answer, {"role": "user", "content": text(n + 300, "later")}]
        tagged = [{"role": "user", "content": text(n + 600, "elsewhere")}]
        lines += [
            {"id": f"{n}/a", "messages": opening, "conversation_id": n},
            {"id": f"{n}/b", "messages": longer},
            {"id": f"{n}/c", "messages": tagged, "conversation_id": n},
        ]
    path = jsonl(tmp_path / "fan.jsonl", lines)
    source = {"jsonl": path, "assistant_turns": "context"}
    _, train, evaluation = build(tmp_path / "out", sources=[source], eval_count=6, seed=seed)
    conversations = [{prompt["id"].split("/")[0] for prompt in split} for split in (train, evaluation)]
    assert not conversations[0] & conversations[1]
    assert (len(train), len(evaluation)) == (30, 6)


def test_a_count_that_whole_groups_cannot_meet_is_refused_with_one_that_they_can(tmp_path: Path, source: Path) -> None:
    twins = jsonl(tmp_path / "twins.jsonl", [{"id": f"t{n}", "prompt": text(n) + " please"} for n in range(40)])
    with pytest.raises(ValueError, match=r"prompts\.eval_count is 7.* 6 works"):
        build(tmp_path / "out", sources=[{"jsonl": source}, {"jsonl": twins}], eval_count=7, near_duplicates="group")


def test_what_an_evaluation_set_holds_leaves_training_counted_by_kind(tmp_path: Path, source: Path) -> None:
    turns = [{"role": "user", "content": text(2)}, {"role": "assistant", "content": "a"}]
    held_out = [
        {"id": "e0", "prompt": text(0)},
        {"id": "e1", "prompt": text(1) + " please"},
        {"id": "e2", "messages": [*turns, {"role": "user", "content": text(90) * 2}]},
        {"id": "e3", "prompt": text(91)},
    ]
    path = jsonl(tmp_path / "held.jsonl", held_out)
    result, train, evaluation = build(tmp_path / "out", sources=[{"jsonl": source}], eval_sources={"mine": path})
    assert ids(train) == {f"s{n}" for n in range(3, 40)}
    assert [prompt["id"] for prompt in evaluation] == ["mine/e0", "mine/e1", "mine/e2", "mine/e3"]
    assert {prompt["source"] for prompt in evaluation} == {"mine"}
    kinds = ("exact_overlap_with_eval", "near_overlap_with_eval", "same_conversation_as_eval")
    assert [result["left_out"][kind] for kind in kinds] == [1, 1, 1]


def test_every_evaluation_workload_keeps_its_name_and_is_limited(tmp_path: Path, source: Path) -> None:
    paths = {
        name: jsonl(tmp_path / f"{name}.jsonl", [{"prompt": text(n, name)} for n in range(50, 60)])
        for name in ("mathematics", "code")
    }
    result, _, _ = build(tmp_path / "out", sources=[{"jsonl": source}], eval_sources=paths, eval_limit=4, eval_count=2)
    assert result["eval_by_source"] == {"code": 4, "mathematics": 4, "stories": 2}


def test_weights_set_the_proportions_of_the_mix_and_what_is_over_is_counted(tmp_path: Path, source: Path) -> None:
    poems = jsonl(tmp_path / "poems.jsonl", [{"prompt": text(n, "poem")} for n in range(100, 110)])
    sources = [{"jsonl": source, "weight": 3}, {"jsonl": poems, "weight": 1}]
    result, train, evaluation = build(tmp_path / "out", sources=sources, eval_count=4)
    assert Counter(prompt["source"] for prompt in [*train, *evaluation]) == {"stories": 30, "poems": 10}
    assert result["left_out"]["over_weight"] == 10


def test_ids_that_several_sources_use_are_made_unique(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{n}.jsonl", [{"id": 1, "prompt": text(n)}]) for n in range(3)]
    _, train, evaluation = build(tmp_path / "out", sources=[{"jsonl": path} for path in paths], eval_count=1)
    assert ids(train) | ids(evaluation) == {"1", "1~2", "1~3"}


def test_when_nothing_is_left_for_training_the_stage_fails_and_leaves_nothing_behind(
    tmp_path: Path, source: Path
) -> None:
    config: dict[str, Any] = {"sources": [{"jsonl": source}]}
    with pytest.raises(ValueError, match=r"of 40 prompts none is left for training.*exact_overlap_with_eval': 40"):
        build(tmp_path / "out", **config, eval_sources={"same": source})
    with pytest.raises(ValueError, match=r"prompts\.eval_count is 40, but only 40 prompts are left"):
        build(tmp_path / "out", **config, eval_count=40)
    build(tmp_path / "out", **config, eval_count=39)


def test_a_finished_stage_is_reused_and_an_edited_source_is_noticed(tmp_path: Path, source: Path) -> None:
    config = PromptsConfig(sources=[{"jsonl": source}], eval_count=5)
    first = build_prompts(config, tmp_path / "out")
    assert build_prompts(config, tmp_path / "out").fingerprint == first.fingerprint
    with source.open("a") as file:
        file.write(json.dumps({"prompt": text(77)}) + "\n")
    with pytest.raises(ValueError, match=r"stories\.jsonl: was"):
        build_prompts(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sources": [{"shipped": True}]}, "held-out"),
        ({"sources": [], "eval_count": 1}, "sources"),
        ({"sources": [{"shipped": True}], "eval_count": 1, "eval_limit": 2}, "eval_limit"),
        ({"sources": [{"shipped": True, "weight": 1}, {"jsonl": "x"}], "eval_count": 1}, "some have none"),
    ],
)
def test_contradictory_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptsConfig(**given)


def test_a_missing_file_is_named_before_the_stage_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl does not exist"):
        build(tmp_path / "out", sources=[{"jsonl": tmp_path / "gone.jsonl"}], eval_count=1)
    assert not (tmp_path / "out").exists()


def test_the_shipped_prompts_have_no_near_duplicates_to_drop(tmp_path: Path) -> None:
    result, _, _ = build(tmp_path / "out", sources=[{"shipped": True}], eval_count=60)
    assert "near_duplicates" not in result["left_out"]
    assert result["train"] + result["eval"] >= 600
