"""The head that a training starts from, where the recipe names one: `train.start_from`."""

import hashlib
from pathlib import Path
from typing import Any

from draftsmith.models.checkpoint import WEIGHTS, fill, load_head
from draftsmith.models.head import load_method, method_of
from draftsmith.models.parts.draft_vocabulary import ids_of
from draftsmith.models.target import FrozenTarget
from draftsmith.recipes.schema import Recipe


def started_head(recipe: Recipe, folder: Path, frozen: FrozenTarget) -> Any:
    """A head of the recipe's settings with the weights of `train.start_from`.

    Losses and schedules may differ from those that it was trained with; what serving engines are told may not.
    """
    try:
        found: Any = load_head(folder, frozen)
    except ValueError as error:
        raise ValueError(f"train.start_from: {error}; exported folders are read by `draftsmith import`") from error
    if (method := method_of(found)) != recipe.method:
        raise ValueError(
            f"train.start_from is {folder}, a head of method {method}, but model.method is {recipe.method}"
        )
    kept_ids = ids_of(found.d2t) if hasattr(found, "d2t") else None
    wanted = getattr(recipe.model, "draft_vocab_size", None)
    if (None if kept_ids is None else kept_ids.shape[0]) != (None if wanted == frozen.vocab_size else wanted):
        size = None if kept_ids is None else kept_ids.shape[0]
        raise ValueError(
            f"model.draft_vocab_size is {wanted}, but {folder} (train.start_from) has {size}; give the same"
        )
    head = load_method(recipe.method).Head(recipe.model, frozen, kept_ids)
    ours, theirs = (_served_fields(each) for each in (head, found))
    differing = [
        f"{name} {ours.get(name)!r}, there {theirs.get(name)!r}" for name in ours if ours[name] != theirs.get(name)
    ]
    if differing:
        raise ValueError(
            f"the model section does not describe the head of train.start_from ({folder}): {'; '.join(differing)}"
        )
    fill(head, found.state_dict(), str(folder))
    return head


def fingerprint_of_start(folder: Path) -> str:
    """Of the weights in a head folder. Raises ValueError when there are none."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"train.start_from is {folder}, which holds no head: {WEIGHTS} is missing")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _served_fields(head: Any) -> dict[str, Any]:
    """What a serving engine is told of a head, in the layout that holds nothing of its training."""
    layouts = head.export_map()
    fields: dict[str, Any] = layouts.get("plain", next(iter(layouts.values()))).config
    return fields
