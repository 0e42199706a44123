"""Progress off a terminal is plain lines with rate and remaining time."""

import io
import sys

import pytest

from draftsmith.data import progress as module
from draftsmith.data.progress import duration, progress


class Clock:
    """Time that passes when told."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_line_every_ten_seconds_and_one_at_the_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("responses", 100, "answers") as bar:
        for _ in range(100):
            clock.now += 0.25
            bar.advance()
    assert capsys.readouterr().err.splitlines() == [
        "responses: 40/100 answers, 4/s, 15 s left",
        "responses: 80/100 answers, 4/s, 5 s left",
        "responses: 100/100 answers, 4/s, took 25 s",
    ]


def test_the_rate_is_of_this_run_and_not_of_what_was_done_before(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("rows", 1000, "rows", done=900) as bar:
        clock.now += 20
        bar.advance(10)
    assert capsys.readouterr().err == "rows: 910/1000 rows, 0.5/s, 3 min 00 s left\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("training", 4, "steps") as bar:
        bar.advance(4)
    assert "training" in terminal.getvalue() and "4/4" in terminal.getvalue() and "/s" in terminal.getvalue()


def test_durations_are_said_as_people_say_them() -> None:
    assert [duration(s) for s in (0, 59.4, 185, 7620)] == ["0 s", "59 s", "3 min 05 s", "2 h 07 min"]
