"""Which blocks of a packed batch a block method trains and drafts on.

B packed rows, T tokens each, M = B*T tokens in all, N blocks, J drafted tokens of a block, R supervised drafts

    tokens    t0 t1 t2 t3 t4 t5        l = 0 0 1 1 1 1        anchors: a with t[a+1] generated, in one document
    a = 2              A  1  2  3      draft j predicts t[a+j], its teacher is last[a+j-1]
    a = 4                    A  1      drafts 2 and 3 run over the document: computed as at inference, not supervised

A block is supervised up to its first token that the target did not generate, that is of another document or that the
draft vocabulary lacks: no draft behind it could be accepted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.batch import Batch


@dataclass(frozen=True)
class Blocks:
    """Ascending anchors (positions among the M tokens), where their documents begin, how many drafts are supervised."""

    starts: list[int]
    anchors: list[int]
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.anchors)

    def rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of every supervised draft its block, and its place in the block (0 is the first draft): int64 [R] each."""
        lengths_N = torch.tensor(self.lengths)
        block_R = torch.repeat_interleave(torch.arange(len(self)), lengths_N)
        place_R = torch.arange(len(block_R)) - (lengths_N.cumsum(0) - lengths_N)[block_R]
        return block_R.to(device), place_R.to(device)

    def part(self, chosen: slice) -> "Blocks":
        return Blocks(self.starts[chosen], self.anchors[chosen], self.lengths[chosen])


def training_blocks(batch: Batch, num_anchors: int, num_drafts: int, is_kept_V: Tensor | None) -> Blocks:
    """At most `num_anchors` random anchors of the batch, each with at least one supervised draft. Never empty.

    The draw depends on the seed that torch's global generator was last given and on the batch, and leaves that
    generator alone: counts and loss of one training step see the same blocks, those of another step see others. A batch
    without any anchor yields one block without a supervised draft, so that all modules still run.
    """
    is_label_M = _label_mask(batch, is_kept_V)
    following_M = torch.cat([is_label_M[1:], is_label_M.new_zeros(1)])
    candidates = following_M.nonzero()[:, 0]
    if not len(candidates):
        return Blocks([0], [0], [0])
    if len(candidates) > num_anchors:
        seed = (torch.initial_seed() + int(batch.input_ids_BT.sum())) % 2**63
        drawn = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:num_anchors]
        candidates = candidates[drawn.sort().values]
    lengths_N, is_alive_N = torch.zeros_like(candidates), torch.ones_like(candidates, dtype=torch.bool)
    padded_M = torch.cat([is_label_M, is_label_M.new_zeros(num_drafts)])
    for draft in range(1, num_drafts + 1):
        is_alive_N = is_alive_N & padded_M[candidates + draft]
        lengths_N = lengths_N + is_alive_N
    return Blocks(_starts(batch)[candidates].tolist(), candidates.tolist(), lengths_N.tolist())


def proposal_blocks(batch: Batch) -> Blocks:
    """One block for every token that a round could start from: generated, with a token before it in its document."""
    anchors = _label_mask(batch, None).nonzero()[:, 0]
    return Blocks(_starts(batch)[anchors].tolist(), anchors.tolist(), [0] * len(anchors))


def _label_mask(batch: Batch, is_kept_V: Tensor | None) -> Tensor:
    """bool [M] on the CPU: the token was generated, follows a token of its document, and the draft can propose it."""
    is_label_BT = batch.loss_mask_BT.clone()
    is_label_BT[:, 1:] &= batch.same_document(1)[:, :-1]
    is_label_BT[:, 0] = False
    if is_kept_V is not None:
        is_label_BT &= is_kept_V[batch.input_ids_BT]
    return is_label_BT.cpu().reshape(-1)


def _starts(batch: Batch) -> Tensor:
    """int64 [M] on the CPU: where the document of each token begins, among the M tokens."""
    documents_BT = batch.document_ids_BT.cpu()
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    index_M = torch.arange(begins_BT.numel())
    return torch.where(begins_BT.reshape(-1), index_M, torch.zeros_like(index_M)).cummax(0).values
