"""The draft vocabulary: which target ids a trimmed head can propose, in the form that serving engines read.

V target vocabulary, Vd draft vocabulary; target id = draft id + d2t[draft id]; t2d[target id] says it is kept
"""

import torch
from torch import Tensor


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
