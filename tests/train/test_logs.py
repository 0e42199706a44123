"""log.jsonl and the offline trackers."""

import json

import pytest
from toy_run import run, toy_config

from draftsmith.train.logs import read_log


def test_tensorboard_and_offline_wandb_record_every_step(tmp_path):
    run(tmp_path, toy_config(trackers=("tensorboard", "wandb"), max_steps=3))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next(tmp_path.rglob("events.out.tfevents*"))
    found = EventAccumulator(str(events.parent)).Reload()
    assert [scalar.step for scalar in found.Scalars("loss")] == [1, 2, 3]
    assert [scalar.value for scalar in found.Scalars("loss")] == pytest.approx(
        [line["loss"] for line in read_log(tmp_path)[:3]]
    )
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))


def test_every_line_is_complete_json(tmp_path):
    run(tmp_path, toy_config(max_steps=3))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3]
    assert {"loss", "lr", "grad_norm", "tokens", "epoch"} <= json.loads(lines[0]).keys()
