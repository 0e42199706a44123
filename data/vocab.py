"""Token counts of the target's answers -> the draft vocabulary: which target ids a trimmed head keeps."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.rows import Row


@dataclass(frozen=True)
class DraftVocabulary:
    """`kept_ids` ascending int64 [Vd]; `coverage` is the share of the counted answer tokens that are kept: the ceiling
    of acceptance that this vocabulary sets."""

    kept_ids: Tensor
    coverage: float


def build_draft_vocab(rows: Iterable[Row], vocab_size: int, draft_vocab_size: int) -> DraftVocabulary:
    """The most frequent answer tokens; ties go to the lower id, and ids that never occurred fill up from the lowest.

    Raises ValueError for an id beyond the vocabulary, a size beyond it, or rows without any answer token.
    """
    if not 0 < draft_vocab_size <= vocab_size:
        raise ValueError(f"model.draft_vocab_size is {draft_vocab_size}; give 1 to {vocab_size}, the target's size")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        answered = np.asarray(row.input_ids, dtype=np.int64)[np.asarray(row.loss_mask, dtype=bool)]
        if answered.size and (answered.max() >= vocab_size or answered.min() < 0):
            worst = answered.max() if answered.max() >= vocab_size else answered.min()
            raise ValueError(
                f"row {row.row_id!r} holds token id {worst}; the target's ids go from 0 to {vocab_size - 1}. "
                "Were the rows made with another target?"
            )
        counts += np.bincount(answered, minlength=vocab_size)
    total = int(counts.sum())
    if total == 0:
        raise ValueError("no row holds a token that the target generated; a draft vocabulary cannot be built")
    order = np.lexsort((np.arange(vocab_size), -counts))[:draft_vocab_size]
    kept = np.sort(order)
    return DraftVocabulary(torch.from_numpy(kept), float(counts[kept].sum() / total))
