"""What happened at each step -> log.jsonl (always), TensorBoard and Weights & Biases (on request), and progress lines.

A line of log.jsonl is written in one piece. A resumed run drops the lines after its checkpoint, so that every step
stands there once.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Self

from draftsmith.data.artefact import write_atomically
from draftsmith.train.config import TrainConfig
from draftsmith.train.engine import Engine

LOG_FILE = "log.jsonl"


class RunLog:
    """The log of one run, written by rank 0; on other ranks every call does nothing."""

    def __init__(self, engine: Engine, config: TrainConfig, folder: Path, first_step: int) -> None:
        self._engine, self._config, self._folder = engine, config, folder
        self._file = -1
        self._last_line_s = 0.0
        self._first = (time.monotonic(), first_step)

    def __enter__(self) -> Self:
        if self._engine.is_main:
            path = self._folder / LOG_FILE
            _drop_lines_after(path, self._first[1])
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self._config.trackers:
            os.environ["WANDB_MODE"] = self._config.wandb_mode
            settings = {name: _plain(value) for name, value in self._config.model_dump().items()}
            wandb = {"dir": str(self._folder), "resume": "allow", "id": _run_id(self._folder, self._engine)}
            self._engine.accelerator.init_trackers(
                "draftsmith", settings, {"wandb": wandb} if "wandb" in self._config.trackers else {}
            )
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self._engine.accelerator.trackers:
            tracker.finish()
        self._engine.accelerator.trackers = []
        if self._file >= 0:
            os.close(self._file)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line, and the numbers in it to the trackers."""
        if self._file >= 0:
            line = json.dumps(
                {"step": step, **{name: _strict(value) for name, value in values.items()}}, allow_nan=False
            )
            os.write(self._file, f"{line}\n".encode())
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self._config.trackers:
            self._engine.accelerator.log(numbers, step=step)

    def show(
        self, step: int, total_steps: int | None, progress: float, loss: float, rate: float, tokens_per_s: float
    ) -> None:
        """A progress line with rate and remaining time, every `log_every_s`."""
        now = time.monotonic()
        if not self._engine.is_main or (now - self._last_line_s < self._config.log_every_s and step != total_steps):
            return
        self._last_line_s = now
        started, first_step = self._first
        per_step = (now - started) / max(step - first_step, 1)
        remaining = step * (1 - progress) / progress if progress > 0 else 0.0
        print(
            f"train  step {step}{f'/{total_steps}' if total_steps else ''}  {progress:4.0%}  loss {loss:.4f}  "
            f"lr {rate:.2e}  {tokens_per_s:,.0f} tokens/s  {per_step:.2f} s/step  ETA {_clock(remaining * per_step)}",
            file=sys.stderr,
            flush=True,
        )

    def say(self, text: str) -> None:
        """A line for the user, from rank 0."""
        if self._engine.is_main:
            print(f"train  {text}", file=sys.stderr, flush=True)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's log."""
    path = folder / LOG_FILE
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.is_file() else []


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.is_file():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        write_atomically(path, "".join(kept))


def _run_id(folder: Path, engine: Engine) -> str:
    """The same for all resumes of a run, so that Weights & Biases shows one curve."""
    path = folder / "wandb-id"
    if engine.is_main and not path.is_file():
        write_atomically(path, os.urandom(6).hex())
    return str(engine.from_main(path.read_text() if engine.is_main else None))


def _strict(value: Any) -> Any:
    """JSON knows no NaN and no infinity: the loss of a skipped step is null."""
    if isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> int | float | str | bool:
    return value if isinstance(value, int | float | str | bool) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
