"""Acceptance rules: the emitted tokens are distributed as the target alone would emit them."""

import pytest
import torch
from answer_distribution import counted_answers, exact_probabilities, z_score
from torch import Tensor
from toy_head import BigramHead, small_model

from draftsmith.data.generate import Sampling
from draftsmith.eval.decode import Decoding, RunningTarget, decode
from draftsmith.eval.verify import confident_length, verify_greedy, verify_sampled

VOCAB, LENGTH, NUM_ANSWERS, PROMPT = 5, 4, 6000, [1, 3]


def test_greedy_accepts_the_longest_equal_prefix_and_adds_the_targets_own_token() -> None:
    best = torch.tensor([[4, 2, 1, 3], [4, 2, 1, 3], [4, 2, 1, 3]])
    logits = torch.nn.functional.one_hot(best, VOCAB).float()
    drafts = torch.tensor([[4, 2, 1], [4, 0, 1], [0, 2, 1]])
    verdict = verify_greedy(logits, drafts)
    assert verdict.accepted_B.tolist() == [3, 1, 0]
    emitted = [row[: n + 1] for row, n in zip(verdict.next_BQ.tolist(), verdict.accepted_B.tolist(), strict=True)]
    assert emitted == [[4, 2, 1, 3], [4, 2], [4]]
    ragged = verify_greedy(logits, drafts, torch.tensor([2, 3, 0]))
    assert ragged.accepted_B.tolist() == [2, 1, 0]


def test_a_draft_ends_before_its_first_token_of_low_confidence() -> None:
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.9, 0.8, 0.7], [0.1, 0.9, 0.9]])
    assert confident_length(confidence, 0.5).tolist() == [1, 3, 0]


def test_a_draft_that_the_target_would_never_emit_is_never_accepted() -> None:
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]).expand(64, 2, 2)
    verdict = verify_sampled(target, torch.zeros(64, 1, dtype=torch.int64), None, None, torch.Generator())
    assert verdict.accepted_B.sum() == 0 and (verdict.next_BQ[:, 0] == 1).all()


def test_equal_distributions_accept_everything() -> None:
    probs = torch.full((64, 3, 4), 0.25)
    verdict = verify_sampled(probs, torch.randint(0, 4, (64, 2)), probs[:, :2], None, torch.Generator())
    assert (verdict.accepted_B == 2).all()


def draft_table(kind: str) -> Tensor:
    """A fixed drafter that disagrees with the target; `trimmed` never proposes two of the five tokens."""
    table = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) ** 2 + 0.02
    if kind == "trimmed":
        table[:, [0, 3]] = 0.0
    return table / table.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("kind", "sampling", "more"),
    [
        ("full", Sampling(temperature=1.0), {}),
        ("full", Sampling(temperature=0.6, seed=1), {}),
        ("trimmed", Sampling(temperature=1.0, seed=2), {}),
        ("full", Sampling(temperature=1.0, seed=3), {"is_draft_greedy": True}),
        ("trimmed", Sampling(temperature=1.0, seed=4), {"min_confidence": 0.5}),
        ("full", Sampling(temperature=1.0, seed=5), {"is_draft_greedy": True, "min_confidence": 0.5}),
        ("full", Sampling(temperature=1.2, top_k=3, seed=6), {}),
        ("full", Sampling(temperature=1.0, top_p=0.7, seed=7), {}),
        ("full", Sampling(temperature=1.0, seed=8), {"num_tokens": 0}),
    ],
    ids=["full", "cool", "trimmed", "greedy-drafts", "confidence", "greedy-confidence", "top-k", "top-p", "plain"],
)
def test_sampled_answers_are_distributed_as_the_targets_own(
    kind: str, sampling: Sampling, more: dict[str, object]
) -> None:
    model = small_model(VOCAB, seed=2, initializer_range=0.15)
    expected = exact_probabilities(model, PROMPT, LENGTH, sampling)
    assert abs(expected.sum() - 1) < 1e-5
    more = dict(more)
    num_tokens = int(more.pop("num_tokens", 3))  # type: ignore[call-overload]
    head = BigramHead(draft_table(kind), torch.tensor([0.9, 0.2, 0.8, 0.6, 0.3])) if num_tokens else None
    wanted = Decoding(LENGTH, frozenset(), num_tokens, sampling, **more)  # type: ignore[arg-type]
    with RunningTarget(model, (1,)) as target:
        answers = decode(target, head, [PROMPT] * NUM_ANSWERS, wanted).answers  # type: ignore[arg-type]
    counted = counted_answers([a.token_ids for a in answers], VOCAB)
    assert counted[expected == 0].sum() == 0, "an answer that the target cannot give"
    if num_tokens:
        assert sum(sum(a.accepted) for a in answers) > NUM_ANSWERS // 4, "the accept path must be exercised"
    assert z_score(counted, expected) < 4.5


def test_the_statistical_test_would_notice_a_biased_verifier() -> None:
    model = small_model(VOCAB, seed=2, initializer_range=0.15)
    sampling = Sampling(temperature=1.0)
    expected = exact_probabilities(model, PROMPT, LENGTH, sampling)
    # The bias of a retrospective stop (DSpark paper, appendix A): a token's own confidence decides on its verification.
    own = torch.tensor([0.9, 0.2, 0.8, 0.6, 0.3])

    class Anticipating(BigramHead):
        def draft(self, *arguments, **named):  # type: ignore[no-untyped-def]
            draft = super().draft(*arguments, **named)
            return type(draft)(draft.tokens_BN, draft.probs_BNV, own[draft.tokens_BN])

    wanted = Decoding(LENGTH, frozenset(), 3, sampling, min_confidence=0.5)
    with RunningTarget(model, (1,)) as target:
        head = Anticipating(draft_table("full"), own)
        answers = decode(target, head, [PROMPT] * NUM_ANSWERS, wanted).answers  # type: ignore[arg-type]
    assert z_score(counted_answers([a.token_ids for a in answers], VOCAB), expected) > 4.5
