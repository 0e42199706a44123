"""A method is one file in models/: found by its name, and named by no other file."""

import re
from pathlib import Path

import pytest

from draftsmith.models.head import available_methods, load_method

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("data", "hidden_states", "models", "train", "eval", "recipes")
INSIDE_VLLM = ROOT / "hidden_states" / "vllm_plugin.py"  # corrects vLLM's own methods, by the names vLLM gives them


def test_every_file_that_defines_a_head_is_a_method() -> None:
    assert "eagle3" in available_methods()
    for method in available_methods():
        module = load_method(method)
        for name in ("Config", "Head", "needs", "read_export"):
            assert hasattr(module, name), f"models/{method}.py defines no {name}"


def test_an_unknown_method_is_refused_with_the_list_of_methods() -> None:
    with pytest.raises(ValueError, match=r"model\.method is 'eagle4'; the methods are .*eagle3"):
        load_method("eagle4")


@pytest.mark.parametrize("method", available_methods())
def test_no_other_file_names_a_method(method: str) -> None:
    names_it = re.compile(rf"""["']{method}["']|\bmodels\.{method}\b|\bmodels import {method}\b""")
    engines_words = re.compile(
        "^SERVED_AS = .*$", re.MULTILINE
    )  # a serving engine's name for it, which may be the same
    offenders = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path not in (ROOT / "models" / f"{method}.py", INSIDE_VLLM)
        and names_it.search(engines_words.sub("", path.read_text()))
    ]
    assert offenders == []


def test_every_setting_of_every_method_is_validated_strictly() -> None:
    for method in available_methods():
        with pytest.raises(ValueError, match="Extra inputs are not permitted"):
            load_method(method).Config(no_such_setting=1)
