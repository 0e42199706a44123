"""What the runtime asks of a drafter, and the drafters that nobody trains: the baselines of every report.

B sequences, R rows, N drafted tokens
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.eval.config import BaselineName, EvalConfig
from draftsmith.eval.ngram import NgramLookup
from draftsmith.eval.suffix import SuffixLookup, SuffixTree
from draftsmith.models.head import Context, Draft, DraftState


class Drafter(Protocol):
    """The part of models.head.Head that decoding needs."""

    def start(self, batch_size: int, device: torch.device) -> DraftState: ...
    def draft(
        self,
        state: DraftState,
        context: Context,
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Draft: ...


class Lookup(Protocol):
    """One text that grows, and what may follow it."""

    def extend(self, tokens: list[int]) -> None: ...
    def propose(self, num_tokens: int) -> list[int]: ...


class LookupState:
    """A lookup for every running sequence."""

    def __init__(self, lookups: list[Lookup]) -> None:
        self.lookups = lookups

    def select(self, rows_B: Tensor) -> None:
        """Keep these sequences, in this order."""
        self.lookups = [self.lookups[row] for row in rows_B.tolist()]


class LookupDrafter:
    """Drafts by looking the text's end up: chosen without chance at any temperature, and of any length up to N."""

    def __init__(self, new_lookup: Callable[[], Lookup]) -> None:
        self._new_lookup = new_lookup

    def start(self, batch_size: int, device: torch.device) -> LookupState:
        """One empty text per sequence."""
        return LookupState([self._new_lookup() for _ in range(batch_size)])

    def draft(
        self,
        state: DraftState,
        context: Context,
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Draft:
        """Take in the newly committed tokens, the bonus included, and propose what followed the like of them."""
        assert isinstance(state, LookupState) and context.ids_BR is not None
        ids, next_ids, starts = context.ids_BR.tolist(), context.next_ids_BR.tolist(), context.start_B.tolist()
        proposals = []
        for row, (lookup, count) in enumerate(zip(state.lookups, context.num_rows_B.tolist(), strict=True)):
            # Row p brings token p+1; only the very first token of a text is none's next.
            lookup.extend([*(ids[row][:1] if starts[row] == 0 else ()), *next_ids[row][:count]])
            proposals.append(lookup.propose(num_tokens))
        width = max(map(len, proposals))
        padded = [proposal + [0] * (width - len(proposal)) for proposal in proposals]
        device = context.next_ids_BR.device
        tokens_BN = torch.tensor(padded, dtype=torch.int64, device=device).view(len(proposals), width)
        return Draft(tokens_BN, None, num_tokens_B=torch.tensor([len(p) for p in proposals], device=device))


class Baseline:
    """A drafter by name, with what it remembers of earlier answers."""

    def __init__(self, name: BaselineName, config: EvalConfig) -> None:
        self._earlier, self._answers = SuffixTree(config.suffix), deque[Sequence[int]]()
        self._max_tokens = config.suffix.max_earlier_tokens if name == "suffix" else 0
        new_lookups: dict[BaselineName, Callable[[], Lookup]] = {
            "ngram": lambda: NgramLookup(config.ngram),
            "suffix": lambda: SuffixLookup(config.suffix, self._earlier),
        }
        self.drafter = LookupDrafter(new_lookups[name])

    def remember(self, answer: Sequence[int]) -> None:
        """An answer that was given; for it the oldest are forgotten."""
        if len(answer) > self._max_tokens:
            return
        self._answers.append(answer)
        while sum(map(len, self._answers)) > self._max_tokens:
            self._earlier.remove(self._answers.popleft())
        open_ends = self._earlier.text()
        for token in answer:
            self._earlier.append(open_ends, token)
