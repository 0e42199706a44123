"""What a report says beside figures: where head and data come from, on which machine, and what to be wary of."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from draftsmith.data.artefact import MANIFEST, read_json, software_versions
from draftsmith.data.rows import provenance_mismatches
from draftsmith.data.target import ResolvedTarget
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.report import workload_cells
from draftsmith.eval.summary import Figures, recommend
from draftsmith.models.checkpoint import read_head_config

_STAGES = ("prompts", "responses", "rows", "train", "export")
# The largest preference of the target for its own token that is put down to rounding, in logits. Chosen, not measured:
# bf16 numbers between 16 and 32 are 0.125 apart, and four such steps are allowed; fp32 is allowed a thousandth.
_ROUNDING_MARGIN = {"float32": 1e-3, "bfloat16": 0.5}
# A share of the generated tokens below which the report warns. Chosen, not measured.
_LOW_COVERAGE = 0.95


class RunFolder:
    """What the stages of a run left. Any of it may be missing: a head can be evaluated alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def held_out_prompts(self) -> Path | None:
        path = self.folder / "prompts" / "eval.jsonl"
        return path if path.is_file() else None

    @cached_property
    def manifests(self) -> dict[str, dict[str, Any]]:
        """Of the finished stages before this one."""
        paths = {stage: self.folder / stage / MANIFEST for stage in _STAGES}
        fix = "Run the stages before again."
        return {stage: read_json(path, fix) for stage, path in paths.items() if path.is_file()}

    @property
    def response_settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.manifests.get("responses", {}).get("key", {}).get("config", {})
        return settings

    @property
    def template_args(self) -> Mapping[str, Any]:
        """Of the chat template: prompts are rendered as they were for the training answers."""
        return dict(self.response_settings.get("chat_template_args") or {})

    @property
    def answers_are_greedy(self) -> bool:
        return not self.response_settings.get("temperature")

    def training_log(self) -> list[dict[str, Any]]:
        """Lines of train/log.jsonl, with the probe's figures by their own name; a torn last line is left out."""
        path = self.folder / "train" / "log.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        kept = ("step", "loss", "elapsed_s", "mal", "probe/mal")
        return [{name: entry[name] for name in kept if name in entry} for entry in entries]


def describe(
    config: EvalConfig,
    target: ResolvedTarget,
    head_folder: Path,
    run: RunFolder,
    figures: Sequence[Figures],
    baselines: Sequence[Figures],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The whole report as one dict; see report.py."""
    saved = read_head_config(head_folder)
    advice = recommend(figures, baselines)
    return {
        "name": run.folder.resolve().name,
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": software_versions(),
        "target": {"name": target.name, **target.key()},
        "head": {"method": saved.method, "config": saved.model, "aux_layers": list(saved.aux_layers), **saved.extra},
        "settings": config.model_dump(mode="json", exclude={"server"}),
        "workloads": workload_cells(figures),
        "baselines": workload_cells(baselines),
        "recommended": {"num_speculative_tokens": advice.pop("n"), **advice},
        "training": run.training_log(),
        "provenance": {
            stage: {"key": manifest.get("key"), "versions": manifest.get("versions"), "result": manifest.get("result")}
            for stage, manifest in run.manifests.items()
        },
        "warnings": list(warnings),
    }


def warnings_about(config: EvalConfig, target: ResolvedTarget, run: RunFolder, figures: Sequence[Figures]) -> list[str]:
    """What a reader must know before trusting a figure."""
    found = []
    if run.manifests.get("rows", {}).get("state") == "done":
        found += provenance_mismatches(run.folder / "rows", target)
    coverage = run.manifests.get("train", {}).get("result", {}).get("draft_vocabulary_coverage")
    if coverage is not None and coverage < _LOW_COVERAGE:
        found.append(
            f"The draft vocabulary covers {coverage:.1%} of the target's answers; the rest can never be accepted."
        )
    if "replay" in config.engines and not run.answers_are_greedy:
        found.append(
            "The held-out answers were sampled, not greedy: replay compares drafts with what was sampled, so its "
            "figures only estimate what an engine would accept."
        )
    found += _divergence_warnings(config, figures)
    if any(row["rounds"] == 0 and row.get("tokens_per_pass") is None for row in figures):
        found.append("Some workloads had no round at all: every answer ended with its first token.")
    return found


def _divergence_warnings(config: EvalConfig, figures: Sequence[Figures]) -> list[str]:
    """Greedy answers that are not the target's own: explained by rounding, or a defect (fault 33)."""
    divergences = {
        (d["id"], row["n"], row["engine"], row["batch_size"]): d for row in figures for d in row.get("divergences", ())
    }
    limit = _ROUNDING_MARGIN[config.dtype]
    defects = [key for key, d in divergences.items() if d["margin"] is None or abs(d["margin"]) > limit]
    if defects:
        identity, n, *_ = defects[0]
        return [
            f"{len(defects)} greedy answers differ from plain decoding by more than rounding explains (limit {limit} "
            f"logits in {config.dtype}); the first is of prompt {identity} at N={n}. This is a defect: speculative "
            "decoding must not change the output."
        ]
    if divergences:
        largest = max(abs(d["margin"]) for d in divergences.values())
        return [
            f"{len(divergences)} greedy answers differ from plain decoding in {config.dtype}; their first differing "
            f"tokens are near ties of the target, at most {largest:.3g} logits apart (see report.json)."
        ]
    return []


def machine() -> dict[str, Any]:
    """What the speed was measured on."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "system": platform.platform(),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or "none",
    }
