"""A trained head -> the folder `eval` of its run: measurements and the report. What was measured is never redone.

measurements.jsonl   one line per batch and setting            report.{json,md,html}
manifest.json        bound to head, target, prompts and rows   vllm-n*.log
"""

from collections.abc import Mapping, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.artefact import Artefact, fingerprint
from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget, load_model, load_tokenizer, stop_token_ids
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.evidence import RunFolder, describe, warnings_about
from draftsmith.eval.measurements import MeasurementLog
from draftsmith.eval.replay import Stream, batches_of, replay
from draftsmith.eval.report import write_report
from draftsmith.eval.serve import serve_sweep
from draftsmith.eval.summary import Figures, baseline_figures, replay_figures, runtime_figures, vllm_figures
from draftsmith.eval.sweep import sweep
from draftsmith.eval.workloads import Question, load_workloads
from draftsmith.models.checkpoint import load_head, read_head_config
from draftsmith.models.export import import_head
from draftsmith.models.target import FrozenTarget

# Changing these adds or leaves out measurements and spoils none.
_SELECTION = {
    "workloads",
    "limit",
    "num_speculative_tokens",
    "temperatures",
    "batch_sizes",
    "engines",
    "baselines",
    "bootstrap_samples",
    "server",
}


def evaluate(
    config: EvalConfig,
    target: ResolvedTarget,
    head_folder: Path,
    export_folder: Path | None,
    rows: Sequence[Row],
    stream: Stream | None,
    run_folder: Path,
) -> Artefact:
    """Measure everything that `config` asks for and write the report into `run_folder`/eval.

    `rows` and `stream` are the held-out rows and their states, for replay. Prompts, training log and provenance are
    read from the stages in `run_folder`. With an export, the *exported* weights are measured by all engines: what is
    measured is what is served. Raises ValueError when an engine lacks what it needs, or when the folder holds an
    evaluation of another head, target or setting.
    """
    _check_inputs(config, export_folder, rows, stream)
    run = RunFolder(run_folder)
    workloads, refusals = load_workloads(config, run.held_out_prompts, load_tokenizer(target), run.template_args)
    request = config.model_dump(mode="json", include=_SELECTION - {"server"}) | {
        "prompts": {name: fingerprint([q.token_ids for q in questions]) for name, questions in workloads.items()}
    }
    folder = run_folder / "eval"
    artefact = Artefact.open(folder, "eval", _key(config, target, head_folder, export_folder, rows, run))
    if artefact.is_done and artefact.result["request"] == request and (folder / "report.html").is_file():
        return artefact
    log = MeasurementLog(folder)
    figures = _in_process(config, target, head_folder, export_folder, rows, stream, workloads, log)
    if "vllm" in config.engines and export_folder is not None:
        method = read_head_config(head_folder).method
        serve_sweep(config, target, export_folder, method, stop_token_ids(target), workloads, log, folder)
        figures += vllm_figures(config, workloads, log)
    baselines = baseline_figures(config, workloads, log) if "runtime" in config.engines else []
    warnings = [*refusals, *warnings_about(config, target, run, [*figures, *baselines])]
    write_report(folder, describe(config, target, head_folder, run, figures, baselines, warnings))
    artefact.finish({"request": request, "acceptance": _acceptance(figures)})
    return artefact


def _in_process(
    config: EvalConfig,
    target: ResolvedTarget,
    head_folder: Path,
    export_folder: Path | None,
    rows: Sequence[Row],
    stream: Stream | None,
    workloads: Mapping[str, Sequence[Question]],
    log: MeasurementLog,
) -> list[Figures]:
    """The figures of runtime and replay. The target is loaded only if the log lacks something, and freed again."""
    if not {"runtime", "replay"} & set(config.engines):
        return []
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    dtype: torch.dtype = getattr(torch, config.dtype)
    frozen = FrozenTarget.load(target.path, dtype, device)
    if export_folder is None:
        loaded = load_head(head_folder, frozen, device)
    else:
        loaded = import_head(export_folder, frozen, read_head_config(head_folder).method, device)
    head: Any = loaded.to(dtype).eval()
    figures: list[Figures] = []
    if "runtime" in config.engines:
        sweep(config, lambda: load_model(target, device, config.dtype), head, stop_token_ids(target), workloads, log)
        figures += runtime_figures(config, workloads, log)
    if "replay" in config.engines and stream is not None:
        batches = batches_of(rows, stream, head.needs.aux_layers, head.needs.kv_layers)
        replayed = replay(head, batches, config.longest)
        figures += replay_figures(config, replayed)
    return figures


def _check_inputs(config: EvalConfig, export_folder: Path | None, rows: Sequence[Row], stream: Stream | None) -> None:
    if "vllm" in config.engines and export_folder is None:
        raise ValueError("eval.engines holds vllm, which serves an exported head; run the export stage first")
    if "replay" in config.engines and (stream is None or not rows):
        raise ValueError("eval.engines holds replay, but there are no held-out rows with states; remove replay")


def _key(
    config: EvalConfig,
    target: ResolvedTarget,
    head_folder: Path,
    export_folder: Path | None,
    rows: Sequence[Row],
    run: RunFolder,
) -> dict[str, Any]:
    """What makes measurements interchangeable. Of an export only the weights: its card is written after evaluation."""
    return {
        "config": config.model_dump(mode="json", exclude=_SELECTION),
        "target": target.key(),
        "head": _digest(head_folder),
        "export": None if export_folder is None else _digest(export_folder),
        "template_args": dict(run.template_args),
        "held_out_rows": fingerprint([[row.row_id, row.input_ids] for row in rows]),
    }


def _digest(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digests[path.name] = file_digest(file, "sha256").hexdigest()[:16]
    return digests


def _acceptance(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """The reproducible part of the figures: no times."""
    names = ("engine", "workload", "temperature", "batch_size", "n", "mal", "acceptance_rate", "per_position", "rounds")
    return [{name: row[name] for name in names} for row in figures]
