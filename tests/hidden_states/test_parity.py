"""The parity check passes on honest sources and names the convention that is off in every other (fault 12)."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget, load_model
from draftsmith.hidden_states.cache import Cache, CacheConfig, build_cache
from draftsmith.hidden_states.parity import check_parity
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.hidden_states.transformers_source import TransformersSource

LAYERS = (1, 3)


class SpoiledSource:
    """A source whose records claim one thing and hold another."""

    def __init__(self, spec: CaptureSpec, honest: TransformersSource, spoil: Callable[[Tensor], Tensor]) -> None:
        self.spec, self._honest, self._spoil = spec, honest, spoil

    def capture(self, rows: Iterable[Row]) -> Generator[Record, None, None]:
        dtype = getattr(torch, self.spec.dtype)
        for record in self._honest.capture(rows):
            yield replace(record, states_TLH=self._spoil(record.states_TLH).to(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_honest_states_of_every_architecture_pass(
    kind: str, dtype: str, make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    target = make_target(kind, dtype)
    report = check_parity(TransformersSource(target, LAYERS, dtype), rows, target)  # type: ignore[arg-type]
    assert [figures.layer for figures in report.layers] == [1, 3, 5] and report.num_rows == 3
    assert report.top1_agreement > 0.95 and report.kl_nats < 1e-3
    assert report.to_json()["layers"][0]["median_error"] < 1e-2


def test_states_stored_in_bfloat16_of_a_float32_run_pass_from_the_cache(
    target: ResolvedTarget, rows: list[Row], tmp_path: Path
) -> None:
    source = TransformersSource(target, LAYERS, "bfloat16")
    build_cache(source, rows, tmp_path / "cache", CacheConfig(reserve_gib=0))
    report = check_parity(Cache.open(tmp_path / "cache"), rows, target)
    assert 1e-4 < report.layers[0].median_error < 4e-3


def everything(target: ResolvedTarget) -> TransformersSource:
    return TransformersSource(target, (0, 1, 2, 3, 4), "float32")


def spoiled(target: ResolvedTarget, layers: tuple[int, ...], spoil: Callable[[Tensor], Tensor]) -> SpoiledSource:
    honest = everything(target)
    return SpoiledSource(replace(honest.spec, layers=(*layers, 5)), honest, spoil)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ((2, 4, 5), "layer index: .*input-of id 2, that is the output of layer 1; output-of ids were used"),
        ((0, 2, 5), "layer index: .*input-of id 0; the source's ids are one too low"),
        ((4, 1, 5), "layer index: .*input-of id 4; the layers are in another order"),
        ((1, 3, 4), "layer 5 does not match .*layer index: .*input-of id 4"),
    ],
)
def test_a_wrong_layer_is_named(
    columns: tuple[int, ...], words: str, dtype: str, make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    target = make_target("llama", dtype)
    source = spoiled(target, LAYERS, lambda states: states[:, list(columns)])
    with pytest.raises(ValueError, match=words):
        check_parity(source, rows, target)


def test_a_post_norm_last_state_is_named(target: ResolvedTarget, rows: list[Row]) -> None:
    norm = load_model(target, "cpu").model.norm

    def spoil(states: Tensor) -> Tensor:
        return torch.cat([states[:, [1, 3]], norm(states[:, -1:])], dim=1)

    with pytest.raises(ValueError, match=r"layer 5 does not match .*norm: the states are post-norm"):
        check_parity(spoiled(target, LAYERS, spoil), rows, target)


def test_a_shift_by_one_token_is_named(target: ResolvedTarget, rows: list[Row]) -> None:
    source = spoiled(target, LAYERS, lambda states: states[:, [1, 3, 5]].roll(1, dims=0))
    with pytest.raises(ValueError, match="token shift: the states are those of the previous token"):
        check_parity(source, rows, target)


def test_a_lost_embedding_scale_is_named(make_target: Callable[..., ResolvedTarget], rows: list[Row]) -> None:
    target = make_target("gemma3")
    scaled = torch.tensor([128.0**-0.5, 1, 1])[:, None]
    source = spoiled(target, (0, 3), lambda states: states[:, [0, 3, 5]] * scaled)
    with pytest.raises(ValueError, match=r"layer 0 .*scale: the states are 0.08839 times the target's"):
        check_parity(source, rows, target)


@pytest.mark.parametrize("run", ["float32", "bfloat16"])
def test_a_lower_precision_than_the_spec_says_is_named(
    run: str, target: ResolvedTarget, make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    honest = everything(target if run == "float32" else make_target("llama", "bfloat16"))
    spec = replace(honest.spec, layers=(1, 3, 5), target_dtype="float32")
    source = SpoiledSource(spec, honest, lambda states: states[:, [1, 3, 5]].bfloat16())
    with pytest.raises(ValueError, match="dtype: every value is a bfloat16 number, but the spec says"):
        check_parity(source, rows, target)


def _rotated_wrong(rotary: Any, positions: bool) -> None:
    """Give every token position 0, or the rotation of a config without rope settings."""
    if positions:
        rotary.register_forward_pre_hook(
            lambda _module, args, kwargs: (args, {"position_ids": kwargs["position_ids"] * 0}), with_kwargs=True
        )
    else:
        rotary.inv_freq = 10000.0 ** -(torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq))


@pytest.mark.parametrize(
    ("positions", "words"),
    [(True, "positions: every token was given the same position"), (False, "RoPE: .*theta 10000 and no scaling")],
)
def test_lost_rope_and_lost_positions_are_named(
    positions: bool, words: str, target: ResolvedTarget, rows: list[Row]
) -> None:
    honest = TransformersSource(target, LAYERS, "float32")
    _rotated_wrong(honest.decoder.rotary_emb, positions)
    with pytest.raises(ValueError, match=words):
        check_parity(SpoiledSource(honest.spec, honest, lambda states: states), rows, target)


def test_another_attention_is_told_from_other_weights(
    target: ResolvedTarget, make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    honest = TransformersSource(target, LAYERS, "float32")
    honest.decoder.rotary_emb.inv_freq *= 1.7
    with pytest.raises(ValueError, match=r"RoPE, positions or attention mask: the first token.*agrees"):
        check_parity(SpoiledSource(honest.spec, honest, lambda states: states), rows, target)
    other = TransformersSource(make_target("qwen3"), LAYERS, "float32")
    with pytest.raises(ValueError, match="no known convention explains it"):
        check_parity(SpoiledSource(other.spec, other, lambda states: states), rows, target)


def _teacher(target: ResolvedTarget, one_plus_w: bool, cap: float | None) -> Callable[[Tensor], Tensor]:
    model = load_model(target, "cpu")
    weight = model.model.norm.weight.float()

    def logits(last_TH: Tensor) -> Tensor:
        last_TH = last_TH.float()
        normed_TH = last_TH * torch.rsqrt(last_TH.square().mean(-1, keepdim=True) + 1e-6)
        logits_TV: Tensor = (normed_TH * (1 + weight if one_plus_w else weight)) @ model.lm_head.weight.float().T
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

    return logits


def test_the_teacher_that_training_uses_is_checked_too(
    target: ResolvedTarget, make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    gemma = make_target("gemma3")
    for honest, teacher in ((target, _teacher(target, False, None)), (gemma, _teacher(gemma, True, 5.0))):
        report = check_parity(TransformersSource(honest, LAYERS, "float32"), rows, honest, teacher=teacher)
        assert report.top1_agreement == 1.0
    for wrong, teacher, words in (
        (target, _teacher(target, True, None), r"norm: its gain is taken as 1\+w, the target's norm multiplies by w"),
        (gemma, _teacher(gemma, False, 5.0), r"norm: its gain is taken as w, the target's norm multiplies by 1\+w"),
        (gemma, _teacher(gemma, True, None), "final_logit_softcapping is left out"),
    ):
        with pytest.raises(ValueError, match=words):
            check_parity(TransformersSource(wrong, LAYERS, "float32"), rows, wrong, teacher=teacher)


def test_no_rows_is_an_error(target: ResolvedTarget) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        check_parity(TransformersSource(target, LAYERS, "float32"), [], target)
