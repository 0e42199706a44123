"""Prompts of a finished stage, and what the next stage wrote: for tests of responses."""

import json
from pathlib import Path
from typing import Any

from draftsmith.data.artefact import Artefact


def prompt(number: int, text: str | None = None, **more: Any) -> dict[str, Any]:
    words = text or f"what is {number} and {'the ' * (number % 5)}rest"
    return {"id": f"p{number}", "source": "tiny", "messages": [{"role": "user", "content": words}]} | more


def prompts_folder(folder: Path, train: list[dict[str, Any]], evaluation: list[dict[str, Any]] | None = None) -> Path:
    artefact = Artefact.open(folder, "prompts", {"lines": [train, evaluation]})
    for split, lines in (("train", train), ("eval", evaluation or [])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    artefact.finish({})
    return folder


def lines(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in found}) == len(found)
    return {line["id"]: line for line in found}
