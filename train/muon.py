"""Muon for matrices and AdamW for the rest behind one optimizer, on whole parameters and on ZeRO's flat shards.

torch.optim.Muon refuses flat shards. DeepSpeed's own Muon compiles Newton-Schulz at import (a minute on a CPU), scales
the rate by shape in another way, and clips the orthogonalised update in place of the gradient at stage 3. Here the
momentum stays sharded, the update is gathered, and each rank orthogonalises the matrices that its shard touches:
the same step as in one process. At stage 2 ranks divide that work; at stage 3 a shard touches every matrix, so each
rank does all of it.

    R rows and C columns of a matrix, P elements of a shard, W ranks
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

# Quintic coefficients, number of steps and eps of Keller Jordan's Muon, as in torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_NORM_EPS = 1e-7
_ADAM_EPS = 1e-8


@dataclass(frozen=True)
class Piece:
    """Where one matrix lies in the shards: `local` is this rank's part, `whole` puts it together from all shards."""

    shape: tuple[int, int]
    local: slice  # of this rank's shard; empty when the matrix is elsewhere
    within: slice  # the same elements, of the flattened matrix
    whole: Callable[[Tensor], Tensor]  # gathered shards [W, P] -> flattened matrix [R*C]


@dataclass(frozen=True)
class Layout:
    """How a flat shard holds matrices, and the ranks that hold the rest."""

    pieces: tuple[Piece, ...]
    process_group: Any


class MuonAdamW(Optimizer):
    """Groups with rule "muon" get Nesterov momentum, orthogonalised; groups with rule "adamw" get AdamW."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], momentum: float
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "momentum": momentum, "weight_decay": 0.0, "rule": "adamw"}
        super().__init__(groups, defaults)
        self.layouts: dict[int, Layout] = {}  # id of a flat shard -> its layout; empty without ZeRO

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update. Under ZeRO all ranks call it with the same groups, since it gathers."""
        assert closure is None, "MuonAdamW takes no closure"
        for group in self.param_groups:
            if group["rule"] == "muon":
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._muon(parameter, group)
            else:
                self._adamw([p for p in group["params"] if p.grad is not None], group)

    def _muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if parameter.ndim == 2:
            parameter.add_(orthogonalise(update), alpha=-group["lr"] * rate_scale(parameter.shape))
            return
        layout = self.layouts.get(id(parameter))
        assert layout is not None, f"Muon met a flat shard of {parameter.numel()} elements without a layout"
        shards_WP = _gather(update, layout.process_group)
        for piece in layout.pieces:
            if piece.local.start == piece.local.stop:
                continue
            matrix_RC = orthogonalise(piece.whole(shards_WP).view(piece.shape))
            rate = group["lr"] * rate_scale(piece.shape)
            parameter[piece.local].add_(matrix_RC.reshape(-1)[piece.within].to(parameter.dtype), alpha=-rate)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.tensor(0.0)
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=_ADAM_EPS,
            maximize=False,
        )


def orthogonalise(update_RC: Tensor) -> Tensor:
    """Newton-Schulz: roughly U V^T of the update's singular value decomposition, in bf16 (eager, no compiler)."""
    a, b, c = _COEFFICIENTS
    is_tall = update_RC.shape[0] > update_RC.shape[1]
    x = update_RC.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_NORM_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def rate_scale(shape: tuple[int, ...]) -> float:
    """match_rms_adamw: Muon's update gets the root mean square of AdamW's; both take one rate (arXiv:2502.16982)."""
    return 0.2 * math.sqrt(max(shape[0], shape[1]))


def attach_zero_layouts(optimizer: MuonAdamW, zero_optimizer: Any, stage: int) -> None:
    """Tell the optimizer how DeepSpeed (0.19) has laid its parameters out in flat shards."""
    describe = _layouts_of_stage_3 if stage == 3 else _layouts_of_stage_1_2
    optimizer.layouts = dict(describe(zero_optimizer))


def _layouts_of_stage_1_2(zero: Any) -> Iterable[tuple[int, Layout]]:
    """A group is one flat buffer, parameters one after another with padding; rank r holds elements r*P..(r+1)*P."""
    for index, shard in enumerate(zero.single_partition_of_fp32_groups):
        if zero.optimizer.param_groups[index]["rule"] != "muon":
            continue
        group = zero.real_dp_process_group[index]
        size = int(zero.partition_size[index])
        first = torch.distributed.get_rank(group=group) * size
        pieces = []
        for parameter, start in zip(
            zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index], strict=True
        ):
            end = start + parameter.numel()
            low, high = max(start, first), min(end, first + size)
            high = max(low, high)
            pieces.append(
                Piece(
                    shape=tuple(parameter.shape),
                    local=slice(low - first, high - first),
                    within=slice(low - start, high - start),
                    whole=lambda shards_WP, start=start, end=end: shards_WP.reshape(-1)[start:end],  # type: ignore[misc]
                )
            )
        yield id(shard), Layout(tuple(pieces), group)


def _layouts_of_stage_3(zero: Any) -> Iterable[tuple[int, Layout]]:
    """A sub-group's shard holds this rank's slice of every parameter, one after another; the last slice is padded."""
    for index, shard in enumerate(zero.fp32_partitioned_groups_flat):
        if zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]["rule"] != "muon":
            continue
        group = zero.sub_group_process_groups[index]
        rank = torch.distributed.get_rank(group=group)
        pieces, offset = [], 0
        for parameter in zero.fp16_groups[index]:
            size, numel = int(parameter.partition_numel()), int(parameter.ds_numel)
            low, high = min(rank * size, numel), min((rank + 1) * size, numel)
            pieces.append(
                Piece(
                    shape=tuple(parameter.ds_shape),
                    local=slice(offset, offset + high - low),
                    within=slice(low, high),
                    whole=lambda shards_WP, offset=offset, size=size, numel=numel: (  # type: ignore[misc]
                        shards_WP[:, offset : offset + size].reshape(-1)[:numel]
                    ),
                )
            )
            offset += size
        yield id(shard), Layout(tuple(pieces), group)


def _gather(shard_P: Tensor, process_group: Any) -> Tensor:
    """This rank's shard -> all shards [W, P]."""
    world = torch.distributed.get_world_size(group=process_group)
    shards = [torch.empty_like(shard_P) for _ in range(world)]
    torch.distributed.all_gather(shards, shard_P.contiguous(), group=process_group)
    return torch.stack(shards)
