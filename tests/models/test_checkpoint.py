"""Heads on disk: exact, atomic, and audited key by key when they are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_head, tiny_kept_ids, tiny_target

from draftsmith.models import checkpoint
from draftsmith.models.checkpoint import load_head, read_head_config, save_head
from draftsmith.models.target import FrozenTarget


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget.load(tiny_target(tmp_path_factory.mktemp("target")), torch.float32)


@pytest.fixture
def head(frozen: FrozenTarget) -> Any:
    return tiny_head("eagle3", frozen, kept_ids=tiny_kept_ids(90), ttt_steps=2)


def edit(folder: Path, **changes: Any) -> None:
    """Replace tensors of a saved head; None removes one."""
    tensors = load_file(folder / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")


def test_every_tensor_and_setting_survives(head: Any, frozen: FrozenTarget, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head", {"step": 7, "target_weights": "abc"})
    loaded = load_head(tmp_path / "head", frozen)
    assert loaded.config == head.config and loaded.needs == head.needs
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], x) for name, x in head.state_dict().items())
    config = read_head_config(tmp_path / "head")
    assert (config.method, config.aux_layers) == ("eagle3", (2, 3, 4))
    assert config.extra == {"step": 7, "target_weights": "abc"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc__weight": None}, "fc.weight is missing"),
        ({"fc__bias": torch.zeros(64)}, "fc.bias is unexpected"),
        ({"norm__weight": torch.ones(65)}, r"norm.weight has shape \(65,\), expected \(64,\)"),
        ({"norm__weight": torch.full((64,), torch.nan)}, "norm.weight hold NaN or Inf"),
        ({"t2d": torch.ones(512, dtype=torch.bool)}, "t2d contradicts"),
        ({"d2t": torch.zeros(90, dtype=torch.int64) + 423}, "423 kept|holds id 512"),
        ({"d2t": None}, "no kept ids were given"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    change: dict[str, Any], message: str, head: Any, frozen: FrozenTarget, tmp_path: Path
) -> None:
    save_head(head, tmp_path)
    edit(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, frozen)


def test_all_faults_are_named_at_once(head: Any, frozen: FrozenTarget, tmp_path: Path) -> None:
    save_head(head, tmp_path)
    edit(tmp_path, fc__weight=None, extra__weight=torch.zeros(1))
    with pytest.raises(ValueError, match=r"extra.weight is unexpected; fc.weight is missing"):
        load_head(tmp_path, frozen)


def test_a_truncated_file_is_refused(head: Any, frozen: FrozenTarget, tmp_path: Path) -> None:
    save_head(head, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load_head(tmp_path, frozen)


def test_a_target_of_other_dimensions_is_refused_naming_them(head: Any, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head")
    other = FrozenTarget.load(tiny_target(tmp_path / "other", vocab_size=600, num_hidden_layers=8), torch.float32)
    with pytest.raises(ValueError, match=r"num_layers 7, this target has 8; vocab_size 512, this target has 600"):
        load_head(tmp_path / "head", other)


def test_a_poisoned_head_is_never_written(head: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        head.fc.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"fc\.weight hold NaN or Inf"):
        save_head(head, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_former_head(
    head: Any, frozen: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(head, tmp_path / "head", {"step": 1})

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        save_head(head, tmp_path / "head", {"step": 2})
    assert read_head_config(tmp_path / "head").extra == {"step": 1}
    load_head(tmp_path / "head", frozen)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_second_save_replaces_the_first(head: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        save_head(head, tmp_path / "head", {"step": step})
    assert read_head_config(tmp_path / "head").extra == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_other_folders_are_not_taken_for_a_head(tmp_path: Path, frozen: FrozenTarget) -> None:
    with pytest.raises(ValueError, match="holds no head"):
        load_head(tmp_path, frozen)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="not the config of a draftsmith head"):
        load_head(tmp_path, frozen)
