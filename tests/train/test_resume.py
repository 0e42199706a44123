"""A resumed run is the uninterrupted run, bit for bit (fault 26), whatever stopped it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy_run import log_of, losses_of, run, toy_config, toy_rows, weights_of

from draftsmith.train.config import TrainConfig
from draftsmith.train.resume import Interrupted


def _stop_at_once(head):
    os.kill(os.getpid(), signal.SIGTERM)
    return {"mal": 1.0}


def _one(head):
    return {"mal": 1.0}


def assert_same_run(found: Path, expected: Path) -> None:
    """Losses, rates and weights, to the last bit."""
    for key in ("step", "loss", "lr", "grad_norm", "tokens"):
        assert [line[key] for line in log_of(found)] == [line[key] for line in log_of(expected)], key
    weights, wanted = weights_of(found), weights_of(expected)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_six_steps_equal_three_and_three_after_sigterm(tmp_path, optimizer, precision):
    config = toy_config(optimizer=optimizer, gradient_accumulation=2, precision=precision)
    run(tmp_path / "whole", config, noise=0.1)
    stopping = TrainConfig(**(config.model_dump() | {"probe_every_steps": 3}))
    with pytest.raises(Interrupted) as stopped:
        run(tmp_path / "halves", stopping, probe=_stop_at_once, noise=0.1)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(losses_of(tmp_path / "halves")) == 3
    run(tmp_path / "halves", config, noise=0.1)
    assert_same_run(tmp_path / "halves", tmp_path / "whole")


def test_lines_after_the_checkpoint_are_written_once(tmp_path):
    config = toy_config(checkpoint_every_steps=2, max_steps=8)
    run(tmp_path / "whole", config)
    calls = []

    def crash(head):
        calls.append(1)
        raise OSError("the machine went away")

    with pytest.raises(OSError, match="went away"):
        run(tmp_path / "crashed", TrainConfig(**(config.model_dump() | {"probe_every_steps": 5})), probe=crash)
    assert len(losses_of(tmp_path / "crashed")) == 5  # the checkpoint is of step 4
    with (tmp_path / "crashed" / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')  # a line cut by the crash
    run(tmp_path / "crashed", config)
    assert [line["step"] for line in log_of(tmp_path / "crashed")] == list(range(1, 9))
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


@pytest.mark.parametrize("after_rename", [False, True])
def test_kill_9_during_a_checkpoint_write_loses_nothing(tmp_path, after_rename):
    config = {"checkpoint_every_steps": 2, "max_steps": 6, "keep_checkpoints": 2}
    item = {
        "folder": str(tmp_path / "killed"),
        "config": config,
        "inject": {"kill_publish_of_step": 4, "after_rename": after_rename},
    }
    (tmp_path / "fits.json").write_text(json.dumps([item]))
    command = [sys.executable, str(Path(__file__).parent / "toy_run.py"), str(tmp_path / "fits.json")]
    # Another number of threads sums in another order, so the last bits would differ.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, timeout=100, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert (checkpoints / "LATEST").read_text().strip() == "step-00000002"
    assert (checkpoints / ("step-00000004" if after_rename else "step-00000004.tmp")).is_dir()
    run(tmp_path / "killed", toy_config(**config))
    run(tmp_path / "whole", toy_config(**config))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert sorted(p.name for p in checkpoints.iterdir()) == ["LATEST", "step-00000004", "step-00000006"]


def test_only_the_last_checkpoints_are_kept(tmp_path):
    run(tmp_path, toy_config(checkpoint_every_steps=1, keep_checkpoints=3))
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == [f"step-0000000{n}" for n in (4, 5, 6)]


@pytest.mark.parametrize(
    ("changes", "rows", "named"),
    [
        ({"optimizer": "muon"}, None, "train.optimizer was 'adamw', is 'muon'"),
        ({"seed": 1}, None, "train.seed was 0, is 1"),
        ({}, toy_rows(29), "rows was"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_by_name(tmp_path, changes, rows, named):
    run(tmp_path, toy_config(max_steps=2))
    with pytest.raises(ValueError, match=named):
        run(tmp_path, toy_config(**({"max_steps": 4} | changes)), rows)


def test_a_checkpoint_of_another_number_of_processes_is_refused(tmp_path):
    run(tmp_path, toy_config(max_steps=2))
    path = tmp_path / "checkpoints" / "step-00000002" / "run.json"
    run_file = json.loads(path.read_text())
    run_file["binding"] |= {"world_size": 2, "zero_stage": 2}
    path.write_text(json.dumps(run_file))
    with pytest.raises(ValueError, match="world_size was 2, is 1; zero_stage was 2, is 0"):
        run(tmp_path, toy_config(max_steps=4))


def test_a_finished_run_started_again_changes_nothing(tmp_path):
    first = run(tmp_path, toy_config(), probe=_one)
    log = (tmp_path / "log.jsonl").read_bytes()
    second = run(tmp_path, toy_config(), probe=_one)
    assert (tmp_path / "log.jsonl").read_bytes() == log
    assert (first.weights, first.steps, first.last_probe) == (second.weights, second.steps, second.last_probe)


@pytest.mark.parametrize("damaged", ["run.json", "model.safetensors", "optimizer.bin", "gone"])
def test_a_checkpoint_that_cannot_be_loaded_is_named_with_an_older_one(tmp_path, damaged):
    config = toy_config(max_steps=4, checkpoint_every_steps=2)
    run(tmp_path, config)
    newest = tmp_path / "checkpoints" / "step-00000004"
    if damaged == "gone":
        (tmp_path / "checkpoints" / "LATEST").write_text("step-00000005\n")
    else:
        content = (newest / damaged).read_bytes()
        (newest / damaged).write_bytes(content[: len(content) // 2])
    older = "step-00000004" if damaged == "gone" else "step-00000002"
    with pytest.raises(ValueError, match=f"cannot be loaded .*write {older} into .*LATEST"):
        run(tmp_path, config)
    (tmp_path / "checkpoints" / "LATEST").write_text(f"{older}\n")
    run(tmp_path, config)
