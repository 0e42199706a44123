"""A ragged batch on RowCache computes what each sequence computes alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.data.generate import Engine
from draftsmith.data.kv_cache import RowCache, attention_masks, mask_BHQS

KINDS = {"llama": {}, "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2}, "gemma3": {"sliding_window": 8}}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    folder = tiny_target(tmp_path, request.param, **KINDS[request.param])
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval().requires_grad_(False)


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 500, (length,), generator=generator) for length in lengths]


def test_ragged_passes_of_several_tokens_give_the_logits_of_each_sequence_alone(model: Any) -> None:
    ids = sequences(40, 21, 33)
    alone = [model(one[None]).logits[0] for one in ids]
    engine = Engine(model)
    cache = engine.cache(3)
    starts = [19, 2, 11]
    prefix = torch.zeros(3, 19, dtype=torch.int64)
    for row, (one, start) in enumerate(zip(ids, starts, strict=True)):
        prefix[row, :start] = one[:start]
    engine.forward(prefix, cache)
    cache.advance(torch.tensor(starts))
    for width in (4, 1, 7):
        places = cache.lengths_B.tolist()
        new = torch.stack([one[place : place + width] for one, place in zip(ids, places, strict=True)])
        logits = engine.logits(engine.forward(new, cache))
        for row, place in enumerate(places):
            torch.testing.assert_close(logits[row], alone[row][place : place + width], atol=2e-4, rtol=1e-4)
        cache.advance(width)


def test_rejected_tokens_leave_no_trace(model: Any) -> None:
    ids = sequences(20, 20)
    expected = [model(one[None]).logits[0, -1] for one in ids]
    engine = Engine(model)
    cache = engine.cache(2)
    engine.forward(torch.stack([one[:15] for one in ids]), cache)
    cache.advance(15)
    engine.forward(torch.full((2, 5), 7), cache)  # a wrong draft
    cache.advance(torch.tensor([2, 0]))
    cache.rollback(torch.tensor([15, 15]))
    logits = engine.logits(engine.forward(torch.stack([one[15:] for one in ids]), cache))[:, -1]
    torch.testing.assert_close(logits, torch.stack(expected), atol=2e-4, rtol=1e-4)


def test_rows_leave_and_new_ones_take_their_slots(model: Any) -> None:
    ids = sequences(12, 9, 30)
    engine = Engine(model)
    cache, other = engine.cache(3), engine.cache(1)
    engine.forward(torch.stack([ids[0][:8], ids[1][:8], ids[0][:8]]), cache)
    cache.advance(8)
    engine.forward(ids[2][None, :29], other)
    other.advance(29)
    cache.put(torch.tensor([2]), other)
    cache.reset_rows(torch.tensor([0]))
    cache.select(torch.tensor([2, 1]))
    logits = engine.logits(engine.forward(torch.stack([ids[2][29:], ids[1][8:]]), cache))[:, -1]
    expected = torch.stack([model(one[None]).logits[0, -1] for one in (ids[2], ids[1])])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_the_cache_grows_without_losing_what_it_holds(model: Any) -> None:
    ids = sequences(300)[0]
    engine = Engine(model)
    cache = engine.cache(1)
    for start in range(0, 300, 60):
        states = engine.forward(ids[None, start : start + 60], cache)
        cache.advance(60)
    assert cache.num_slots >= 300
    torch.testing.assert_close(engine.logits(states)[0, -1], model(ids[None]).logits[0, -1], atol=2e-4, rtol=1e-4)


def test_put_into_an_empty_cache_allocates_it() -> None:
    full, empty = RowCache(1, 1), RowCache(1, 3)
    full.begin(2)
    full.update(torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4), 0)
    full.advance(2)
    empty.put(torch.tensor([1]), full)
    assert empty.lengths_B.tolist() == [0, 2, 0]
    assert empty.layers[0].keys.shape[:2] == (3, 2)
    assert empty.layers[0].keys[1, :, :2].eq(1).all() and empty.layers[0].keys[0].eq(0).all()


def test_a_mask_shows_each_query_what_lies_before_it_and_within_its_window() -> None:
    positions = torch.tensor([[2, 3], [0, 1]])
    assert mask_BHQS(positions, 4)[:, 0].int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    assert mask_BHQS(positions, 4, window=2)[0, 0].int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_each_layer_type_gets_its_mask() -> None:
    class Config:
        layer_types = ("full_attention", "sliding_attention")
        sliding_window = 2

    positions = torch.tensor([[3], [1]])
    masks = attention_masks(Config, mask_BHQS(positions, 4), positions, 4, torch.float32)
    hidden = float("-inf")
    assert masks["full_attention"][1, 0, 0].tolist() == [0, 0, hidden, hidden]
    assert masks["sliding_attention"][0, 0, 0].tolist() == [hidden, hidden, 0, 0]


def test_rows_are_what_the_cache_holds_at_their_positions_keys_before_values() -> None:
    cache = RowCache(2, 2)
    cache.begin(6)
    torch.manual_seed(0)
    shapes = [(2, 3, 4), (2, 1, 8)]  # the second layer has heads of its own
    written = [[torch.randn(b, g, 6, d) for _ in range(2)] for b, g, d in shapes]
    for layer, pair in zip(cache.layers, written, strict=True):
        layer.update(*pair)
    positions_BR = torch.tensor([[4, 5, 0], [1, 2, 3]])
    found_BRE = cache.rows((0, 1), positions_BR)
    assert found_BRE.shape == (2, 3, 2 * 3 * 4 + 2 * 8)
    for b, r in ((0, 0), (0, 2), (1, 1)):
        at = [x[b, :, positions_BR[b, r]].flatten() for pair in written for x in pair]
        assert torch.equal(found_BRE[b, r], torch.cat(at))
