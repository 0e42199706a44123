"""The log of an evaluation: one JSON line per measured batch, appended and synced, so that a kill loses one at most."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.artefact import write_atomically


@dataclass(frozen=True)
class Cell:
    """What is measured: an engine on a workload in one setting. `n` 0 is plain decoding.

    Of a baseline, which runs in the runtime, the engine is the baseline's name.
    """

    engine: str
    workload: str
    temperature: float
    batch_size: int
    n: int


@dataclass(frozen=True)
class Measurement:
    """One batch of a cell. An answer holds `token_ids`, and per round `drafted`, `accepted` and `emitted`."""

    cell: Cell
    ids: tuple[str, ...]
    seconds: float
    answers: tuple[dict[str, Any], ...]
    prefill_s: float | None = None
    divergences: tuple[dict[str, Any], ...] = ()


class MeasurementLog:
    """measurements.jsonl in a folder: what is in it is not measured again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "measurements.jsonl"
        lines = self._path.read_text().splitlines(keepends=True) if self._path.is_file() else []
        complete = [line for line in lines if line.endswith("}\n")]
        if len(complete) < len(lines):  # a kill tore the last line
            write_atomically(self._path, "".join(complete))
        self._found: dict[tuple[Cell, tuple[str, ...]], Measurement] = {}
        for number, line in enumerate(complete, 1):
            try:
                self._remember(_parse(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self._path}:{number} is damaged ({error!r}); delete that line, and it is measured again"
                ) from error

    def get(self, cell: Cell, ids: Sequence[str]) -> Measurement | None:
        """The measurement of these prompts, if it was made."""
        return self._found.get((cell, tuple(ids)))

    def add(self, measurement: Measurement) -> None:
        """Append one, durably."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(asdict(measurement)) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._remember(measurement)

    def _remember(self, measurement: Measurement) -> None:
        self._found[measurement.cell, measurement.ids] = measurement


def _parse(line: dict[str, Any]) -> Measurement:
    return Measurement(
        cell=Cell(**line.pop("cell")),
        ids=tuple(line.pop("ids")),
        answers=tuple(line.pop("answers")),
        divergences=tuple(line.pop("divergences")),
        **line,
    )
