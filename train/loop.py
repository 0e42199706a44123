"""fit(): rows and their hidden states -> a trained head, in one path for one process and for many.

All ranks run the same lines in the same order; whatever could make them part (end of data, time, signals, skipped
steps) is agreed on first. Rank 0 alone writes logs and weights.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from draftsmith.data.rows import Row
from draftsmith.models.head import Head
from draftsmith.models.target import FrozenTarget
from draftsmith.train.batches import Batches, Packer, Plan, Stream, Window
from draftsmith.train.best import BestWeights, Probe, SaveWeights
from draftsmith.train.config import TrainConfig
from draftsmith.train.engine import Engine, StepReport, make_accelerator
from draftsmith.train.logs import RunLog
from draftsmith.train.optim import learning_rate_at, progress_of
from draftsmith.train.resume import Checkpoints, Interrupted, RunState, StopSignals
from draftsmith.train.stall import Watchdog


@dataclass(frozen=True)
class FitResult:
    """What a finished run leaves. `weights` are the best ones by acceptance (the last ones without a probe)."""

    weights: Path
    best_step: int
    best_score: float | None
    last_probe: dict[str, float]
    steps: int
    ended_by: Literal["steps", "time"]
    num_tokens: int  # over all epochs and ranks
    num_supervised: int  # rows of the term that has most
    num_skipped_steps: int  # with a non-finite loss or gradient
    num_rows: int
    num_rows_too_long: int  # longer than tokens_per_batch: not trained on
    num_rows_unsupervised: int  # context only
    elapsed_s: float  # over all resumes
    world_size: int


def fit(
    config: TrainConfig,
    head: nn.Module,
    frozen: FrozenTarget,
    rows: Sequence[Row],
    stream: Stream,
    folder: Path,
    probe: Probe | None,
    *,
    save_weights: SaveWeights,
) -> FitResult:
    """Train `head` (models.head.Head) on `rows`; continue where a former run in `folder` stopped.

    `frozen` must lie on `engine.device_of_this_process()`. `probe` measures held-out acceptance (key "mal"),
    `save_weights` writes a head into a folder. Raises ValueError for settings that do not fit together, RuntimeError
    when too many steps had to be skipped, Interrupted (a SystemExit) after SIGTERM or Ctrl-C, its checkpoint saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    accelerator = make_accelerator(config, folder)
    needs = cast(Head, head).needs
    packer = Packer(stream.spec, needs.aux_layers, config, needs.kv_layers)
    _check_frozen(frozen, stream, accelerator.device)
    engine = Engine(accelerator, config, head, packer.dummy())
    plan = Plan(rows, config, engine.world)
    total_steps = plan.total_steps()
    checkpoints = Checkpoints(folder / "checkpoints", engine, config, rows)
    state = checkpoints.load() or RunState()
    best = BestWeights(folder, engine, save_weights, probe)
    clock = _Clock(config, state)

    with (
        RunLog(engine, config, folder, state.step) as log,
        Watchdog(folder / "heartbeats", engine.rank, engine.world, config.stall_timeout_s) as watchdog,
        StopSignals() as signals,
        closing(Batches(plan, rows, stream, packer, config, engine.rank, state.position)) as batches,
    ):
        log.say(_greeting(engine, plan, state, total_steps))
        windows = iter(batches)
        ended_by: Literal["steps", "time"] = "steps"
        while total_steps is None or state.step < total_steps:
            watchdog.beat(state.step, "reading rows")
            window = next(windows)
            # 1. agree: the terms' counts over the whole window, whether to stop, and rank 0's clock
            _seed_step(config, state.step, engine.rank)  # before the counts: a head may count what it draws
            watchdog.beat(state.step, "waiting for all ranks")
            micro_batches = engine.to_device(window.batches)
            local_counts = engine.counts(micro_batches)
            counts, agreed = _agree(engine, window, local_counts, signals, clock)
            state.elapsed_s = agreed["elapsed_s"]
            if agreed["stop"]:
                checkpoints.save(state)
                signal_number = signals.received or signal.SIGTERM
                log.say(f"stopped by a signal at step {state.step}; checkpoint saved, run the same command to continue")
                raise Interrupted(signal_number)
            if config.max_minutes and state.elapsed_s >= 60 * config.max_minutes:
                ended_by = "time"
                break
            # 2. one optimizer step
            progress = progress_of(config, state.step, total_steps, state.elapsed_s)
            rate = learning_rate_at(config, progress)
            watchdog.beat(state.step, "training")
            report = engine.step(micro_batches, local_counts, counts, rate, window.row_ids)
            state.step += 1
            state.position = window.following
            state.num_tokens += int(agreed["tokens"])
            state.num_supervised += int(max(counts.values()))
            state.num_skipped += report.is_skipped
            log.write(state.step, _line(window, report, counts, rate, agreed))
            log.show(state.step, total_steps, progress, report.loss, rate, clock.tokens_per_s(agreed["tokens"]))
            _check_budget(config, state, report, log)
            # 3. now and then: held-out acceptance, a checkpoint
            if config.probe_every_steps and state.step % config.probe_every_steps == 0:
                watchdog.beat(state.step, "probing" if engine.is_main else "waiting for the probe")
                log.write(state.step, {"probe": (figures := best.measure(state)), **_named("probe", figures)})
            if clock.checkpoint_is_due(state):
                watchdog.beat(state.step, "writing a checkpoint")
                checkpoints.save(state)
                best.forget_older(state)
        # 4. the end
        if state.num_supervised == 0:
            raise ValueError(
                f"{state.step} steps found nothing to learn from: no row is long enough for a supervised one"
            )
        watchdog.beat(state.step, "probing" if engine.is_main else "waiting for the probe")
        if state.probed_step != state.step:
            log.write(state.step, {"probe": (figures := best.measure(state)), **_named("probe", figures)})
        checkpoints.save(state)
        best.forget_older(state)
        log.say(f"{state.step} steps done; best at step {state.best_step}, acceptance {state.best_score}")
    return _result(best, state, plan, rows, ended_by, engine.world)


class _Clock:
    """Time over all resumes, and what is due by it. Decisions use rank 0's time, which `agree` hands to all."""

    def __init__(self, config: TrainConfig, state: RunState) -> None:
        self._config = config
        self._offset_s = state.elapsed_s - time.monotonic()
        self._last_checkpoint_s = state.elapsed_s
        self._last_step_s = self.elapsed_s()

    def elapsed_s(self) -> float:
        return self._offset_s + time.monotonic()

    def tokens_per_s(self, num_tokens: float) -> float:
        """Of the step that has just ended."""
        now = self.elapsed_s()
        duration, self._last_step_s = max(now - self._last_step_s, 1e-9), now
        return num_tokens / duration

    def checkpoint_is_due(self, state: RunState) -> bool:
        config = self._config
        by_steps = config.checkpoint_every_steps is not None and state.step % config.checkpoint_every_steps == 0
        minutes = (state.elapsed_s - self._last_checkpoint_s) / 60
        if by_steps or (config.checkpoint_every_minutes is not None and minutes >= config.checkpoint_every_minutes):
            self._last_checkpoint_s = state.elapsed_s
            return True
        return False


def _agree(
    engine: Engine, window: Window, local_counts: Sequence[dict[str, float]], signals: StopSignals, clock: _Clock
) -> tuple[dict[str, float], dict[str, float]]:
    """The window's term counts over all ranks; and tokens, stop, elapsed_s."""
    counts = {name: sum(each[name] for each in local_counts) for name in local_counts[0]}
    mine = {
        "tokens": float(window.num_tokens),
        "stop": float(signals.received != 0),
        "elapsed_s": clock.elapsed_s() if engine.is_main else 0.0,
    }
    agreed = engine.agree(mine | _named("count", counts))
    return {name: agreed[f"count/{name}"] for name in counts}, agreed


def _line(
    window: Window, report: StepReport, counts: dict[str, float], rate: float, agreed: dict[str, float]
) -> dict[str, object]:
    return {
        "epoch": window.position.epoch,
        "loss": report.loss,
        "lr": rate,
        "grad_norm": report.grad_norm,
        "tokens": int(agreed["tokens"]),
        "elapsed_s": round(agreed["elapsed_s"], 3),
        **_named("term", report.terms),
        **_named("count", counts),
        **report.metrics,
        **({"skipped": True, "rows": report.offending_rows} if report.is_skipped else {}),
    }


def _check_budget(config: TrainConfig, state: RunState, report: StepReport, log: RunLog) -> None:
    """Report a skipped step (fault 29). Raises RuntimeError past the budget."""
    if not report.is_skipped:
        return
    names = ", ".join(report.offending_rows[:8]) + (" …" if len(report.offending_rows) > 8 else "")
    what = f"step {state.step}: loss {report.loss}, gradient norm {report.grad_norm}; skipped, rows {names}"
    log.say(what)
    if state.num_skipped > config.max_nonfinite_steps:
        raise RuntimeError(
            f"{state.num_skipped} steps were not finite, train.max_nonfinite_steps is {config.max_nonfinite_steps}. "
            f"Last: {what}. The weights hold none of them. Verify the hidden states of these rows, or lower "
            "train.learning_rate."
        )


def _seed_step(config: TrainConfig, step: int, rank: int) -> None:
    """Random draws of a step depend on seed, step and rank only, so probes and resumes cannot shift them."""
    torch.manual_seed((config.seed * 1_000_003 + step) * 4096 + rank)


def _check_frozen(frozen: FrozenTarget, stream: Stream, device: torch.device) -> None:
    if frozen.head_VH.device.type != device.type:
        raise ValueError(
            f"the target's frozen parts are on {frozen.head_VH.device}, training runs on {device}; load them there"
        )
    spec = stream.spec
    if spec.layers[-1] != frozen.num_layers or spec.hidden_size != frozen.hidden_size:
        raise ValueError(
            f"the hidden states have layers {list(spec.layers)} of width {spec.hidden_size}, but the target has "
            f"{frozen.num_layers} layers of width {frozen.hidden_size}: they are of another target"
        )


def _greeting(engine: Engine, plan: Plan, state: RunState, total_steps: int | None) -> str:
    count = sum(parameter.numel() for parameter in engine.parameters)
    skipped = f", {plan.num_too_long} rows longer than tokens_per_batch left out" if plan.num_too_long else ""
    where = f"{engine.world} x {engine.device.type}" + (f", ZeRO-{engine.stage}" if engine.is_deepspeed else "")
    start = f"continuing at step {state.step}" if state.step else "starting"
    return (
        f"{start} of {total_steps or 'unlimited'} steps; {where}; {len(plan.kept)} rows{skipped}; {count:,} parameters"
    )


def _named(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _result(
    best: BestWeights, state: RunState, plan: Plan, rows: Sequence[Row], ended_by: Literal["steps", "time"], world: int
) -> FitResult:
    assert state.best_step is not None, "a run ends with a measurement"
    return FitResult(
        weights=best.path(state.best_step),
        best_step=state.best_step,
        best_score=state.best_score,
        last_probe=state.last_probe,
        steps=state.step,
        ended_by=ended_by,
        num_tokens=state.num_tokens,
        num_supervised=state.num_supervised,
        num_skipped_steps=state.num_skipped,
        num_rows=len(rows),
        num_rows_too_long=plan.num_too_long,
        num_rows_unsupervised=plan.num_unsupervised,
        elapsed_s=state.elapsed_s,
        world_size=world,
    )
