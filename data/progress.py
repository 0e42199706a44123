"""Progress of long work: a bar with rate and remaining time on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_PLAIN_INTERVAL_S = 10.0


class Progress(Protocol):
    """What a stage reports to."""

    def advance(self, count: int = 1) -> None:
        """So many more items are done."""


class Silent:
    """Reports nothing."""

    def advance(self, count: int = 1) -> None:
        """See Progress."""


class PlainLines:
    """A line at most every ten seconds, for logs and pipes."""

    def __init__(self, title: str, total: int, unit: str, done: int = 0) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = self._first = done
        self._start = self._last = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """See Progress."""
        self._done += count
        now = time.monotonic()
        if now - self._last >= _PLAIN_INTERVAL_S or self._done >= self._total > 0:
            self._last = now
            rate = (self._done - self._first) / max(now - self._start, 1e-9)
            left = (self._total - self._done) / rate if rate else float("inf")
            print(
                f"{self._title}: {self._done}/{self._total} {self._unit}, {rate:.1f}/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


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
        TextColumn(f"{unit}, {{task.fields[rate]}}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, completed=done, rate="")
        start = time.monotonic()
        finished = done

        class Bar:
            def advance(self, count: int = 1) -> None:
                nonlocal finished
                finished += count
                rate = (finished - done) / max(time.monotonic() - start, 1e-9)
                bar.update(task, completed=finished, rate=f"{rate:.1f}/s")

        yield Bar()
