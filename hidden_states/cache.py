"""Records on disk: written in sharded safetensors, found by row id, verified by checksum, bound to one CaptureSpec.

    hidden_states/
      manifest.json               data/artefact.py; its key is the spec: a cache of other states is refused by name
      rows.json                   the row ids of the finished cache, so that a lost record can be named
      shard-0000-000000.safetensors   about `shard_mib` of records: `states/ROW` [T, L, H] and `token_ids/ROW` [T],
                              and `kv/ROW` [T, E] where the spec has keys and values
      shard-0000-000000.json      what the shard holds: sha256 and length per record, sha256 and size of the file

A shard is renamed into place before its .json, and only the .json makes it part of the cache: a kill leaves at most an
unlisted shard, which is overwritten. Several processes may write: each has its own shard numbers (the first four
digits are the rank).
"""

import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.artefact import Artefact, fingerprint, read_artefact, write_atomically
from draftsmith.data.rows import Row
from draftsmith.hidden_states.record import CaptureSpec, Record, Source, check_record

STAGE = "hidden_states"
ROW_LIST = "rows.json"
_MIB = 1 << 20
_GIB = 1 << 30
# Index entry, safetensors header and token ids of a record besides its states; measured at 300-450 bytes + 8 a token.
_RECORD_OVERHEAD_BYTES = 512
# Open memory maps per reader. Each costs address space and a file descriptor, not memory.
_OPEN_SHARDS = 64


class CacheConfig(BaseModel, extra="forbid", frozen=True):
    """How records are stored."""

    shard_mib: int = Field(default=64, gt=0, description="size at which a shard is closed; a kill loses one open shard")
    reserve_gib: float = Field(default=1.0, ge=0, description="disk space that must stay free after the build")


@dataclass(frozen=True)
class Entry:
    """Where a record is and what it must be."""

    shard: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class Damage:
    """One finding of `verify`."""

    row_id: str  # empty where it is the shard as a whole
    shard: str
    problem: str

    def __str__(self) -> str:
        return f"{f'record {self.row_id}' if self.row_id else 'shard'} ({self.shard or 'no shard'}): {self.problem}"


class Cache:
    """A cache of one spec, for reading and writing. `Cache.open` to read; `Cache.create` to write or continue."""

    def __init__(self, artefact: Artefact, config: CacheConfig, rank: int = 0) -> None:
        self.artefact = artefact
        self.folder = artefact.folder
        self.spec = spec_of(artefact)
        self.config = config
        self._rank = rank
        self._entries: dict[str, Entry] = {}
        self._listed: set[str] = set()
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._pending: dict[str, Record] = {}
        self._pending_bytes = 0
        self.refresh()

    @classmethod
    def create(cls, folder: Path, spec: CaptureSpec, config: CacheConfig, rank: int = 0) -> "Cache":
        """Start or continue the cache of exactly this spec. Raises ValueError naming what differs otherwise."""
        return cls(Artefact.open(folder, STAGE, {"spec": spec.to_json()}), config, rank)

    @classmethod
    def open(cls, folder: Path, spec: CaptureSpec | None = None) -> "Cache":
        """Open a finished cache for reading; with a spec, only if it holds exactly that."""
        artefact = read_artefact(folder, STAGE)
        if spec is not None:
            artefact = Artefact.open(folder, STAGE, {"spec": spec.to_json()})
        return cls(artefact, CacheConfig())

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._entries or row_id in self._pending

    def __len__(self) -> int:
        return len(self._entries) + len(self._pending)

    @property
    def row_ids(self) -> list[str]:
        """Every row the cache holds, in the order in which they were written."""
        return [*self._entries, *self._pending]

    def refresh(self) -> None:
        """Take in the shards that other processes have finished since."""
        for index in sorted(self.folder.glob("shard-*.json")):
            if index.name not in self._listed:
                self._take_in(_read_listing(index))
                self._listed.add(index.name)

    def write(self, record: Record, row: Row) -> None:
        """Check and keep a record; it is on disk when its shard is full, or after `flush`."""
        check_record(record, row, self.spec)
        if record.row_id in self:
            raise ValueError(f"record {record.row_id} is already in {self.folder}; row ids must be unique")
        self._pending[record.row_id] = record
        self._pending_bytes += record.num_bytes()
        if self._pending_bytes >= self.config.shard_mib * _MIB:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard, atomically."""
        if not self._pending:
            return
        number = 1 + max((int(name[11:17]) for name in self._listed if name[6:10] == f"{self._rank:04d}"), default=-1)
        path = self.folder / f"shard-{self._rank:04d}-{number:06d}.safetensors"
        listing = _write_shard(path, self._pending)
        self._take_in(listing)
        self._listed.add(path.with_suffix(".json").name)
        self._pending, self._pending_bytes = {}, 0

    def read(self, row: Row) -> Record:
        """The record of a row, memory-mapped. Raises ValueError naming the record when it cannot be that row's."""
        if row.row_id in self._pending:
            return self._pending[row.row_id]
        if row.row_id not in self._entries:
            raise ValueError(f"record {row.row_id} is not in {self.folder}; run `draftsmith hidden-states build`")
        shard = self._entries[row.row_id].shard
        try:
            file = self._shard(shard)
            names = ("token_ids", "states", "kv") if self.spec.kv_layers else ("token_ids", "states")
            record = Record(row.row_id, *(file.get_tensor(f"{name}/{row.row_id}") for name in names))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"record {row.row_id}: {self.folder / shard} cannot be read ({error}). "
                "Run `draftsmith hidden-states verify` and build again."
            ) from error
        check_record(record, row, self.spec)
        return record

    def capture(self, rows: Iterable[Row]) -> Generator[Record, None, None]:
        """A cache is itself a `record.Source`, so that the parity check runs on stored records as on fresh ones."""
        for row in rows:
            yield self.read(row)

    def finish(self, row_ids: Sequence[str]) -> None:
        """Mark the cache done, as holding these rows (all must be on disk)."""
        missing = [row_id for row_id in row_ids if row_id not in self._entries]
        assert not missing, f"{len(missing)} records are not written, the first is {missing[0]}"
        write_atomically(self.folder / ROW_LIST, json.dumps(list(row_ids)))
        tokens = sum(self._entries[row_id].num_tokens for row_id in row_ids)
        rows = fingerprint(sorted(row_ids))
        self.artefact.finish({"num_records": len(row_ids), "num_tokens": tokens, "rows": rows})

    def evict(self, damages: Iterable[Damage]) -> list[str]:
        """Delete the shards in which `verify` found damage. Returns the rows lost; the next build captures them."""
        shards = {damage.shard for damage in damages if damage.shard}
        lost = [row_id for row_id, entry in self._entries.items() if entry.shard in shards]
        for shard in shards:
            self._files.pop(shard, None)
            index = (self.folder / shard).with_suffix(".json")
            index.unlink(missing_ok=True)  # first: a shard that nothing lists is no part of the cache
            (self.folder / shard).unlink(missing_ok=True)
            self._listed.discard(index.name)
        for row_id in lost:
            del self._entries[row_id]
        return lost

    def _take_in(self, listing: dict[str, Any]) -> None:
        for row_id, entry in listing["records"].items():
            self._entries[row_id] = Entry(listing["shard"], entry["num_tokens"], entry["sha256"])

    def _shard(self, name: str) -> Any:
        if name in self._files:
            self._files.move_to_end(name)
        else:
            self._files[name] = safe_open(self.folder / name, "pt")
            if len(self._files) > _OPEN_SHARDS:
                self._files.popitem(last=False)
        return self._files[name]


def build_cache(
    source: Source,
    rows: Sequence[Row],
    folder: Path,
    config: CacheConfig,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Artefact:
    """Capture every row that the cache does not hold yet. `on_record` is told of each, for a progress bar.

    Raises ValueError before any capture when the disk is too small, and when the folder holds another spec.
    """
    cache = Cache.create(folder, source.spec, config)
    row_ids = [row.row_id for row in rows]
    if len(set(row_ids)) != len(row_ids):
        repeated = len(row_ids) - len(set(row_ids))
        raise ValueError(f"{repeated} rows have a row_id that occurred before; a record belongs to exactly one row")
    if not rows:
        raise ValueError("there are no rows to capture; the rows stage produced nothing")
    missing = [row for row in rows if row.row_id not in cache]
    if not missing and cache.artefact.is_done and set(_read_row_list(folder)) == set(row_ids):
        return cache.artefact
    refuse_without_space(folder, missing, source.spec, config)
    with closing(source.capture(missing)) as captured:
        try:
            for row, record in zip(missing, captured, strict=True):
                cache.write(record, row)
                on_record(record)
        finally:
            cache.flush()  # an interrupted build keeps what it has
    cache.finish(row_ids)
    return cache.artefact


def estimate(rows: Iterable[Row], spec: CaptureSpec) -> int:
    """Bytes on disk of a cache of these rows."""
    lengths = [len(row.input_ids) for row in rows]
    return estimate_bytes(sum(lengths), len(lengths), spec)


def estimate_bytes(num_tokens: int, num_rows: int, spec: CaptureSpec) -> int:
    """Bytes on disk of a cache of this many tokens in this many rows."""
    state_bytes = 2 if spec.dtype == "bfloat16" else 4
    features = len(spec.layers) * spec.hidden_size + spec.kv_width
    return num_tokens * (features * state_bytes + 8) + num_rows * _RECORD_OVERHEAD_BYTES


def refuse_without_space(folder: Path, rows: Sequence[Row], spec: CaptureSpec, config: CacheConfig) -> None:
    """Raise ValueError with the figures when the cache of these rows does not fit on the disk (fault 17)."""
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    free, needed = shutil.disk_usage(existing).free, estimate(rows, spec)
    if needed + config.reserve_gib * _GIB > free:
        tokens = sum(len(row.input_ids) for row in rows)
        raise ValueError(
            f"the hidden states need {needed / _GIB:.2f} GiB in {folder} ({len(rows)} rows, {tokens} tokens, "
            f"{len(spec.layers)} layers of {spec.hidden_size} in {spec.dtype}), but {free / _GIB:.2f} GiB are free and "
            f"hidden_states.cache.reserve_gib keeps {config.reserve_gib:.2f}. Use hidden_states.mode: online (stores "
            "nothing), hidden_states.dtype: bfloat16, fewer rows, or an output_dir on a larger disk."
        )


def info(folder: Path) -> dict[str, Any]:
    """What a cache holds, for people: state, spec, counts and sizes. Also of an unfinished cache."""
    cache = _open_any(folder)
    return {
        "state": cache.artefact.manifest["state"],
        "num_records": len(cache),
        "num_tokens": sum(entry.num_tokens for entry in cache._entries.values()),
        "num_shards": len(cache._listed),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "spec": cache.spec.to_json(),
    }


def verify(folder: Path) -> list[Damage]:
    """Read every byte of a cache. Empty when all is well; else each damaged or missing record, by name."""
    cache = _open_any(folder)
    damages = [damage for name in sorted(cache._listed) for damage in _verify_shard(folder, name)]
    if cache.artefact.is_done:
        lost = [row_id for row_id in _read_row_list(folder) if row_id not in cache]
        damages += [Damage(row_id, "", "missing: no shard lists it") for row_id in lost]
    return damages


def spec_of(artefact: Artefact) -> CaptureSpec:
    """The spec that a cache's manifest names as its key."""
    return CaptureSpec.of_json(artefact.manifest["key"]["spec"])


def _open_any(folder: Path) -> Cache:
    """Open a cache in whatever state it is."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise ValueError(f"{folder} holds no hidden states (no manifest.json); run `draftsmith hidden-states build`")
    key = json.loads(manifest.read_text()).get("key")
    return Cache(Artefact.open(folder, STAGE, key), CacheConfig())


def _write_shard(path: Path, records: dict[str, Record]) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    for row_id, record in records.items():
        tensors[f"states/{row_id}"] = record.states_TLH.contiguous()
        tensors[f"token_ids/{row_id}"] = record.token_ids_T.contiguous()
        if record.kv_TE is not None:
            tensors[f"kv/{row_id}"] = record.kv_TE.contiguous()
    written: dict[str, Any] = {}

    def write(temporary: Path) -> None:
        save_file(tensors, temporary)
        written["bytes"], written["sha256"] = temporary.stat().st_size, _file_sha256(temporary)

    write_atomically(path, write)
    listing = (
        {"shard": path.name}
        | written
        | {
            "records": {
                row_id: {
                    "num_tokens": len(record.token_ids_T),
                    "sha256": _sha256(record.token_ids_T, record.states_TLH, record.kv_TE),
                }
                for row_id, record in records.items()
            }
        }
    )
    write_atomically(path.with_suffix(".json"), json.dumps(listing))
    return listing


def _read_listing(index: Path) -> dict[str, Any]:
    try:
        listing: dict[str, Any] = json.loads(index.read_text())
        assert re.fullmatch(r"shard-\d{4}-\d{6}\.safetensors", listing["shard"]) and listing["records"] is not None
    except (ValueError, KeyError, AssertionError) as error:
        raise ValueError(f"{index} is damaged ({error!r}). Delete it and build again.") from error
    return listing


def _read_row_list(folder: Path) -> list[str]:
    path = folder / ROW_LIST
    row_ids: list[str] = json.loads(path.read_text()) if path.is_file() else []
    return row_ids


def _verify_shard(folder: Path, index_name: str) -> Iterator[Damage]:
    listing = _read_listing(folder / index_name)
    shard, records = listing["shard"], listing["records"]
    path = folder / shard
    if not path.is_file():
        yield from (Damage(row_id, shard, "missing: the shard is gone") for row_id in records)
        return
    size = path.stat().st_size
    if size != listing["bytes"]:
        yield Damage("", shard, f"the file has {size} bytes, {listing['bytes']} were written")
    try:
        file: Any = safe_open(path, "pt")
        held = set(file.keys())
    except (SafetensorError, OSError) as error:
        yield from (Damage(row_id, shard, f"unreadable: {error}") for row_id in records)
        return
    any_damaged = size != listing["bytes"]
    for row_id, entry in records.items():
        names = [f"{name}/{row_id}" for name in ("token_ids", "states", "kv")]
        if not set(names[:2]) <= held:
            problem = "missing: the shard does not hold it"
        elif _sha256(*(file.get_tensor(name) for name in names if name in held)) != entry["sha256"]:
            problem = "its bytes have changed since they were written (sha256 differs)"
        else:
            continue
        any_damaged = True
        yield Damage(row_id, shard, problem)
    if not any_damaged and _file_sha256(path) != listing["sha256"]:
        yield Damage("", shard, "bytes outside the records have changed since they were written (sha256 differs)")


def _sha256(*tensors: Tensor | None) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rank_of_process() -> int:
    """This process's rank under accelerate, DeepSpeed or torchrun, all of which set RANK."""
    return int(os.environ.get("RANK", "0"))
