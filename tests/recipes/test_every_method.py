"""Every method goes the whole path of a run by its name alone: trained, exported, read back, measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_target

from draftsmith.models.head import available_methods
from draftsmith.recipes.schema import load_recipe
from draftsmith.recipes.stages import read_report, run_stages


@pytest.fixture(scope="module")
def target_with_everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a kind that also brings an MTP layer, for methods that begin from one."""
    return tiny_target(tmp_path_factory.mktemp("target"), "mimo")


@pytest.mark.parametrize("method", available_methods())
def test_a_run_goes_through_with_the_default_settings_of_its_method(
    method: str, settings: Callable[[Path], dict[str, Any]], target_with_everything: Path, tmp_path: Path
) -> None:
    data = settings(tmp_path / "run")
    data["target"]["model"] = str(target_with_everything)
    data["model"] = {"method": method}
    data["export"]["layout"] = "plain"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    run_stages(load_recipe(path))
    report = read_report(tmp_path / "run")
    cells = [cell for cells in report["workloads"].values() for cell in cells]
    assert {cell["engine"] for cell in cells} == {"runtime", "replay"}
    assert all(cell["mal"] >= 1.0 for cell in cells if cell["num_speculative_tokens"])
    losses = [line for line in (tmp_path / "run/train/log.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(losses) == 6
    assert method in (tmp_path / "run/export/model/README.md").read_text()
