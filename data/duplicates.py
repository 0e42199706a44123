"""Which prompts are the same, nearly the same, or of one conversation: keys for equality, MinHash for likeness."""

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from draftsmith.data.artefact import fingerprint
from draftsmith.data.prompt_sources import Prompt

_NUM_PERMUTATIONS = 128  # datasketch's default: a standard error of at most 0.045 of the estimated similarity
_SHINGLE_TOKENS = 3
# Words, single marks (so that "3 + 4" and "3 - 4" differ), single characters of scripts that use no spaces.
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[^\w\s]")
_MOST_INDEXABLE = 0.95


def text_key(prompt: Prompt) -> str:
    """Equal for prompts that are equal but for white space and Unicode form."""
    turns = [[m["role"], _text(m.get("content")), m.get("tool_calls")] for m in prompt["messages"]]
    return fingerprint([turns, [_text(turn) for turn in prompt.get("followups", [])], prompt.get("tools")])


def conversation_keys(prompt: Prompt) -> list[str]:
    """Prompts that share one of these come from one conversation: its recorded id, or the same opening user turn."""
    opening = next((m for m in prompt["messages"] if m["role"] == "user"), prompt["messages"][0])
    keys = [f"opening {fingerprint(_text(opening.get('content')))}"]
    if "conversation_id" in prompt:
        keys.append(f"id {prompt['source']} {prompt['conversation_id']}")
    return keys


class LikenessIndex:
    """Finds the prompts, of those added, whose token shingles overlap by at least `threshold` (Jaccard)."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        # The index only proposes, so it may be laxer: datasketch has no banding for similarities near 1.
        self._index = MinHashLSH(threshold=min(threshold, _MOST_INDEXABLE), num_perm=_NUM_PERMUTATIONS)
        self._sketches: dict[str, Any] = {}

    def find(self, sketch: Any) -> list[str]:
        """The keys of all similar prompts, in order. The index proposes, the estimated similarity decides."""
        candidates = sorted(self._index.query(sketch))
        return [key for key in candidates if sketch.jaccard(self._sketches[key]) >= self._threshold]

    def add(self, key: str, sketch: Any) -> None:
        self._index.insert(key, sketch)
        self._sketches[key] = sketch


def sketch_of(prompt: Prompt) -> Any:
    """The MinHash of what the users say. System messages are left out: one long system text would make all alike."""
    from datasketch import MinHash

    tokens = list(_tokens(prompt))
    width = min(_SHINGLE_TOKENS, len(tokens))
    sketch = MinHash(num_perm=_NUM_PERMUTATIONS)
    sketch.update_batch([" ".join(tokens[i : i + width]).encode() for i in range(len(tokens) - width + 1)] or [b""])
    return sketch


def _tokens(prompt: Prompt) -> Iterator[str]:
    turns = [m.get("content") for m in prompt["messages"] if m["role"] not in ("system", "developer")]
    for turn in [*turns, *prompt.get("followups", [])]:
        yield from _TOKEN.findall(unicodedata.normalize("NFKC", _text(turn)).lower())


def _text(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    return " ".join(unicodedata.normalize("NFC", text).split())
