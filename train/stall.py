"""A watchdog over the ranks of a run: when one does not come, the others name it and stop instead of waiting on.

A rank that waits in a collective cannot be interrupted, so every rank writes where it is into a small file, and a
thread of each rank reads all files once its own rank has not moved for `timeout_s`.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Self

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the run can be resumed from its last checkpoint


class Watchdog:
    """Call `beat` wherever this rank gets on. With one process it does nothing."""

    def __init__(self, folder: Path, rank: int, world: int, timeout_s: float) -> None:
        self._folder, self._rank, self._world, self._timeout_s = folder, rank, world, timeout_s
        self._last = time.monotonic()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._world > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.beat(0, "starting")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()

    def beat(self, step: int, doing: str) -> None:
        """This rank is at `step` and now does `doing`."""
        self._last = time.monotonic()
        if self._world > 1:
            temporary = self._path(self._rank).with_suffix(".tmp")
            temporary.write_text(json.dumps({"step": step, "doing": doing, "time": time.time()}))
            temporary.replace(self._path(self._rank))

    def report(self) -> str:
        """Who lags behind, in words."""
        states = {rank: self._read(rank) for rank in range(self._world)}
        waiting = [rank for rank, (_, doing, _) in states.items() if doing.startswith("waiting")]
        laggards = [rank for rank in states if rank not in waiting] or [min(states, key=lambda rank: states[rank][0])]
        lines = [
            f"rank {rank} is at step {step}, {doing}, for {time.time() - since:.0f} s"
            for rank, (step, doing, since) in states.items()
        ]
        return (
            f"no step for {self._timeout_s:.0f} s (train.stall_timeout_s); stalled: "
            f"rank {', '.join(map(str, laggards))}. {'; '.join(lines)}. Resume from the last checkpoint."
        )

    def _watch(self) -> None:
        while not self._is_done.wait(min(1.0, self._timeout_s / 4)):
            if time.monotonic() - self._last > self._timeout_s:
                print(f"train  {self.report()}", file=sys.stderr, flush=True)
                os._exit(EXIT_CODE)

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"

    def _read(self, rank: int) -> tuple[int, str, float]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path(rank).read_text())
            return int(found["step"]), str(found["doing"]), float(found["time"])
        return -1, "not started", time.time()
