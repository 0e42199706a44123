"""Exact greedy acceptance from stored target states, for every proposal length at once, without running the target.

    T tokens of a row, N drafted tokens, p the position of a round's bonus token

        row       x0 x1 x2 | x3 x4 x5 x6 x7      x3..x7 were generated greedily
        round     p = 3: the head sees states 0..2 and token x3, drafts for x4, x5, ...; a = equal prefix
        next      p += min(a, N) + 1             until p is the last token of the answer

The target's greedy choices *are* the row, so a draft is accepted exactly where it equals the row: the counts equal the
runtime's clipped ones (`min(accepted, emitted)`), number for number. On sampled rows they are an estimate only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftsmith.data.packing import plan_packs
from draftsmith.data.rows import Row
from draftsmith.eval.metrics import Counts
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.models.batch import Batch
from draftsmith.models.target import FrozenTarget

# Packed length; longer rows get a batch of their own. The draft's activations are small beside the target's.
_PACK_TOKENS = 2048
# States up to this size are kept between two probes of a training run.
_KEPT_BYTES = 2 * 1024**3


class Stream(Protocol):
    """What replay wants of a record stream."""

    spec: CaptureSpec

    def records(self, row_ids: Sequence[str]) -> Iterator[Record]: ...


@dataclass(frozen=True)
class Replayed:
    """One row's counts, for proposal lengths 1..n."""

    row_id: str
    conversation_id: str
    source: str
    by_length: tuple[Counts, ...]  # of N = 1, 2, ..., n


def replay(head: Any, batches: Iterable[tuple[Sequence[Row], Batch]], num_tokens: int) -> list[Replayed]:
    """The counts of every row. The head's drafts for N must be the first N of its drafts for `num_tokens`."""
    device = next(head.parameters()).device
    was_training = head.training
    head.eval()
    replayed = []
    try:
        with torch.no_grad():
            for rows, batch in batches:
                drafted_TN = head.propose(batch.to(device), num_tokens)[0].cpu()
                start = 0
                for row in rows:
                    end = start + len(row.input_ids)
                    replayed.append(_replay_row(row, drafted_TN[start:end]))
                    start = end
    finally:
        head.train(was_training)
    return replayed


def make_probe(
    rows: Sequence[Row], stream: Stream, frozen: FrozenTarget, num_tokens: int
) -> Callable[[nn.Module], dict[str, float]]:
    """A probe for training: head -> {"mal": at num_tokens, "mal@1": ..., "acceptance_rate": ...} on these rows.

    Raises ValueError at once when no row holds an answer of two tokens, from which nothing can be measured.
    """
    if not any(end > first for row in rows for first, end in _answers(row)):
        raise ValueError("the acceptance probe needs held-out rows whose answers have at least two tokens")
    features = len(stream.spec.layers) * frozen.hidden_size + stream.spec.kv_width
    size = sum(len(row.input_ids) for row in rows) * features * 4
    kept: list[tuple[Sequence[Row], Batch]] = []

    def probe(module: nn.Module) -> dict[str, float]:
        head: Any = module
        if size <= _KEPT_BYTES:
            kept[:] = kept or list(batches_of(rows, stream, head.needs.aux_layers, head.needs.kv_layers))
        batches = kept or batches_of(rows, stream, head.needs.aux_layers, head.needs.kv_layers)
        found = replay(head, batches, num_tokens)
        totals = [Counts.total([row.by_length[n] for row in found]) for n in range(num_tokens)]
        figures = {f"mal@{n + 1}": float(total.mal or 1.0) for n, total in enumerate(totals)}
        last = totals[-1]
        return {"mal": figures[f"mal@{num_tokens}"], "acceptance_rate": last.accepted / last.drafted, **figures}

    return probe


def batches_of(
    rows: Sequence[Row], stream: Stream, aux_layers: Sequence[int], kv_layers: tuple[int, ...] = ()
) -> Iterator[tuple[Sequence[Row], Batch]]:
    """Rows and their stored states, packed into batches of one packed row each."""
    missing = [layer for layer in aux_layers if layer not in stream.spec.layers]
    if missing:
        raise ValueError(f"the head needs the target's layers {missing}, the states hold {list(stream.spec.layers)}")
    if kv_layers and kv_layers != stream.spec.kv_layers:
        raise ValueError(
            f"the head needs the keys and values of the target's layers {list(kv_layers)}, the states hold those of "
            f"{list(stream.spec.kv_layers)}"
        )
    places = [stream.spec.layers.index(layer) for layer in sorted(aux_layers)]
    lengths = [len(row.input_ids) for row in rows]
    longest = max(_PACK_TOKENS, *lengths)
    packs = [sorted(pack) for pack in plan_packs(lengths, longest, seed=0, epoch=0)]
    records = iter(stream.records([rows[index].row_id for pack in packs for index in pack]))
    for pack in packs:
        chosen = [rows[index] for index in pack]
        yield chosen, _lay_out(chosen, [next(records) for _ in pack], places)


def _lay_out(rows: Sequence[Row], records: Sequence[Record], places: Sequence[int]) -> Batch:
    for row, record in zip(rows, records, strict=True):
        if record.row_id != row.row_id or record.token_ids_T.tolist() != list(row.input_ids):
            raise ValueError(f"asked for the states of row {row.row_id}, got row {record.row_id} or other token ids")
    lengths = [len(row.input_ids) for row in rows]
    states_TLH = torch.cat([record.states_TLH for record in records])
    kv = [record.kv_TE for record in records if record.kv_TE is not None]
    return Batch(
        input_ids_BT=torch.cat([record.token_ids_T for record in records])[None],
        loss_mask_BT=torch.tensor([bit for row in rows for bit in row.loss_mask])[None],
        document_ids_BT=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))[None],
        position_ids_BT=torch.cat([torch.arange(length) for length in lengths])[None],
        aux_BTF=states_TLH[:, list(places)].flatten(1)[None],
        last_BTH=states_TLH[:, -1][None],
        kv_BTE=torch.cat(kv)[None] if kv else None,
    )


def _replay_row(row: Row, drafted_TN: Tensor) -> Replayed:
    """Walk every answer of a row once for each proposal length."""
    num_tokens = drafted_TN.shape[1]
    walked: list[list[int]] = [[] for _ in range(num_tokens)]
    for first, end in _answers(row):
        if first == 0:
            raise ValueError(f"row {row.row_id} begins with an answer; a round needs at least one token before it")
        matched = _matched_prefixes(row, drafted_TN, first, end)
        for n in range(num_tokens):
            at = first
            while at < end:
                accepted = min(matched[at - first], n + 1)
                walked[n].append(accepted)
                at += accepted + 1
    counts = tuple(Counts.of_rounds([n + 1] * len(accepted), accepted, n + 1) for n, accepted in enumerate(walked))
    return Replayed(row.row_id, row.conversation_id, row.source, counts)


def _matched_prefixes(row: Row, drafted_TN: Tensor, first: int, end: int) -> list[int]:
    """For every bonus position first..end-1: how many drafts equal the tokens that follow it, up to position `end`."""
    following = torch.full((end - first, drafted_TN.shape[1]), -1)
    ids_T = torch.tensor(row.input_ids)
    for i in range(min(drafted_TN.shape[1], end - first)):
        following[: end - first - i, i] = ids_T[first + 1 + i : end + 1]
    # The draft for bonus position p stands at row p-1, which sees states 0..p-1 and token p.
    return (drafted_TN[first - 1 : end - 1] == following).long().cumprod(1).sum(1).tolist()


def _answers(row: Row) -> Iterator[tuple[int, int]]:
    """First and last position of every run of generated tokens."""
    first = None
    for position, is_generated in enumerate((*row.loss_mask, False)):
        if is_generated and first is None:
            first = position
        elif not is_generated and first is not None:
            yield first, position - 1
            first = None
