"""What a recipe will take: tokens, disk, memory and time, compared with what this machine has.

Before anything is generated the number of answer tokens is not known; half of responses.max_new_tokens per turn is
assumed, and said. Once rows exist, their real counts are used, and what is on disk already is not counted again.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from draftsmith.data.artefact import MANIFEST
from draftsmith.data.target import ResolvedTarget, resolve_target
from draftsmith.hidden_states.cache import estimate_bytes
from draftsmith.hidden_states.stream import spec_for
from draftsmith.models.head import load_method
from draftsmith.recipes.schema import Recipe

_GIB = 1 << 30
# Share of responses.max_new_tokens that answers use on average; measured 0.6 to 0.9 on short limits, far less on long.
_ANSWER_SHARE = 0.5
_PROMPT_TOKENS = 80
# Arithmetic throughput assumed where nothing was measured, in FLOP/s: 2 CPU cores with AMX, and a current accelerator.
_CPU_FLOPS = 3e11
_GPU_FLOPS = 2e14
# Decoding a batch reaches about a quarter of the arithmetic of a pass over whole rows: it waits for memory.
_DECODING_SLOWDOWN = 4
# torch, transformers and what they load, before any model.
_PROCESS_BYTES = 1 << 30
# Stored per parameter in training: fp32 weight, gradient and two moments (Muon has one; the bf16 copy takes its place).
_TRAINING_BYTES_PER_PARAMETER = 16
# Activations kept for the backward pass, in units of tokens x width x 4 bytes per unrolled step: a layer's own.
_ACTIVATION_UNITS = 64


@dataclass(frozen=True)
class Estimate:
    """Figures in tokens, bytes and seconds; `assumed` lists what they rest on."""

    train_tokens: int
    cache_bytes: int  # still to be written
    free_disk_bytes: int
    reserve_bytes: int  # of the disk, that hidden_states.cache.reserve_gib keeps
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
            f"disk       {_gib(self.cache_bytes)} of hidden states to write; {_gib(self.free_disk_bytes)} are free",
            f"memory     {_gib(self.memory_bytes)} at the peak; {_gib(self.free_memory_bytes)} are free",
            f"time       about {_minutes(self.generation_s)} of generation, {_minutes(self.capture_s)} of capture, "
            f"{_minutes(self.training_s)} of training",
            *(f"assumed    {text}" for text in self.assumed),
        ]
        return "\n".join(lines)

    def refuse_what_does_not_fit(self) -> None:
        """Raises ValueError with the figures when disk or memory do not suffice."""
        problems = []
        if self.cache_bytes and self.cache_bytes + self.reserve_bytes > self.free_disk_bytes:
            problems.append(
                f"the hidden-states cache needs {_gib(self.cache_bytes)}, {_gib(self.free_disk_bytes)} are free and "
                f"hidden_states.cache.reserve_gib keeps {_gib(self.reserve_bytes)}; use hidden_states.mode: online, "
                "fewer prompts, or an output_dir on a larger disk"
            )
        if self.memory_bytes > self.free_memory_bytes:
            problems.append(
                f"the run needs {_gib(self.memory_bytes)} of memory and {_gib(self.free_memory_bytes)} are free; "
                "lower responses.batch_size or train.tokens_per_batch, or use a larger machine"
            )
        if problems:
            raise ValueError("this does not fit: " + "; ".join(problems))


@dataclass(frozen=True)
class _Size:
    """Of the models, as far as the arithmetic goes."""

    target_bytes: int
    target_parameters: int
    hidden: int
    vocab: int
    draft_vocab: int
    head_parameters: int
    steps: int


def estimate(recipe: Recipe) -> Estimate:
    """Estimate a run. Resolves the target's config (a built-in target is fetched), loads no weights."""
    target = resolve_target(recipe.target)
    config = _text_config(target)
    needs = load_method(recipe.method).needs(recipe.model, config)
    size = _size(recipe, target, config, len(needs.aux_layers))
    tokens, num_rows, assumed = _tokens(recipe)
    flops, free_memory, where = _machine()
    states = recipe.hidden_states
    spec = spec_for(states, target, needs.aux_layers, needs.kv_layers)
    cache = 0 if states.mode == "online" else estimate_bytes(tokens, num_rows, spec)
    passes = 2 * size.target_parameters * tokens / flops
    disk = shutil.disk_usage(_existing_parent(recipe.output_dir))
    return Estimate(
        train_tokens=tokens,
        cache_bytes=max(0, cache - _bytes_in(recipe.output_dir / "hidden_states")),
        free_disk_bytes=disk.free,
        reserve_bytes=int(states.cache.reserve_gib * _GIB),
        memory_bytes=_memory(recipe, size, spec.layers),
        free_memory_bytes=free_memory,
        generation_s=0.0 if _is_done(recipe, "responses") else passes * _DECODING_SLOWDOWN,
        capture_s=0.0 if _is_done(recipe, "hidden_states/train") else passes * _num_captures(recipe),
        training_s=0.0 if _is_done(recipe, "train") else _training_s(recipe, size, tokens, flops),
        assumed=(*assumed, where),
    )


def _size(recipe: Recipe, target: ResolvedTarget, config: Any, num_aux: int) -> _Size:
    weights = sum(path.stat().st_size for path in target.path.glob("*.safetensors"))
    hidden, vocab = int(config.hidden_size), int(config.vocab_size)
    stored_bytes = 4 if str(getattr(config, "dtype", "")).endswith("float32") else 2
    # A decoder layer that reads two streams has about 5 hidden^2 of attention and 3 hidden * intermediate of MLP.
    mlp = 3 * hidden * int(getattr(config, "intermediate_size", 4 * hidden))
    return _Size(
        target_bytes=weights,
        target_parameters=weights // stored_bytes,
        hidden=hidden,
        vocab=vocab,
        draft_vocab=getattr(recipe.model, "draft_vocab_size", None) or vocab,
        head_parameters=5 * hidden**2 + mlp + num_aux * hidden**2,
        steps=getattr(recipe.model, "ttt_steps", 1),
    )


def _memory(recipe: Recipe, size: _Size, layers: tuple[int, ...]) -> int:
    """The largest of the stages: they run one after the other."""
    answering = size.target_bytes
    if recipe.responses.engine == "vllm" or recipe.hidden_states.source == "vllm":
        answering += recipe.hidden_states.server.kv_cache_gib * _GIB + 2 * _PROCESS_BYTES  # server, engine, worker
    frozen = 2 * size.vocab * size.hidden * 2  # embedding and lm_head in bf16
    activations = _ACTIVATION_UNITS * recipe.train.tokens_per_batch * size.hidden * 4 * size.steps
    states = recipe.hidden_states.prefetch_rows * recipe.rows.max_row_tokens * len(layers) * size.hidden * 2
    training = frozen + size.head_parameters * _TRAINING_BYTES_PER_PARAMETER + activations + states
    if recipe.hidden_states.mode != "offline":
        training += size.target_bytes
    return _PROCESS_BYTES + max(answering, training)


def _num_captures(recipe: Recipe) -> int:
    """Passes over the rows that capture states: one, or one an epoch when nothing is kept."""
    return (recipe.train.epochs or 1) if recipe.hidden_states.mode == "online" else 1


def _training_s(recipe: Recipe, size: _Size, tokens: int, flops: float) -> float:
    per_step = 6 * size.head_parameters + 4 * size.hidden * size.draft_vocab
    per_token = per_step * size.steps + 2 * size.hidden * size.draft_vocab  # the teacher's logits are shared
    limit = None if recipe.train.max_minutes is None else recipe.train.max_minutes * 60
    if recipe.train.epochs is None and recipe.train.max_steps is None:
        assert limit is not None, "TrainConfig demands an end"
        return limit
    step_tokens = recipe.train.tokens_per_batch * recipe.train.gradient_accumulation
    seen = [tokens * recipe.train.epochs] if recipe.train.epochs else []
    seen += [recipe.train.max_steps * step_tokens] if recipe.train.max_steps else []
    seconds = per_token * min(seen) / flops
    return seconds if limit is None else min(seconds, limit)


def _tokens(recipe: Recipe) -> tuple[int, int, list[str]]:
    """(training tokens, rows, what was assumed)."""
    manifest = _manifest(recipe, "rows")
    if "train" in manifest.get("result", {}):
        found = manifest["result"]["train"]
        return int(found["tokens"]), int(found["rows"]), ["token counts are those of the finished rows stage"]
    count, text = _num_prompts(recipe)
    per_row = _PROMPT_TOKENS + int(_ANSWER_SHARE * recipe.responses.max_new_tokens)
    per_row = min(per_row, recipe.rows.max_row_tokens)
    return (
        count * per_row,
        count,
        [text, f"{per_row} tokens a row ({_PROMPT_TOKENS} of prompt, half of responses.max_new_tokens)"],
    )


def _num_prompts(recipe: Recipe) -> tuple[int, str]:
    total = 0
    for index, source in enumerate(recipe.prompts.sources):
        if source.file is None:
            if source.limit is None:
                raise ValueError(
                    f"prompts.sources.{index}.limit is missing: how many prompts {source.dataset} has is not known "
                    "before it is downloaded, so nothing can be estimated; give a limit, or run `draftsmith prompts`, "
                    "`responses` and `rows` first"
                )
            total += source.limit
            continue
        if not source.file.is_file():
            raise ValueError(f"prompts.sources: {source.file} does not exist (looked for in {Path.cwd()})")
        with source.file.open("rb") as file:
            lines = sum(1 for _ in file)
        total += min(lines, source.limit or lines)
    count = max(0, total - recipe.prompts.eval_count)
    return count, f"{count} training prompts, one turn each, before duplicates are left out"


def _machine() -> tuple[float, int, str]:
    import torch

    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return _GPU_FLOPS, int(free), f"{_GPU_FLOPS:.0e} FLOP/s on one accelerator"
    cores = os.cpu_count() or 1
    flops = _CPU_FLOPS * cores / 2
    return flops, psutil.virtual_memory().available, f"{flops:.0e} FLOP/s on {cores} cores"


def _text_config(target: ResolvedTarget) -> Any:
    from transformers import AutoConfig

    trust = target.trust_remote_code
    return AutoConfig.from_pretrained(target.path, local_files_only=True, trust_remote_code=trust).get_text_config()


def _manifest(recipe: Recipe, stage: str) -> dict[str, Any]:
    path = recipe.output_dir / stage / MANIFEST
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return manifest


def _is_done(recipe: Recipe, stage: str) -> bool:
    return _manifest(recipe, stage).get("state") == "done"


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors")) if folder.is_dir() else 0


def _existing_parent(folder: Path) -> Path:
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
