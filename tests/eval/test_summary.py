"""The recommended proposal length and its reason, and the warnings about greedy answers that differ."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.target import ResolvedTarget
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.evidence import RunFolder, warnings_about
from draftsmith.eval.summary import ALL, recommend


def row(n: int, speed_up: float, **more: Any) -> dict[str, Any]:
    return {
        "engine": "runtime",
        "workload": ALL,
        "temperature": 0.0,
        "batch_size": 1,
        "n": n,
        "speed_up": speed_up,
        "speed_up_interval": [speed_up - 0.1, speed_up + 0.1],
        "mal": 1 + n / 3,
        "mal_interval": None,
        "rounds": 10,
    } | more


def test_the_fastest_length_is_recommended_and_the_reason_names_all_that_were_tried() -> None:
    advice = recommend([row(1, 1.2), row(3, 1.5), row(5, 1.3), row(5, 9.9, workload="one of them")])
    assert advice["n"] == 3 and advice["pays"] and advice["verdict"].startswith("Worth serving with N = 3: 1.50 times")
    for words in ("N=3", "1.50 times", "N=1: 1.20x", "N=5: 1.30x", "1.40 to 1.60"):
        assert words in advice["reason"]


def test_of_lengths_as_fast_as_another_the_shortest_is_taken() -> None:
    advice = recommend([row(1, 1.2), row(3, 1.49), row(5, 1.5)])
    assert advice["n"] == 3 and "N=5 is within 2%" in advice["reason"]


def test_the_break_even_is_given_by_batch_size() -> None:
    rows = [row(3, 1.5), row(5, 1.4), row(3, 1.1, batch_size=8), row(5, 0.9, batch_size=8), row(3, 0.7, batch_size=32)]
    advice = recommend(rows)
    assert [(each["batch_size"], each["n"]) for each in advice["break_even"]] == [(1, 3), (8, 3), (32, 3)]
    assert "pays up to batch size 8" in advice["reason"]


def test_no_gain_is_said_plainly() -> None:
    advice = recommend([row(1, 0.9), row(3, 0.8)])
    assert advice["verdict"].startswith("Do not serve it")
    assert advice["n"] == 1 and not advice["pays"] and "no N is faster than plain decoding" in advice["reason"]


def test_a_single_workload_is_judged_by_itself_whatever_other_engines_pooled() -> None:
    replayed = [row(3, 0.0, engine="replay", workload=name) | {"speed_up": None} for name in ("a", "b", ALL)]
    assert recommend([*replayed, row(3, 1.4, workload="mine")])["n"] == 3


def test_a_speed_up_whose_interval_holds_1_is_not_shown() -> None:
    advice = recommend([row(1, 1.05), row(3, 0.9)])
    assert not advice["pays"] and advice["verdict"].startswith("Not shown to be faster: 1.05 times (0.95 to 1.15)")


def test_without_a_measured_speed_nothing_is_recommended() -> None:
    advice = recommend([row(3, 0.0, engine="replay") | {"speed_up": None}])
    assert advice["n"] is None and "add runtime or vllm" in advice["reason"]


@pytest.mark.parametrize(
    ("dtype", "margin", "words"),
    [
        ("bfloat16", 0.125, "near ties of the target, at most 0.125 logits apart"),
        ("bfloat16", 3.0, "This is a defect"),
        ("float32", 0.125, "This is a defect"),
        ("float32", None, "This is a defect"),
    ],
)
def test_a_differing_answer_is_explained_by_its_margin_or_called_a_defect(
    dtype: Any, margin: float | None, words: str, tmp_path: Path
) -> None:
    target = ResolvedTarget("tiny", tmp_path, "w", "t", "c", dtype)
    divergence = {"id": "p1", "position": 4, "plain": 1, "speculative": 2, "margin": margin}
    config = EvalConfig(engines=("runtime",), dtype=dtype)
    (warning,) = warnings_about(config, target, RunFolder(tmp_path), [row(3, 1.5, divergences=[divergence])])
    assert words in warning
