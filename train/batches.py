"""Rows and their records -> windows of packed batches for one rank, in an order that seed and epoch fix; resumable.

    window    what one optimizer step trains on: `accumulation` micro steps on each of `world` ranks, one pack each
    pack      the rows of one packed batch, B = 1

        packs of an epoch      p0 p1 p2 p3 | p4 p5 p6        world 2, accumulation 2: two windows
        rank 0, micro 0 1      p0    p2      p4    p6
        rank 1, micro 0 1         p1    p3      p5    --     no pack left: None, a dummy takes its place in the engine

World 1 with accumulation 4 trains on the same windows: the number of processes does not change what a step sees.

    T tokens of the packed row, L captured layers, H target width
"""

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.data.packing import plan_packs
from draftsmith.data.rows import Row
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.models.batch import Batch
from draftsmith.train.config import TrainConfig

# Packed rows are padded to a multiple of this: few distinct shapes for kernels and allocators, little padding.
_LENGTH_MULTIPLE = 64


class Stream(Protocol):
    """Where records come from: hidden_states.stream.RecordStream, online, offline or hybrid."""

    @property
    def spec(self) -> CaptureSpec:
        """What the records hold."""

    def records(self, row_ids: Sequence[str]) -> Iterator[Record]:
        """The records of these rows, in this order."""


@dataclass(frozen=True)
class Position:
    """The next window to train on."""

    epoch: int = 0
    window: int = 0


@dataclass(frozen=True)
class Window:
    """One rank's part of an optimizer step. `row_ids` name the rows of each micro step, for error messages."""

    position: Position
    following: Position
    batches: tuple[Batch | None, ...]
    row_ids: tuple[tuple[str, ...], ...]
    num_tokens: int


class Plan:
    """Which rows go into which window. The same on all ranks, without communication."""

    def __init__(self, rows: Sequence[Row], config: TrainConfig, world: int) -> None:
        lengths = [len(row.input_ids) for row in rows]
        self.kept = [index for index, length in enumerate(lengths) if 0 < length <= config.tokens_per_batch]
        self.num_too_long = sum(length > config.tokens_per_batch for length in lengths)
        self.num_unsupervised = sum(
            length <= config.tokens_per_batch and not any(row.loss_mask)
            for row, length in zip(rows, lengths, strict=True)
        )
        if len(rows) == self.num_too_long + self.num_unsupervised:
            raise ValueError(
                f"no row can be trained on: of {len(lengths)} rows, {self.num_too_long} are longer than "
                f"train.tokens_per_batch ({config.tokens_per_batch}) and {self.num_unsupervised} "
                "have no token of the target"
            )
        self.packs_per_window = world * config.gradient_accumulation
        self._kept_lengths = [lengths[index] for index in self.kept]
        self._config = config

    def packs(self, epoch: int) -> list[list[int]]:
        """The packs of an epoch, as indices into the rows."""
        packs = plan_packs(self._kept_lengths, self._config.tokens_per_batch, self._config.seed, epoch)
        return [[self.kept[index] for index in pack] for pack in packs]

    def num_windows(self, epoch: int) -> int:
        """Optimizer steps in an epoch; the last one may be partial."""
        return -(-len(self.packs(epoch)) // self.packs_per_window)

    def total_steps(self) -> int | None:
        """Steps of the whole run by epochs and max_steps; None when only max_minutes ends it."""
        limits = [self._config.max_steps] if self._config.max_steps else []
        if self._config.epochs:
            limits.append(sum(self.num_windows(epoch) for epoch in range(self._config.epochs)))
        return min(limits) if limits else None


class Batches:
    """An iterator of windows for one rank, from a position on, read ahead by a thread. Close it when done early."""

    def __init__(
        self,
        plan: Plan,
        rows: Sequence[Row],
        stream: Stream,
        packer: "Packer",
        config: TrainConfig,
        rank: int,
        start: Position,
    ) -> None:
        world = plan.packs_per_window // config.gradient_accumulation
        self._windows = _windows(plan, rows, stream, packer, config, (rank, world), start)
        self._queue: queue.Queue[Window | BaseException | None] = queue.Queue(config.prefetch_windows)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Window]:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop reading ahead."""
        self._is_closed.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)

    def _read_ahead(self) -> None:
        last: BaseException | None = None
        try:
            for window in self._windows:
                self._put(window)
                if self._is_closed.is_set():
                    break
        except BaseException as error:
            last = error
        finally:
            self._windows.close()
        self._put(last)

    def _put(self, item: "Window | BaseException | None") -> None:
        while not self._is_closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue


def _windows(
    plan: Plan,
    rows: Sequence[Row],
    stream: Stream,
    packer: "Packer",
    config: TrainConfig,
    rank_and_world: tuple[int, int],
    start: Position,
) -> Generator[Window, None, None]:
    """Windows epoch after epoch; one pass over the stream per epoch, so that the stream can read ahead too."""
    rank, world = rank_and_world
    epoch, first = start.epoch, start.window
    while config.epochs is None or epoch < config.epochs:
        packs = plan.packs(epoch)
        num_windows = -(-len(packs) // plan.packs_per_window)
        size = plan.packs_per_window
        mine = [
            [packs[p] if p < len(packs) else None for p in range(w * size + rank, (w + 1) * size, world)]
            for w in range(first, num_windows)
        ]
        wanted = [rows[index].row_id for window in mine for pack in window if pack for index in pack]
        records = iter(stream.records(wanted)) if wanted else iter(())
        for offset, window in enumerate(mine):
            at = Position(epoch, first + offset)
            is_last = at.window + 1 == num_windows
            yield Window(
                position=at,
                following=Position(epoch + 1, 0) if is_last else Position(epoch, at.window + 1),
                batches=tuple(packer.pack([rows[i] for i in pack], records) if pack else None for pack in window),
                row_ids=tuple(tuple(rows[i].row_id for i in pack or ()) for pack in window),
                num_tokens=sum(len(rows[i].input_ids) for pack in window if pack for i in pack),
            )
        epoch, first = epoch + 1, 0


class Packer:
    """Rows and records -> one packed batch. It knows which captured layers the head wants."""

    def __init__(
        self, spec: CaptureSpec, aux_layers: tuple[int, ...], config: TrainConfig, kv_layers: tuple[int, ...] = ()
    ) -> None:
        missing = [layer for layer in aux_layers if layer not in spec.layers]
        if missing:
            raise ValueError(
                f"the head needs the target's layers {missing}, but the hidden states hold {list(spec.layers)}"
            )
        if kv_layers and kv_layers != spec.kv_layers:
            raise ValueError(
                f"the head needs the keys and values of the target's layers {list(kv_layers)}, but the hidden states "
                f"hold those of {list(spec.kv_layers)}"
            )
        self.aux_indices = [spec.layers.index(layer) for layer in sorted(aux_layers)]
        self._kv_width = spec.kv_width if kv_layers else None
        self.spec = spec
        self._max_tokens = config.tokens_per_batch
        self._dtype = torch.float32 if config.precision == "fp32" else None

    def pack(self, rows: Sequence[Row], records: Iterator[Record]) -> Batch:
        """Take the records of `rows` from the stream, side by side. Raises ValueError naming a wrong record."""
        return self.lay_out(rows, [_next_record(row, records) for row in rows])

    def lay_out(self, rows: Sequence[Row], records: Sequence[Record]) -> Batch:
        """One packed batch [1, T] on the CPU; padding has document id -1 and zero states."""
        used = sum(len(row.input_ids) for row in rows)
        length = min(-(-used // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, self._max_tokens)
        ids_T = torch.zeros(length, dtype=torch.int64)
        mask_T = torch.zeros(length, dtype=torch.bool)
        documents_T = torch.full((length,), -1, dtype=torch.int64)
        positions_T = torch.zeros(length, dtype=torch.int64)
        dtype = self._dtype or records[0].states_TLH.dtype
        states_TLH = torch.zeros(length, len(self.spec.layers), self.spec.hidden_size, dtype=dtype)
        kv_TE = None if self._kv_width is None else torch.zeros(length, self._kv_width, dtype=dtype)
        start = 0
        for document, (row, record) in enumerate(zip(rows, records, strict=True)):
            here = slice(start, start + len(row.input_ids))
            ids_T[here] = record.token_ids_T
            mask_T[here] = torch.tensor(row.loss_mask, dtype=torch.bool)
            documents_T[here] = document
            positions_T[here] = torch.arange(len(row.input_ids))
            states_TLH[here] = record.states_TLH
            if kv_TE is not None and record.kv_TE is not None:
                kv_TE[here] = record.kv_TE
            start = here.stop
        return self._batch(ids_T, mask_T, documents_T, positions_T, states_TLH, kv_TE)

    def dummy(self) -> Batch:
        """A supervised batch that stands in where a rank has none; the engine trains on it with weight 0.

        Supervised, so that the head takes its usual path: ranks then reduce the same gradients in the same order.
        """
        length = min(_LENGTH_MULTIPLE, self._max_tokens)
        zeros_T = torch.zeros(length, dtype=torch.int64)
        dtype = self._dtype or getattr(torch, self.spec.dtype)
        generator = torch.Generator().manual_seed(0)
        states_TLH = torch.randn(length, len(self.spec.layers), self.spec.hidden_size, generator=generator).to(dtype)
        kv_TE = None if self._kv_width is None else torch.randn(length, self._kv_width, generator=generator).to(dtype)
        ones_T = torch.ones(length, dtype=torch.bool)
        return self._batch(zeros_T, ones_T, zeros_T, torch.arange(length), states_TLH, kv_TE)

    def _batch(
        self,
        ids_T: Tensor,
        mask_T: Tensor,
        documents_T: Tensor,
        positions_T: Tensor,
        states_TLH: Tensor,
        kv_TE: Tensor | None,
    ) -> Batch:
        return Batch(
            input_ids_BT=ids_T[None],
            loss_mask_BT=mask_T[None],
            document_ids_BT=documents_T[None],
            position_ids_BT=positions_T[None],
            aux_BTF=states_TLH[:, self.aux_indices].flatten(1)[None],
            last_BTH=states_TLH[:, -1].contiguous()[None],
            kv_BTE=None if kv_TE is None else kv_TE[None],
        )


def _next_record(row: Row, records: Iterator[Record]) -> Record:
    record = next(records, None)
    if record is None:
        raise ValueError(
            f"the hidden states ended before row {row.row_id}; the stream owes one record for every row asked for"
        )
    if record.row_id != row.row_id or record.token_ids_T.tolist() != list(row.input_ids):
        raise ValueError(f"asked for the hidden states of row {row.row_id}, got row {record.row_id} or other token ids")
    if record.states_TLH.shape[0] != len(row.input_ids):
        raise ValueError(
            f"row {row.row_id} has {len(row.input_ids)} tokens, its record {record.states_TLH.shape[0]} states"
        )
    return record
