"""Every head in our runtime: greedy output is the target's own, sampled output is distributed as the target's own.

N drafted tokens
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_batch, tiny_head, tiny_kept_ids, tiny_target
from toy_head import plain_greedy
from transformers import AutoModelForCausalLM

from draftsmith.data.generate import Sampling, target_distribution
from draftsmith.data.rows import Row
from draftsmith.eval.decode import Decoded, Decoding, RunningTarget, decode
from draftsmith.eval.metrics import Counts
from draftsmith.eval.replay import replay
from draftsmith.eval.schedule import Profile, Throughput
from draftsmith.models.head import available_methods, load_method
from draftsmith.models.target import FrozenTarget

PROMPTS = [[5, 6, 7, 8], [9, 3], [10, 11, 12, 13, 14, 15, 16], [77, 88, 99]]
MAX_NEW_TOKENS, NUM_TOKENS = 14, 4
METHODS = [
    (method, is_trimmed)
    for method in available_methods()
    for is_trimmed in (False, True)
    if not is_trimmed or "draft_vocab_size" in load_method(method).Config.model_fields
]
CONFIDENT = [case for case in METHODS if hasattr(load_method(case[0]).Head, "propose_with_confidence")]


def name_of(case: tuple[str, bool]) -> str:
    return f"{case[0]}-{'trimmed' if case[1] else 'full'}"


class Scene:
    """A target, its greedy answers as rows, and a head fitted to them until it is sometimes right."""

    def __init__(self, folder: Path, method: str, is_trimmed: bool) -> None:
        tiny_target(folder, "mimo")  # brings an MTP layer, for methods that begin from one
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.plain = [plain_greedy(self.model, prompt, MAX_NEW_TOKENS, set()) for prompt in PROMPTS]
        self.rows = []
        for index, (prompt, answer) in enumerate(zip(PROMPTS, self.plain, strict=True)):
            mask = (False,) * len(prompt) + (True,) * len(answer)
            self.rows.append(Row(f"row{index}", f"c{index}", "tiny", (*prompt, *answer), mask))
        frozen = FrozenTarget.load(folder, torch.float32)
        kept_ids = None
        if is_trimmed:
            common = {token for answer in self.plain[:3] for token in answer}
            kept_ids = torch.tensor(sorted(common | set(tiny_kept_ids(50).tolist())))
        self.head = tiny_head(method, frozen, kept_ids=kept_ids)
        self.batch = tiny_batch(folder, [self.rows], self.head.needs.aux_layers)
        optimizer = torch.optim.Adam(self.head.parameters(), lr=2e-3)
        for _ in range(25):
            terms, _ = self.head.loss(self.batch)
            torch.autograd.backward(sum(term.weight * term.sum for term in terms.values()))
            optimizer.step()
            optimizer.zero_grad()

    def answers(self, num_tokens: int, **more: Any) -> list[Decoded]:
        wanted = Decoding(MAX_NEW_TOKENS, frozenset(), num_tokens, **more)
        with RunningTarget(self.model, self.head.needs.aux_layers) as target:
            return decode(target, self.head, PROMPTS, wanted).answers


def typical_confidence(head: Any, run: Callable[[], object]) -> float:
    """The lower quartile of the confidences in `run`: a threshold that stops some drafts, and not most."""
    found, draft = [], head.draft

    def recording(*arguments: Any) -> Any:
        drafted = draft(*arguments)
        found.append(drafted.confidence_BN.flatten())
        return drafted

    head.draft = recording
    run()
    del head.draft
    return float(torch.cat(found).quantile(0.25))


@pytest.fixture(scope="module", params=METHODS, ids=name_of)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("target"), *request.param)


def test_greedy_output_is_the_targets_own_token_for_token(scene: Scene) -> None:
    accepted = rounds = 0
    for num_tokens in (1, NUM_TOKENS):
        answers = scene.answers(num_tokens)
        assert [a.token_ids for a in answers] == scene.plain
        accepted += sum(sum(a.accepted) for a in answers)
        rounds += sum(len(a.accepted) for a in answers)
    assert accepted > 10 and rounds > 15, "the head must be sometimes right and sometimes wrong"


@pytest.mark.parametrize("scene", CONFIDENT, indirect=True, ids=name_of)
def test_stopping_at_a_low_confidence_changes_no_greedy_output(scene: Scene) -> None:
    threshold = typical_confidence(scene.head, lambda: scene.answers(NUM_TOKENS))
    answers = scene.answers(NUM_TOKENS, min_confidence=threshold)
    assert [a.token_ids for a in answers] == scene.plain
    assert len({length for a in answers for length in a.drafted}) > 1, "no draft was stopped"


@pytest.mark.parametrize("scene", CONFIDENT, indirect=True, ids=name_of)
def test_scheduling_by_throughput_changes_no_greedy_output(scene: Scene) -> None:
    scene.head.confidence_temperatures = (0.7, 1.5)
    drafted = []
    for dearest in (1.0, 1 + 16 * typical_confidence(scene.head, lambda: scene.answers(NUM_TOKENS)) / 4):
        profile = Profile((1, 4, 20), (1.0, 1.0, dearest))
        answers = scene.answers(NUM_TOKENS, schedule=Throughput(profile))
        assert [a.token_ids for a in answers] == scene.plain
        drafted.append([length for a in answers for length in a.drafted])
    del scene.head.confidence_temperatures
    free, paid = drafted
    assert set(free) == {NUM_TOKENS}, "where more tokens cost nothing, every draft is whole"
    assert sum(paid) < sum(free), "the schedule made no difference between drafts"


def test_replay_equals_the_runtimes_clipped_counts_for_every_length(scene: Scene) -> None:
    found = replay(scene.head, [(scene.rows, scene.batch)], NUM_TOKENS)
    for n in range(1, NUM_TOKENS + 1):
        for row, answer in zip(found, scene.answers(n), strict=True):
            clipped = [min(pair) for pair in zip(answer.accepted, answer.emitted, strict=True)]
            assert row.by_length[n - 1] == Counts.of_rounds([n] * len(clipped), clipped, n)


def test_replay_of_one_length_gives_the_counts_that_it_gives_of_all(scene: Scene) -> None:
    every = replay(scene.head, [(scene.rows, scene.batch)], 3)
    one = replay(scene.head, [(scene.rows, scene.batch)], 3, [3])
    assert [row.by_length[2] for row in one] == [row.by_length[2] for row in every]


# ---------------------------------------------------------------- at temperature

VOCAB, LENGTH, NUM_ANSWERS, PROMPT = 5, 4, 5000, [1, 3]


def exact(model: Any, sampling: Sampling) -> np.ndarray:
    """The target's probability of every answer of LENGTH tokens, by enumeration."""
    answers = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], dim=1)
    with torch.no_grad():
        probs = target_distribution(model(ids).logits[:, len(PROMPT) - 1 : -1], sampling)
    return probs.gather(2, answers[..., None])[..., 0].double().prod(1).numpy()


@pytest.mark.parametrize(
    "method_and_trim, stop",
    [
        pytest.param(case, stop, id=f"{name_of(case)}-{stop}")
        for stop, cases in (("nothing", METHODS), ("confidence", CONFIDENT), ("throughput", CONFIDENT))
        for case in cases
    ],
)
def test_sampled_answers_are_distributed_as_the_targets_own(
    method_and_trim: tuple[str, bool], stop: str, tmp_path: Path
) -> None:
    method, is_trimmed = method_and_trim
    tiny_target(tmp_path, "mimo", vocab_size=VOCAB, std=0.04, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().requires_grad_(False)
    frozen = FrozenTarget.load(tmp_path, torch.float32)
    head = tiny_head(method, frozen, kept_ids=torch.tensor([1, 2, 4]) if is_trimmed else None)
    sampling = Sampling(temperature=0.9, seed=3)
    expected = exact(model, sampling)
    with RunningTarget(model, head.needs.aux_layers) as target, torch.no_grad():
        wanted = Decoding(LENGTH, frozenset(), 3, sampling)
        if stop == "throughput":  # with so many sequences it is much like a threshold of survival
            wanted = replace(wanted, schedule=Throughput(Profile((1, NUM_ANSWERS, 4 * NUM_ANSWERS), (1.0, 2.0, 3.0))))
        if stop == "confidence":
            before = replace(wanted, sampling=replace(sampling, seed=4))
            threshold = typical_confidence(head, lambda: decode(target, head, [PROMPT] * 200, before))
            wanted = replace(wanted, min_confidence=threshold)
        answers = decode(target, head, [PROMPT] * NUM_ANSWERS, wanted).answers
    places = torch.tensor([a.token_ids for a in answers]) @ (VOCAB ** torch.arange(LENGTH - 1, -1, -1))
    counted = np.bincount(places.numpy(), minlength=VOCAB**LENGTH)
    least = NUM_ANSWERS // (5 if stop == "nothing" else 20)
    assert sum(sum(a.accepted) for a in answers) > least, "the accept path must be exercised"
    mean = expected * NUM_ANSWERS
    large = mean >= 5
    cells, means = np.append(counted[large], counted[~large].sum()), np.append(mean[large], mean[~large].sum())
    freedom = int(large.sum())
    z_score = (((cells - means) ** 2 / np.maximum(means, 1e-9)).sum() - freedom) / np.sqrt(2 * freedom)
    assert z_score < 4.5
