"""Prompt lookup: the tokens that followed the longest n-gram of the text's end where it first stood (vLLM's `ngram`).

    text        a b c d a b        longest earlier n-gram of its end: `a b`, first at 0
    proposal    c d a b            what followed it there, at most N tokens; none where no n-gram repeats

As in vLLM 0.32 (v1/spec_decode/ngram_proposer.py): the longest match within [min_match, max_match] wins, of equally
long ones the earliest; the match may overlap the end of the text, and its continuation may be shorter than N.
"""

from typing import Self

from pydantic import BaseModel, Field, model_validator


class NgramConfig(BaseModel, extra="forbid", frozen=True):
    """vLLM's prompt_lookup_min and prompt_lookup_max."""

    min_match: int = Field(2, ge=1, description="shortest n-gram that is looked up")
    max_match: int = Field(5, ge=1, description="longest n-gram that is looked up; 5 is vLLM's default")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match is {self.min_match}, above max_match {self.max_match}; swap them")
        return self


class NgramLookup:
    """One text that grows, with an index of where each of its n-grams first ended."""

    def __init__(self, config: NgramConfig) -> None:
        self._sizes = range(config.max_match, config.min_match - 1, -1)
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}  # n-gram -> position right behind its first occurrence

    def extend(self, tokens: list[int]) -> None:
        """Append to the text."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._following.setdefault(tuple(self._tokens[end - size :]), end)

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens; none without a match."""
        end = len(self._tokens)
        for size in self._sizes:
            if size <= end:
                following = self._following[tuple(self._tokens[end - size :])]
                if following < end:
                    return self._tokens[following : following + num_tokens]
        return []
