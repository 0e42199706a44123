"""Figures of acceptance and speed as vLLM defines them, with 95 % intervals by bootstrap over prompts.

    mean acceptance length (MAL)   1 + accepted / rounds: tokens per target pass, bonus included
    acceptance rate                accepted / drafted
    rate of position i             share of rounds that accept at least i+1 drafts

A round is a target pass that verifies a draft. Counts are additive: a workload's are the sum of its prompts'.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """What happened in the rounds of one answer, or of many."""

    rounds: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]  # rounds that accepted at least i+1 drafts

    @classmethod
    def of_rounds(cls, drafted: Sequence[int], accepted: Sequence[int], num_positions: int) -> "Counts":
        """From what each round drafted and accepted."""
        positions = tuple(sum(a > i for a in accepted) for i in range(num_positions))
        return cls(len(accepted), sum(drafted), sum(accepted), positions)

    @classmethod
    def total(cls, parts: Sequence["Counts"]) -> "Counts":
        """The sum of counts with equally many positions."""
        positions = tuple(sum(column) for column in zip(*(part.per_position for part in parts), strict=True))
        return cls(
            sum(part.rounds for part in parts),
            sum(part.drafted for part in parts),
            sum(part.accepted for part in parts),
            positions,
        )

    @property
    def mal(self) -> float | None:
        """None when there was no round: every answer ended with its first token."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def acceptance(per_prompt: Sequence[Counts], samples: int, seed: int) -> dict[str, Any]:
    """MAL with its interval over prompts, acceptance rate, rate of every position, and the counts behind them."""
    total = Counts.total(per_prompt)
    columns = np.array([[part.accepted, part.rounds] for part in per_prompt], dtype=np.float64)
    interval = bootstrap_interval(columns, lambda sums: 1 + sums[:, 0] / sums[:, 1], samples, seed)
    return {
        "mal": total.mal,
        "mal_interval": interval if total.rounds else None,
        "acceptance_rate": total.accepted / total.drafted if total.drafted else None,
        "per_position": [count / total.rounds for count in total.per_position] if total.rounds else [],
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "per_position_accepted": list(total.per_position),
        "prompts": len(per_prompt),
    }


def speed_up(
    tokens: Sequence[int],
    seconds: Sequence[float],
    plain_tokens: Sequence[int],
    plain_seconds: Sequence[float],
    samples: int,
    seed: int,
) -> dict[str, Any]:
    """Ratio of two throughputs in tokens/s, with its interval over the units (prompts, or batches of them).

    Units are paired: both were measured on the same prompts, one right after the other.
    """
    columns = np.array([tokens, seconds, plain_tokens, plain_seconds], dtype=np.float64).T
    sums = columns.sum(0, keepdims=True)
    return {
        "speed_up": float(_throughput_ratio(sums)[0]),
        "speed_up_interval": bootstrap_interval(columns, _throughput_ratio, samples, seed),
        "tokens_per_s": float(sums[0, 0] / sums[0, 1]),
        "plain_tokens_per_s": float(sums[0, 2] / sums[0, 3]),
    }


def bootstrap_interval(columns_UK: Floats, statistic: Any, samples: int, seed: int) -> list[float] | None:
    """The 2.5th and 97.5th percentile of a statistic of column sums, over resampled units; None for a single unit.

    `statistic` maps sums [samples, K] to values [samples].
    """
    num_units = columns_UK.shape[0]
    if num_units < 2:
        return None
    weights = np.random.default_rng(seed).multinomial(num_units, np.full(num_units, 1 / num_units), size=samples)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(weights @ columns_UK)
    values = values[np.isfinite(values)]  # a resample of nothing but prompts without a round has no value
    return [float(bound) for bound in np.percentile(values, [2.5, 97.5])] if values.size else None


def _throughput_ratio(sums: Floats) -> Floats:
    ratio: Floats = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    return ratio
