"""Every method goes the whole path of a run by its name alone: trained, exported, read back, measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target

from draftsmith.data.artefact import read_artefact
from draftsmith.models.head import available_methods, load_method
from draftsmith.recipes.schema import parse_recipe
from draftsmith.recipes.stages import read_report, run_stages


@pytest.fixture(scope="module")
def target_with_everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a kind that also brings an MTP layer, for methods that begin from one."""
    return tiny_target(tmp_path_factory.mktemp("target"), "mimo")


@pytest.mark.parametrize("method", available_methods())
def test_a_recipe_of_the_method_trains_exports_and_measures(
    method: str, settings: Callable[[Path], dict[str, Any]], target_with_everything: Path, tmp_path: Path
) -> None:
    data = settings(tmp_path / "run")
    data["target"]["model"] = str(target_with_everything)
    data["model"] = {"method": method}
    if "draft_vocab_size" in load_method(method).Config.model_fields:
        data["model"]["draft_vocab_size"] = 256
    data["train"] |= {"max_steps": 2, "probe_every_steps": 1}
    data["export"]["layout"] = "plain"
    run_stages(parse_recipe(data, "a tiny recipe"))
    assert read_artefact(tmp_path / "run" / "train", "train").result["steps"] == 2
    assert method in (tmp_path / "run/export/model/README.md").read_text()
    for workload, cells in read_report(tmp_path / "run")["workloads"].items():
        runtime = {cell["num_speculative_tokens"]: cell for cell in cells if cell["engine"] == "runtime"}
        assert set(runtime) == {1, 3}, workload
        assert all(cell["divergences"] == [] for cell in runtime.values()), "the output is the target's own"
        assert all(cell["mal"] >= 1.0 for cell in cells if cell["num_speculative_tokens"])
