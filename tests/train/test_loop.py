"""fit in one process: what a step optimises, skipped steps, probing, results."""

import json
from contextlib import closing

import pytest
import torch
from toy_run import (
    HUGE,
    POISON,
    SPEC,
    ToyHead,
    ToyStream,
    log_of,
    losses_of,
    run,
    run_real,
    save_toy,
    toy_config,
    toy_rows,
    toy_target,
    weights_of,
    with_token,
)

from draftsmith.train.batches import Packer
from draftsmith.train.loop import fit


def test_the_loss_falls(tmp_path):
    run(tmp_path, toy_config(max_steps=40, learning_rate=2e-2))
    losses = losses_of(tmp_path)
    assert sum(losses[-5:]) < sum(losses[:5]) - 1


def test_a_step_is_the_mean_over_all_its_supervised_rows(tmp_path):
    """Accumulation weighs every supervised row alike, in the trailing partial window too (fault 27)."""
    rows = toy_rows(11)
    config = toy_config(epochs=1, max_steps=None, gradient_accumulation=3, learning_rate=1e-9)
    run(tmp_path, config, rows)
    lines = log_of(tmp_path)
    all_rows = Packer(SPEC, (1, 2), toy_config(tokens_per_batch=1000)).lay_out(
        rows, list(ToyStream(rows).records([row.row_id for row in rows]))
    )
    head = ToyHead()
    terms, _ = head.loss(all_rows)
    counts = head.counts(all_rows)
    for name in counts:
        assert sum(line[f"count/{name}"] for line in lines) == counts[name]
        total = sum(line[f"term/{name}"] * line[f"count/{name}"] for line in lines)
        assert total == pytest.approx(terms[name].sum.item(), rel=1e-5)
    assert lines[-1]["count/step0"] < lines[0]["count/step0"]
    for line in lines:
        assert line["loss"] == pytest.approx(line["term/step0"] + 0.75 * line["term/step1"], rel=1e-5)
        assert 0 <= line["accuracy0"] <= 1


def test_the_counts_of_a_step_see_the_random_state_of_its_loss(tmp_path):
    """A head that samples what it trains on counts what it will sample, for every micro step."""
    seen = {"counts": [], "loss": []}

    class Sampling(ToyHead):
        def counts(self, batch):
            seen["counts"].append(torch.initial_seed())
            return super().counts(batch)

        def loss(self, batch):
            seen["loss"].append(torch.initial_seed())
            return super().loss(batch)

    rows, config = toy_rows(), toy_config(max_steps=3, gradient_accumulation=2)
    fit(config, Sampling(), toy_target(), rows, ToyStream(rows), tmp_path, None, save_weights=save_toy)
    assert len(set(seen["loss"])) == 3 and len(seen["loss"]) == 6
    assert set(seen["loss"]) <= set(seen["counts"])
    # Where a step's loss begins, its counts were the last that were asked for.
    for step in range(3):
        assert seen["loss"][2 * step] == seen["loss"][2 * step + 1] == seen["counts"][-1 - 3 * (2 - step)]


def test_accumulating_equals_one_long_batch(tmp_path):
    rows = toy_rows(6)
    run(tmp_path / "long", toy_config(tokens_per_batch=200, max_steps=4), rows)
    run(tmp_path / "accumulated", toy_config(tokens_per_batch=20, gradient_accumulation=10, max_steps=4), rows)
    assert losses_of(tmp_path / "accumulated") == pytest.approx(losses_of(tmp_path / "long"), rel=1e-5)
    for key in ("grad_norm", "tokens"):
        expected = [line[key] for line in log_of(tmp_path / "long")]
        assert [line[key] for line in log_of(tmp_path / "accumulated")] == pytest.approx(expected, rel=1e-4)


def test_a_batch_without_supervised_rows_changes_no_gradient(tmp_path):
    """Fault 21: zero loss, defined gradient, the run goes on."""
    rows = [row if i % 3 else type(row)(row.row_id, "c", "toy", row.input_ids, (False,) * len(row.input_ids))
            for i, row in enumerate(toy_rows(12))]  # fmt: skip
    result = run(tmp_path, toy_config(tokens_per_batch=20, epochs=1, max_steps=None), rows)
    masked = [line for line in log_of(tmp_path) if line["count/step0"] == 0]
    assert masked and all(line["loss"] == 0 and line["grad_norm"] == 0 for line in masked)
    assert result.num_rows_unsupervised == 4 and result.num_skipped_steps == 0


@pytest.mark.parametrize("token", [POISON, HUGE])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_non_finite_step_is_skipped_named_and_harmless(tmp_path, token, optimizer):
    rows = with_token(toy_rows(), 4, token)
    config = toy_config(epochs=1, max_steps=None, gradient_accumulation=2, optimizer=optimizer)
    result = run(tmp_path, config, rows)
    skipped = [line for line in log_of(tmp_path) if line.get("skipped")]
    assert result.num_skipped_steps == len(skipped) == 1
    assert "row-4" in skipped[0]["rows"] and skipped[0]["grad_norm"] is None
    assert all(torch.isfinite(value).all() for value in weights_of(tmp_path).values())


def test_too_many_non_finite_steps_stop_the_run_naming_the_rows(tmp_path):
    rows = with_token(with_token(toy_rows(), 4, POISON), 9, POISON)
    with pytest.raises(RuntimeError, match=r"max_nonfinite_steps is 1\..*row-"):
        run(tmp_path, toy_config(epochs=5, max_steps=None, max_nonfinite_steps=1), rows)


def test_the_best_weights_are_chosen_by_acceptance(tmp_path):
    scores = iter([1.2, 1.9, 1.5])
    seen = []

    def probe(head):
        assert not head.training
        seen.append({name: value.clone() for name, value in head.state_dict().items()})
        return {"mal": next(scores), "loss": 3.0}

    result = run(tmp_path, toy_config(probe_every_steps=2), probe=probe)
    assert result.best_step == 4 and result.best_score == 1.9 and result.last_probe["mal"] == 1.5
    saved = torch.load(result.weights / "weights.pt")
    assert all(torch.equal(saved[name], seen[1][name]) for name in saved)
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["step-00000004"]
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 4
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["probe/mal"] for line in lines if "probe" in line] == [1.2, 1.9, 1.5]


def test_a_probe_without_the_score_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="must hold 'mal'"):
        run(tmp_path, toy_config(max_steps=1), probe=lambda head: {"loss": 1.0})


def test_bf16_keeps_fp32_weights_and_moments(tmp_path):
    result = run(tmp_path, toy_config(precision="bf16", optimizer="muon"))
    assert {value.dtype for value in weights_of(tmp_path).values()} == {torch.float32}
    assert all(torch.isfinite(torch.tensor(losses_of(tmp_path)))) and result.steps == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_real_eagle3_head_learns(tmp_path, precision):
    config = toy_config(max_steps=60, learning_rate=2e-2, precision=precision, optimizer="muon", tokens_per_batch=200)
    run_real("eagle3", tmp_path, config)
    losses = losses_of(tmp_path)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_states_of_another_target_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyStream, "spec", type(SPEC)((1, 2, 5), "float32", 16, "w", "t", "c", "float32"))
    with pytest.raises(ValueError, match="they are of another target"):
        run(tmp_path, toy_config())


def test_an_open_ended_run_is_refused():
    with pytest.raises(ValueError, match="give at least one"):
        toy_config(max_steps=None)


def test_very_short_rows_are_harmless_and_a_run_of_nothing_else_is_an_error(tmp_path):
    """Fault 20."""
    short = [type(row)(f"short-{i}", "c", "toy", row.input_ids[:i], (True,) * i) for i, row in enumerate(toy_rows(3))]
    result = run(tmp_path / "mixed", toy_config(epochs=1, max_steps=None), toy_rows(5) + short)
    assert result.num_rows_unsupervised == 1 and all(torch.isfinite(torch.tensor(losses_of(tmp_path / "mixed"))))
    with pytest.raises(ValueError, match="nothing to learn from"):
        run(tmp_path / "nothing", toy_config(epochs=1, max_steps=None), short[:2])


class ToySource:
    """Captures the toy stream's records; in place of a target."""

    spec = SPEC

    def capture(self, rows):
        for row in rows:
            yield from ToyStream([row]).records([row.row_id])


def test_the_real_record_stream_feeds_the_same_training(tmp_path):
    from draftsmith.hidden_states.stream import HiddenStatesConfig, RecordStream

    rows = toy_rows()
    config = toy_config(epochs=2, max_steps=None)
    run(tmp_path / "toy", config, rows)
    with closing(RecordStream(HiddenStatesConfig(mode="online"), SPEC, rows, None, ToySource())) as stream:
        fit(config, ToyHead(), toy_target(), rows, stream, tmp_path / "real", None, save_weights=save_toy)
    assert losses_of(tmp_path / "real") == losses_of(tmp_path / "toy")
