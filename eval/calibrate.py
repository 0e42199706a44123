"""Calibration: held-out rounds -> temperatures that turn a head's confidences into chances (DSpark, section 3.2).

    R rounds, N draft positions, B sequences

        calibrated    sigmoid(logit(confidence) / temperature of its position)
        survival      product of positions 1..j: the chance that the target accepts all up to draft j
        sequential    position 1 first, then 2 with that of 1 fixed, ..: the temperature on a grid at which the survival
                      up to it has the least expected calibration error
        ECE           sum over bins of share of rounds * |mean survival - share of them that survived|

Temperatures are kept beside a head's weights and applied by the runtime, so what a head gives stays as it was trained.
They rescale each confidence by itself and look at no token: what may be decided on a confidence may be on this one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftsmith.data.rows import Row
from draftsmith.eval.replay import Rounds, Stream, batches_of, observe
from draftsmith.models.checkpoint import load_head, read_head_config, save_head, set_temperatures
from draftsmith.models.target import FrozenTarget

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_NUM_BINS = 10
_GRID = np.geomspace(1 / 8, 8, 97)  # holds 1; neighbours are 4 % apart. Chosen, not measured
# fp32 gives sigmoids above 17 as 1, whose logit is infinite.
_CLOSEST_TO_SURE = 1e-6


def calibrate(
    folder: Path, target: FrozenTarget, rows: Sequence[Row], stream: Stream, num_tokens: int, device: torch.device
) -> tuple[float, ...]:
    """Fit temperatures for the head in `folder` on half of these held-out rows, and write them beside its weights.

    Returns them, and writes nothing when there are none: the head gives no confidences, or no row is for fitting.
    """
    head: Any = load_head(folder, target, device)
    chosen = [row for row in rows if is_for_fitting(row)]
    rounds = observe(head, batches_of(chosen, stream, head.needs.aux_layers), num_tokens) if chosen else None
    if rounds is None:
        return ()
    temperatures = fit_temperatures(rounds)
    set_temperatures(head, temperatures, str(folder))
    save_head(head, folder, read_head_config(folder).extra)
    return temperatures


def calibrated(confidence_BN: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Confidences after temperature scaling; positions behind the last temperature take that one, none changes none."""
    if not temperatures:
        return confidence_BN
    count = confidence_BN.shape[1]
    padded = [*temperatures, *[temperatures[-1]] * count][:count]
    return torch.sigmoid(torch.logit(confidence_BN, _CLOSEST_TO_SURE) / confidence_BN.new_tensor(padded))


def is_for_fitting(row: Row) -> bool:
    """Half of the held-out conversations, by their names: temperatures are fitted on it and judged on the other."""
    return crc32(row.conversation_id.encode()) % 2 == 0


def fit_temperatures(rounds: Rounds) -> tuple[float, ...]:
    """One temperature per draft position; 1 where confidences are as good as chance lets calibrated ones look."""
    logit_RN = torch.logit(rounds.confidence_RN.double(), _CLOSEST_TO_SURE).numpy()
    survival_R, found = np.ones(len(logit_RN)), []
    for place, logit_R in enumerate(logit_RN.T):
        known_R, survived_R = _outcomes(rounds, place)

        def ece(temperature: float, before_R: Floats = survival_R, logit_R: Floats = logit_R) -> float:
            return _ece((before_R * _sigmoid(logit_R / temperature))[known_R], survived_R)  # noqa: B023 - called here

        is_calibrated = ece(1.0) <= _chance_ece((survival_R * _sigmoid(logit_R))[known_R])
        found.append(1.0 if is_calibrated else float(min(_GRID, key=ece)))
        survival_R = survival_R * _sigmoid(logit_R / found[-1])
    return tuple(found)


def describe_calibration(rounds: Rounds, temperatures: Sequence[float]) -> dict[str, Any]:
    """ECE of the survivals by position and of all together, and their reliability, before and after `temperatures`."""
    confidence_RN = rounds.confidence_RN.double()
    versions = {"before": confidence_RN, "after": calibrated(confidence_RN, temperatures)}
    survivals = {name: values_RN.cumprod(1).numpy() for name, values_RN in versions.items()}
    outcomes = [_outcomes(rounds, place) for place in range(confidence_RN.shape[1])]
    survived = np.concatenate([survived_R for _, survived_R in outcomes])
    parts = {
        name: [survival_RN[known_R, place] for place, (known_R, _) in enumerate(outcomes)]
        for name, survival_RN in survivals.items()
    }
    return {
        "rounds": len(confidence_RN),
        "temperatures": list(temperatures),
        "positions": [
            {
                "rounds": len(survived_R),
                "temperature": temperatures[min(place, len(temperatures) - 1)] if temperatures else 1.0,
                **{f"ece_{name}": _ece(parts[name][place], survived_R) for name in versions},
            }
            for place, (_, survived_R) in enumerate(outcomes)
        ],
        **{f"ece_{name}": _ece(np.concatenate(parts[name]), survived) for name in versions},
        "reliability": {name: _reliability(np.concatenate(parts[name]), survived) for name in versions},
    }


def _outcomes(rounds: Rounds, place: int) -> tuple[Bools, Bools]:
    """Which rounds tell whether the draft survived place (0-based), and of those whether it did."""
    known_R = (rounds.known_R > place).numpy()
    return known_R, (rounds.accepted_R > place).numpy()[known_R]


def _ece(survival_R: Floats, survived_R: Bools) -> float:
    _, gap_K = _bins(survival_R, survival_R - survived_R)
    return float(np.abs(gap_K).sum() / max(len(survival_R), 1))


def _chance_ece(survival_R: Floats) -> float:
    """What the ECE of calibrated survivals seldom exceeds: mean and two deviations, each bin's gap being normal."""
    _, variance_K = _bins(survival_R, survival_R * (1 - survival_R))
    mean = np.sqrt(2 / np.pi * variance_K).sum()
    deviation = np.sqrt((1 - 2 / np.pi) * variance_K.sum())
    return float((mean + 2 * deviation) / max(len(survival_R), 1))


def _reliability(survival_R: Floats, survived_R: Bools) -> list[dict[str, float]]:
    """The bins that hold anything."""
    count_K, predicted_K = _bins(survival_R, survival_R)
    _, observed_K = _bins(survival_R, survived_R.astype(np.float64))
    return [
        {"predicted": float(predicted / count), "observed": float(observed / count), "count": int(count)}
        for count, predicted, observed in zip(count_K, predicted_K, observed_K, strict=True)
        if count
    ]


def _bins(survival_R: Floats, values_R: Floats) -> tuple[Floats, Floats]:
    """Bins of equal width over [0, 1]: how many rounds each holds, and the sum of their values."""
    bin_R = np.minimum((survival_R * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    counts_K, sums_K = (np.zeros(_NUM_BINS), np.zeros(_NUM_BINS))
    np.add.at(counts_K, bin_R, 1.0)
    np.add.at(sums_K, bin_R, values_R)
    return counts_K, sums_K


def _sigmoid(logit_R: Floats) -> Floats:
    return 1 / (1 + np.exp(-logit_R))
