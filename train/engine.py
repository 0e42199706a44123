"""One engine for every machine: one process, or DeepSpeed ZeRO 1-3 over many, behind step, agree and whole_head.

    loss = sum over terms k of  weight_k * sum_k * world / global_count_k

`global_count_k` is the term's count over all ranks and micro steps of the window, known before the first backward.
DeepSpeed averages gradients over the ranks, hence `world`; its division by the accumulation is switched off.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn

from draftsmith.models.batch import Batch
from draftsmith.models.head import Head
from draftsmith.train.config import TrainConfig
from draftsmith.train.muon import MuonAdamW, attach_zero_layouts
from draftsmith.train.optim import build_optimizer, set_learning_rate

_LAUNCH_HINT = "start it with `accelerate launch --config_file recipes/accelerate/….yaml -m draftsmith.train RECIPE`"

_EVERY_SIZE = 10**12  # elements; no parameter is larger


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, summed over ranks and micro steps."""

    is_skipped: bool  # a loss or gradient was not finite: nothing was updated, on any rank
    grad_norm: float  # before clipping
    loss: float  # the objective: sum of weight * sum / global count
    terms: dict[str, float]  # term -> mean over its rows
    metrics: dict[str, float]  # metric -> sum / count
    offending_rows: list[str]  # of a skipped step


class Objective(nn.Module):
    """The head under its loss, as one forward: what DeepSpeed wraps, and where autocast begins.

    DeepSpeed would switch off an autocast entered outside of its own forward.
    """

    def __init__(self, head: nn.Module, autocast: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.head = head
        self._autocast = autocast

    def forward(self, batch: Batch, counts: Mapping[str, float], weight: float) -> tuple[Tensor, Tensor]:
        """The batch's part of the objective, times `weight`; and detached [loss, term sums, metric sums and counts]."""
        with self._autocast:
            terms, metrics = cast(Head, self.head).loss(batch)
        assert terms.keys() == counts.keys(), f"head.loss has the terms {sorted(terms)}, head.counts {sorted(counts)}"
        parts = [term.sum.float() * (term.weight / max(counts[name], 1.0)) for name, term in sorted(terms.items())]
        loss = torch.stack(parts).sum()
        pairs = [metrics[name] for name in sorted(metrics)]
        values = [loss, *(terms[name].sum for name in sorted(terms)), *(s for s, _ in pairs), *(c for _, c in pairs)]
        report = torch.stack([value.detach().to(loss.device, torch.float64) for value in values])
        self.names = (sorted(terms), sorted(metrics))
        # A weight of 0 must also silence a NaN of a dummy batch in the report, hence not a product.
        return loss * weight, report if weight else torch.zeros_like(report)


class Engine:
    """The prepared head and optimizer."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, head: nn.Module, dummy: Batch) -> None:
        self.accelerator, self.config, self.head = accelerator, config, head
        self.world, self.rank = accelerator.num_processes, accelerator.process_index
        self.is_main = accelerator.is_main_process
        self.device = accelerator.device
        self.is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        self._dummy = dummy.to(self.device)
        self._prepare()
        self.parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 without DeepSpeed."""
        return int(self.accelerator.deepspeed_plugin.zero_stage) if self.is_deepspeed else 0

    def _prepare(self) -> None:
        config, head = self.config, self.head
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # fp32 masters; ZeRO copies them before its cast to bf16
        head.to(self.device)
        module = Objective(head, autocast_of(config, self.device))
        optimizer = build_optimizer(module, config)
        # DeepSpeed casts buffers to bf16 as well, which would ruin rotary frequencies: keep and restore them.
        buffers = [
            (owner, name, value)
            for owner in head.modules()
            for name, value in owner._buffers.items()
            if value is not None
        ]
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        for owner, name, value in buffers:
            owner._buffers[name] = value.to(self.device)
        if self.is_deepspeed and isinstance(optimizer, MuonAdamW):
            attach_zero_layouts(optimizer, self.module.optimizer, self.stage)

    def to_device(self, batches: Sequence[Batch | None]) -> list[Batch | None]:
        """Move a window's batches."""
        return [None if batch is None else batch.to(self.device) for batch in batches]

    def counts(self, batches: Sequence[Batch | None]) -> list[dict[str, float]]:
        """Term counts of each micro step of this rank, dummies 0."""
        names = cast(Head, self.head).counts(self._dummy).keys()
        return [
            dict.fromkeys(names, 0.0)
            if batch is None
            else {name: float(count) for name, count in cast(Head, self.head).counts(batch).items()}
            for batch in batches
        ]

    def agree(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum over the ranks. Everything that decides what a rank does next goes through here, so ranks never part."""
        names = sorted(values)
        vector = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        return dict(zip(names, self._sum(vector).tolist(), strict=True))

    def step(
        self,
        batches: Sequence[Batch | None],
        local_counts: Sequence[Mapping[str, float]],
        counts: Mapping[str, float],
        rate: float,
        row_ids: Sequence[Sequence[str]],
    ) -> StepReport:
        """Forward, backward and update over one window; `counts` are the window's, over all ranks.

        A non-finite loss is made to poison every gradient, so that the same check that guards against non-finite
        gradients (DeepSpeed's is agreed over ranks) drops the step everywhere before it touches a weight.
        """
        set_learning_rate(self.optimizer, rate)
        total: Tensor | None = None
        finite: list[Tensor] = []
        for index, (batch, local) in enumerate(zip(batches, local_counts, strict=True)):
            has_rows = batch is not None and any(local.values())
            if not has_rows and not self.is_deepspeed and (total is not None or index + 1 < len(batches)):
                finite.append(torch.ones((), dtype=torch.bool, device=self.device))
                continue  # one process has nobody to stay in step with
            self._make_whole()
            loss, report = self.module(
                batch if has_rows else self._dummy, counts, float(self.world) if has_rows else 0.0
            )
            finite.append(torch.isfinite(loss.detach()))
            self._backward(loss * torch.where(finite[-1], 1.0, torch.nan), is_last=index + 1 == len(batches))
            total = report if total is None else total + report
        assert total is not None
        norm, is_skipped = self._update()
        offending = self._offending(finite, row_ids) if is_skipped else []
        return self._report(self._sum(total), counts, norm, is_skipped, offending)

    def _make_whole(self) -> None:
        """Stage 3: gather what the last step left sharded. A head may use a weight outside of the module that owns it
        (chunked losses), where DeepSpeed's hooks would miss it."""
        if self.stage == 3:
            parameters: list[Any] = list(self.head.parameters())
            sharded = [p for p in parameters if p.ds_status.name == "NOT_AVAILABLE"]
            if sharded:
                sharded[0].all_gather(sharded)

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        if not self.is_deepspeed:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        self.module.set_gradient_accumulation_boundary(is_boundary=is_last)
        self.module.backward(loss, scale_wrt_gas=False)

    def _update(self) -> tuple[float, bool]:
        """Clip and step, unless a gradient is not finite. Returns the norm before clipping; whether it was skipped."""
        if self.is_deepspeed:
            self.module.step()
            is_skipped = bool(self.module.optimizer.overflow)
            return float("nan") if is_skipped else float(self.module.get_global_grad_norm()), is_skipped
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm or float("inf")))
        is_skipped = not torch.isfinite(torch.tensor(norm)).item()
        if not is_skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, is_skipped

    def _report(
        self, total: Tensor, counts: Mapping[str, float], norm: float, is_skipped: bool, offending: list[str]
    ) -> StepReport:
        terms, metrics = self._objective().names
        values = total.tolist()
        sums, counted = values[1 + len(terms) :][: len(metrics)], values[1 + len(terms) + len(metrics) :]
        return StepReport(
            is_skipped=is_skipped,
            grad_norm=norm,
            loss=values[0],
            terms={name: value / max(counts[name], 1.0) for name, value in zip(terms, values[1:], strict=False)},
            metrics={name: s / c for name, s, c in zip(metrics, sums, counted, strict=True) if c > 0},
            offending_rows=offending,
        )

    def _offending(self, finite: Sequence[Tensor], row_ids: Sequence[Sequence[str]]) -> list[str]:
        """Rows of all ranks whose loss was not finite; all rows of the window where only gradients were at fault."""
        flags = torch.stack(list(finite)).tolist()
        named = self.gather([i for is_finite, ids in zip(flags, row_ids, strict=True) if not is_finite for i in ids])
        return sorted(named or self.gather([i for ids in row_ids for i in ids]))

    def _objective(self) -> Objective:
        return cast(Objective, self.accelerator.unwrap_model(self.module))

    def _sum(self, vector: Tensor) -> Tensor:
        if self.world > 1:
            torch.distributed.all_reduce(vector)
        return vector

    def gather(self, items: list[str]) -> list[str]:
        """The items of all ranks, on all ranks."""
        return cast(list[str], gather_object(items)) if self.world > 1 else items

    def from_main(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        return broadcast_object_list([value])[0] if self.world > 1 else value

    @contextmanager
    def whole_head(self) -> Iterator[nn.Module]:
        """The head with all its weights, in eval mode: for probing and saving on rank 0. All ranks enter.

        The weights are those the forward pass uses: bf16 under DeepSpeed with bf16, else fp32.
        """
        gathered: AbstractContextManager[Any] = nullcontext()
        if self.stage == 3:
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(list(self.head.parameters()))
        self.head.eval()
        try:
            with gathered, torch.no_grad(), autocast_of(self.config, self.device):
                yield self.head
                self.accelerator.wait_for_everyone()
        finally:
            self.head.train()


def autocast_of(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast for precision bf16; weights stay in their own dtype."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if config.precision == "bf16" else nullcontext()


def device_of_this_process() -> torch.device:
    """Where this process trains: load the target's frozen parts here, before `fit`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def make_accelerator(config: TrainConfig, folder: Path) -> Accelerator:
    """Accelerate, set up for what launched this process. Raises ValueError where ranks would train apart.

    accelerate starts separate, silent copies in several configurations (CPU without its gloo hint, FSDP on a CPU).
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would guess the same, with a warning
    world = int(os.environ.get("WORLD_SIZE", "1"))
    is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if world > 1 and not is_deepspeed:
        raise ValueError(f"this run was started with {world} processes but without DeepSpeed; {_LAUNCH_HINT}")
    handlers = []
    if is_deepspeed:
        import deepspeed

        # torch 2.13 renamed collectives that DeepSpeed 0.19 calls; a warning per call and rank would bury the log.
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
        # Built with a compiler at start-up on every CPU; it only speeds up all-reduce within a machine.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = None if torch.cuda.is_available() else "gloo"
        # The watchdog (stall.py) names the stalled rank; the group's own timeout only comes after it.
        timeout = timedelta(seconds=config.stall_timeout_s + 60)
        handlers = [InitProcessGroupKwargs(backend=backend, timeout=timeout)]
    accelerator = Accelerator(
        mixed_precision="no",  # the engine enters autocast itself; DeepSpeed's bf16 stands in its JSON
        gradient_accumulation_steps=config.gradient_accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config(config), zero3_init_flag=False)
        if is_deepspeed
        else None,
        kwargs_handlers=handlers,
        log_with=list(config.trackers) or None,
        project_dir=str(folder),
    )
    expected = DistributedType.DEEPSPEED if is_deepspeed else DistributedType.NO
    if accelerator.num_processes != world or accelerator.distributed_type != expected:
        raise ValueError(
            f"accelerate sees {accelerator.num_processes} processes of {accelerator.distributed_type}, but {world} "
            f"were started and {expected} is wanted: they would train apart. {_LAUNCH_HINT}"
        )
    return accelerator


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """The launch configuration's DeepSpeed JSON, completed from the recipe. Raises ValueError where they disagree."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if not path:
        raise ValueError(
            "the launch configuration names no deepspeed_config_file; use one of recipes/accelerate/*.yaml"
        )
    if not Path(path).is_file():
        raise ValueError(f"the launch configuration's deepspeed_config_file {path} does not exist in {Path.cwd()}")
    settings: dict[str, Any] = json.loads(Path(path).read_text())
    stage = settings.get("zero_optimization", {}).get("stage")
    if stage not in (1, 2, 3):
        # Stage 0 with bf16 takes one Adam step with zero gradients at start (FP16_UnfusedOptimizer), so its first
        # updates are too small.
        raise ValueError(f"{path}: zero_optimization.stage is {stage}; use 1, 2 or 3")
    for section in ("optimizer", "scheduler"):
        if section in settings:
            raise ValueError(f"{path}: remove its `{section}`; train.optimizer and train.schedule set it")
    _settle(settings, path, "train_micro_batch_size_per_gpu", 1, "one packed row per process and micro step")
    _settle(settings, path, "gradient_accumulation_steps", config.gradient_accumulation, "train.gradient_accumulation")
    _settle(settings, path, "gradient_clipping", config.clip_norm or 0.0, "train.clip_norm")
    _settle(settings.setdefault("bf16", {}), path, "enabled", config.precision == "bf16", "train.precision")
    settings["bf16"].setdefault("check_grad_overflow", True)  # else NaN gradients would reach the weights
    if settings["bf16"]["check_grad_overflow"] is not True:
        raise ValueError(f"{path}: bf16.check_grad_overflow must be true, else a NaN gradient reaches the weights")
    if stage == 3:
        # A head's weights stay whole within a step (see _make_whole); masters, moments and gradients are sharded.
        _settle(settings["zero_optimization"], path, "stage3_param_persistence_threshold", _EVERY_SIZE, "fixed")
    settings.pop("train_batch_size", None)
    # fp32 sums of gradients; on ROCm bf16 communication has produced NaN weights (accelerate, utils/dataclasses.py).
    settings.setdefault("communication_data_type", "fp32")
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if config.optimizer == "muon" and "offload_optimizer" in settings["zero_optimization"]:
        raise ValueError(
            f"{path}: zero_optimization.offload_optimizer is not supported with train.optimizer: muon; use adamw"
        )
    return settings


def _settle(settings: dict[str, Any], path: str, name: str, value: Any, field: str) -> None:
    found = settings.get(name, "auto")
    if found not in ("auto", value):
        raise ValueError(
            f'{path}: {name} is {found}, but {field} is {value}; write "auto" in the JSON to follow the recipe'
        )
    settings[name] = value
