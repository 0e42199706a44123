"""Figures and their intervals."""

import numpy as np
import pytest

from draftsmith.eval.metrics import Counts, acceptance, bootstrap_interval, speed_up


def test_figures_follow_vllms_definitions() -> None:
    counts = [Counts.of_rounds([3, 3, 3], [3, 0, 1], 3), Counts.of_rounds([3], [2], 3)]
    found = acceptance(counts, 200, 0)
    assert found["mal"] == 1 + 6 / 4 and found["acceptance_rate"] == 6 / 12
    assert found["per_position"] == [3 / 4, 2 / 4, 1 / 4]
    assert (found["rounds"], found["drafted"], found["prompts"]) == (4, 12, 2)


def test_the_interval_is_seeded_holds_the_figure_and_shrinks_with_more_prompts() -> None:
    draws = np.random.default_rng(0).integers(0, 4, size=(200, 10))
    counts = [Counts.of_rounds([3] * 10, row.tolist(), 3) for row in draws]
    few, many = acceptance(counts[:10], 500, 1), acceptance(counts, 500, 1)
    assert acceptance(counts, 500, 1) == many
    for found in (few, many):
        low, high = found["mal_interval"]
        assert low < found["mal"] < high
    assert np.ptp(many["mal_interval"]) < 0.5 * np.ptp(few["mal_interval"])


def test_answers_without_rounds_give_no_figure_instead_of_a_wrong_one() -> None:
    found = acceptance([Counts.of_rounds([], [], 2), Counts.of_rounds([], [], 2)], 100, 0)
    assert found["mal"] is None and found["mal_interval"] is None and found["acceptance_rate"] is None


def test_one_prompt_has_no_interval() -> None:
    assert bootstrap_interval(np.ones((1, 2)), lambda sums: sums[:, 0], 100, 0) is None


def test_speed_up_is_a_ratio_of_throughputs() -> None:
    found = speed_up([10, 20, 30], [1.0, 2.0, 3.0], [10, 20, 30], [2.0, 4.0, 6.0], 200, 0)
    assert found["speed_up"] == pytest.approx(2.0) and found["tokens_per_s"] == pytest.approx(10.0)
    assert found["speed_up_interval"] == pytest.approx([2.0, 2.0])
