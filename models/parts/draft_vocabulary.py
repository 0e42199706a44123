"""The draft vocabulary: which target ids a trimmed head can propose, in the form that serving engines read.

V target vocabulary, Vd draft vocabulary; target id = draft id + d2t[draft id]; t2d[target id] says it is kept
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.models.target import FrozenTarget


def offsets_of(kept_ids: Tensor) -> Tensor:
    """d2t int64 [Vd] of ascending kept target ids."""
    return kept_ids - torch.arange(kept_ids.shape[0], device=kept_ids.device)


def ids_of(d2t: Tensor) -> Tensor:
    """The kept target ids [Vd] of offsets: the inverse of `offsets_of`."""
    return d2t + torch.arange(d2t.shape[0], device=d2t.device)


def kept_mask(kept_ids: Tensor, vocab_size: int) -> Tensor:
    """t2d bool [V] of kept target ids."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=kept_ids.device)
    mask[kept_ids] = True
    return mask


def check_kept_ids(kept_ids: Tensor, vocab_size: int) -> Tensor:
    """Ascending, unique ids inside the target's vocabulary, as int64; else ValueError (fault 24)."""
    kept_ids = kept_ids.to(torch.int64)
    if kept_ids.ndim != 1 or kept_ids.numel() == 0:
        raise ValueError(f"the draft vocabulary has shape {tuple(kept_ids.shape)}; give a non-empty list of target ids")
    if int(kept_ids.min()) < 0 or int(kept_ids.max()) >= vocab_size:
        raise ValueError(
            f"the draft vocabulary holds id {int(kept_ids.max())}; the target's vocabulary ends at {vocab_size - 1}"
        )
    if not (kept_ids[1:] > kept_ids[:-1]).all():
        raise ValueError("the draft vocabulary must be ascending without repetition")
    return kept_ids


@dataclass(frozen=True)
class DraftVocabulary:
    """What a head can propose: all of the target's tokens, or the kept ones, with the target's rows of lm_head."""

    head_VH: Tensor  # the target's rows, frozen
    kept_ids: Tensor | None  # ascending target ids; None = all of them
    full_size: int

    @classmethod
    def register(
        cls, head: nn.Module, target: FrozenTarget, wanted: int | None, kept_ids: Tensor | None
    ) -> "DraftVocabulary":
        """Check `model.draft_vocab_size` and the kept ids, and give `head` the buffers d2t and t2d if it trims."""
        full = target.vocab_size
        if wanted is not None and wanted > full:
            raise ValueError(f"model.draft_vocab_size is {wanted}; the target has only {full} tokens")
        if wanted is None or wanted == full:
            return cls(target.head_VH, None, full)
        if kept_ids is None:
            raise ValueError("model.draft_vocab_size trims the vocabulary, but no kept ids were given")
        kept_ids = check_kept_ids(kept_ids, full).to(target.head_VH.device)
        if kept_ids.shape[0] != wanted:
            raise ValueError(f"model.draft_vocab_size is {wanted}, but {kept_ids.shape[0]} kept ids were given")
        head.register_buffer("d2t", offsets_of(kept_ids))
        head.register_buffer("t2d", kept_mask(kept_ids, full))
        return cls(target.head_VH[kept_ids], kept_ids, full)

    @property
    def is_kept_V(self) -> Tensor | None:
        """bool [full size], None where nothing is trimmed."""
        return None if self.kept_ids is None else kept_mask(self.kept_ids, self.full_size)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.kept_ids is None else self.kept_ids[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """The draft ids of target ids; of those that are not kept, some id that means nothing."""
        if self.kept_ids is None:
            return target_ids
        return torch.searchsorted(self.kept_ids, target_ids).clamp_max(self.kept_ids.shape[0] - 1)

    def widen(self, probs_XV: Tensor) -> Tensor:
        """Probabilities over the draft vocabulary [..., Vd] -> over the target's [..., V], zero outside."""
        if self.kept_ids is None:
            return probs_XV
        wide = probs_XV.new_zeros(*probs_XV.shape[:-1], self.full_size)
        return wide.index_copy_(-1, self.kept_ids, probs_XV)

    def serving_copies(self, target: FrozenTarget) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Tensors of the target that an export must hold, and those that it may hold (see `models.head.Layout`)."""
        copies = {} if self.kept_ids is None else {"lm_head.weight": self.head_VH}
        if target.embedding_scale != 1.0:  # Gemma: engines do not scale the embeddings they share with the target
            copies["embed_tokens.weight"] = target.embedding_VH * target.embedding_scale
        optional = {"embed_tokens.weight": target.embedding_VH, "lm_head.weight": self.head_VH}
        return copies, {name: tensor for name, tensor in optional.items() if name not in copies}
