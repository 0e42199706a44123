"""Two processes under accelerate and DeepSpeed: equal to one, resumable, in step when a rank has bad or no data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_resume import assert_same_run
from toy_run import POISON, REAL_HEADS, log_of, losses_of, run, run_real, toy_config, toy_rows, weights_of

from draftsmith.train.batches import Plan

_ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def _start(folder: Path, fits: list[dict], launcher: list[str], **environment: str) -> subprocess.CompletedProcess:
    (folder / "fits.json").write_text(json.dumps(fits))
    command = [sys.executable, "-m", *launcher, str(Path(__file__).parent / "toy_run.py"), str(folder / "fits.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=_ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    return done


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_equal_one_and_resume_bit_for_bit(tmp_path, stage):
    """Several runs in one launch, since starting takes most of the time."""
    settings = json.loads((_ROOT / f"recipes/deepspeed/zero{stage}-bf16.json").read_text())
    settings["bf16"] = {"enabled": "auto"}  # exact comparisons are made in fp32
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    fits = []
    for optimizer in ("adamw", "muon"):
        config = {"optimizer": optimizer, "gradient_accumulation": 2}
        stopping = config | {"probe_every_steps": 3}
        fits += [
            {"folder": str(tmp_path / f"whole-{optimizer}"), "config": config},
            {"folder": str(tmp_path / f"halves-{optimizer}"), "config": stopping, "signal_in_probe": True},
            {"folder": str(tmp_path / f"halves-{optimizer}"), "config": config},
        ]
    uneven = {"max_steps": None, "epochs": 2, "gradient_accumulation": 2}
    count = _count_with_an_idle_rank(uneven)
    fits.append({"folder": str(tmp_path / "uneven"), "config": uneven, "rows": count})
    fits.append({"folder": str(tmp_path / "poisoned"), "config": uneven, "rows": count, "tokens": [[4, POISON]]})
    for method in REAL_HEADS:
        fits.append({"folder": str(tmp_path / method), "config": {"optimizer": "muon"}, "method": method})
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    _start(
        tmp_path,
        fits,
        launcher,
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(tmp_path / "ds.json"),
    )
    for optimizer in ("adamw", "muon"):
        whole = tmp_path / f"whole-{optimizer}"
        _assert_close(whole, tmp_path / f"one-{optimizer}", optimizer=optimizer, gradient_accumulation=4)
        assert json.loads((tmp_path / f"halves-{optimizer}" / "stopped.json").read_text()) == 143
        assert_same_run(tmp_path / f"halves-{optimizer}", whole)
    _assert_close(
        tmp_path / "uneven", tmp_path / "one-uneven", toy_rows(count), **(uneven | {"gradient_accumulation": 4})
    )
    for method in REAL_HEADS:
        run_real(method, tmp_path / f"one-{method}", toy_config(optimizer="muon", gradient_accumulation=2))
        assert losses_of(tmp_path / method) == pytest.approx(losses_of(tmp_path / f"one-{method}"), rel=1e-4), method
    skipped = [line for line in log_of(tmp_path / "poisoned") if line.get("skipped")]
    assert len(skipped) == 2 and all("row-4" in line["rows"] for line in skipped)
    assert all(torch.isfinite(value).all() for value in weights_of(tmp_path / "poisoned").values())


def _count_with_an_idle_rank(config: dict) -> int:
    """A number of rows whose last window of the first epoch has one pack: rank 1 gets none at all."""
    config = toy_config(**config)
    return next(count for count in range(15, 60) if len(Plan(toy_rows(count), config, 2).packs(0)) % 4 == 1)


def _assert_close(two: Path, one: Path, rows=None, **config) -> None:
    """The run of two processes equals one process that takes the same windows, up to the order of fp32 sums."""
    run(one, toy_config(**config), rows)
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-5)
    for key in ("grad_norm", "accuracy0", "tokens", "count/step1"):
        assert [line[key] for line in log_of(two)] == pytest.approx([line[key] for line in log_of(one)], rel=1e-4), key
    expected = weights_of(one)
    for name, value in weights_of(two).items():
        # Newton-Schulz runs in bf16, so an fp32 rounding difference may grow to a bf16 one of a small update.
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-5)


def test_the_shipped_two_cpu_launch_file_trains_in_bf16(tmp_path):
    fits = [{"folder": str(tmp_path / "run"), "config": {"precision": "bf16", "gradient_accumulation": 2}}]
    launcher = ["accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu-2.yaml"]
    _start(tmp_path, fits, launcher)
    run(tmp_path / "one", toy_config(precision="bf16", gradient_accumulation=4))
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "one"), rel=5e-3)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["world_size"] == 2
    frequencies = weights_of(tmp_path / "run")["frequencies"]
    assert frequencies.dtype == torch.float32 and frequencies[1] == torch.tensor(1 / 3), (
        "DeepSpeed's cast spares buffers"
    )
