"""Every method drafts without changing what the target says: greedy token for token, sampled in distribution."""

from pathlib import Path
from typing import Any

import pytest
import torch
from answer_distribution import counted_answers, exact_probabilities, z_score
from tiny import fitting_kind, tiny_head, tiny_kept_ids, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.data.generate import Sampling
from draftsmith.eval.decode import Decoded, Decoding, RunningTarget, decode
from draftsmith.models.head import available_methods, load_method
from draftsmith.models.target import FrozenTarget

CASES = [
    pytest.param(method, is_trimmed, id=f"{method}-{'trimmed' if is_trimmed else 'full'}")
    for method in available_methods()
    for is_trimmed in (False, True)
    if not is_trimmed or "draft_vocab_size" in load_method(method).Config.model_fields
]


def decoded(folder: Path, method: str, kept_ids: Tensor | None, prompts: list[list[int]], wanted: Decoding) -> Any:
    """The target as a transformers model, and the answers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    head = tiny_head(method, FrozenTarget.load(folder, torch.float32), kept_ids=kept_ids)
    with RunningTarget(model, head.needs.aux_layers, head.needs.kv_layers) as target:
        return model, decode(target, head, prompts, wanted).answers


@pytest.mark.parametrize("method, is_trimmed", CASES)
def test_greedy_answers_are_the_targets_own_token_for_token(method: str, is_trimmed: bool, tmp_path: Path) -> None:
    # So few tokens that random drafts are accepted now and then, also whole.
    folder = tiny_target(tmp_path, fitting_kind(method), vocab_size=8)
    prompts = [[5, 6, 7, 3], [4], [3, 4, 5, 6, 7, 3, 4], [6, 3]]
    kept_ids = tiny_kept_ids(5, 8) if is_trimmed else None
    model, answers = decoded(folder, method, kept_ids, prompts, Decoding(40, frozenset(), 3))
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt + answer.token_ids])
            assert model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer.token_ids
    accepted = [count for answer in answers for count in answer.accepted]
    assert {0, 1} <= set(accepted) and len(accepted) > 40, "rejected and accepted drafts are both wanted"


@pytest.mark.parametrize("method, is_trimmed", CASES)
def test_sampled_answers_are_distributed_as_the_targets_own(method: str, is_trimmed: bool, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, fitting_kind(method), vocab_size=5, std=0.04, num_hidden_layers=3)
    sampling, prompt, kept_ids = Sampling(temperature=0.9, seed=1), [1, 3], torch.tensor([0, 2, 3])
    wanted = Decoding(4, frozenset(), 3, sampling)
    answers: list[Decoded]
    model, answers = decoded(folder, method, kept_ids if is_trimmed else None, [prompt] * 2500, wanted)
    assert sum(sum(answer.accepted) for answer in answers) > 600, "the accept path must be exercised"
    counted = counted_answers([answer.token_ids for answer in answers], 5)
    assert z_score(counted, exact_probabilities(model, prompt, 4, sampling)) < 4.5
