"""One iterator of records for training: offline, online and hybrid differ only here.

    offline   the cache was built before; every pass reads it
    online    every pass captures anew, a few rows ahead of training, and keeps nothing
    hybrid    the first pass captures and keeps, later passes read

All three give the same records for the same rows, bit for bit, as a source gives a row the same states whatever its
neighbours are (see transformers_source.py).
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from draftsmith.data.artefact import Artefact
from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget
from draftsmith.hidden_states.cache import (
    Cache,
    CacheConfig,
    build_cache,
    rank_of_process,
    refuse_without_space,
)
from draftsmith.hidden_states.record import CaptureSpec, Record, Source, check_record
from draftsmith.hidden_states.transformers_source import (
    StatesDtype,
    TransformersSource,
    capture_spec,
    text_config,
)
from draftsmith.hidden_states.vllm_server import ServerConfig, launch
from draftsmith.hidden_states.vllm_source import VllmClientConfig, VllmSource

# How long a blocked producer sleeps before it looks whether the consumer has gone.
_POLL_S = 0.2


class HiddenStatesConfig(BaseModel, extra="forbid", frozen=True):
    """How the target's states are captured and handed to training."""

    mode: Literal["offline", "online", "hybrid"] = Field(default="offline", description="see the top of stream.py")
    source: Literal["transformers", "vllm"] = Field(default="transformers", description="what runs the target")
    dtype: StatesDtype = Field(default="bfloat16", description="of the stored states, not of the target's run")
    device: str = Field(default="auto", description="transformers: where the target runs; auto = GPU if there is one")
    batch_rows: int = Field(default=1, ge=1, description="transformers: rows per forward pass; 1 is as fast on a CPU")
    prefetch_rows: int = Field(default=32, ge=1, description="records that are ready before training asks for them")
    cache: CacheConfig = CacheConfig()
    endpoints: tuple[str, ...] = Field(
        default=(), description="vllm: URLs of running extraction servers on this machine's disk; empty = launch one"
    )
    client: VllmClientConfig = VllmClientConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _refuse_unused_settings(self) -> "HiddenStatesConfig":
        unused = {"transformers": ("endpoints", "client"), "vllm": ("device", "batch_rows")}[self.source]
        for name in unused:
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"hidden_states.{name} is set but hidden_states.source is {self.source}, which does not use it; "
                    "remove it or change the source"
                )
        return self


class RecordStream:
    """Records for any sequence of row ids. Threads run only while an iterator of `records` is alive."""

    def __init__(
        self,
        config: HiddenStatesConfig,
        spec: CaptureSpec,
        rows: Sequence[Row],
        cache: Cache | None = None,
        source: Source | None = None,
        release_source: Callable[[], None] = lambda: None,
    ) -> None:
        assert cache is not None or source is not None, "a stream reads a cache, runs a source, or both"
        self.spec = spec
        self._config, self._cache, self._source = config, cache, source
        self._release_source = release_source
        self._rows = rows
        self._index = {row.row_id: index for index, row in enumerate(rows)}
        self._running: set[Generator[Record, None, None]] = set()

    def records(self, row_ids: Sequence[str]) -> Iterator[Record]:
        """The records of these rows, in this order, prepared ahead by a thread.

        Raises ValueError for an unknown or damaged record, naming it, and whatever the source raises.
        """
        unknown = [row_id for row_id in row_ids if row_id not in self._index]
        if unknown:
            raise ValueError(f"row {unknown[0]} is not one of the {len(self._rows)} rows of this stream")
        iterator = _prefetch(lambda: self._produce(row_ids), self._config.prefetch_rows)
        self._running.add(iterator)
        try:
            yield from iterator
        finally:
            iterator.close()
            self._running.discard(iterator)

    def close(self) -> None:
        """Stop every thread of this stream and put on disk what was captured."""
        for iterator in list(self._running):
            iterator.close()
        self._running.clear()

    def _produce(self, row_ids: Sequence[str]) -> Generator[Record, None, None]:
        if self._source is None:
            for row_id in row_ids:
                assert self._cache is not None
                yield self._cache.read(self._row(row_id))
        elif self._cache is None:
            with closing(self._source.capture(self._row(row_id) for row_id in row_ids)) as captured:
                for row_id, record in zip(row_ids, captured, strict=True):
                    check_record(record, self._row(row_id), self.spec)
                    yield record
        else:
            yield from self._read_or_capture(row_ids, self._cache, self._source)

    def _read_or_capture(self, row_ids: Sequence[str], cache: Cache, source: Source) -> Generator[Record, None, None]:
        cache.refresh()
        missing = list(dict.fromkeys(row_id for row_id in row_ids if row_id not in cache))
        wanted = set(missing)
        with closing(source.capture(self._row(row_id) for row_id in missing)) as captured:
            try:
                for row_id in row_ids:
                    row = self._row(row_id)
                    if row_id in wanted:
                        wanted.discard(row_id)
                        cache.write(next(captured), row)
                    yield cache.read(row)
            finally:
                cache.flush()
        if all(row_id in cache for row_id in self._index):
            cache.finish(list(self._index))
            self._source = None  # nothing is left to capture: free the target's memory, or stop its server
            self._release_source()

    def _row(self, row_id: str) -> Row:
        return self._rows[self._index[row_id]]


def build_states(
    config: HiddenStatesConfig,
    source: Source,
    rows: Sequence[Row],
    folder: Path,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Artefact | None:
    """The hidden-states stage: offline builds the cache, hybrid prepares it (and refuses a full disk), online does
    nothing. Returns the cache's artefact, if there is one."""
    if config.mode == "offline":
        return build_cache(source, rows, folder, config.cache, on_record)
    if config.mode == "hybrid":
        cache = Cache.create(folder, source.spec, config.cache)
        missing = [row for row in rows if row.row_id not in cache]
        refuse_without_space(folder, missing, source.spec, config.cache)
        return cache.artefact
    return None


@contextmanager
def open_source(
    config: HiddenStatesConfig,
    target: ResolvedTarget,
    layers: tuple[int, ...],
    folder: Path,
    endpoints: Sequence[str] = (),
    kv_layers: tuple[int, ...] = (),
) -> Generator[Source, None, None]:
    """The configured source of a target's states at these layers (and the last pre-norm one), and of these layers'
    keys and values. Raises ValueError when it cannot give those.

    `endpoints` are extraction servers that the caller has launched; else those of the config; else a server is
    launched for as long as the source is open, with its log under `folder`.
    """
    if config.source == "transformers":
        yield TransformersSource(target, layers, config.dtype, _device(config.device), config.batch_rows, kv_layers)
        return
    spec = spec_for(config, target, layers, kv_layers)
    urls = tuple(endpoints) or config.endpoints
    if urls:
        yield VllmSource(urls, spec, config.client)
        return
    with launch(target, config.server, folder / "vllm-extraction.log", capture_layers=spec.layers) as server:
        yield VllmSource((server.url,), spec, config.client)


@contextmanager
def open_stream(
    config: HiddenStatesConfig,
    target: ResolvedTarget,
    layers: tuple[int, ...],
    rows: Sequence[Row],
    folder: Path,
    endpoints: Sequence[str] = (),
    kv_layers: tuple[int, ...] = (),
) -> Generator[RecordStream, None, None]:
    """The stream of a run. `folder` is the cache's; in hybrid mode the target is loaded only while rows are missing.

    Raises ValueError when the cache is of another target, other layers or another dtype, or lacks rows.
    """
    spec = spec_for(config, target, layers, kv_layers)
    cache: Cache | None = None
    if config.mode == "offline":
        cache = Cache.open(folder, spec)
    elif config.mode == "hybrid":
        cache = Cache.create(folder, spec, config.cache, rank_of_process())
    lacking = [row.row_id for row in rows if cache is None or row.row_id not in cache]
    if config.mode == "offline" and lacking:
        raise ValueError(
            f"{folder} lacks {len(lacking)} of {len(rows)} rows, the first is {lacking[0]}. "
            "Run `draftsmith hidden-states build` again."
        )
    if not lacking:
        with closing(RecordStream(config, spec, rows, cache, None)) as stream:
            yield stream
        return
    with ExitStack() as opened:
        source = opened.enter_context(open_source(config, target, layers, folder.parent, endpoints, kv_layers))
        assert source.spec == spec, f"the source captures {source.spec}, the recipe wants {spec}"
        with closing(RecordStream(config, spec, rows, cache, source, opened.close)) as stream:
            del source  # the stream alone holds it, so that it can let it go
            yield stream


def spec_for(
    config: HiddenStatesConfig, target: ResolvedTarget, layers: tuple[int, ...], kv_layers: tuple[int, ...] = ()
) -> CaptureSpec:
    """The spec of a capture, from the target's config alone: nothing is loaded.

    Raises ValueError when the configured source cannot give the keys and values of `kv_layers`.
    """
    if kv_layers and config.source != "transformers":
        raise ValueError(
            f"hidden_states.source is {config.source}, but model.method also reads the target's keys and values, which "
            "only transformers gives; set hidden_states.source to transformers"
        )
    return capture_spec(target, layers, config.dtype, text_config(target), kv_layers)


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _prefetch(produce: Callable[[], Generator[Record, None, None]], depth: int) -> Generator[Record, None, None]:
    """Run a generator in a thread, at most `depth` records ahead. Its error is raised here, in the consumer."""
    ready: queue.Queue[Record | BaseException | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Record | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            with closing(produce()) as records:
                if all(put(record) for record in records):
                    put(None)
        except BaseException as error:  # whatever it is, the consumer must see it, or it would wait for ever
            put(error)

    thread = threading.Thread(target=run, name="hidden-states-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
