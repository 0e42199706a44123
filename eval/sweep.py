"""The sweep: every proposal length on every workload, temperature and batch size through the runtime -> measurements.

The plain run of a batch comes right before its speculative ones, so that a machine whose speed drifts does so for both.
Baselines (`eval.baselines`) are cells whose engine is the baseline's name; they share the plain run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from draftsmith.data.generate import Sampling
from draftsmith.data.progress import progress
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.decode import Decoded, Decoding, RunningTarget, decode
from draftsmith.eval.drafters import Baseline, Drafter
from draftsmith.eval.measurements import Cell, Measurement, MeasurementLog
from draftsmith.eval.workloads import Question
from draftsmith.models.head import Head

_WARM_UP_TOKENS = 8


def runtime_cells(
    config: EvalConfig, workloads: Mapping[str, Sequence[Question]]
) -> Iterator[tuple[Cell, list[Question]]]:
    """Every batch that the runtime measures, in order: for each batch of prompts all proposal lengths, plain first.

    Baselines come last, at the longest proposal length.
    """
    for temperature in config.temperatures:
        for batch_size in config.batch_sizes:
            for name, questions in workloads.items():
                for batch in batches(questions, batch_size):
                    for n in (0, *config.num_speculative_tokens):
                        yield Cell("runtime", name, temperature, batch_size, n), batch
                    for baseline in config.baselines:
                        yield Cell(baseline, name, temperature, batch_size, config.longest), batch


def batches(questions: Sequence[Question], batch_size: int) -> list[list[Question]]:
    """Prompts in their order, cut into batches."""
    return [list(questions[start : start + batch_size]) for start in range(0, len(questions), batch_size)]


def sweep(
    config: EvalConfig,
    load: Callable[[], Any],
    head: Head,
    stop_ids: Sequence[int],
    workloads: Mapping[str, Sequence[Question]],
    log: MeasurementLog,
) -> None:
    """Measure what the log lacks; `load` gives the target as a transformers model, if there is anything to do."""
    wanted = list(runtime_cells(config, workloads))
    missing = [(cell, batch) for cell, batch in wanted if log.get(cell, _ids(batch)) is None]
    if not missing:
        return
    stops = frozenset(stop_ids)
    with (
        RunningTarget(load(), head.needs.aux_layers, head.needs.kv_layers) as target,
        progress("eval/runtime", len(wanted), "batches", len(wanted) - len(missing)) as bar,
    ):
        _warm_up(config, target, head, missing[0][1])
        baselines = _Baselines(config, wanted, log)
        for cell, batch in missing:
            is_head = cell.engine == "runtime"
            drafter = (head if is_head else baselines.drafter(cell, batch)) if cell.n else None
            log.add(_measure(config, target, drafter, stops, cell, batch, log))
            bar.advance()


def explain_divergence(
    target: RunningTarget, question: Question, plain_ids: Sequence[int], token_ids: Sequence[int]
) -> dict[str, Any] | None:
    """Where a greedy answer first leaves the plain one, and by how little the target preferred the plain token.

    None when they are equal. In fp32 there must be none; in bf16 the margin is that of a tie up to rounding (fault 33).
    """
    if list(plain_ids) == list(token_ids):
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(plain_ids, token_ids, strict=False)) if a != b),
        min(len(plain_ids), len(token_ids)),
    )
    if position == min(len(plain_ids), len(token_ids)):
        return {"id": question.id, "position": position, "plain": None, "speculative": None, "margin": None}
    plain, speculative = plain_ids[position], token_ids[position]
    with torch.inference_mode():
        ids = torch.tensor([[*question.token_ids, *plain_ids[:position]]], device=target.engine.device)
        states = target.engine.forward(ids, target.engine.cache(1))
        logits_V = target.engine.logits(states[0, -1]).float()
    margin = float(logits_V[plain] - logits_V[speculative])
    return {
        "id": question.id,
        "position": position,
        "plain": plain,
        "speculative": speculative,
        "margin": margin,
    }


def _measure(
    config: EvalConfig,
    target: RunningTarget,
    drafter: Drafter | None,
    stops: frozenset[int],
    cell: Cell,
    batch: Sequence[Question],
    log: MeasurementLog,
) -> Measurement:
    settings = _decoding(config, stops, cell.temperature, cell.n, config.max_new_tokens)
    if cell.engine != "runtime":
        settings = replace(settings, min_confidence=None)  # a looked-up token has no confidence
    done = decode(target, drafter, [question.token_ids for question in batch], settings)
    divergences: list[dict[str, Any]] = []
    plain = log.get(Cell("runtime", cell.workload, cell.temperature, cell.batch_size, 0), _ids(batch))
    if cell.n and cell.temperature == 0 and plain is not None:
        for question, answer, reference in zip(batch, done.answers, plain.answers, strict=True):
            found = explain_divergence(target, question, reference["token_ids"], answer.token_ids)
            divergences += [found] if found else []
    return Measurement(
        cell, _ids(batch), done.seconds, tuple(map(_as_json, done.answers)), done.prefill_s, tuple(divergences)
    )


class _Baselines:
    """The baselines' drafters, one per cell, each with the answers of its cell's earlier batches, as the log has them.

    So a run that was interrupted continues with what an uninterrupted one would remember.
    """

    def __init__(self, config: EvalConfig, wanted: Sequence[tuple[Cell, list[Question]]], log: MeasurementLog) -> None:
        self._config, self._log = config, log
        self._batches: dict[Cell, list[tuple[str, ...]]] = {}
        for cell, batch in wanted:
            self._batches.setdefault(cell, []).append(_ids(batch))
        self._found: dict[Cell, tuple[Baseline, int]] = {}

    def drafter(self, cell: Cell, batch: Sequence[Question]) -> Drafter:
        """The drafter for this batch of the cell."""
        name = next(name for name in self._config.baselines if name == cell.engine)
        baseline, num_seen = self._found.get(cell) or (Baseline(name, self._config), 0)
        before = self._batches[cell].index(_ids(batch))
        for ids in self._batches[cell][num_seen:before]:
            measured = self._log.get(cell, ids)
            for answer in measured.answers if measured is not None else ():
                baseline.remember(answer["token_ids"])
        self._found[cell] = (baseline, before)
        return baseline.drafter


def _warm_up(config: EvalConfig, target: RunningTarget, head: Head, batch: Sequence[Question]) -> None:
    """The first passes of a process pay for allocations and kernel choices; nobody's figure should."""
    for n in (0, config.longest):
        settings = _decoding(config, frozenset(), 0.0, n, min(_WARM_UP_TOKENS, config.max_new_tokens))
        decode(target, head if n else None, [question.token_ids for question in batch], settings)


def _decoding(config: EvalConfig, stops: frozenset[int], temperature: float, n: int, max_new_tokens: int) -> Decoding:
    sampling = Sampling(temperature, config.top_p, config.top_k, config.seed)
    return Decoding(
        max_new_tokens,
        stops,
        n,
        sampling,
        is_draft_greedy=config.draft_sampling == "greedy",
        min_confidence=config.min_confidence,
    )


def _ids(batch: Sequence[Question]) -> tuple[str, ...]:
    return tuple(question.id for question in batch)


def _as_json(answer: Decoded) -> dict[str, Any]:
    return asdict(answer)
