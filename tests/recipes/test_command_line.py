"""The command line: what it prints, and the code that it ends with."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.recipes import doctor
from draftsmith.recipes.process import SETTINGS
from draftsmith.recipes.run import main
from draftsmith.recipes.stages import STAGES

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def draftsmith(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """draftsmith(*words) -> exit code, and everything that was printed."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delenv("DRAFTSMITH_DEBUG", raising=False)
    for name in (*SETTINGS, "DRAFTSMITH_DEBUG"):
        monkeypatch.setenv(name, "")  # so that what main() sets is undone

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["draftsmith", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out + printed.err

    return run


def test_help_names_every_command_and_the_stages(draftsmith: Command) -> None:
    code, text = draftsmith("--help")
    assert code == 0
    commands = (
        "run",
        "check",
        "doctor",
        "hidden-states",
        "export",
        "import",
        "eval",
        "prompts",
        "responses",
        "rows",
        "train",
    )
    assert all(name in text for name in commands)
    code, text = draftsmith("run", "--help")
    assert code == 0 and all(name in text for name in STAGES)


@pytest.mark.parametrize("words", [["nope"], ["run"], ["run", "--nope", "x"], ["hidden-states", "nope"], []])
def test_wrong_usage_ends_with_2(words: list[str], draftsmith: Command) -> None:
    code, text = draftsmith(*words)
    assert code == 2 and text


def test_an_error_is_one_message_without_a_traceback_and_ends_with_1(draftsmith: Command, tmp_path: Path) -> None:
    code, text = draftsmith("run", str(tmp_path / "none.yaml"))
    assert code == 1 and text.startswith("draftsmith: recipe ") and "Traceback" not in text


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_raises_the_error_itself(
    place: str, draftsmith: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", str(tmp_path / "none.yaml")]
    monkeypatch.setattr(
        sys, "argv", ["draftsmith", *(["--debug", *words] if place == "before" else [*words, "--debug"])]
    )
    with pytest.raises(ValueError, match="does not exist"):
        main()


def test_check_shows_its_figures_and_refuses_what_does_not_fit(draftsmith: Command, recipe_file: Path) -> None:
    code, text = draftsmith("check", str(recipe_file))
    assert code == 0 and all(word in text for word in ("tokens", "disk", "memory", "time", "assumed"))
    code, text = draftsmith("check", str(recipe_file), "--set", "hidden_states.cache.reserve_gib=1e9")
    assert code == 1 and "GiB are free" in text and "hidden_states.mode: online" in text
    code, text = draftsmith("check", str(recipe_file), "--set", "train.max_step=3")
    assert code == 1 and "did you mean max_steps?" in text


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_doctor_ends_with_1_when_something_fails(
    level: doctor.Level, code: int, draftsmith: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda probe: [doctor.Finding(level, "thing", "looked at")])
    found, text = draftsmith("doctor")
    assert found == code and "looked at" in text


def test_ctrl_c_ends_with_130_and_says_how_to_continue(draftsmith: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(probe: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "diagnose", interrupt)
    code, text = draftsmith("doctor")
    assert code == 130 and "run the same command to continue" in text


def test_each_stage_runs_alone(draftsmith: Command, recipe_file: Path) -> None:
    code, text = draftsmith("prompts", str(recipe_file))
    assert code == 0 and "== prompts" in text and "== responses" not in text
    code, text = draftsmith("rows", str(recipe_file))
    assert code == 1 and "holds no finished responses stage" in text
