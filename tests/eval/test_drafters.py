"""Looked-up drafts of any length, none included, leave the output the target's own: greedy and sampled."""

from typing import Any

import pytest
import torch
from answer_distribution import counted_answers, exact_probabilities, z_score
from toy_head import plain_greedy, small_model

from draftsmith.data.generate import Sampling
from draftsmith.eval.config import BaselineName, EvalConfig
from draftsmith.eval.decode import Decoding, RunningTarget, decode
from draftsmith.eval.drafters import Baseline
from draftsmith.eval.ngram import NgramConfig
from draftsmith.models.head import Context

CONFIG = EvalConfig(ngram=NgramConfig(min_match=1, max_match=3))
BASELINES: tuple[BaselineName, ...] = ("ngram", "suffix")


@pytest.mark.parametrize("layers", [(), (1,)], ids=["no states captured", "states captured"])
@pytest.mark.parametrize("name", BASELINES)
def test_greedy_output_is_the_targets_own_with_drafts_of_every_length(
    name: BaselineName, layers: tuple[int, ...]
) -> None:
    model = small_model(vocab_size=12)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [8, 4, 8, 4]]
    with RunningTarget(model, layers) as target:
        wanted = Decoding(40, frozenset({2}), 4)
        answers = decode(target, Baseline(name, CONFIG).drafter, prompts, wanted).answers
    assert [a.token_ids for a in answers] == [plain_greedy(model, p, 40, {2}) for p in prompts]
    drafted, accepted = [d for a in answers for d in a.drafted], [n for a in answers for n in a.accepted]
    assert len(set(drafted)) > 1 and 0 not in drafted, "a pass without a draft is no round"
    assert any(accepted) and any(a < d for a, d in zip(accepted, drafted, strict=True))
    passes = [len(a.emitted) + len(a.token_ids) - 1 - sum(a.emitted) for a in answers]
    assert any(len(a.drafted) < n for a, n in zip(answers, passes, strict=True)), "some passes had no draft"


@pytest.mark.parametrize("name", BASELINES)
def test_sampled_answers_are_distributed_as_the_targets_own(name: BaselineName) -> None:
    model = small_model(vocab_size=5, seed=2, initializer_range=0.15)
    sampling, prompt = Sampling(temperature=1.0, seed=3), [1, 3]  # what is sampled soon repeats a token
    expected = exact_probabilities(model, prompt, 4, sampling)
    with RunningTarget(model) as target:
        drafter = Baseline(name, CONFIG).drafter
        answers = decode(target, drafter, [prompt] * 6000, Decoding(4, frozenset(), 3, sampling)).answers
    assert sum(sum(a.accepted) for a in answers) > 300, "the accept path must be exercised"
    assert z_score(counted_answers([a.token_ids for a in answers], 5), expected) < 4.5


@pytest.mark.parametrize("name", BASELINES)
def test_the_text_that_is_looked_up_begins_with_the_prompts_first_token_and_ends_with_the_bonus(
    name: BaselineName,
) -> None:
    drafter = Baseline(name, EvalConfig(ngram=NgramConfig(min_match=3, max_match=3))).drafter
    state = drafter.start(2, torch.device("cpu"))
    context = rows([[7, 8, 9, 4, 7, 8], [1, 2, 0, 0, 0, 0]], [[8, 9, 4, 7, 8, 9], [2, 5, 0, 0, 0, 0]], [0, 0], [6, 2])
    draft = drafter.draft(state, context, 3, 0.7, None)
    assert draft.num_tokens_B is not None and draft.probs_BNV is None
    assert draft.num_tokens_B.tolist() == [3, 0] and draft.tokens_BN[0].tolist() == [4, 7, 8]
    state.select(torch.tensor([0]))
    draft = drafter.draft(state, rows([[9, 4]], [[4, 7]], [6], [2]), 2, 0.0, None)
    assert draft.tokens_BN.tolist() == [[8, 9]]


def test_a_batch_without_any_match_drafts_nothing() -> None:
    drafter = Baseline("ngram", CONFIG).drafter
    draft = drafter.draft(drafter.start(1, torch.device("cpu")), rows([[1]], [[2]], [0], [1]), 3, 0.0, None)
    assert draft.tokens_BN.shape == (1, 0)


def test_the_last_answers_are_remembered_as_far_as_there_is_room() -> None:
    for room, expected in ((0, []), (3, []), (4, [3, 4]), (7, [3, 4]), (8, [5, 6])):
        suffix = CONFIG.suffix.model_copy(update={"max_earlier_tokens": room})
        baseline = Baseline("suffix", CONFIG.model_copy(update={"suffix": suffix}))
        baseline.remember([1, 2, 5, 6])  # of two that continue equally often, the first that was seen wins
        baseline.remember([1, 2, 3, 4])
        drafter = baseline.drafter
        draft = drafter.draft(drafter.start(1, torch.device("cpu")), rows([[9, 1]], [[1, 2]], [0], [2]), 3, 0.0, None)
        assert draft.tokens_BN.flatten().tolist() == expected


def rows(ids: list[list[int]], next_ids: list[list[int]], start: list[int], count: list[int]) -> Context:
    nothing: Any = torch.empty(len(ids), len(ids[0]), 0)
    return Context(
        torch.tensor(next_ids), nothing, nothing, torch.tensor(start), torch.tensor(count), torch.tensor(ids)
    )
