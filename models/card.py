"""The model card (README.md) of an exported head: for which target, from which data, with which measured acceptance."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.models.head import served_as


@dataclass(frozen=True)
class Card:
    """What only the run knows. Everything is optional; what is missing is said to be missing."""

    recipe: str = ""  # the resolved recipe, as YAML
    data: Mapping[str, Any] = field(default_factory=dict)  # provenance: sources, counts, engine, sampling, fingerprints
    # One measurement each: workload, N, MAL and whatever else was measured; keys are the columns.
    acceptance: Sequence[Mapping[str, Any]] = ()
    license: str | None = None


def model_card(
    card: Card, config: Mapping[str, Any], target_name: str, method: str, num_tokens: int, layout: str
) -> str:
    """Markdown with the front matter that the Hugging Face Hub reads."""
    head = ["---", "library_name: vllm"]
    if target_name.count("/") == 1 and not target_name.startswith((".", "/", "~")):  # a Hub id, not a local path
        head += [f"base_model: {target_name}", "base_model_relation: adapter"]
    head += [f"license: {card.license}"] if card.license else []
    head += ["tags:", "- speculative-decoding", f"- {method}", "---", ""]
    sections = [
        f"# {method} draft head for {target_name}",
        f"Drafts tokens that `{target_name}` verifies, so that it answers faster with unchanged output.",
        "## Serve it",
        _serving(target_name, method, num_tokens, layout),
        "## Measured acceptance",
        _table(card.acceptance) if card.acceptance else "Not measured.",
        "## Data",
        "\n".join(f"- {name}: {value}" for name, value in card.data.items()) or "Not recorded.",
        "## Recipe",
        f"```yaml\n{card.recipe.strip()}\n```" if card.recipe else "Not recorded.",
        "## Configuration",
        f"```json\n{json.dumps(dict(config), indent=1)}\n```",
    ]
    return "\n".join(head) + "\n\n".join(sections) + "\n"


def _serving(target_name: str, method: str, num_tokens: int, layout: str) -> str:
    if layout == "target":  # the folder is the target itself, with the head in it
        speculative = json.dumps({**served_as(method), "num_speculative_tokens": num_tokens})
        return f"```\nvllm serve THIS_FOLDER --speculative-config '{speculative}'\n```"
    speculative = json.dumps({**served_as(method), "model": "THIS_FOLDER", "num_speculative_tokens": num_tokens})
    explicit = f"```\nvllm serve {target_name} --speculative-config '{speculative}'\n```"
    if layout != "speculators":
        return explicit
    return f"```\nvllm serve THIS_FOLDER\n```\n\nor, with target and number of draft tokens given:\n\n{explicit}"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
