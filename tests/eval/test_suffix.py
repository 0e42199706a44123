"""Suffix decoding follows the counts: of this text, and of earlier answers where those score better."""

import random
from collections import Counter

import pytest

from draftsmith.eval.suffix import SuffixConfig, SuffixLookup, SuffixTree

CONFIG = SuffixConfig()


def tree_of(config: SuffixConfig, *texts: list[int]) -> SuffixTree:
    tree = SuffixTree(config)
    for text in texts:
        open_ends = tree.text()
        for token in text:
            tree.append(open_ends, token)
    return tree


def by_definition(config: SuffixConfig, texts: list[list[int]], end: list[int], num_tokens: int) -> tuple[float, int]:
    """Score and length of the best proposal, from counts of all n-grams of the texts."""
    counts = Counter(
        tuple(text[start : start + size])
        for text in texts
        for start in range(len(text))
        for size in range(1, min(config.max_depth, len(text) - start) + 1)
    )
    counts[()] = sum(map(len, texts))
    best = (0.0, 0)
    for size in range(1, len(end)):
        path = tuple(end[len(end) - size :])
        if not counts[path]:
            break
        score, probability, length = 0.0, 1.0, 0
        while length < min(num_tokens, int(size * config.max_length_factor)):
            following = [key for key in counts if key and key[:-1] == path]  # of equals, the first that was seen
            if not following:
                break
            longer = max(following, key=lambda key: counts[key])
            probability *= counts[longer] / counts[path]
            if probability < config.min_probability:
                break
            path = longer
            score, length = score + probability, length + 1
        best = max(best, (score, length)) if length and score >= best[0] else best
    return best


def test_the_most_frequent_continuation_is_proposed() -> None:
    tree = tree_of(CONFIG, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8])
    score, tokens = tree.propose([7, 1, 2], 4)
    assert tokens == [3, 9] and score == pytest.approx(2 / 3 + 1 / 3)  # 8 is as frequent as 9, and came later
    assert tree.propose([7, 1, 2], 1) == (pytest.approx(2 / 3), [3])
    assert tree.propose([7, 7, 7], 4) == (0.0, [])


def test_a_proposal_is_no_longer_than_its_match_times_the_factor() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    for factor, expected in ((1.0, [4, 5, 6]), (2.0, [4, 5, 6, 7, 8]), (0.4, [4])):
        config = SuffixConfig(max_length_factor=factor)
        assert tree_of(config, text).propose([0, 1, 2, 3], 9)[1] == expected


def test_a_proposal_ends_where_the_counts_make_it_improbable() -> None:
    text = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 5]
    for limit, expected in ((0.6, [2]), (0.5, [2, 4])):
        assert tree_of(SuffixConfig(min_probability=limit), text).propose([9, 0, 1], 3)[1] == expected


def test_the_tree_counts_every_suffix_and_scores_by_the_counts() -> None:
    draw, num_proposals = random.Random(1), 0
    for _ in range(150):
        config = SuffixConfig(max_depth=draw.randint(2, 6), max_length_factor=draw.choice([1.0, 2.0]))
        texts = [[draw.randint(0, 4) for _ in range(draw.randint(1, 14))] for _ in range(draw.randint(1, 3))]
        end = [draw.randint(0, 4) for _ in range(draw.randint(2, config.max_depth))]
        score, tokens = tree_of(config, *texts).propose(end, 3)
        assert score == pytest.approx(by_definition(config, texts, end, 3)[0])
        num_proposals += bool(tokens)
    assert num_proposals > 60


def test_a_removed_text_leaves_no_trace() -> None:
    draw = random.Random(2)
    for _ in range(50):
        config = SuffixConfig(max_depth=draw.randint(2, 6))
        texts = [[draw.randint(0, 4) for _ in range(draw.randint(1, 14))] for _ in range(3)]
        tree = tree_of(config, *texts)
        tree.remove(texts[1])
        end = [draw.randint(0, 4) for _ in range(config.max_depth)]
        assert tree.propose(end, 3)[0] == pytest.approx(by_definition(config, [texts[0], texts[2]], end, 3)[0])
        for text in (texts[0], texts[2]):
            tree.remove(text)
        assert all(tree.propose([token, token], 3) == (0.0, []) for token in range(5))


def test_a_text_repeats_itself_and_earlier_answers_help_only_with_a_better_score() -> None:
    lookup = SuffixLookup(CONFIG, tree_of(CONFIG, [5, 6, 7, 8]))
    lookup.extend([1, 5, 6])
    assert lookup.propose(3) == [7, 8], "only the earlier answer goes on"
    lookup.extend([2, 3, 1, 5, 6])
    assert lookup.propose(3) == [7, 8], (
        "the earlier answer is surer: here 1 5 6 went on once and stands at its end once"
    )
    lookup.extend([2, 3, 1, 5, 6])
    assert lookup.propose(3) == [2, 3, 1], "three matched tokens go on with three of this text"
