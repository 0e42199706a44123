"""What a recipe will take: tokens, disk, memory and time, compared with what this machine has.

Before anything is generated the number of answer tokens is not known; half of responses.max_new_tokens per turn is
assumed, and said. Once rows exist, their real counts are used.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from draftsmith.recipes.schema import Recipe

_GIB = 1 << 30
# Share of responses.max_new_tokens that answers use on average; measured 0.6 to 0.9 on short limits, far less on long.
_ANSWER_SHARE = 0.5
_PROMPT_TOKENS = 80
# Arithmetic throughput assumed where nothing was measured, in FLOP/s: 2 CPU cores with AMX, and a current accelerator.
_CPU_FLOPS = 3e11
_GPU_FLOPS = 2e14


@dataclass(frozen=True)
class Estimate:
    """Figures in tokens, bytes and seconds; `assumed` lists what they rest on."""

    train_tokens: int
    cache_bytes: int
    free_disk_bytes: int
    memory_bytes: int
    free_memory_bytes: int
    generation_s: float
    capture_s: float
    training_s: float
    assumed: tuple[str, ...]

    def render(self) -> str:
        """A few lines for a person."""
        lines = [
            f"tokens     {self.train_tokens:,} in training rows",
            f"disk       {_gib(self.cache_bytes)} of hidden states; {_gib(self.free_disk_bytes)} are free",
            f"memory     {_gib(self.memory_bytes)} at the peak; {_gib(self.free_memory_bytes)} are free",
            f"time       about {_minutes(self.generation_s)} of generation, {_minutes(self.capture_s)} of capture, "
            f"{_minutes(self.training_s)} of training",
            *(f"assumed    {text}" for text in self.assumed),
        ]
        return "\n".join(lines)

    def refuse_what_does_not_fit(self) -> None:
        """Raises ValueError with the figures when disk or memory do not suffice."""
        problems = []
        if self.cache_bytes > self.free_disk_bytes:
            problems.append(
                f"the hidden-states cache needs {_gib(self.cache_bytes)} and {_gib(self.free_disk_bytes)} are free; "
                "use hidden_states.mode: online, fewer prompts, or another output_dir"
            )
        if self.memory_bytes > self.free_memory_bytes:
            problems.append(
                f"the run needs {_gib(self.memory_bytes)} of memory and {_gib(self.free_memory_bytes)} are free; "
                "lower responses.batch_size or train.tokens_per_batch, or use a larger machine"
            )
        if problems:
            raise ValueError("; ".join(problems))


def estimate(recipe: Recipe) -> Estimate:
    """Estimate a run. Resolves the target's config (a built-in target is fetched), loads no weights."""
    from draftsmith.data.target import resolve_target
    from draftsmith.models.head import load_method

    target = resolve_target(recipe.target)
    config = json.loads((target.path / "config.json").read_text())
    config = config.get("text_config", config)
    weights = sum(path.stat().st_size for path in target.path.glob("*.safetensors"))
    num_parameters = weights / 2
    tokens, assumed = _tokens(recipe)
    from transformers import AutoConfig

    text_config = AutoConfig.from_pretrained(target.path, local_files_only=True).get_text_config()
    num_layers = len(load_method(recipe.method).needs(recipe.model, text_config).aux_layers) + 1
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    width = 4 if recipe.hidden_states.dtype == "float32" else 2
    cache = 0 if recipe.hidden_states.mode == "online" else int(tokens * num_layers * hidden * width)
    head_parameters = 12 * hidden**2 + (num_layers - 1) * hidden**2
    flops, memory, where = _machine()
    generation = 0 if _exists(recipe, "responses") else 2 * num_parameters * tokens * 4 / flops
    draft_vocab = getattr(recipe.model, "draft_vocab_size", None) or vocab
    steps = getattr(recipe.model, "ttt_steps", 1)
    per_token = 6 * head_parameters * steps + 4 * hidden * draft_vocab * steps + 2 * hidden * draft_vocab
    training = per_token * tokens * (recipe.train.epochs or 1) / flops
    if recipe.train.max_minutes is not None:
        training = (
            recipe.train.max_minutes * 60
            if recipe.train.epochs is None
            else min(training, recipe.train.max_minutes * 60)
        )
    activations = 64 * recipe.train.tokens_per_batch * hidden * 4 * steps
    peak = weights + 2 * vocab * hidden * 2 + head_parameters * 16 + activations + (1 << 30)
    free = shutil.disk_usage(_existing_parent(recipe.output_dir)).free
    return Estimate(
        train_tokens=tokens,
        cache_bytes=cache,
        free_disk_bytes=free,
        memory_bytes=int(peak),
        free_memory_bytes=memory,
        generation_s=generation,
        capture_s=2 * num_parameters * tokens / flops,
        training_s=training,
        assumed=(*assumed, where),
    )


def _tokens(recipe: Recipe) -> tuple[int, list[str]]:
    manifest = recipe.output_dir / "rows" / "manifest.json"
    if manifest.is_file():
        result = json.loads(manifest.read_text()).get("result", {})
        if "train" in result:
            return int(result["train"]["tokens"]), ["token counts are those of the finished rows stage"]
    count, text = _num_prompts(recipe)
    per_row = _PROMPT_TOKENS + int(_ANSWER_SHARE * recipe.responses.max_new_tokens)
    return count * per_row, [text, f"{per_row} tokens a row ({_PROMPT_TOKENS} of prompt, half of max_new_tokens)"]


def _num_prompts(recipe: Recipe) -> tuple[int, str]:
    total = 0
    for source in recipe.prompts.sources:
        if source.file is None:
            total += source.limit or 0
            continue
        if not source.file.is_file():
            raise ValueError(f"prompts.sources: {source.file} does not exist (looked for in {Path.cwd()})")
        with source.file.open("rb") as file:
            lines = sum(1 for _ in file)
        total += min(lines, source.limit or lines)
    return total, f"{total} prompts (datasets from the hub count with their limit only)"


def _machine() -> tuple[float, int, str]:
    import torch

    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return _GPU_FLOPS, int(free), f"{_GPU_FLOPS:.0e} FLOP/s on one accelerator"
    cores = os.cpu_count() or 1
    return (
        _CPU_FLOPS * cores / 2,
        psutil.virtual_memory().available,
        f"{_CPU_FLOPS * cores / 2:.0e} FLOP/s on {cores} cores",
    )


def _exists(recipe: Recipe, stage: str) -> bool:
    manifest: Any = recipe.output_dir / stage / "manifest.json"
    return bool(manifest.is_file() and json.loads(manifest.read_text()).get("state") == "done")


def _existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
