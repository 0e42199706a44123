"""Packs hold every row exactly once per epoch, never too much, and little padding."""

import random

from draftsmith.data.packing import plan_packs

LENGTHS = random.Random(0).choices(range(1, 301), k=1000)


def test_every_row_that_fits_appears_exactly_once() -> None:
    packs = plan_packs(LENGTHS, max_tokens=512, seed=0, epoch=0)
    assert sorted(index for pack in packs for index in pack) == list(range(len(LENGTHS)))


def test_no_pack_is_over_full_or_empty() -> None:
    for pack in plan_packs(LENGTHS, max_tokens=512, seed=0, epoch=0):
        assert 0 < sum(LENGTHS[index] for index in pack) <= 512


def test_rows_that_are_too_long_or_empty_are_left_out() -> None:
    assert sorted(i for pack in plan_packs([5, 0, 11, 10], 10, seed=0, epoch=0) for i in pack) == [0, 3]


def test_the_same_seed_and_epoch_give_the_same_plan_and_another_epoch_another() -> None:
    plan = plan_packs(LENGTHS, 512, seed=1, epoch=2)
    assert plan == plan_packs(LENGTHS, 512, seed=1, epoch=2)
    assert plan != plan_packs(LENGTHS, 512, seed=1, epoch=3)
    assert plan != plan_packs(LENGTHS, 512, seed=2, epoch=2)


def test_padding_is_below_five_per_cent() -> None:
    assert sum(LENGTHS) / (512 * len(plan_packs(LENGTHS, 512, seed=0, epoch=0))) > 0.95


def test_nothing_to_pack_gives_no_packs() -> None:
    assert plan_packs([], 512, seed=0, epoch=0) == []
