"""Progress of long work: a bar with rate and remaining time on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PLAIN_INTERVAL_S = 10.0


class Progress(Protocol):
    """What a stage reports to."""

    def advance(self, count: int = 1, /) -> None:
        """So many more items are done."""


class Silent:
    """Reports nothing."""

    def advance(self, count: int = 1, /) -> None:
        """See Progress."""


class PlainLines:
    """A line every ten seconds and one at the end, for logs and pipes."""

    def __init__(self, title: str, total: int, unit: str, done: int = 0) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = self._first = done
        self._start = self._last = time.monotonic()

    def advance(self, count: int = 1, /) -> None:
        """See Progress."""
        self._done += count
        now = time.monotonic()
        is_last = count > 0 and self._done >= self._total
        if now - self._last < _PLAIN_INTERVAL_S and not is_last:
            return
        self._last = now
        elapsed_s = now - self._start
        rate = (self._done - self._first) / max(elapsed_s, 1e-9)
        left_s = (self._total - self._done) / rate if rate else 0.0
        when = f"took {duration(elapsed_s)}" if is_last else f"{duration(left_s)} left" if rate else "stalled"
        line = f"{self._title}: {self._done}/{self._total} {self._unit}, {rate:.3g}/s, {when}"
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int, unit: str, done: int = 0) -> Iterator[Progress]:
    """Show the progress of `total` items, of which `done` were finished by an earlier run."""
    if not sys.stderr.isatty():
        yield PlainLines(title, total, unit, done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit} {{task.fields[rate]}}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar, bar.add_task(title, total=total, completed=done, rate=""))


class _Bar:
    """One bar of rich, with the rate over this run."""

    def __init__(self, bar: "RichProgress", task: "TaskID") -> None:
        self._bar, self._task = bar, task
        self._count, self._start = 0, time.monotonic()

    def advance(self, count: int = 1, /) -> None:
        """See Progress."""
        self._count += count
        rate = self._count / max(time.monotonic() - self._start, 1e-9)
        self._bar.update(self._task, advance=count, rate=f"{rate:.3g}/s")


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
