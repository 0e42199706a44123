"""Windows: packing, order, ranks, position, and what a wrong record leads to."""

import time
from dataclasses import replace

import pytest
import torch
from toy_run import LAYERS, SPEC, ToyStream, toy_config, toy_rows

from draftsmith.data.rows import Row
from draftsmith.hidden_states.record import Record
from draftsmith.train.batches import Batches, Packer, Plan, Position


def _windows(rows, config, rank=0, world=1, start=None, stream=None):
    packer = Packer(SPEC, LAYERS[:-1], config)
    batches = Batches(
        Plan(rows, config, world), rows, stream or ToyStream(rows), packer, config, rank, start or Position()
    )
    try:
        return list(batches)
    finally:
        batches.close()


def test_a_packed_batch_holds_each_rows_ids_mask_positions_and_states():
    rows = toy_rows(3)
    config = toy_config(tokens_per_batch=200)
    records = list(ToyStream(rows).records([row.row_id for row in rows]))
    batch = Packer(SPEC, (2, 1), config).lay_out(rows, records)
    start = 0
    for document, (row, record) in enumerate(zip(rows, records, strict=True)):
        here = slice(start, start + len(row.input_ids))
        assert batch.input_ids_BT[0, here].tolist() == list(row.input_ids)
        assert batch.loss_mask_BT[0, here].tolist() == list(row.loss_mask)
        assert set(batch.document_ids_BT[0, here].tolist()) == {document}
        assert batch.position_ids_BT[0, here].tolist() == list(range(len(row.input_ids)))
        torch.testing.assert_close(batch.aux_BTF[0, here], record.states_TLH[:, :2].flatten(1))  # ascending: layer 1, 2
        torch.testing.assert_close(batch.last_BTH[0, here], record.states_TLH[:, -1])
        start = here.stop
    assert batch.input_ids_BT.shape[1] % 64 == 0
    assert (batch.document_ids_BT[0, start:] == -1).all() and not batch.loss_mask_BT[0, start:].any()


def test_every_row_comes_once_per_epoch_in_another_order_each_time():
    rows = toy_rows()
    windows = _windows(rows, toy_config(epochs=2, max_steps=None))
    names = [
        [name for w in windows if w.position.epoch == epoch for ids in w.row_ids for name in ids] for epoch in (0, 1)
    ]
    assert sorted(names[0]) == sorted(names[1]) == sorted(row.row_id for row in rows)
    assert names[0] != names[1]


def test_two_ranks_share_the_windows_of_one():
    rows = toy_rows()
    alone = _windows(rows, toy_config(epochs=1, gradient_accumulation=4))
    shared = [_windows(rows, toy_config(epochs=1, gradient_accumulation=2), rank, 2) for rank in (0, 1)]
    assert len(alone) == len(shared[0]) == len(shared[1])
    for whole, first, second in zip(alone, *shared, strict=True):
        assert {*whole.row_ids} == {*first.row_ids, *second.row_ids}
        assert whole.num_tokens == first.num_tokens + second.num_tokens
    assert any(batch is None for batch in alone[-1].batches), "this case has a trailing partial window"


def test_reading_resumes_at_any_position():
    rows = toy_rows()
    config = toy_config(epochs=2, gradient_accumulation=2)
    windows = _windows(rows, config)
    for index in (1, len(windows) // 2, len(windows) - 1):
        resumed = _windows(rows, config, start=windows[index - 1].following)
        assert [w.row_ids for w in resumed] == [w.row_ids for w in windows[index:]]


def test_rows_that_do_not_fit_are_counted_and_left_out():
    rows = [*toy_rows(4), Row("long", "c", "toy", tuple(range(30)), (True,) * 30)]
    plan = Plan(rows, toy_config(tokens_per_batch=24), 1)
    assert plan.num_too_long == 1 and 4 not in plan.kept


def test_nothing_to_train_on_is_an_error():
    rows = [Row("a", "c", "toy", tuple(range(30)), (True,) * 30), Row("b", "c", "toy", (1, 2, 3), (False,) * 3)]
    with pytest.raises(ValueError, match=r"1 are longer than train.tokens_per_batch \(24\) and 1 have no token"):
        Plan(rows, toy_config(tokens_per_batch=24), 1)


class _Wrong(ToyStream):
    def __init__(self, rows, change):
        super().__init__(rows)
        self.change = change

    def records(self, row_ids):
        for record in super().records(row_ids):
            if (changed := self.change(record)) is not None:
                yield changed


@pytest.mark.parametrize(
    "change",
    [
        lambda r: Record("other", r.token_ids_T, r.states_TLH),
        lambda r: Record(r.row_id, r.token_ids_T + 1, r.states_TLH),
        lambda r: Record(r.row_id, r.token_ids_T, r.states_TLH[:-1]),
        lambda r: None,
    ],
)
def test_a_record_that_is_not_the_rows_stops_the_run_by_name(change):
    with pytest.raises(ValueError, match="row-"):
        _windows(toy_rows(), toy_config(epochs=1), stream=_Wrong(toy_rows(), change))


def test_layers_that_were_not_captured_are_refused():
    with pytest.raises(ValueError, match=r"layers \[3\]"):
        Packer(SPEC, (1, 3), toy_config())


def test_closing_early_ends_the_reader_and_its_stream():
    rows, is_closed = toy_rows(), []

    class Endless(ToyStream):
        def records(self, row_ids):
            try:
                yield from super().records(row_ids)
            finally:
                is_closed.append(True)

    config = toy_config(max_steps=None, max_minutes=1)
    batches = Batches(Plan(rows, config, 1), rows, Endless(rows), Packer(SPEC, (1, 2), config), config, 0, Position())
    next(iter(batches))
    batches.close()
    time.sleep(0.05)
    assert not batches._thread.is_alive() and is_closed


def test_a_packed_batch_holds_the_keys_and_values_that_the_head_wants():
    spec, rows, config = replace(SPEC, kv_layers=(1, 3), kv_width=6), toy_rows(3), toy_config(tokens_per_batch=200)
    records = [
        replace(record, kv_TE=torch.randn(len(record.token_ids_T), 6))
        for record in ToyStream(rows).records([row.row_id for row in rows])
    ]
    packer = Packer(spec, (1,), config, (1, 3))
    batch, start = packer.lay_out(rows, records), 0
    for record in records:
        torch.testing.assert_close(batch.kv_BTE[0, start : start + len(record.kv_TE)], record.kv_TE)
        start += len(record.kv_TE)
    assert not batch.kv_BTE[0, start:].any() and packer.dummy().kv_BTE.shape[2] == 6
    assert Packer(spec, (1,), config).lay_out(rows, records).kv_BTE is None
    with pytest.raises(
        ValueError, match=r"keys and values of the target's layers \[2\], but .* hold those of \[1, 3\]"
    ):
        Packer(spec, (1,), config, (2,))
