"""The cache: what was written is read back; whatever cannot be the states of a row is refused by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget
from draftsmith.hidden_states.cache import Cache, CacheConfig, build_cache, estimate, info, verify
from draftsmith.hidden_states.record import CaptureSpec, Record, check_record
from draftsmith.hidden_states.transformers_source import TransformersSource

CONFIG = CacheConfig(shard_mib=1, reserve_gib=0)
SPEC = CaptureSpec((2, 4, 5), "float32", 16, "weights", "tokenizer", "template", "float32")


class FakeSource:
    """Random states, made from the row's id; it remembers what it was asked for."""

    def __init__(self, spec: CaptureSpec = SPEC, fail_at: str = "") -> None:
        self.spec = spec
        self.asked: list[str] = []
        self._fail_at = fail_at

    def capture(self, rows: Iterable[Row]) -> Generator[Record, None, None]:
        for row in rows:
            if row.row_id == self._fail_at:
                raise RuntimeError("the target died")
            self.asked.append(row.row_id)
            yield record_of(row, self.spec)


def record_of(row: Row, spec: CaptureSpec = SPEC) -> Record:
    generator = torch.Generator().manual_seed(int(row.row_id.removeprefix("row")))
    states = torch.randn(len(row.input_ids), len(spec.layers), spec.hidden_size, generator=generator)
    return Record(row.row_id, torch.tensor(row.input_ids), states.to(getattr(torch, spec.dtype)))


@pytest.fixture
def many_rows(make_rows: Callable[..., list[Row]]) -> list[Row]:
    return make_rows([600, 900, 30, 800, 1000, 5, 400, 2000, 1, 700] * 3)  # several shards of 1 MiB


@pytest.fixture
def built(tmp_path: Path, many_rows: list[Row]) -> Path:
    build_cache(FakeSource(), many_rows, tmp_path / "cache", CONFIG)
    return tmp_path / "cache"


def test_records_come_back_bit_for_bit_in_any_order(built: Path, many_rows: list[Row]) -> None:
    cache = Cache.open(built, SPEC)
    assert len(list(built.glob("*.safetensors"))) > 2 and len(cache) == len(many_rows)
    for row in reversed(many_rows):
        record, wanted = cache.read(row), record_of(row)
        assert torch.equal(record.states_TLH, wanted.states_TLH) and torch.equal(record.token_ids_T, wanted.token_ids_T)
    assert verify(built) == []


def test_a_real_target_is_cached_and_read_back(target: ResolvedTarget, rows: list[Row], tmp_path: Path) -> None:
    source = TransformersSource(target, (2,), "bfloat16")
    artefact = build_cache(source, rows, tmp_path / "cache", CONFIG)
    assert artefact.is_done and artefact.result["num_tokens"] == sum(len(row.input_ids) for row in rows)
    cache = Cache.open(tmp_path / "cache", source.spec)
    for row, fresh in zip(rows, source.capture(rows), strict=True):
        assert torch.equal(cache.read(row).states_TLH, fresh.states_TLH)


def test_a_finished_build_is_not_repeated_and_new_rows_are_added(
    built: Path, many_rows: list[Row], make_rows: Callable[..., list[Row]]
) -> None:
    source = FakeSource()
    before = build_cache(source, many_rows, built, CONFIG).fingerprint
    assert source.asked == []
    more = [*many_rows, *(row for row in make_rows([7] * 35) if row.row_id not in {r.row_id for r in many_rows})]
    assert build_cache(source, more, built, CONFIG).fingerprint != before
    assert source.asked == [row.row_id for row in more[len(many_rows) :]]
    assert verify(built) == []


def test_an_interrupted_build_keeps_its_records_and_is_continued(tmp_path: Path, many_rows: list[Row]) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(RuntimeError, match="the target died"):
        build_cache(FakeSource(fail_at="row17"), many_rows, folder, CONFIG)
    assert info(folder)["state"] == "running" and info(folder)["num_records"] == 17
    with pytest.raises(ValueError, match="a finished hidden_states stage is needed"):
        Cache.open(folder)
    source = FakeSource()
    build_cache(source, many_rows, folder, CONFIG)
    assert source.asked == [row.row_id for row in many_rows[17:]] and verify(folder) == []


def test_a_kill_between_shard_and_listing_loses_that_shard_only(built: Path, many_rows: list[Row]) -> None:
    last = max(built.glob("shard-*.json"))
    lost = list(json.loads(last.read_text())["records"])
    last.unlink()
    (built / ".shard-0000-000009.safetensors.abc.tmp").write_bytes(b"half a shard")
    assert [damage.row_id for damage in verify(built)] == lost
    source = FakeSource()
    build_cache(source, many_rows, built, CONFIG)
    assert source.asked == lost and verify(built) == []


# --- fault 13: zero, constant or NaN states, at write and at read ------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda states: states.zero_(), "layer 2 is constant"),
        (lambda states: states[:, 1].fill_(0.5), "layer 4 is constant"),
        (lambda states: states[3, 2, 7].fill_(torch.nan), "NaN or Inf"),
        (lambda states: states[-2:].zero_(), "the states of token 6 are all zero"),
    ],
)
def test_states_that_a_broken_capture_gives_are_refused_at_write_and_at_read(
    spoil: Callable[[torch.Tensor], object],
    words: str,
    tmp_path: Path,
    make_rows: Callable[..., list[Row]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = make_rows([8])
    record = record_of(row)
    spoil(record.states_TLH)
    cache = Cache.create(tmp_path / "cache", SPEC, CONFIG)
    with pytest.raises(ValueError, match=f"record row0: .*{words}"):
        cache.write(record, row)
    with monkeypatch.context() as patch:  # as if another program had written it
        patch.setattr("draftsmith.hidden_states.cache.check_record", lambda *_: None)
        cache.write(record, row)
    cache.flush()
    cache.finish(["row0"])
    with pytest.raises(ValueError, match=f"record row0: .*{words}"):
        Cache.open(tmp_path / "cache", SPEC).read(row)


# --- fault 14: states of another request, or fewer rows than tokens ----------------------------------------------


def test_states_of_another_request_or_of_fewer_tokens_are_refused(make_rows: Callable[..., list[Row]]) -> None:
    row, other = make_rows([8, 8])
    record = record_of(row)
    with pytest.raises(ValueError, match="its token ids are not those of the row"):
        check_record(dataclasses.replace(record, token_ids_T=torch.tensor(other.input_ids)), row, SPEC)
    with pytest.raises(ValueError, match=r"states are torch.float32 \(5, 3, 16\), expected float32 \(8, 3, 16\)"):
        check_record(dataclasses.replace(record, states_TLH=record.states_TLH[:5]), row, SPEC)
    with pytest.raises(ValueError, match="was given for row row1"):
        check_record(record, other, SPEC)


def test_a_cached_record_of_a_row_whose_tokens_have_changed_is_refused(built: Path, many_rows: list[Row]) -> None:
    changed = dataclasses.replace(many_rows[3], input_ids=tuple(reversed(many_rows[3].input_ids)))
    with pytest.raises(ValueError, match="record row3: its token ids are not those of the row"):
        Cache.open(built, SPEC).read(changed)


# --- fault 15: truncated files, flipped bytes, zeroed tails ------------------------------------------------------


def _place_of(folder: Path, row_id: str) -> tuple[Path, int, int]:
    """The shard of a record and where its states begin and end in the file."""
    shard = folder / Cache.open(folder)._entries[row_id].shard
    content = shard.read_bytes()
    header = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + header])[f"states/{row_id}"]["data_offsets"]
    return shard, 8 + header + start, 8 + header + end


def test_verify_names_the_record_with_a_flipped_byte(built: Path) -> None:
    shard, start, end = _place_of(built, "row12")
    content = bytearray(shard.read_bytes())
    content[(start + end) // 2] ^= 1
    shard.write_bytes(content)
    (damage,) = verify(built)
    assert (damage.row_id, damage.shard) == ("row12", shard.name) and "sha256 differs" in damage.problem


def test_verify_names_the_record_with_a_zeroed_tail(built: Path) -> None:
    shard, _, end = _place_of(built, "row7")
    content = bytearray(shard.read_bytes())
    content[end - 640 : end] = bytes(640)
    shard.write_bytes(content)
    assert [damage.row_id for damage in verify(built)] == ["row7"]


def test_verify_finds_a_flipped_byte_in_the_header(built: Path) -> None:
    shard = min(built.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    place = content.index(b'"states/row1"') + len(b'"states/row')
    content[place] = ord("9")
    shard.write_bytes(content)
    damages = verify(built)
    assert any(damage.shard == shard.name for damage in damages)


def test_verify_names_every_record_of_a_truncated_or_missing_shard(built: Path, many_rows: list[Row]) -> None:
    first, second, *_ = sorted(built.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    second.unlink()
    damages = verify(built)
    for shard in (first, second):
        held = set(json.loads(shard.with_suffix(".json").read_text())["records"])
        assert held <= {damage.row_id for damage in damages if damage.shard == shard.name}
    with pytest.raises(ValueError, match=r"record row0: .*shard-0000-000000\.safetensors cannot be read"):
        Cache.open(built).read(many_rows[0])


def test_evicting_damage_lets_the_next_build_repair_it(built: Path, many_rows: list[Row]) -> None:
    shard, start, _ = _place_of(built, "row12")
    content = bytearray(shard.read_bytes())
    content[start] ^= 1
    shard.write_bytes(content)
    lost = Cache.open(built).evict(verify(built))
    assert "row12" in lost
    source = FakeSource()
    build_cache(source, many_rows, built, CONFIG)
    assert source.asked == lost and verify(built) == []


# --- fault 16: a cache of other states ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("target_weights", "other", "spec.target_weights: was 'weights', wanted 'other'"),
        ("chat_template", "other", "spec.chat_template: was 'template', wanted 'other'"),
        ("tokenizer", "other", "spec.tokenizer"),
        ("layers", (1, 4, 5), r"spec.layers: was \[2, 4, 5\], wanted \[1, 4, 5\]"),
        ("dtype", "bfloat16", "spec.dtype: was 'float32', wanted 'bfloat16'"),
        ("target_dtype", "bfloat16", "spec.target_dtype"),
    ],
)
def test_a_cache_of_other_states_is_refused_naming_what_differs(
    field: str, value: object, words: str, built: Path, many_rows: list[Row]
) -> None:
    other = dataclasses.replace(SPEC, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        Cache.open(built, other)
    with pytest.raises(ValueError, match=words):
        build_cache(FakeSource(other), many_rows, built, CONFIG)
    assert verify(built) == []


# --- fault 17: the disk ------------------------------------------------------------------------------------------


def test_the_estimate_is_within_two_percent_of_the_bytes_on_disk(built: Path, many_rows: list[Row]) -> None:
    assert estimate(many_rows, SPEC) == pytest.approx(info(built)["bytes"], rel=0.02)


def test_a_build_that_does_not_fit_is_refused_with_the_figures_before_any_capture(
    tmp_path: Path, many_rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 << 20))
    source = FakeSource()
    with pytest.raises(ValueError, match=r"need 0.00 GiB in .*30 rows, 19308 tokens.*but 0.00 GiB are free.*online"):
        build_cache(source, many_rows, tmp_path / "cache", CONFIG)
    assert source.asked == []


def test_no_rows_and_repeated_row_ids_are_refused(tmp_path: Path, many_rows: list[Row]) -> None:
    with pytest.raises(ValueError, match="no rows to capture"):
        build_cache(FakeSource(), [], tmp_path / "empty", CONFIG)
    with pytest.raises(ValueError, match="1 rows have a row_id that occurred before"):
        build_cache(FakeSource(), [*many_rows, many_rows[0]], tmp_path / "twice", CONFIG)


def test_two_processes_write_into_one_cache(tmp_path: Path, many_rows: list[Row]) -> None:
    first = Cache.create(tmp_path / "cache", SPEC, CONFIG, rank=0)
    second = Cache.create(tmp_path / "cache", SPEC, CONFIG, rank=1)
    for index, row in enumerate(many_rows):
        (first, second)[index % 2].write(record_of(row), row)
    first.flush()
    second.flush()
    first.refresh()
    first.finish([row.row_id for row in many_rows])
    assert verify(tmp_path / "cache") == [] and len(Cache.open(tmp_path / "cache")) == len(many_rows)
