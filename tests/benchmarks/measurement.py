"""Time and peak memory of a training step, measured the same way in every process of the benchmark (Linux only).

Extra memory is the highest resident set of all steps, warm-up included, above what the process held once the weights
and the batch were loaded: activations, logits, gradients and the optimiser's state count, the frozen weights do not.

OpenMP threads wait for each other actively, so a single busy neighbour can make a step several times as long. How many
cores other processes had meanwhile is therefore part of the result.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workload import CLIP_NORM, LEARNING_RATE, MODES

_MIB = 1 << 20


def parse_arguments(*more: tuple[str, tuple[str, ...]]) -> argparse.Namespace:
    """The command line of a measured process; `more` are (option, choices), the first choice being the default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=sorted(MODES), required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up-steps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    for option, choices in more:
        parser.add_argument(option, choices=choices, default=choices[0])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


def measure(
    head: nn.Module,
    forward: Callable[[], tuple[Tensor, list[Tensor]]],
    arguments: argparse.Namespace,
    supervised_rows: Callable[[], list[int]],
    **facts: Any,
) -> None:
    """Train `head` for some steps and print one JSON line. `forward` returns the loss and its part of each TTT step."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    seconds, first_losses = [], []
    resident = _settle()
    all_began, all_busy, own_busy = time.perf_counter(), _busy_seconds(), time.process_time()
    for index in range(arguments.warm_up_steps + arguments.steps):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=MODES[arguments.mode].is_bf16):
            loss, losses = forward()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        elapsed = time.perf_counter() - began
        if index == 0:
            first_losses = [float(part) for part in losses]
        if index >= arguments.warm_up_steps:
            seconds.append(elapsed)
        del loss, losses
    others = _busy_seconds() - all_busy - (time.process_time() - own_busy)
    extra_mib = (_status("VmHWM") - resident) / _MIB
    result = {
        "seconds_per_step": statistics.median(seconds),
        "cores_taken_by_others": max(0.0, others / (time.perf_counter() - all_began)),
        "seconds": seconds,
        "extra_mib": extra_mib,
        "losses": first_losses,
        "supervised_rows": supervised_rows(),
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "torch": torch.__version__,
        **facts,
    }
    print(json.dumps(result))


def _settle() -> int:
    """Give freed memory back to the system, restart the kernel's peak counter, and return the resident bytes."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets VmHWM to the present resident set
    return _status("VmRSS")


def _busy_seconds() -> float:
    """Processor seconds that the whole machine has spent since boot, idle and waiting for disks left out."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _status(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; the benchmark runs on Linux only")
