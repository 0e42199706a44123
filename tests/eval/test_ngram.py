"""Prompt lookup proposes what vLLM's does: of the longest repeated n-gram, what followed its first occurrence."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from draftsmith.eval.ngram import NgramConfig, NgramLookup

REPOSITORY = Path(__file__).resolve().parents[2]


def proposed(text: list[int], num_tokens: int, min_match: int, max_match: int) -> list[int]:
    lookup = NgramLookup(NgramConfig(min_match=min_match, max_match=max_match))
    lookup.extend(text)
    return lookup.propose(num_tokens)


def by_definition(text: list[int], num_tokens: int, min_match: int, max_match: int) -> list[int]:
    for size in range(min(max_match, len(text)), min_match - 1, -1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[len(text) - size :]:
                return text[start + size :][:num_tokens]
    return []


@pytest.mark.parametrize(
    ("text", "num_tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),  # the text ends before N
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, [8]),  # equally long: the first
        ([2, 8, 1, 2, 9, 1, 2], 1, [9]),  # longer before earlier
        ([7, 7, 7], 3, [7]),  # overlapping
        ([1, 2, 3], 3, []),
        ([1, 5, 1], 3, []),  # one token is shorter than min_match
        ([], 3, []),
    ],
)
def test_it_continues_the_first_occurrence_of_the_longest_match(
    text: list[int], num_tokens: int, expected: list[int]
) -> None:
    assert proposed(text, num_tokens, 2, 5) == expected


def test_it_equals_a_search_through_the_whole_text_however_the_text_grew() -> None:
    draw, num_matches = random.Random(0), 0
    for _ in range(400):
        low = draw.randint(1, 3)
        sizes = (low, draw.randint(low, 5))
        text = [draw.randint(0, 4) for _ in range(draw.randint(1, 25))]
        lookup = NgramLookup(NgramConfig(min_match=sizes[0], max_match=sizes[1]))
        for end in range(0, len(text), 3):
            lookup.extend(text[end : end + 3])
            expected = by_definition(text[: end + 3], 4, *sizes)
            assert lookup.propose(4) == expected
            num_matches += bool(expected)
    assert num_matches > 500


def test_a_shortest_match_above_the_longest_is_refused() -> None:
    with pytest.raises(ValueError, match="min_match is 6, above max_match 5"):
        NgramConfig(min_match=6)


# Runs in vLLM's environment: cases on standard input, what vLLM's own search proposes on standard output.
_VLLM_SEARCH = """
import json, sys
import numpy as np
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as find
found = [find(np.array(text), low, high, 10**6, n).tolist() for text, n, low, high in json.load(sys.stdin)]
print("proposals", json.dumps(found))
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_it_proposes_what_vllm_proposes() -> None:
    python = Path(os.environ.get("DRAFTSMITH_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))
    if not python.is_file():
        pytest.skip(f"no vLLM environment at {python}; set DRAFTSMITH_VLLM_PYTHON or run make setup-vllm")
    draw, cases = random.Random(7), []
    for _ in range(1000):
        low = draw.randint(1, 3)
        text = [draw.randint(0, 3) for _ in range(draw.randint(1, 30))]
        cases.append((text, draw.randint(1, 5), low, draw.randint(low, 5)))
    done = subprocess.run(
        [str(python), "-c", _VLLM_SEARCH], input=json.dumps(cases), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("proposals "))
    expected = json.loads(line.removeprefix("proposals "))
    assert [proposed(*case) for case in cases] == expected and sum(map(bool, expected)) > 300
