"""An exported folder, ours or another trainer's -> a head folder: what `draftsmith import` does.

The head can then be trained further or measured: `train.start_from: HEAD_FOLDER`, with `max_steps: 0` for the latter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.target import TargetConfig, resolve_target
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import find_method, import_head, read_export_config
from draftsmith.models.head import load_method
from draftsmith.models.target import FrozenTarget


@dataclass(frozen=True)
class Imported:
    """What was read."""

    method: str
    num_parameters: int
    settings: dict[str, Any]  # of the recipe's `model` section that differ from the method's defaults
    note: str | None  # what a reader should look at


def import_folder(folder: Path, into: Path, target_name: str, method: str | None = None) -> Imported:
    """Read `folder` as a head for this target and save it in `into`.

    Raises ValueError when the folder is no head, of an unknown method, damaged, or of another target; nothing is
    written then.
    """
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; fetch a published head first: hf download OWNER/NAME --local-dir {folder}"
        )
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise ValueError(f"--into is {into}, which exists already; give a new folder")
    method = method or find_method(folder)
    load_method(method)  # an unknown name is refused before the target is read
    verifier = (read_export_config(folder).get("speculators_config") or {}).get("verifier") or {}
    named = str(verifier.get("name_or_path") or "")
    resolved = resolve_target(TargetConfig(model=target_name))
    head: Any = import_head(folder, FrozenTarget.load(resolved.path, torch.float32), method)
    extra = {"target": resolved.key(), "target_name": resolved.name, "imported_from": str(folder)}
    save_head(head, into, extra)
    is_other = named and Path(named).name.lower() not in (Path(target_name).name.lower(), resolved.path.name.lower())
    return Imported(
        method=method,
        num_parameters=sum(parameter.numel() for parameter in head.parameters()),
        settings=head.config.model_dump(mode="json", exclude_defaults=True),
        note=f"it names {named} as its target; its sizes fit {target_name}, so see that the two agree"
        if is_other
        else None,
    )
