"""Which drafted tokens a pass verifies: those that raise this machine's expected throughput (DSpark, section 3.2).

    B sequences, N drafted tokens, C = B*N candidates

        confidence       .9 .8 .5    survival  .90 .72 .36     the chance that the target accepts all up to this token
                         .6 .9 .9              .60 .54 .49
        by survival      .90 .72 .60 .54 .49 .36
        tokens a second  (B + survivals admitted so far) * steps a second of a pass over B + so many tokens
        admitted         .90 .72 .60 | .54     up to the first that does not raise it: lengths 2 and 1

Lossless, because whether a token is verified is decided before it is drawn, as far as its own sequence goes. The walk
takes survivals as they fall, so the decision on draft j rests on confidences up to j, which neither its own draw nor a
later one enters (`Draft.confidence_BN`), and on other sequences, whose draws are independent; and it ends at the first
token that does not pay, so nothing later takes a decision back. The best prefix of the whole list would look ahead at
confidences that depend on the token: tokens that lead to good drafts would be verified more often than others, and the
output would be biased (appendix A of the paper; a test shows it). The profile is measured beforehand, on other rounds.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.artefact import write_atomically
from draftsmith.eval.decode import Decoding, Running, RunningTarget
from draftsmith.eval.drafters import Drafter

# Timed rounds of every length; one more comes first, untimed.
_ROUNDS = 5


@dataclass(frozen=True)
class Profile:
    """Seconds of a step (drafting, target pass, verification) by the tokens in its pass; both ascend."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of_samples(cls, samples: Iterable[tuple[int, float]]) -> "Profile":
        """The median of every number of tokens; then, as more tokens never cost less, the nearest rising curve."""
        found: dict[int, list[float]] = {}
        for count, seconds in samples:
            found.setdefault(count, []).append(seconds)
        tokens = sorted(found)
        return cls(tuple(tokens), tuple(_rising([median(found[each]) for each in tokens])))

    def steps_per_s(self, tokens: Sequence[int]) -> list[float]:
        """Steps a second of passes over so many tokens, by linear interpolation of the seconds."""
        seconds: list[float] = np.interp(tokens, self.tokens, self.seconds).tolist()
        return [1 / each for each in seconds]


@dataclass(frozen=True)
class Throughput:
    """The schedule of the module's docstring."""

    profile: Profile

    def lengths(self, confidence_BN: Tensor) -> Tensor:
        """int64 [B]: how many tokens of every draft are verified."""
        batch, num_tokens = confidence_BN.shape
        # Stable, and survival never rises along a row: every token comes behind those before it in its sequence.
        survival_C, order_C = confidence_BN.double().cumprod(1).flatten().sort(descending=True, stable=True)
        steps_C1 = survival_C.new_tensor(self.profile.steps_per_s(range(batch, batch + len(order_C) + 1)))
        emitted_C1 = batch + torch.cat([survival_C.new_zeros(1), survival_C.cumsum(0)])
        throughput_C1 = emitted_C1 * steps_C1
        num_admitted = int((throughput_C1[1:] > throughput_C1[:-1]).long().cumprod(0).sum())
        return torch.bincount(order_C[:num_admitted] // num_tokens, minlength=batch)


@dataclass
class Fixed:
    """The schedule of a probe: the same length for all."""

    length: int

    def lengths(self, confidence_BN: Tensor) -> Tensor:
        """int64 [B]"""
        return torch.full(confidence_BN.shape[:1], self.length, device=confidence_BN.device)


@torch.inference_mode()
def measure_profile(
    target: RunningTarget,
    head: Drafter,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    settings: Decoding,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Time rounds of every draft length, of one sequence and of `batch_size`, as decoding runs them.

    Lengths take turns, so that a machine whose speed drifts does so for all. The prompts are answered without end.
    """
    samples: list[tuple[int, float]] = []
    for num_rows in sorted({1, batch_size}):
        fixed = Fixed(0)
        rounds = (1 + _ROUNDS) * (1 + settings.num_speculative_tokens)
        endless = rounds * (1 + settings.num_speculative_tokens) + 2
        wanted = replace(settings, max_new_tokens=endless, stop_ids=frozenset(), min_confidence=None, schedule=fixed)
        running = Running(target, head, wanted)
        running.prefill(list(islice(cycle(prompts), num_rows)))
        for turn in range(1 + _ROUNDS):
            for fixed.length in range(settings.num_speculative_tokens + 1):
                started = clock()
                running.round()
                if turn:
                    samples.append((num_rows * (1 + fixed.length), clock() - started))
    return Profile.of_samples(samples)


@dataclass(frozen=True)
class Setting:
    """What a profile holds for."""

    temperature: float
    batch_size: int
    n: int


class ProfileLog:
    """profiles.json in a folder, beside the measurements: what is in it is not measured again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "profiles.json"
        lines = json.loads(self._path.read_text()) if self._path.is_file() else []
        self.found = {
            Setting(**line["setting"]): Profile(tuple(line["tokens"]), tuple(line["seconds"])) for line in lines
        }

    def get(self, setting: Setting, measure: Callable[[], Profile]) -> Profile:
        """The profile of a setting, measured if there is none yet."""
        if setting not in self.found:
            self.found[setting] = measure()
            write_atomically(self._path, json.dumps(self.as_json(), indent=1) + "\n")
        return self.found[setting]

    def as_json(self) -> list[dict[str, object]]:
        """All of them, for the file and for the report."""
        return [{"setting": asdict(setting), **asdict(profile)} for setting, profile in self.found.items()]


def _rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence of least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
