"""A run's state <-> checkpoints on disk, so that a resumed run continues bit for bit (with as many CPU threads).

    checkpoints/step-00000120/     weights, optimizer (fp32), random states (accelerate); run.json: position, world, …
    checkpoints/step-00000240.tmp/ being written, or left by a kill: never read, removed by the next save
    checkpoints/LATEST             the name of the newest complete one; written last

Everything a folder holds is on disk before it gets its name, and it has its name before LATEST names it.
"""

import json
import shutil
import signal
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from draftsmith.data.artefact import fingerprint, sync_to_disk, write_atomically
from draftsmith.data.rows import Row
from draftsmith.train.batches import Position
from draftsmith.train.config import TrainConfig
from draftsmith.train.engine import Engine

_RUN_FILE = "run.json"
# Settings that shape the saved tensors or the order of the rows; a checkpoint of other ones cannot be continued.
_BINDING = ("optimizer", "precision", "gradient_accumulation", "tokens_per_batch", "seed")


@dataclass
class RunState:
    """Where a run stands, apart from weights and optimizer."""

    step: int = 0  # optimizer steps taken, skipped ones included
    position: Position = field(default_factory=Position)
    elapsed_s: float = 0.0  # over all resumes
    num_tokens: int = 0
    num_supervised: int = 0  # rows of the head's largest term
    num_skipped: int = 0  # steps with a non-finite loss or gradient
    best_step: int | None = None
    best_score: float | None = None
    last_probe: dict[str, float] = field(default_factory=dict)
    probed_step: int | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of dataclasses.asdict."""
        return cls(**(values | {"position": Position(**values["position"])}))


class Checkpoints:
    """The checkpoints of one run. `save` and `load` are entered by all ranks."""

    def __init__(self, folder: Path, engine: Engine, config: TrainConfig, rows: Sequence[Row]) -> None:
        self.folder, self._engine, self._keep = folder, engine, config.keep_checkpoints
        self._binding = {
            "world_size": engine.world,
            "zero_stage": engine.stage,
            "rows": fingerprint([[row.row_id, len(row.input_ids)] for row in rows]),
            **{f"train.{name}": getattr(config, name) for name in _BINDING},
        }

    def save(self, state: RunState) -> None:
        """Write a checkpoint of this step, unless LATEST is one already; delete the oldest ones."""
        name = f"step-{state.step:08d}"
        if self._engine.from_main(self._latest()) == name:
            return
        final, temporary = self.folder / name, self.folder / f"{name}.tmp"
        if self._engine.is_main:
            for leftover in self.folder.glob("*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir(parents=True)
        self._engine.accelerator.wait_for_everyone()
        self._engine.accelerator.save_state(str(temporary))
        self._engine.accelerator.wait_for_everyone()
        if self._engine.is_main:
            self._publish(state, temporary, final)
        self._engine.accelerator.wait_for_everyone()

    def load(self) -> RunState | None:
        """Continue from LATEST: restores weights, optimizer and random states. None when there is no checkpoint.

        Raises ValueError when it is damaged, or of another number of processes, another ZeRO stage or other settings.
        """
        name = self._engine.from_main(self._latest())
        if name is None:
            return None
        try:
            run = json.loads((self.folder / name / _RUN_FILE).read_text())
            binding, state = run["binding"], RunState.from_json(run["state"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(name, error) from error
        differences = [
            f"{key} was {binding.get(key)!r}, is {value!r}"
            for key, value in self._binding.items()
            if binding.get(key) != value
        ]
        if differences:
            raise ValueError(
                f"{self.folder / name} cannot be continued: {'; '.join(differences)}. "
                f"Start with the settings it was made with, or delete {self.folder} to train anew."
            )
        try:
            self._engine.accelerator.load_state(str(self.folder / name))
        except Exception as error:  # torch, pickle and safetensors each raise types of their own
            raise self._damaged(name, error) from error
        return state

    def _damaged(self, name: str, error: Exception) -> ValueError:
        others = sorted(path.name for path in self.folder.glob("step-*") if path.suffix != ".tmp" and path.name != name)
        older = f"write {others[-1]} into {self.folder / 'LATEST'} to continue there, or " if others else ""
        return ValueError(
            f"the checkpoint {self.folder / name} cannot be loaded ({type(error).__name__}: {error}); if "
            f"it is damaged, {older}delete {self.folder} to train anew"
        )

    def _publish(self, state: RunState, temporary: Path, final: Path) -> None:
        write_atomically(
            temporary / _RUN_FILE, json.dumps({"binding": self._binding, "state": asdict(state)}, indent=1)
        )
        for path in sorted(temporary.rglob("*"), reverse=True):
            sync_to_disk(path)
        sync_to_disk(temporary)
        if final.exists():  # a kill came between its name and LATEST
            shutil.rmtree(final)
        temporary.rename(final)
        sync_to_disk(self.folder)
        write_atomically(self.folder / "LATEST", f"{final.name}\n")
        complete = sorted(path for path in self.folder.glob("step-*") if path.is_dir() and path.suffix != ".tmp")
        for old in complete[: -self._keep]:
            shutil.rmtree(old)

    def _latest(self) -> str | None:
        pointer = self.folder / "LATEST"
        return pointer.read_text().strip() if pointer.is_file() else None


class Interrupted(SystemExit):
    """SIGTERM or Ctrl-C, after the checkpoint was saved; exits with 128 + the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)


class StopSignals:
    """While entered, SIGTERM and Ctrl-C only set `received`: the step in flight ends. A second one acts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread: whoever owns it handles signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
