"""Every method runs from a recipe on a tiny target, from prompts to a report of what was exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.artefact import read_artefact
from draftsmith.models.head import available_methods, load_method
from draftsmith.recipes.schema import parse_recipe
from draftsmith.recipes.stages import read_report, run_stages


@pytest.mark.parametrize("method", available_methods())
def test_a_recipe_of_the_method_trains_exports_and_measures(
    method: str, settings: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    data = settings(tmp_path / "run")
    data["model"] = {"method": method}
    if "draft_vocab_size" in load_method(method).Config.model_fields:
        data["model"]["draft_vocab_size"] = 256
    data["train"] |= {"max_steps": 2, "probe_every_steps": 1}
    run_stages(parse_recipe(data, "a tiny recipe"))
    assert read_artefact(tmp_path / "run" / "train", "train").result["steps"] == 2
    for workload, cells in read_report(tmp_path / "run")["workloads"].items():
        runtime = {cell["num_speculative_tokens"]: cell for cell in cells if cell["engine"] == "runtime"}
        assert set(runtime) == {1, 3}, workload
        assert all(cell["divergences"] == [] for cell in runtime.values()), "the output is the target's own"
