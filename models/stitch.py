"""A target's checkpoint and new tensors -> a copy of the target that holds them, ready to be served as one model.

For heads that are a part of their target. Files that hold none of the new names are linked, not copied; files that do
are written again without them, since engines read every tensor of every file and would meet the old ones too.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models.target import INDEX, StoredTensors

_CONFIG = "config.json"
# Weights in other formats would be a second, older truth beside the new files.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_WRITTEN_ANEW = {_CONFIG, INDEX, "README.md"}


def stitch(
    stored: StoredTensors, tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Write into the empty `folder` the checkpoint behind `stored` with `tensors` added or replaced, and its config
    with `config`'s fields changed; returns that config. Tokenizer and all other small files are copied."""
    merged: dict[str, Any] = json.loads((stored.folder / _CONFIG).read_text()) | dict(config)
    (folder / _CONFIG).write_text(json.dumps(merged, indent=1) + "\n")
    for file in sorted(stored.folder.iterdir()):
        is_other = file.suffix not in _OTHER_WEIGHTS and file.name not in _WRITTEN_ANEW and file.name[0] != "."
        if file.is_file() and is_other:
            shutil.copyfile(file, folder / file.name)
    shards = sorted(set(stored.files.values()))
    places: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate([*shards, None], 1):
        name = f"model-{number:05d}-of-{len(shards) + 1:05d}.safetensors"
        if shard is None:
            save_file(dict(tensors), folder / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
        else:
            kept = [each for each, file in stored.files.items() if file == shard and each not in tensors]
            _write_shard(shard, kept, folder / name)
            places |= dict.fromkeys(kept, name)
        num_bytes += (folder / name).stat().st_size
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return merged


def _write_shard(source: Path, kept: list[str], into: Path) -> None:
    with safe_open(source, "pt") as file:
        if set(file.keys()) != set(kept):
            save_file({name: file.get_tensor(name) for name in kept}, into, metadata={"format": "pt"})
            return
    try:
        os.link(source.resolve(), into)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, into)
