"""A head's parameters -> one optimizer object (AdamW, or Muon with AdamW), and the learning rate of a step.

Both work unchanged under ZeRO: the optimizer state is fp32, and a group says by itself which rule updates it.
"""

import math

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from draftsmith.train.config import TrainConfig
from draftsmith.train.muon import MuonAdamW

# Muon is for matrices between hidden states. A table that is indexed by token ids, or scores them, has rows that are
# updated unevenly, which orthogonalisation would even out (Keller Jordan, "Muon", section "When should you use it").
_TABLE_NAMES = ("embed", "lm_head")


def build_optimizer(module: nn.Module, config: TrainConfig) -> Optimizer:
    """The optimizer over the trainable parameters. Raises ValueError when there are none."""
    matrices, tables, vectors = _split(module)
    if not matrices + tables + vectors:
        raise ValueError("the head has no trainable parameter; check the model section for a setting that freezes it")
    decayed = {"weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        groups = [{"params": matrices + tables, **decayed}, {"params": vectors, "weight_decay": 0.0}]
        fused = _is_on_gpu(module)
        return AdamW(
            [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, fused=fused
        )
    if not matrices:
        raise ValueError(
            "train.optimizer is 'muon', but the head has no trainable matrix for it; use train.optimizer: adamw"
        )
    groups = [
        {"params": matrices, "rule": "muon", **decayed},
        {"params": tables, "rule": "adamw", **decayed},
        {"params": vectors, "rule": "adamw", "weight_decay": 0.0},
    ]
    return MuonAdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        momentum=config.muon_momentum,
    )


def learning_rate_at(config: TrainConfig, progress: float) -> float:
    """The learning rate at `progress` in [0, 1]: linear warm-up over the first `warmup_ratio`, then the decay to 0."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < config.warmup_ratio:
        return config.learning_rate * progress / config.warmup_ratio
    rest = (progress - config.warmup_ratio) / (1.0 - config.warmup_ratio)
    factor = {"constant": 1.0, "linear": 1.0 - rest, "cosine": 0.5 * (1.0 + math.cos(math.pi * rest))}[config.schedule]
    return config.learning_rate * factor


def progress_of(config: TrainConfig, step: int, total_steps: int | None, elapsed_s: float) -> float:
    """How far the run is at step `step` (from 0): in steps or in time, whichever is further.

    The middle of a step counts, so neither the first nor the last step has a rate of 0.
    """
    in_steps = (step + 0.5) / total_steps if total_steps else 0.0
    in_time = elapsed_s / (60.0 * config.max_minutes) if config.max_minutes else 0.0
    return max(in_steps, in_time)


def _is_on_gpu(module: nn.Module) -> bool:
    """True where torch's fused AdamW runs: it needs no JIT build, unlike DeepSpeed's (fragile on ROCm)."""
    return all(p.device.type == "cuda" for p in module.parameters() if p.requires_grad)


def _split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (matrices, token tables, the rest), in the module's order."""
    tables_by_id = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif parameter.ndim > 2 or id(parameter) in tables_by_id or any(part in name.lower() for part in _TABLE_NAMES):
            tables.append(parameter)
        else:
            matrices.append(parameter)
    return matrices, tables, vectors


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of every group; ZeRO's optimizer hands out the groups of the one it wraps."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_dtypes(optimizer: Optimizer) -> set[torch.dtype]:
    """The dtypes of the optimizer's moments; a test holds them to float32."""
    return {value.dtype for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)}
