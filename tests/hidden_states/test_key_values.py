"""Keys and values: captured as the target's cache holds them, stored, read back, and refused where they are not its.

T tokens, E features of keys and values
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import keys_and_values, tiny_config, tiny_target

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget
from draftsmith.hidden_states.cache import Cache, CacheConfig, build_cache, estimate_bytes, verify
from draftsmith.hidden_states.key_values import kv_width
from draftsmith.hidden_states.record import CaptureSpec, Record, check_record
from draftsmith.hidden_states.stream import HiddenStatesConfig, open_stream, spec_for
from draftsmith.hidden_states.transformers_source import TransformersSource

KV_LAYERS = (2, 6)
CONFIG = CacheConfig(shard_mib=1, reserve_gib=0)


def resolved(folder: Path, kind: str) -> ResolvedTarget:
    return ResolvedTarget(f"tiny-{kind}", tiny_target(folder, kind), "weights", "tokenizer", "template", "float32")


@pytest.fixture
def target(tmp_path: Path) -> ResolvedTarget:
    return resolved(tmp_path / "target", "gemma4")


@pytest.mark.parametrize("batch_rows", [1, 3])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gemma4"])
def test_they_are_what_the_targets_cache_holds_and_change_no_state(
    kind: str, batch_rows: int, tmp_path: Path, rows: list[Row]
) -> None:
    target = resolved(tmp_path, kind)
    source = TransformersSource(target, (2,), "float32", batch_rows=batch_rows, kv_layers=KV_LAYERS)
    plain = TransformersSource(target, (2,), "float32", batch_rows=batch_rows)
    for row, record, other in zip(rows, source.capture(rows), plain.capture(rows), strict=True):
        check_record(record, row, source.spec)
        expected_TE = keys_and_values(target.path, row.input_ids, KV_LAYERS)
        assert record.kv_TE is not None and other.kv_TE is None
        torch.testing.assert_close(record.kv_TE, expected_TE, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(record.states_TLH, other.states_TLH, rtol=1e-4, atol=1e-4)


def test_they_are_stored_and_read_back_bit_for_bit_and_verified(
    target: ResolvedTarget, rows: list[Row], tmp_path: Path
) -> None:
    source = TransformersSource(target, (2,), "bfloat16", kv_layers=KV_LAYERS)
    folder = tmp_path / "cache"
    build_cache(source, rows, folder, CONFIG)
    cache = Cache.open(folder, source.spec)
    assert cache.spec == source.spec and cache.spec.kv_width == 2 * 64 + 2 * 64
    for row, fresh in zip(rows, source.capture(rows), strict=True):
        found = cache.read(row).kv_TE
        assert found is not None and fresh.kv_TE is not None
        assert found.dtype == torch.bfloat16 and torch.equal(found, fresh.kv_TE)
    assert verify(folder) == []
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size == pytest.approx(estimate_bytes(sum(len(r.input_ids) for r in rows), len(rows), source.spec), rel=0.05)
    (shard,) = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    at = data.index(fresh.kv_TE.view(torch.uint8).numpy().tobytes()[:64])
    data[at] ^= 1
    shard.write_bytes(bytes(data))
    assert [damage.row_id for damage in verify(folder)] == [rows[-1].row_id]


def test_a_spec_without_them_is_written_as_before_there_were_any(
    target: ResolvedTarget, rows: list[Row], tmp_path: Path
) -> None:
    """So that caches, and everything made from them, keep their keys."""
    source = TransformersSource(target, (2,), "float32")
    build_cache(source, rows, tmp_path / "cache", CONFIG)
    key = json.loads((tmp_path / "cache" / "manifest.json").read_text())["key"]["spec"]
    assert set(key) == {
        "layers",
        "dtype",
        "hidden_size",
        "target_weights",
        "tokenizer",
        "chat_template",
        "target_dtype",
        "norm",
    }
    assert CaptureSpec.of_json(key) == source.spec
    with pytest.raises(ValueError, match="kv_layers"):
        Cache.open(tmp_path / "cache", TransformersSource(target, (2,), "float32", kv_layers=KV_LAYERS).spec)


def test_a_stream_hands_them_to_training(target: ResolvedTarget, rows: list[Row], tmp_path: Path) -> None:
    config = HiddenStatesConfig(mode="online", dtype="float32", device="cpu")
    with open_stream(config, target, (2,), rows, tmp_path / "states", kv_layers=KV_LAYERS) as stream:
        for row, record in zip(rows, stream.records([row.row_id for row in rows]), strict=True):
            assert record.kv_TE is not None and record.kv_TE.shape == (len(row.input_ids), stream.spec.kv_width)


def test_a_source_that_cannot_give_them_is_refused_before_anything_runs(target: ResolvedTarget) -> None:
    with pytest.raises(ValueError, match=r"set hidden_states\.source to transformers"):
        spec_for(HiddenStatesConfig(source="vllm"), target, (2,), KV_LAYERS)


def test_layers_without_keys_of_their_own_are_refused_by_number() -> None:
    shared = tiny_config("gemma4", num_kv_shared_layers=3)
    assert kv_width(shared, (2, 3)) == 2 * 64 + 2 * 64
    with pytest.raises(ValueError, match="layer 6 has no keys and values of its own; layers 0 to 3 have"):
        kv_width(shared, (2, 6))
    with pytest.raises(ValueError, match="layer 7 has no keys"):
        kv_width(tiny_config("llama"), (7,))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda r: replace(r, kv_TE=None), "keys and values are missing"),
        (lambda r: replace(r, kv_TE=r.kv_TE[:, 1:]), r"expected float32 \(17, 6\)"),
        (lambda r: replace(r, kv_TE=r.kv_TE.bfloat16()), "bfloat16"),
        (lambda r: replace(r, kv_TE=r.kv_TE.index_fill(0, torch.tensor([3]), float("nan"))), "NaN or Inf"),
        (lambda r: replace(r, kv_TE=r.kv_TE.index_fill(0, torch.tensor([3]), 0.0)), "neither keys nor values"),
    ],
)
def test_a_record_whose_keys_and_values_cannot_be_the_rows_is_refused(
    spoil: Callable[[Record], Record], words: str, rows: list[Row]
) -> None:
    spec = CaptureSpec((2, 5), "float32", 16, "w", "t", "c", "float32", kv_layers=(1,), kv_width=6)
    states = torch.randn(17, 2, 16)
    record = Record(rows[0].row_id, torch.tensor(rows[0].input_ids), states, torch.randn(17, 6))
    check_record(record, rows[0], spec)
    with pytest.raises(ValueError, match=words):
        check_record(spoil(record), rows[0], spec)
    with pytest.raises(ValueError, match="not asked for"):
        check_record(record, rows[0], replace(spec, kv_layers=(), kv_width=0))
