"""RecordStream: offline, online and hybrid give the same records; its thread never outlives it and hides no error."""

import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget
from draftsmith.hidden_states import stream as stream_module
from draftsmith.hidden_states.cache import Cache, CacheConfig, verify
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.hidden_states.stream import (
    HiddenStatesConfig,
    RecordStream,
    build_states,
    open_source,
    open_stream,
    spec_for,
)
from draftsmith.hidden_states.transformers_source import TransformersSource

LAYERS = (2, 3)
CACHE = CacheConfig(reserve_gib=0)


def config_of(mode: str, **settings: Any) -> HiddenStatesConfig:
    return HiddenStatesConfig(mode=mode, cache=CACHE, device="cpu", **settings)  # type: ignore[arg-type]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hidden-states-prefetch"]


class CountingSource:
    """A source around another that counts, waits or fails."""

    def __init__(self, source: TransformersSource, fail_at: str = "", wait_s: float = 0.0) -> None:
        self.spec, self._source = source.spec, source
        self.asked: list[str] = []
        self.closed = False
        self._fail_at, self._wait_s = fail_at, wait_s

    def capture(self, rows: Iterable[Row]) -> Generator[Record, None, None]:
        try:
            for row in rows:
                if row.row_id == self._fail_at:
                    raise RuntimeError("the target died")
                time.sleep(self._wait_s)
                self.asked.append(row.row_id)
                yield from self._source.capture([row])
        finally:
            self.closed = True


@pytest.fixture
def source(target: ResolvedTarget) -> TransformersSource:
    return TransformersSource(target, LAYERS, "bfloat16")


def epochs(rows: Sequence[Row]) -> list[list[str]]:
    """Three passes in three orders, the second over a part."""
    row_ids = [row.row_id for row in rows]
    return [row_ids[::-1], row_ids[1:4], row_ids[3:] + row_ids[:3]]


def test_the_three_modes_give_the_same_records_bit_for_bit(
    target: ResolvedTarget, rows: list[Row], tmp_path: Path
) -> None:
    passes: dict[str, list[Record]] = {}
    for mode in ("offline", "online", "hybrid"):
        config, folder = config_of(mode), tmp_path / mode / "hidden_states"
        if mode == "offline":
            with open_source(config, target, LAYERS, tmp_path) as source:
                build_states(config, source, rows, folder)
        with open_stream(config, target, LAYERS, rows, folder) as stream:
            passes[mode] = [record for epoch in epochs(rows) for record in stream.records(epoch)]
        assert folder.exists() == (mode != "online")
    wanted = [row_id for epoch in epochs(rows) for row_id in epoch]
    for records in passes.values():
        assert [record.row_id for record in records] == wanted
        for record, reference in zip(records, passes["offline"], strict=True):
            assert torch.equal(record.states_TLH, reference.states_TLH)
            assert torch.equal(record.token_ids_T, reference.token_ids_T)
    assert threads() == []


def test_hybrid_captures_each_row_once_over_all_passes_and_then_lets_the_target_go(
    source: TransformersSource, rows: list[Row], tmp_path: Path
) -> None:
    counting, released = CountingSource(source), []
    cache = Cache.create(tmp_path / "cache", source.spec, CACHE)
    with closing(
        RecordStream(config_of("hybrid"), source.spec, rows, cache, counting, lambda: released.append(True))
    ) as stream:
        half = [row.row_id for row in rows[:3]]
        list(stream.records(half))
        assert counting.asked == half and not released
        for epoch in epochs(rows):
            list(stream.records(epoch))
        assert sorted(counting.asked) == sorted(row.row_id for row in rows) and released
    assert Cache.open(tmp_path / "cache").spec == source.spec and verify(tmp_path / "cache") == []


def test_a_hybrid_pass_that_breaks_off_keeps_what_it_captured(
    source: TransformersSource, rows: list[Row], target: ResolvedTarget, tmp_path: Path
) -> None:
    cache = Cache.create(tmp_path / "cache", source.spec, CACHE)
    broken = CountingSource(source, fail_at="row4")
    row_ids = [row.row_id for row in rows]
    stream = RecordStream(config_of("hybrid"), source.spec, rows, cache, broken)
    with closing(stream), pytest.raises(RuntimeError, match="the target died"):
        list(stream.records(row_ids))
    with open_stream(config_of("hybrid"), target, LAYERS, rows, tmp_path / "cache") as stream:
        assert len(list(stream.records(row_ids))) == len(rows)
    again = Cache.open(tmp_path / "cache", source.spec)
    assert set(again.row_ids) == set(row_ids) and len(broken.asked) == 4


def test_a_finished_hybrid_cache_does_not_load_the_target(
    target: ResolvedTarget, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hidden_states"
    with open_stream(config_of("hybrid"), target, LAYERS, rows, folder) as stream:
        list(stream.records([row.row_id for row in rows]))
    monkeypatch.setattr(stream_module, "TransformersSource", lambda *_: pytest.fail("the target was loaded"))
    with open_stream(config_of("hybrid"), target, LAYERS, rows, folder) as stream:
        assert len(list(stream.records([row.row_id for row in rows]))) == len(rows)


def test_an_error_of_the_source_reaches_the_consumer_after_the_records_before_it(
    source: TransformersSource, rows: list[Row]
) -> None:
    broken = CountingSource(source, fail_at="row3")
    stream = RecordStream(config_of("online"), source.spec, rows, None, broken)
    received = []
    with pytest.raises(RuntimeError, match="the target died"):
        for record in stream.records([row.row_id for row in rows]):
            received.append(record.row_id)
    assert received == ["row0", "row1", "row2"] and threads() == []


def test_a_damaged_record_reaches_the_consumer_as_an_error_with_its_name(
    source: TransformersSource, rows: list[Row]
) -> None:
    class Broken(CountingSource):
        def capture(self, rows: Iterable[Row]) -> Generator[Record, None, None]:
            for record in super().capture(rows):
                if record.row_id == "row2":
                    record.states_TLH.zero_()
                yield record

    stream = RecordStream(config_of("online"), source.spec, rows, None, Broken(source))
    with pytest.raises(ValueError, match="record row2: layer 2 is constant"):
        list(stream.records([row.row_id for row in rows]))


def test_the_thread_runs_ahead_by_the_prefetch_depth_and_stops_when_the_consumer_does(
    source: TransformersSource, rows: list[Row]
) -> None:
    counting = CountingSource(source)
    stream = RecordStream(config_of("online", prefetch_rows=2), source.spec, rows, None, counting)
    iterator = stream.records([row.row_id for row in rows])
    next(iterator)
    deadline = time.monotonic() + 10
    while len(counting.asked) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(counting.asked) == 4  # one consumed, two ready, one waiting for a place
    assert threads() != []
    stream.close()
    assert threads() == [] and counting.closed
    assert list(iterator) == []


def test_dropping_a_half_read_iterator_stops_its_thread(source: TransformersSource, rows: list[Row]) -> None:
    counting = CountingSource(source)
    stream = RecordStream(config_of("online", prefetch_rows=1), source.spec, rows, None, counting)
    iterator = stream.records(["row0", "row1"])
    next(iterator)
    del iterator
    assert threads() == [] and counting.closed


def test_unknown_rows_and_an_incomplete_offline_cache_are_refused_by_name(
    target: ResolvedTarget, source: TransformersSource, rows: list[Row], tmp_path: Path
) -> None:
    stream = RecordStream(config_of("online"), source.spec, rows, None, source)
    with pytest.raises(ValueError, match="row row99 is not one of the 7 rows"):
        list(stream.records(["row99"]))
    build_states(config_of("offline"), source, rows[:5], tmp_path / "hidden_states")
    stream_of_all = open_stream(config_of("offline"), target, LAYERS, rows, tmp_path / "hidden_states")
    with pytest.raises(ValueError, match="lacks 2 of 7 rows, the first is row5"), stream_of_all:
        pass


def test_a_cache_of_other_layers_is_refused_when_the_stream_opens(
    target: ResolvedTarget, source: TransformersSource, rows: list[Row], tmp_path: Path
) -> None:
    build_states(config_of("offline"), source, rows, tmp_path / "hidden_states")
    other = open_stream(config_of("offline"), target, (1, 3), rows, tmp_path / "hidden_states")
    with pytest.raises(ValueError, match=r"spec.layers: was \[2, 3, 5\], wanted \[1, 3, 5\]"), other:
        pass


def test_the_spec_is_known_without_loading_the_target(target: ResolvedTarget, source: TransformersSource) -> None:
    spec: CaptureSpec = spec_for(config_of("offline"), target, LAYERS)
    assert spec == source.spec


def test_settings_that_the_chosen_source_does_not_use_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"endpoints is set but hidden_states.source is transformers"):
        HiddenStatesConfig(endpoints=("http://127.0.0.1:8000",))
    with pytest.raises(ValidationError, match=r"batch_rows is set but hidden_states.source is vllm"):
        HiddenStatesConfig(source="vllm", batch_rows=4)
    assert HiddenStatesConfig(source="vllm", endpoints=("http://127.0.0.1:8000",)).mode == "offline"
