"""Whether sampled answers are distributed as a target alone would sample them: exact probabilities and a chi-square."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from draftsmith.data.generate import Sampling, target_distribution


def exact_probabilities(model: Any, prompt: Sequence[int], length: int, sampling: Sampling) -> np.ndarray:
    """The target's probability of every answer of `length` tokens, by enumeration, in the order of `answer_places`."""
    answers = torch.tensor(list(product(range(model.config.vocab_size), repeat=length)))
    ids = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers], dim=1)
    with torch.no_grad():
        probs = target_distribution(model(ids).logits[:, len(prompt) - 1 : -1], sampling)
    return probs.gather(2, answers[..., None])[..., 0].double().prod(1).numpy()


def counted_answers(answers: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """How often each answer was given; all answers are of one length."""
    length = len(answers[0])
    places = torch.tensor(answers) @ (vocab_size ** torch.arange(length - 1, -1, -1))
    return np.bincount(places.numpy(), minlength=vocab_size**length)


def z_score(counted: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square over cells of at least 5 expected answers (the rest in one), in standard deviations from its mean."""
    mean = expected * counted.sum()
    large = mean >= 5
    cells = np.append(counted[large], counted[~large].sum())
    means = np.append(mean[large], max(mean[~large].sum(), 1e-9))
    keep = means > 1e-6
    chi_square = (((cells - means) ** 2)[keep] / means[keep]).sum()
    freedom = keep.sum() - 1
    return float((chi_square - freedom) / np.sqrt(2 * freedom))
