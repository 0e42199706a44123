"""Learning-rate schedule, parameter groups, and Muon against torch's own."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from toy_run import ToyHead, log_of, run, toy_config

from draftsmith.train.muon import Layout, MuonAdamW, Piece, orthogonalise
from draftsmith.train.optim import build_optimizer, learning_rate_at, progress_of, state_dtypes


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_is_continuous_and_ends_at_zero_or_stays(schedule):
    config = toy_config(schedule=schedule, warmup_ratio=0.1, learning_rate=1.0)
    rates = [learning_rate_at(config, step / 1000) for step in range(1001)]
    assert rates[0] == 0 and max(rates) == pytest.approx(1.0)
    assert max(abs(a - b) for a, b in pairwise(rates)) < 0.0101  # no jump, at the end of warm-up neither
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.0)
    assert learning_rate_at(toy_config(warmup_ratio=0), 0.0) > 0


def test_progress_follows_the_budget_that_binds():
    config = toy_config(max_minutes=1.0)
    assert progress_of(config, 0, 10, 0.0) == pytest.approx(0.05)
    assert progress_of(config, 1, 10, 30.0) == pytest.approx(0.5)
    assert progress_of(config, 9, 10, 30.0) == pytest.approx(0.95)
    assert progress_of(config, 5, None, 60.0) == pytest.approx(1.0)


def test_a_time_budget_ends_the_run_with_a_decayed_rate(tmp_path):
    result = run(tmp_path, toy_config(max_steps=None, max_minutes=1.5 / 60, schedule="linear"))
    assert result.ended_by == "time" and result.elapsed_s >= 1.5
    assert log_of(tmp_path)[-1]["lr"] < 0.2 * 5e-3


def test_muon_takes_matrices_only_and_decay_spares_vectors():
    head = ToyHead()
    groups = build_optimizer(head, toy_config(optimizer="muon")).param_groups
    by_rule = {id(p): (group["rule"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert {name: by_rule[id(p)] for name, p in head.named_parameters()} == {
        "fc.weight": ("muon", 0.05),
        "mix.weight": ("muon", 0.05),
        "mix.bias": ("adamw", 0.0),
        "norm.weight": ("adamw", 0.0),
        "norm.bias": ("adamw", 0.0),
        "token_embed.weight": ("adamw", 0.05),
        "lm_head.weight": ("adamw", 0.05),
    }


def test_a_head_without_matrices_refuses_muon():
    with pytest.raises(ValueError, match="no trainable matrix"):
        build_optimizer(nn.LayerNorm(4), toy_config(optimizer="muon"))
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(nn.LayerNorm(4).requires_grad_(False), toy_config())


def _gradients(parameters, step):
    for index, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_and_its_adamw_equal_torchs_own():
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(7))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    groups = [
        {"params": ours[:2], "rule": "muon", "weight_decay": 0.1},
        {"params": ours[2:], "rule": "adamw", "weight_decay": 0.01},
    ]
    optimizer = MuonAdamW(groups, lr=0.01, betas=(0.9, 0.95), momentum=0.95)
    muon = torch.optim.Muon(theirs[:2], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(theirs[2:], lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(4):
        _gradients(ours, step)
        _gradients(theirs, step)
        optimizer.step()
        muon.step()
        adamw.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert state_dtypes(optimizer) == {torch.float32}


def test_a_flat_shard_without_a_layout_is_refused():
    shard = nn.Parameter(torch.randn(12))
    shard.grad = torch.ones(12)
    optimizer = MuonAdamW([{"params": [shard], "rule": "muon"}], lr=0.01, betas=(0.9, 0.95), momentum=0.95)
    with pytest.raises(AssertionError, match="without a layout"):
        optimizer.step()


def test_flat_shards_take_the_step_of_whole_matrices(monkeypatch):
    torch.manual_seed(1)
    matrices = [torch.randn(4, 5), torch.randn(6, 3)]
    gradients = [torch.randn(4, 5), torch.randn(6, 3)]
    whole = [nn.Parameter(matrix.clone()) for matrix in matrices]
    for parameter, gradient in zip(whole, gradients, strict=True):
        parameter.grad = gradient
    reference = MuonAdamW([{"params": whole, "rule": "muon"}], lr=0.1, betas=(0.9, 0.95), momentum=0.9)
    reference.step()

    flat, flat_gradient = torch.cat([m.flatten() for m in matrices]), torch.cat([g.flatten() for g in gradients])
    size = flat.numel() // 2
    updated = []
    for rank in range(2):
        shard = nn.Parameter(flat[rank * size : (rank + 1) * size].clone())
        shard.grad = flat_gradient[rank * size : (rank + 1) * size]
        optimizer = MuonAdamW([{"params": [shard], "rule": "muon"}], lr=0.1, betas=(0.9, 0.95), momentum=0.9)
        pieces = []
        for start, end, shape in ((0, 20, (4, 5)), (20, 38, (6, 3))):
            low, high = max(start, rank * size), max(min(end, (rank + 1) * size), max(start, rank * size))
            pieces.append(
                Piece(
                    shape,
                    slice(low - rank * size, high - rank * size),
                    slice(low - start, high - start),
                    lambda shards, start=start, end=end: shards.reshape(-1)[start:end],
                )
            )
        optimizer.layouts = {id(shard): Layout(tuple(pieces), None)}
        momentum = torch.zeros(38).lerp(flat_gradient, 0.1)
        shards = flat_gradient.lerp(momentum, 0.9).view(2, size)
        monkeypatch.setattr("draftsmith.train.muon._gather", lambda update, group, shards=shards: shards)
        optimizer.step()
        updated.append(shard.detach())
    torch.testing.assert_close(torch.cat(updated), torch.cat([p.detach().flatten() for p in whole]), rtol=0, atol=1e-6)


def test_orthogonalised_updates_have_singular_values_near_one():
    for shape in ((8, 20), (20, 8)):
        values = torch.linalg.svdvals(
            orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0))).float()
        )
        assert values.min() > 0.5 and values.max() < 1.5
