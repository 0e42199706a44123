"""The weights worth keeping: those with the best acceptance so far, measured by a probe. Not by loss.

weights/step-00000300/   written by the caller's save_weights
best.json                {"step", "score", "folder"}; written last
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import nn

from draftsmith.data.artefact import write_atomically
from draftsmith.train.engine import Engine
from draftsmith.train.resume import RunState

# The probe's figure that chooses: mean acceptance length, higher is better.
SCORE = "mal"
Probe = Callable[[nn.Module], dict[str, float]]
SaveWeights = Callable[[nn.Module, Path], object]


class BestWeights:
    """Probes the head and keeps its best weights. All ranks call; rank 0 measures and writes."""

    def __init__(self, folder: Path, engine: Engine, save_weights: SaveWeights, probe: Probe | None) -> None:
        self._folder, self._engine, self._save, self._probe = folder, engine, save_weights, probe

    def measure(self, state: RunState) -> dict[str, float]:
        """Run the probe, note its figures in `state`, and save the weights when they are the best so far.

        Without a probe the newest weights count as the best.
        """
        figures: dict[str, float] = {}
        with self._engine.whole_head() as head:
            if self._engine.is_main and self._probe is not None:
                figures = {name: float(value) for name, value in self._probe(head).items()}
                if SCORE not in figures:
                    raise ValueError(
                        f"the probe returned {sorted(figures)}; it must hold {SCORE!r}, by which the best is chosen"
                    )
            figures = self._engine.from_main(figures)
            score = figures.get(SCORE)
            if score is None or state.best_score is None or score > state.best_score:
                state.best_step, state.best_score = state.step, score
                if self._engine.is_main:
                    self._write(head, state)
        state.last_probe, state.probed_step = figures, state.step
        return figures

    def path(self, step: int) -> Path:
        """The folder of the weights of a step."""
        return self._folder / "weights" / f"step-{step:08d}"

    def forget_older(self, state: RunState) -> None:
        """Delete beaten weights. Called once a checkpoint names the present best, so that a resume finds its own."""
        if self._engine.is_main and state.best_step is not None:
            for old in (self._folder / "weights").glob("step-*"):
                if old != self.path(state.best_step):
                    shutil.rmtree(old)

    def _write(self, head: nn.Module, state: RunState) -> None:
        final = self.path(state.step)
        temporary = final.with_suffix(".tmp")
        for leftover in (temporary, final):
            if leftover.exists():
                shutil.rmtree(leftover)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        self._save(head, temporary)
        temporary.rename(final)
        best = {"step": state.step, "score": state.best_score, "folder": str(final.relative_to(self._folder))}
        write_atomically(self._folder / "best.json", json.dumps(best) + "\n")
