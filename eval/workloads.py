"""Workloads: name -> prompts as token ids, from JSONL files or from the held-out prompts of a run, by their source."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.chat import TemplateRefusal, prompt_ids
from draftsmith.data.prompt_sources import Prompt, PromptSource, read_source
from draftsmith.data.prompts import read_prompts
from draftsmith.eval.config import EvalConfig


@dataclass(frozen=True)
class Question:
    """One prompt of a workload. Of a conversation with follow-ups the first turn is asked."""

    id: str
    token_ids: tuple[int, ...]


def load_workloads(
    config: EvalConfig, held_out: Path | None, tokenizer: Any, template_args: Mapping[str, Any], room: int
) -> tuple[dict[str, list[Question]], list[str]]:
    """The workloads, and a warning for each from which prompts were left out; `room` is the longest prompt in tokens.

    Raises ValueError when a workload is empty.
    """
    warnings: list[str] = []
    workloads: dict[str, list[Question]] = {}
    for name, prompts in _prompts(config, held_out).items():
        questions: list[Question] = []
        refused = too_long = 0
        for prompt in prompts[: config.limit]:
            try:
                ids = prompt_ids(tokenizer, prompt["messages"], prompt.get("tools"), template_args)
            except TemplateRefusal:
                refused += 1
                continue
            if len(ids) > room:
                too_long += 1
                continue
            questions.append(Question(str(prompt["id"]), tuple(ids)))
        if refused:
            warnings.append(f"{name}: the target's chat template refused {refused} prompts; they are not measured.")
        if too_long:
            warnings.append(
                f"{name}: {too_long} prompts have more than {room} tokens, all that the target's context leaves beside "
                f"eval.max_new_tokens = {config.max_new_tokens}; they are not measured."
            )
        if not questions:
            raise ValueError(
                f"eval workload {name} holds no prompt that can be asked: the target's chat template refused "
                f"{refused}, and {too_long} leave no room in its context for eval.max_new_tokens = "
                f"{config.max_new_tokens}"
            )
        workloads[name] = questions
    return workloads, warnings


def _prompts(config: EvalConfig, held_out: Path | None) -> dict[str, Sequence[Prompt]]:
    if config.workloads:
        return {
            name: read_source(PromptSource(jsonl=path, limit=config.limit), 0.0, Counter())
            for name, path in config.workloads.items()
        }
    if held_out is None:
        raise ValueError("eval.workloads is empty and this run holds no prompts out; name at least one workload")
    grouped: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(held_out):
        grouped.setdefault(str(prompt["source"]), []).append(prompt)
    if not grouped:
        raise ValueError(f"{held_out} holds no prompts; set prompts.eval_count, or name eval.workloads")
    return dict(grouped)
