"""Every method runs from a recipe on a tiny target, from prompts to a report of what was exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import fitting_kind, tiny_head, tiny_target

from draftsmith.data.artefact import read_artefact
from draftsmith.models.checkpoint import load_head, save_head
from draftsmith.models.export import export_head, import_head
from draftsmith.models.head import available_methods, load_method
from draftsmith.models.target import FrozenTarget
from draftsmith.recipes.schema import parse_recipe
from draftsmith.recipes.stages import read_report, run_stages


@pytest.mark.parametrize("method", available_methods())
def test_a_recipe_of_the_method_trains_exports_and_measures(
    method: str, settings: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    data = settings(tmp_path / "run")
    target = tiny_target(tmp_path / "target", fitting_kind(method, ("llama", "gemma4")))
    data["target"]["model"] = str(target)
    data["model"] = {"method": method}
    if "draft_vocab_size" in load_method(method).Config.model_fields:
        data["model"]["draft_vocab_size"] = 256
    data["train"] |= {"max_steps": 2, "probe_every_steps": 1}
    data["export"]["layout"] = max(tiny_head(method, FrozenTarget.load(target, torch.float32)).export_map())
    run_stages(parse_recipe(data, "a tiny recipe"))
    assert read_artefact(tmp_path / "run" / "train", "train").result["steps"] == 2
    for workload, cells in read_report(tmp_path / "run")["workloads"].items():
        runtime = {cell["num_speculative_tokens"]: cell for cell in cells if cell["engine"] == "runtime"}
        assert set(runtime) == {1, 3}, workload
        assert all(cell["divergences"] == [] for cell in runtime.values()), "the output is the target's own"


@pytest.mark.parametrize("method", available_methods())
def test_training_starts_from_an_exported_head_when_the_recipe_names_one(
    method: str, settings: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    target = tiny_target(tmp_path / "target", fitting_kind(method, ("llama", "gemma4")))
    frozen = FrozenTarget.load(target, torch.float32)
    head: Any = tiny_head(method, frozen)
    layout: Any = max(head.export_map())
    save_head(head, tmp_path / "start")
    export_head(
        tmp_path / "start",
        tmp_path / "exported",
        target=frozen,
        target_name=str(target),
        num_speculative_tokens=3,
        layout=layout,
        dtype="float32",
    )
    data = settings(tmp_path / "run")
    data["target"]["model"], data["model"] = str(target), {"method": method}
    data["train"] |= {"max_steps": 1, "learning_rate": 1e-12, "init_from": str(tmp_path / "exported")}
    run_stages(parse_recipe(data, "a tiny recipe"), last="train")
    run = tmp_path / "run" / "train"
    start = import_head(tmp_path / "exported", frozen, method)
    trained = load_head(run / read_artefact(run, "train").result["weights"], frozen)
    for name, tensor in start.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)
