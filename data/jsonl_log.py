"""An append-only JSON-lines file that survives a kill at any moment: only what was in flight is lost.

Each line reaches the operating system as it is appended (a kill -9 cannot take it back) and the disk within two
seconds (a power cut can take those). A line that was torn by a power cut or a full disk is cut off at the next start.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

_SYNC_INTERVAL_S = 2.0


class JsonlLog:
    """Open a log for appending, mending its end. A context manager; on leaving, everything is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:  # the lock goes with the process, however it ends
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process is writing {path}; wait for it or use another output_dir") from error
        _cut_torn_line(path)
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sync()
        self._file.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced >= _SYNC_INTERVAL_S:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def read_jsonl_log(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines; none where there is no file. Raises ValueError for a line that is not an object."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # torn; the next append cuts it off
            try:
                found = json.loads(line)
            except ValueError as error:  # also bytes that are no UTF-8
                raise ValueError(
                    f"{path}:{number} is damaged ({error}); delete that line and run the same command again"
                ) from error
            if not isinstance(found, dict):
                raise ValueError(f"{path}:{number} is damaged (no object); delete that line and run the command again")
            yield found


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        block, start = b"", end
        while start > 0 and b"\n" not in block:
            start = max(0, start - 65536)
            file.seek(start)
            block = file.read(end - start)
        whole = start + block.rfind(b"\n") + 1
        if whole < end:
            file.truncate(whole)
            os.fsync(file.fileno())
