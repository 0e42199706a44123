"""A head on disk: model.safetensors and config.json in one folder, written atomically, audited when read.

The file holds exactly the head's state_dict; nothing of the target is in it. `config.json` says which method and
settings it belongs to and which target's dimensions it was trained for.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.models.head import load_method, method_of
from draftsmith.models.parts.draft_vocabulary import ids_of
from draftsmith.models.target import FrozenTarget

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_FORMAT = 1


@dataclass(frozen=True)
class HeadConfig:
    """What config.json of a head folder says."""

    method: str
    model: dict[str, Any]  # the method's Config
    aux_layers: tuple[int, ...]
    target: dict[str, Any]  # dimensions
    extra: dict[str, Any]  # the caller's: fingerprints of target and data, step, figures


def save_head(head: Any, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write a head (models.head.Head) into `folder`; a former head there is replaced only once this one is complete.

    Raises ValueError naming a tensor that is not finite: a poisoned head is never written.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    _refuse_non_finite(tensors, "this head")
    config = {
        "format": _FORMAT,
        "method": method_of(head),
        "model": head.config.model_dump(mode="json"),
        "aux_layers": list(head.needs.aux_layers),
        "target": dimensions(head.target),
        "extra": dict(extra or {}),
    }

    def write(temporary: Path) -> None:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=1) + "\n")

    write_folder(folder, write)


def read_head_config(folder: Path) -> HeadConfig:
    """config.json of a head folder. Raises ValueError when the folder holds no head of ours."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no head: {CONFIG} is missing")
    found = json.loads(path.read_text())
    if found.get("format") != _FORMAT or "method" not in found:
        raise ValueError(
            f"{path} is not the config of a draftsmith head (format {found.get('format')!r}, expected {_FORMAT}); "
            "exported folders are read by models.export.import_head"
        )
    return HeadConfig(found["method"], found["model"], tuple(found["aux_layers"]), found["target"], found["extra"])


def load_head(folder: Path, target: FrozenTarget, device: torch.device | str = "cpu") -> nn.Module:
    """Read a head for this target, in fp32. Every key, shape and value is audited.

    Raises ValueError naming each tensor that is missing, unexpected, of another shape or not finite, and each dimension
    in which this target is not the one that the head was trained for.
    """
    config = read_head_config(folder)
    differences = [
        f"{name} {value!r}, this target has {dimensions(target).get(name)!r}"
        for name, value in config.target.items()
        if dimensions(target).get(name) != value
    ]
    if differences:
        raise ValueError(f"{folder} was trained for another target: {'; '.join(differences)}")
    tensors = read_tensors(folder)
    module = load_method(config.method)
    kept_ids = ids_of(tensors["d2t"]) if "d2t" in tensors else None
    head = module.Head(module.Config(**config.model), target, kept_ids)
    if head.needs.aux_layers != config.aux_layers:
        raise ValueError(
            f"{folder} was trained on layers {config.aux_layers}, but its settings now mean {head.needs.aux_layers}; "
            f"write model.aux_layers into {CONFIG}"
        )
    fill(head, tensors, str(folder))
    moved: nn.Module = head.to(device)
    return moved


def dimensions(target: FrozenTarget) -> dict[str, Any]:
    """What must be equal for a head to fit a target."""
    return {
        "model_type": str(target.config.model_type),
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's model.safetensors. Raises ValueError when the file is missing or torn."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} holds no weights: {WEIGHTS} is missing")
    try:
        with safe_open(path, "pt"):
            pass
        return load_file(path)
    except Exception as error:  # safetensors raises its own type, whose import path has changed between versions
        raise ValueError(f"{path} is not readable ({error}); the file is damaged") from error


def fill(head: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into a head's parameters and buffers, all of them and nothing else. ValueError as in `load_head`."""
    wanted = head.state_dict()
    faults = [f"{name} is missing" for name in wanted.keys() - tensors.keys()]
    faults += [f"{name} is unexpected" for name in tensors.keys() - wanted.keys()]
    for name in wanted.keys() & tensors.keys():
        found, expected = tuple(tensors[name].shape), tuple(wanted[name].shape)
        if found != expected:
            faults.append(f"{name} has shape {found}, expected {expected}")
        elif name in ("d2t", "t2d") and not torch.equal(tensors[name], wanted[name].cpu()):
            # Both are built from the kept ids; two that disagree are a corrupt vocabulary.
            faults.append(f"{name} contradicts the other tensors of the draft vocabulary")
    if faults:
        raise ValueError(f"{source}: {'; '.join(sorted(faults))}")
    _refuse_non_finite(tensors, source)
    head.load_state_dict(dict(tensors))


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder beside `folder`, then move it there: readers see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)
        for path in [*sorted(temporary.iterdir()), temporary]:
            _sync(path)
        if folder.exists():
            # A folder cannot be renamed over another; a kill between the two renames leaves both complete folders.
            former = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".former", dir=folder.parent))
            folder.rename(former / folder.name)
            temporary.rename(folder)
            shutil.rmtree(former)
        else:
            temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_non_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    broken = sorted(name for name, x in tensors.items() if x.is_floating_point() and not torch.isfinite(x).all())
    if broken:
        raise ValueError(f"{source}: {', '.join(broken)} hold NaN or Inf")
