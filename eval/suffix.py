"""Suffix decoding: the most frequent continuation of the text's end, in this text and in earlier answers.

SuffixDecoding, arXiv:2411.04975, section 4, with the rules and defaults of the implementation that vLLM 0.32 calls
(ArcticInference): every suffix of a text, cut at `max_depth` tokens, is a path of a tree whose nodes count how often
they were passed. For each length m of a match of the text's end,

    path      from the matched node always to the child that was passed most often
    length    at most m * max_length_factor tokens: longer matches are trusted further
    q         product of child count / node count; the path ends where it falls below min_probability
    score     sum of q over the path: how many of its tokens are expected to be accepted

the path with the best score wins, of equal ones the one with the longest match. The tree of the text itself and the
tree of earlier answers are asked alike; the latter wins only with a better score.
"""

from collections import deque
from collections.abc import Sequence

from pydantic import BaseModel, Field


class SuffixConfig(BaseModel, extra="forbid", frozen=True):
    """vLLM's suffix_decoding_* settings, with its defaults."""

    max_depth: int = Field(24, ge=2, description="tokens of match and proposal together")
    max_length_factor: float = Field(1.0, gt=0, description="longest proposal per token of the match")
    min_probability: float = Field(0.1, ge=0, le=1, description="of a proposal, by the counts; it ends below")
    max_earlier_tokens: int = Field(
        20_000,
        ge=0,
        description="also look into so much of the last answers, of the same workload and setting; 0 = only into the "
        "text itself. A token takes up to max_depth nodes of some 300 bytes each",
    )


class SuffixTree:
    """Counts of all suffixes of several texts. A node is [times passed, {token: node}]."""

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._root = _Node()

    def text(self) -> "deque[_Node]":
        """The open ends of a new text: hand them to `append` with each of its tokens."""
        return deque(maxlen=self._config.max_depth)

    def append(self, open_ends: "deque[_Node]", token: int) -> None:
        """One more token of a text: every suffix that is not yet at full depth grows by it."""
        if len(open_ends) == self._config.max_depth:
            open_ends.popleft()
        open_ends.append(self._root)
        self._root.count += 1
        for index, node in enumerate(open_ends):
            child = node.children.setdefault(token, _Node())
            child.count += 1
            open_ends[index] = child

    def remove(self, text: Sequence[int]) -> None:
        """Take a whole text out again."""
        for start in range(len(text)):
            node = self._root
            node.count -= 1
            for token in text[start : start + self._config.max_depth]:
                child = node.children[token]
                child.count -= 1
                if child.count == 0:
                    del node.children[token]
                    break
                node = child

    def propose(self, end: Sequence[int], num_tokens: int) -> tuple[float, list[int]]:
        """Score and tokens of the best continuation of a text that ends so; nothing scores 0."""
        best_score, best = 0.0, list[int]()
        for size in range(1, len(end)):
            node = self._find(end[len(end) - size :])
            if node is None:
                break
            longest = min(num_tokens, int(size * self._config.max_length_factor + 1e-6))
            score, tokens = self._follow(node, longest)
            if tokens and score >= best_score:
                best_score, best = score, tokens
        return best_score, best

    def _find(self, tokens: Sequence[int]) -> "_Node | None":
        node: _Node | None = self._root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
        return node

    def _follow(self, node: "_Node", num_tokens: int) -> tuple[float, list[int]]:
        score, probability, tokens = 0.0, 1.0, list[int]()
        while len(tokens) < num_tokens and node.children:
            token, child = max(node.children.items(), key=lambda item: item[1].count)
            probability *= child.count / node.count
            if probability < self._config.min_probability:
                break
            tokens.append(token)
            score += probability
            node = child
        return score, tokens


class SuffixLookup:
    """One text that grows; `earlier` is the tree of answers that were given before."""

    def __init__(self, config: SuffixConfig, earlier: SuffixTree) -> None:
        self._tree, self._earlier = SuffixTree(config), earlier
        self._open_ends = self._tree.text()
        self._end: deque[int] = deque(maxlen=config.max_depth)

    def extend(self, tokens: list[int]) -> None:
        """Append to the text."""
        for token in tokens:
            self._tree.append(self._open_ends, token)
            self._end.append(token)

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens; none where nothing repeats."""
        end = list(self._end)
        score, tokens = self._tree.propose(end, num_tokens)
        other_score, other_tokens = self._earlier.propose(end, num_tokens)
        return other_tokens if other_score > score else tokens


class _Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, _Node] = {}
