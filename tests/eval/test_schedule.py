"""The throughput schedule: what it admits, the profile it goes by, and that looking ahead would bias the output."""

from collections.abc import Iterator
from itertools import count, product
from pathlib import Path

import pytest
import torch
from answer_distribution import counted_answers, exact_probabilities, z_score
from torch import Tensor
from toy_head import BigramHead, small_model

from draftsmith.data.generate import Sampling
from draftsmith.eval.decode import Decoding, Running, RunningTarget, decode
from draftsmith.eval.schedule import Profile, ProfileLog, Setting, Throughput, measure_profile

# A pass is as good as free up to 4 tokens, then every further one costs a fifth of it.
PROFILE = Profile((1, 4, 24), (1.0, 1.02, 5.0))


def confidences(batch: int, num_tokens: int, seed: int) -> Tensor:
    return torch.rand(batch, num_tokens, generator=torch.Generator().manual_seed(seed))


def throughput(profile: Profile, confidence_BN: Tensor, lengths: tuple[int, ...]) -> float:
    """Expected tokens a second when so much of every draft is verified, from the definition."""
    emitted = 0.0
    for row, length in zip(confidence_BN.double().tolist(), lengths, strict=True):
        chance, emitted = 1.0, emitted + 1
        for confidence in row[:length]:
            chance *= confidence
            emitted += chance
    return emitted * profile.steps_per_s([len(lengths) + sum(lengths)])[0]


def walked(profile: Profile, confidence_BN: Tensor) -> list[int]:
    """Algorithm 1 of the paper, one token at a time."""
    batch, num_tokens = confidence_BN.shape
    survival = confidence_BN.double().cumprod(1).tolist()
    ranked = sorted(((row, j) for row in range(batch) for j in range(num_tokens)), key=lambda p: -survival[p[0]][p[1]])
    size, emitted, lengths = batch, float(batch), [0] * batch
    best = emitted * profile.steps_per_s([size])[0]
    for row, j in ranked:
        size, emitted = size + 1, emitted + survival[row][j]
        if emitted * profile.steps_per_s([size])[0] <= best:
            break
        best, lengths[row] = emitted * profile.steps_per_s([size])[0], j + 1
    return lengths


@pytest.mark.parametrize("seed", range(20))
def test_the_lengths_are_those_of_the_papers_algorithm(seed: int) -> None:
    confidence = confidences(1 + seed % 4, 1 + seed % 5, seed)
    assert Throughput(PROFILE).lengths(confidence).tolist() == walked(PROFILE, confidence)


def test_the_drawn_example_admits_three_tokens() -> None:
    # Steps a second fall so that the fourth admitted token, of survival 0.54, no longer pays.
    profile = Profile((2, 5, 6, 8), (1.0, 1.1, 1.3, 1.9))
    assert Throughput(profile).lengths(torch.tensor([[0.9, 0.8, 0.5], [0.6, 0.9, 0.9]])).tolist() == [2, 1]


@pytest.mark.parametrize("seed", range(10))
def test_no_other_lengths_have_a_higher_throughput_where_every_token_costs_more_than_the_one_before(seed: int) -> None:
    confidence = confidences(2, 4, seed)
    profile = Profile(tuple(range(2, 11)), tuple(1 + 0.02 * i**2 for i in range(9)))
    found = tuple(Throughput(profile).lengths(confidence).tolist())
    best = max(product(range(5), repeat=2), key=lambda lengths: throughput(profile, confidence, lengths))
    assert throughput(profile, confidence, found) == pytest.approx(throughput(profile, confidence, best))


def test_free_tokens_are_all_admitted_and_dear_or_hopeless_ones_are_not() -> None:
    confidence = confidences(3, 4, 0).clamp_min(0.01)
    free, dear = Profile((1, 15), (1.0, 1.0)), Profile((3, 15), (1.0, 13.0))
    assert Throughput(free).lengths(confidence).tolist() == [4, 4, 4]
    assert Throughput(dear).lengths(confidence).tolist() == [0, 0, 0]
    assert Throughput(free).lengths(torch.zeros(3, 4)).tolist() == [0, 0, 0]
    assert Throughput(free).lengths(torch.ones(3, 4)).tolist() == [4, 4, 4]


def test_more_confidence_in_all_tokens_or_a_cheaper_pass_never_verifies_less() -> None:
    for seed in range(20):
        confidence = confidences(1, 6, seed)
        lengths = [int(Throughput(PROFILE).lengths(confidence**power)) for power in (4.0, 1.0, 0.25)]
        assert lengths == sorted(lengths)
        slower = Profile(
            PROFILE.tokens, tuple(s + 0.3 * t for t, s in zip(PROFILE.tokens, PROFILE.seconds, strict=True))
        )
        assert int(Throughput(slower).lengths(confidence)) <= lengths[1]


def test_later_confidences_of_a_sequence_do_not_decide_on_earlier_tokens() -> None:
    for seed in range(20):
        confidence = confidences(2, 4, seed)
        for place in range(1, 4):
            changed = confidence.clone()
            changed[0, place:] = confidences(1, 4 - place, seed + 100)
            before, after = (int(Throughput(PROFILE).lengths(each)[0]) for each in (confidence, changed))
            assert min(before, place) == min(after, place)


def test_a_profile_takes_medians_and_never_says_that_more_tokens_cost_less() -> None:
    samples = [(1, 1.0), (1, 9.0), (1, 1.1), (2, 3.0), (3, 2.0), (4, 4.0)]
    profile = Profile.of_samples(samples)
    assert profile == Profile((1, 2, 3, 4), (1.1, 2.5, 2.5, 4.0))
    assert profile.steps_per_s([1, 4]) == [1 / 1.1, 0.25]
    assert profile.steps_per_s([3.5]) == [1 / 3.25]  # type: ignore[list-item]


def test_a_probe_times_every_length_of_one_and_of_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    model, now = small_model(vocab_size=16), 0.0
    head = BigramHead(torch.rand(16, 16), torch.linspace(0.1, 1, 16))
    original = Running.round

    def round_that_costs_by_its_tokens(running: Running) -> None:
        nonlocal now
        length = running.settings.schedule.length  # type: ignore[union-attr]
        original(running)
        now += 10.0 + len(running.answers) * (1 + length)

    monkeypatch.setattr(Running, "round", round_that_costs_by_its_tokens)
    with RunningTarget(model, (1,)) as target:
        settings = Decoding(4, frozenset(range(16)), 2)
        profile = measure_profile(target, head, [[3, 1], [4]], 4, settings, clock=lambda: now)
    assert profile.tokens == (1, 2, 3, 4, 8, 12)
    assert profile.seconds == (11.0, 12.0, 13.0, 14.0, 18.0, 22.0)


def test_profiles_are_kept_and_not_measured_again(tmp_path: Path) -> None:
    calls: Iterator[int] = count()

    def measure() -> Profile:
        next(calls)
        return PROFILE

    for _ in range(2):
        log = ProfileLog(tmp_path)
        assert log.get(Setting(0.0, 4, 3), measure) == PROFILE
    assert next(calls) == 1
    assert log.as_json()[0]["setting"] == {"temperature": 0.0, "batch_size": 4, "n": 3}


VOCAB, LENGTH, NUM_ANSWERS, PROMPT = 5, 4, 6000, [1, 3]


class LookingAhead:
    """The best length of every draft by itself: it weighs a token by the confidences that its draw leads to."""

    def lengths(self, confidence_BN: Tensor) -> Tensor:
        emitted_BN1 = 1 + torch.cat([torch.zeros(len(confidence_BN), 1), confidence_BN.cumprod(1).cumsum(1)], dim=1)
        return (emitted_BN1 * torch.tensor(Profile((1, 2, 4), (1.0, 1.55, 1.65)).steps_per_s([1, 2, 3, 4]))).argmax(1)


@pytest.mark.parametrize("is_lossless", [True, False], ids=["the walk", "looking ahead"])
def test_the_walk_leaves_the_output_the_targets_own_and_looking_ahead_would_not(is_lossless: bool) -> None:
    model = small_model(VOCAB, seed=2, initializer_range=0.15)
    sampling = Sampling(temperature=1.0, seed=5)
    expected = exact_probabilities(model, PROMPT, LENGTH, sampling)
    table = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) ** 2 + 0.02
    head = BigramHead(table / table.sum(-1, keepdim=True), torch.tensor([0.95, 0.1, 0.9, 0.5, 0.2]))
    rising = Profile((1, NUM_ANSWERS, 4 * NUM_ANSWERS), (1.0, 2.0, 4.0))
    schedule = Throughput(rising) if is_lossless else LookingAhead()
    with RunningTarget(model, (1,)) as target:
        wanted = Decoding(LENGTH, frozenset(), 3, sampling, schedule=schedule)
        answers = decode(target, head, [PROMPT] * NUM_ANSWERS, wanted).answers
    found = z_score(counted_answers([a.token_ids for a in answers], VOCAB), expected)
    assert len({length for a in answers for length in a.drafted}) > 1
    assert sum(sum(a.accepted) for a in answers) > NUM_ANSWERS // 8, "the accept path must be exercised"
    assert found < 4.5 if is_lossless else found > 4.5
