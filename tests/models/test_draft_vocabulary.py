"""d2t and t2d: mutual inverses, and clear errors for vocabularies that cannot be."""

import pytest
import torch
from tiny import tiny_head, tiny_kept_ids, tiny_target

from draftsmith.models.parts.draft_vocabulary import check_kept_ids, ids_of, kept_mask, offsets_of
from draftsmith.models.target import FrozenTarget


@pytest.mark.parametrize("size", [1, 7, 300, 512])
def test_d2t_and_t2d_are_mutual_inverses(size: int) -> None:
    kept_ids = tiny_kept_ids(size)
    d2t, t2d = offsets_of(kept_ids), kept_mask(kept_ids, 512)
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert torch.equal(torch.arange(size) + d2t, kept_ids)
    assert torch.equal(ids_of(d2t), kept_ids)
    assert torch.equal(t2d.nonzero()[:, 0], kept_ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 512], r"holds id 512; the target's vocabulary ends at 511"),
        ([-1, 5], "the draft vocabulary holds id"),
        ([3, 2], "must be ascending without repetition"),
        ([2, 2], "must be ascending without repetition"),
        ([], "non-empty"),
    ],
)
def test_impossible_draft_vocabularies_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kept_ids(torch.tensor(ids, dtype=torch.int64), 512)


def test_a_head_refuses_a_vocabulary_of_another_size(tmp_path_factory: pytest.TempPathFactory) -> None:
    frozen = FrozenTarget.load(tiny_target(tmp_path_factory.mktemp("target")), torch.float32)
    with pytest.raises(ValueError, match="the target has only 512 tokens"):
        tiny_head("eagle3", frozen, draft_vocab_size=600)
    with pytest.raises(ValueError, match="no kept ids were given"):
        tiny_head("eagle3", frozen, draft_vocab_size=100)
