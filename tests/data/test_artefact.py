"""A stage's folder: what a kill or a damage leaves of its manifest."""

import json
from pathlib import Path

import pytest

from draftsmith.data.artefact import Artefact, is_done, read_artefact


def test_a_kill_during_the_first_write_of_a_manifest_does_not_block_the_stage(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.abc123.tmp").write_text('{"sta')
    assert not Artefact.open(tmp_path, "rows", {}).is_done


@pytest.mark.parametrize(
    "text", ['{"stage": "rows", "sta', "[]", "{}", '{"stage": "rows", "state": "done", "key": {}}']
)
def test_a_damaged_manifest_is_named_with_the_fix(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    for read in (
        lambda: Artefact.open(tmp_path, "rows", {}),
        lambda: read_artefact(tmp_path, "rows"),
        lambda: is_done(tmp_path),
    ):
        with pytest.raises(ValueError, match=r"manifest\.json is not .*Delete .* to build it anew"):
            read()


def test_a_folder_that_holds_something_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text(json.dumps("mine"))
    with pytest.raises(ValueError, match="is not empty"):
        Artefact.open(tmp_path, "rows", {})
