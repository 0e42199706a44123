"""Measurements -> figures: a row per engine, workload, setting and proposal length, and the proposal length to use."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measurements import Cell, Measurement, MeasurementLog
from draftsmith.eval.metrics import Counts, acceptance, speed_up
from draftsmith.eval.replay import Replayed
from draftsmith.eval.sweep import runtime_cells
from draftsmith.eval.workloads import Question

ALL = "all workloads"
# Two proposal lengths whose speed-ups differ by less are equal here; the shorter one wastes less at larger batches.
_TIE = 0.02

Figures = dict[str, Any]
Measured = list[tuple[Cell, Measurement]]


def runtime_figures(
    config: EvalConfig, workloads: Mapping[str, Sequence[Question]], log: MeasurementLog
) -> list[Figures]:
    """Of the runtime: acceptance as verified (vLLM's counts), clipped acceptance (replay's), speed-up, divergences."""
    measured = [(cell, found) for cell, found in _of_runtime(config, workloads, log) if cell.engine == "runtime"]
    return _figures(config, measured, _runtime_counts)


def baseline_figures(
    config: EvalConfig, workloads: Mapping[str, Sequence[Question]], log: MeasurementLog
) -> list[Figures]:
    """Of the untrained drafters, in the runtime, at the longest proposal length; `engine` is the baseline's name."""
    measured = list(_of_runtime(config, workloads, log))
    found: list[Figures] = []
    for name in config.baselines:
        mine = [(cell, each) for cell, each in measured if cell.engine == name or not cell.n]
        found += _figures(config, mine, _runtime_counts)
    return found


def _of_runtime(
    config: EvalConfig, workloads: Mapping[str, Sequence[Question]], log: MeasurementLog
) -> Iterator[tuple[Cell, Measurement]]:
    for cell, batch in runtime_cells(config, workloads):
        found = log.get(cell, tuple(question.id for question in batch))
        assert found is not None, f"{cell} was not measured"
        yield cell, found


def vllm_figures(config: EvalConfig, workloads: Mapping[str, Sequence[Question]], log: MeasurementLog) -> list[Figures]:
    """Of the vLLM servers: acceptance by its counters, and speed-up by the requests' latencies."""
    measured: Measured = []
    for name, questions in workloads.items():
        for batch_size in config.batch_sizes:
            for n in (0, *config.num_speculative_tokens):
                cell = Cell("vllm", name, 0.0, batch_size, n)
                found = log.get(cell, tuple(question.id for question in questions))
                assert found is not None, f"{cell} was not measured"
                measured.append((cell, found))
    return _figures(config, measured, _vllm_counts)


def replay_figures(config: EvalConfig, replayed: Sequence[Replayed]) -> list[Figures]:
    """Of replay: clipped acceptance on the held-out rows, by source; a conversation is one unit of the bootstrap."""
    by_source: dict[str, list[Replayed]] = {}
    for row in replayed:
        by_source.setdefault(row.source, []).append(row)
    if len(by_source) > 1:
        by_source[ALL] = list(replayed)
    found = []
    for name, rows in by_source.items():
        for n in config.num_speculative_tokens:
            ordered = sorted(rows, key=lambda row: row.conversation_id)
            counts = [
                Counts.total([row.by_length[n - 1] for row in group])
                for _, group in groupby(ordered, key=lambda row: row.conversation_id)
            ]
            figures = acceptance(counts, config.bootstrap_samples, config.seed)
            found.append(
                {"engine": "replay", "workload": name, "temperature": 0.0, "batch_size": None, "n": n, **figures}
            )
    return found


def recommend(figures: Sequence[Figures], baselines: Sequence[Figures] = ()) -> dict[str, Any]:
    """The proposal length with the best measured speed-up over all workloads; and up to which batch size it pays.

    Judged at the first temperature and smallest batch size, by the runtime, or by vLLM where only that was measured.
    `baselines` are named beside it: what the head adds to drafting without training.
    """
    timed = [row for row in figures if row.get("speed_up") is not None]
    engine = next((name for name in ("runtime", "vllm") if any(row["engine"] == name for row in timed)), None)
    if engine is None:
        reason = "No engine measured speed; add runtime or vllm to eval.engines."
        return {"n": None, "verdict": "Speed was not measured.", "reason": reason, "break_even": []}
    rows = [row for row in timed if row["engine"] == engine]
    pooled = _pooled_name(rows)
    rows = [row for row in rows if row["workload"] == pooled]
    rows = [row for row in rows if row["temperature"] == rows[0]["temperature"]]
    smallest = min(row["batch_size"] for row in rows)
    first = sorted((row for row in rows if row["batch_size"] == smallest), key=lambda row: int(row["n"]))
    best = max(first, key=lambda row: float(row["speed_up"]))
    chosen = next(row for row in first if row["speed_up"] >= (1 - _TIE) * best["speed_up"])
    break_even = _break_even(rows)
    setting = ("workload", "temperature", "batch_size")
    beside = [row for row in baselines if all(row[name] == chosen[name] for name in setting)]
    return {
        "n": chosen["n"],
        "engine": engine,
        "batch_size": smallest,
        "speed_up": chosen["speed_up"],
        "speed_up_interval": chosen["speed_up_interval"],
        "mal": chosen["mal"],
        "mal_interval": chosen["mal_interval"],
        "pays": _certain_speed_up(chosen) > 1,
        "verdict": _verdict(chosen, engine),
        "break_even": break_even,
        "baselines": {row["engine"]: {"n": row["n"], "speed_up": row["speed_up"]} for row in beside},
        "reason": _reason(chosen, best, first, engine, break_even) + _without_training(beside),
    }


def _certain_speed_up(row: Figures) -> float:
    """The lower end of the speed-up's interval, or the speed-up where there is none."""
    interval = row["speed_up_interval"]
    return float(interval[0] if interval else row["speed_up"])


def _verdict(chosen: Figures, engine: str) -> str:
    """Whether the head is worth serving, in one sentence."""
    figures = f"{chosen['speed_up']:.2f} times"
    if chosen["speed_up_interval"]:
        figures += " ({:.2f} to {:.2f})".format(*chosen["speed_up_interval"])
    figures += f", {engine}, batch size {chosen['batch_size']}"
    if _certain_speed_up(chosen) > 1:
        return f"Worth serving with N = {chosen['n']}: {figures}."
    if chosen["speed_up"] > 1:
        return (
            f"Not shown to be faster: {figures} at the best N = {chosen['n']}. Measure more prompts, or train longer."
        )
    return f"Do not serve it: no N is faster than plain decoding, the best is {figures}."


def _reason(chosen: Figures, best: Figures, rows: Sequence[Figures], engine: str, break_even: Sequence[Figures]) -> str:
    tried = ", ".join(f"N={row['n']}: {row['speed_up']:.2f}x" for row in rows)
    text = f"N={chosen['n']} decodes {chosen['speed_up']:.2f} times as fast as plain decoding ({engine}, {tried})"
    if chosen["speed_up_interval"]:
        text += "; 95 % interval {:.2f} to {:.2f}".format(*chosen["speed_up_interval"])
    if chosen is not best:
        text += f"; N={best['n']} is within {_TIE:.0%}, and the shorter draft wastes less at larger batches"
    if chosen["speed_up"] <= 1:
        text += "; no N is faster than plain decoding here, this one loses least"
    pays = [row["batch_size"] for row in break_even if row["speed_up"] > 1]
    if len(break_even) > 1 and pays:
        text += f"; it pays up to batch size {max(pays)} of those measured"
    return text + "."


def _without_training(baselines: Sequence[Figures]) -> str:
    parts = [f"{row['engine']} {row['speed_up']:.2f}x" for row in baselines]
    return f" Drafts that need no training reach {' and '.join(parts)} there." if parts else ""


def _break_even(rows: Sequence[Figures]) -> list[Figures]:
    """The best proposal length of every batch size."""
    found = []
    for size in sorted({row["batch_size"] for row in rows}):
        best = max((row for row in rows if row["batch_size"] == size), key=lambda row: float(row["speed_up"]))
        found.append({name: best[name] for name in ("batch_size", "n", "speed_up", "mal")})
    return found


def _pooled_name(figures: Sequence[Figures]) -> str:
    names = list(dict.fromkeys(row["workload"] for row in figures))
    return ALL if ALL in names else names[0]


def _figures(config: EvalConfig, measured: Measured, counts_of: Any) -> list[Figures]:
    """A row per cell with n > 0, of every workload and, where there are several, of all together."""
    workloads = list(dict.fromkeys(cell.workload for cell, _ in measured))
    cells = list(dict.fromkeys(cell for cell, _ in measured if cell.n))
    found = []
    for name in [*workloads, *([ALL] if len(workloads) > 1 else [])]:
        for cell in (cell for cell in cells if cell.workload == (workloads[0] if name == ALL else name)):
            mine = [m for c, m in measured if _matches(c, cell, cell.n, name)]
            plain = [m for c, m in measured if _matches(c, cell, 0, name)]
            figures: Figures = {
                "engine": cell.engine,
                "workload": name,
                "temperature": cell.temperature,
                "batch_size": cell.batch_size,
                "n": cell.n,
                **counts_of(config, mine, cell.n),
                **_speed(config, mine, plain),
                "tokens": sum(len(answer["token_ids"]) for m in mine for answer in m.answers),
                "divergences": [d for m in mine for d in m.divergences],
            }
            found.append(figures)
    return found


def _matches(cell: Cell, like: Cell, n: int, workload: str) -> bool:
    same = (cell.temperature, cell.batch_size, cell.n) == (like.temperature, like.batch_size, n)
    return same and workload in (ALL, cell.workload)


def _runtime_counts(config: EvalConfig, measured: Sequence[Measurement], n: int) -> Figures:
    answers = [answer for measurement in measured for answer in measurement.answers]
    verified = [Counts.of_rounds(answer["drafted"], answer["accepted"], n) for answer in answers]
    clipped = [
        Counts.of_rounds(
            answer["drafted"], [min(p) for p in zip(answer["accepted"], answer["emitted"], strict=True)], n
        )
        for answer in answers
    ]
    found = acceptance(verified, config.bootstrap_samples, config.seed)
    # Passes in which nothing was drafted are no rounds (vLLM counts none either), but they are passes.
    passes = sum(len(a["emitted"]) + len(a["token_ids"]) - 1 - sum(a["emitted"]) for a in answers)
    per_pass = 1 + Counts.total(verified).accepted / passes if passes else None
    return found | {"mal_clipped": Counts.total(clipped).mal, "tokens_per_pass": per_pass}


def _vllm_counts(config: EvalConfig, measured: Sequence[Measurement], n: int) -> Figures:
    counted = [answer["counts"] for m in measured for answer in m.answers if "counts" in answer]
    counts = [
        Counts(c["drafts"], c["draft_tokens"], c["accepted"], (*c["per_position"], *[0] * n)[:n]) for c in counted
    ]
    found = acceptance(counts, config.bootstrap_samples, config.seed)
    has_own_counts = len(counts) == sum(len(m.answers) for m in measured)
    return found if has_own_counts else found | {"mal_interval": None}


def _speed(config: EvalConfig, measured: Sequence[Measurement], plain: Sequence[Measurement]) -> Figures:
    """Units of the runtime are batches; those of vLLM, which runs requests as they come, are requests."""
    units = [_units(m) for m in measured]
    plain_units = [_units(m) for m in plain]
    tokens, seconds = zip(*(unit for part in units for unit in part), strict=True)
    plain_tokens, plain_seconds = zip(*(unit for part in plain_units for unit in part), strict=True)
    found = speed_up(tokens, seconds, plain_tokens, plain_seconds, config.bootstrap_samples, config.seed)
    for name, parts in (("tokens_per_s", measured), ("plain_tokens_per_s", plain)):
        generated = sum(len(answer["token_ids"]) for m in parts for answer in m.answers)
        found[name] = generated / sum(m.seconds for m in parts)
    return found


def _units(measurement: Measurement) -> list[tuple[int, float]]:
    if "seconds" in measurement.answers[0]:
        return [(len(answer["token_ids"]), answer["seconds"]) for answer in measurement.answers]
    return [(sum(len(answer["token_ids"]) for answer in measurement.answers), measurement.seconds)]
