"""The draft vocabulary: which target ids are kept, and how much of the answers they cover."""

import pytest

from draftsmith.data.rows import Row
from draftsmith.data.vocab import build_draft_vocab


def row(ids: list[int], mask: list[bool] | None = None) -> Row:
    return Row("r", "r", "s", tuple(ids), tuple(mask or [True] * len(ids)))


def test_the_most_frequent_answer_tokens_are_kept_in_ascending_order() -> None:
    vocabulary = build_draft_vocab([row([9, 9, 9, 4, 4, 2])], vocab_size=10, draft_vocab_size=2)
    assert vocabulary.kept_ids.tolist() == [4, 9]
    assert vocabulary.coverage == pytest.approx(5 / 6)


def test_ties_go_to_the_lower_id_and_unused_ids_fill_up_from_the_lowest() -> None:
    vocabulary = build_draft_vocab([row([7, 5])], vocab_size=10, draft_vocab_size=1)
    assert vocabulary.kept_ids.tolist() == [5]
    vocabulary = build_draft_vocab([row([7, 5])], vocab_size=10, draft_vocab_size=4)
    assert vocabulary.kept_ids.tolist() == [0, 1, 5, 7]


def test_prompt_tokens_are_not_counted() -> None:
    vocabulary = build_draft_vocab([row([3, 3, 8], [False, False, True])], vocab_size=10, draft_vocab_size=1)
    assert vocabulary.kept_ids.tolist() == [8]


def test_the_whole_vocabulary_covers_everything() -> None:
    vocabulary = build_draft_vocab([row([3, 1])], vocab_size=4, draft_vocab_size=4)
    assert vocabulary.kept_ids.tolist() == [0, 1, 2, 3]
    assert vocabulary.coverage == 1.0


def test_an_id_beyond_the_vocabulary_names_the_row_and_the_id() -> None:
    with pytest.raises(ValueError, match=r"'r' holds token id 12; .* 0 to 9"):
        build_draft_vocab([row([3, 12])], vocab_size=10, draft_vocab_size=2)
    with pytest.raises(ValueError, match="holds token id -1"):
        build_draft_vocab([row([3, -1])], vocab_size=10, draft_vocab_size=2)


@pytest.mark.parametrize("size", [0, 11])
def test_a_draft_vocabulary_larger_than_the_targets_or_empty_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"model\.draft_vocab_size is"):
        build_draft_vocab([row([3])], vocab_size=10, draft_vocab_size=size)


def test_rows_without_answers_cannot_give_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="no row holds a token that the target generated"):
        build_draft_vocab([row([3], [False])], vocab_size=10, draft_vocab_size=2)
