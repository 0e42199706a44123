"""Acceptance rules: the target's logits over [bonus, drafts] and a draft -> how many drafts stand, and what follows.

    B sequences, N drafted tokens, Q = N+1 verified positions, V target vocabulary

        input    bonus  d1   d2   d3         the target reads these in one pass
        logits   p0     p1   p2   p3         p[k] judges d[k+1]; p[accepted] gives the token after the accepted prefix
        output   d1     d2   x                accepted = 2: x comes from p2, as correction of d3

Both rules are lossless: what is emitted is distributed as the target alone would emit it (arXiv:2211.17192).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Sequence b emits next_BQ[b, : accepted_B[b] + 1]; what stands behind it there is of no meaning."""

    accepted_B: Tensor  # int64
    next_BQ: Tensor  # int64


def verify_greedy(logits_BQV: Tensor, drafted_BN: Tensor, num_drafted_B: Tensor | None = None) -> Verdict:
    """Accept the longest prefix that equals the target's most likely tokens; then the target's own token.

    `num_drafted_B` are ragged draft lengths: tokens at and behind it were never proposed.
    """
    best_BQ = logits_BQV.argmax(-1)
    is_equal_BN = best_BQ[:, :-1] == drafted_BN
    return Verdict(_prefix_length(is_equal_BN, num_drafted_B), best_BQ)


def verify_sampled(
    target_BQV: Tensor,
    drafted_BN: Tensor,
    draft_BNV: Tensor | None,
    num_drafted_B: Tensor | None,
    generator: torch.Generator,
) -> Verdict:
    """Rejection sampling: accept d with probability min(1, p(d)/q(d)), else draw from (p - q)+, renormalised.

    `target_BQV` is what the target alone would sample from (temperature, top-k and top-p applied); `draft_BNV` must be
    exactly what each draft was drawn from, None for drafts chosen without chance (q is one-hot). `generator` must be
    independent of the one that drew the drafts.
    """
    batch, num_drafts = drafted_BN.shape
    target_of_draft_BN = target_BQV[:, :-1].gather(2, drafted_BN[:, :, None])[..., 0]
    chance_BN = torch.rand(batch, num_drafts, generator=generator, device=target_BQV.device)
    if draft_BNV is not None:
        chance_BN = chance_BN * draft_BNV.gather(2, drafted_BN[:, :, None])[..., 0]
    accepted_B = _prefix_length(chance_BN < target_of_draft_BN, num_drafted_B)
    rows_B = torch.arange(batch, device=accepted_B.device)
    next_BV = target_BQV[rows_B, accepted_B].clone()
    limit_B = torch.full_like(accepted_B, num_drafts) if num_drafted_B is None else num_drafted_B
    rejected = (accepted_B < limit_B).nonzero()[:, 0]
    if rejected.numel():
        place = accepted_B[rejected]
        if draft_BNV is None:
            next_BV[rejected, drafted_BN[rejected, place]] = 0.0
        else:
            rest = (next_BV[rejected] - draft_BNV[rejected, place]).clamp_min_(0.0)
            # p = q up to rounding leaves nothing: a rejection then has probability 0 up to rounding, and p is right.
            next_BV[rejected] = torch.where(rest.sum(-1, keepdim=True) > 0, rest, next_BV[rejected])
    next_BQ = torch.cat([drafted_BN, drafted_BN.new_zeros(batch, 1)], dim=1)
    next_BQ[rows_B, accepted_B] = torch.multinomial(next_BV, 1, generator=generator)[:, 0]
    return Verdict(accepted_B, next_BQ)


def confident_length(confidence_BN: Tensor, min_confidence: float) -> Tensor:
    """Draft lengths int64 [B]: each draft ends before its first token of less confidence than this.

    Lossless at temperature > 0 only if a token's confidence was known before the token was drawn: it may depend on the
    tokens before it, never on itself or later ones, or the output is biased (a test shows it).
    """
    return _prefix_length(confidence_BN >= min_confidence, None)


def _prefix_length(is_good_BN: Tensor, limit_B: Tensor | None) -> Tensor:
    """The number of leading True, at most `limit_B`."""
    length_B = is_good_BN.to(torch.int64).cumprod(1).sum(1)
    return length_B if limit_B is None else torch.minimum(length_B, limit_B)
