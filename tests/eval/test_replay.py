"""Replay from stored states gives the runtime's counts, number for number, and refuses what it cannot replay."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import capture, tiny_batch, tiny_head, tiny_kept_ids, tiny_target
from transformers import AutoModelForCausalLM

from draftsmith.data.rows import Row
from draftsmith.eval.decode import Decoded, Decoding, RunningTarget, decode
from draftsmith.eval.metrics import Counts
from draftsmith.eval.replay import Replayed, batches_of, make_probe, replay
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.models.target import FrozenTarget

LONGEST = 4
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [400, 3], [77, 88, 99], [21, 22]]


class StoredStates:
    """States captured by tests/tiny.py, as a stream."""

    def __init__(self, folder: Path, rows: Sequence[Row], aux_layers: tuple[int, ...]) -> None:
        layers = (*aux_layers, 7)
        self.spec = CaptureSpec(layers, "float32", 64, "w", "t", "c", "float32")
        self.rows = {row.row_id: row for row in rows}
        self.capture = partial(capture, folder, aux_layers=aux_layers)
        self.num_read = 0

    def records(self, row_ids: Sequence[str]) -> Iterator[Record]:
        for row_id in row_ids:
            self.num_read += 1
            ids = self.rows[row_id].input_ids
            aux_TF, last_TH = self.capture(ids)
            states = torch.cat([aux_TF, last_TH], dim=1).view(len(ids), -1, 64)
            yield Record(row_id, torch.tensor(ids), states)


def answers_of(model: object, head: object, num_tokens: int, stops: Sequence[int]) -> list[Decoded]:
    wanted = Decoding(20, frozenset(stops), num_tokens)
    with RunningTarget(model, (2, 3, 4)) as target:
        return decode(target, head, PROMPTS, wanted).answers  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[None, 200], ids=["full", "trimmed"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A target, its greedy rows, and a head that was fitted to them, so that it is often right and often wrong."""
    folder = tiny_target(tmp_path_factory.mktemp("target"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    frozen = FrozenTarget.load(folder, torch.float32)
    with RunningTarget(model) as target:
        plain = decode(target, None, PROMPTS, Decoding(20, frozenset(), 0)).answers
    stop = plain[2].token_ids[11]
    rows = []
    for index, (prompt, answer) in enumerate(zip(PROMPTS, plain, strict=True)):
        ids = answer.token_ids
        ids = ids[: ids.index(stop) + 1] if stop in ids else ids
        mask = [False] * len(prompt) + [True] * len(ids)
        rows.append(Row(f"row{index}", f"c{index}", "ab"[index % 2], (*prompt, *ids), tuple(mask)))
    kept_ids = None if request.param is None else tiny_kept_ids(request.param)
    head = tiny_head("eagle3", frozen, kept_ids=kept_ids)
    batch = tiny_batch(folder, [rows], (2, 3, 4))
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-3)
    for _ in range(25):
        terms, _ = head.loss(batch)
        sum(term.sum for term in terms.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return folder, model, frozen, head, rows, stop


def test_replay_equals_the_runtimes_clipped_counts_for_every_length(scene) -> None:  # type: ignore[no-untyped-def]
    folder, model, _, head, rows, stop = scene
    stream = StoredStates(folder, rows, (2, 3, 4))
    found = {row.row_id: row for row in replay(head, batches_of(rows, stream, (2, 3, 4)), LONGEST)}
    accepted = 0
    for n in range(1, LONGEST + 1):
        answers = answers_of(model, head, n, (stop,))
        for row, answer in zip(rows, answers, strict=True):
            assert tuple(answer.token_ids) == row.input_ids[-len(answer.token_ids) :]
            clipped = [min(pair) for pair in zip(answer.accepted, answer.emitted, strict=True)]
            expected = Counts.of_rounds([n] * len(clipped), clipped, n)
            assert found[row.row_id].by_length[n - 1] == expected
            accepted += expected.accepted
    rounds = sum(row.by_length[-1].rounds for row in found.values())
    assert accepted > 10 and rounds > 15, "the head must be sometimes right and sometimes wrong"


def test_a_row_of_two_answers_counts_as_two_generations(scene) -> None:  # type: ignore[no-untyped-def]
    folder, _, _, head, rows, _ = scene
    first = rows[0]
    mask = list(first.loss_mask)
    mask[9] = False  # a template's token between two answers
    split = Row("split", "c", "a", first.input_ids, tuple(mask))
    (found,) = replay(head, batches_of([split], StoredStates(folder, [split], (2, 3, 4)), (2, 3, 4)), 2)
    shorter = Row("short", "c", "a", first.input_ids[:9], first.loss_mask[:9])
    (begin,) = replay(head, batches_of([shorter], StoredStates(folder, [shorter], (2, 3, 4)), (2, 3, 4)), 2)
    late = tuple(position > 9 for position in range(len(mask)))
    (end,) = replay(
        head,
        batches_of(
            [late_row := Row("late", "c", "a", first.input_ids, late)],
            StoredStates(folder, [late_row], (2, 3, 4)),
            (2, 3, 4),
        ),
        2,
    )
    assert found.by_length[1] == Counts.total([begin.by_length[1], end.by_length[1]])


def test_the_probe_reports_every_length_and_reads_the_states_once(scene) -> None:  # type: ignore[no-untyped-def]
    folder, _, frozen, head, rows, _ = scene
    stream = StoredStates(folder, rows, (2, 3, 4))
    probe = make_probe(rows, stream, frozen, LONGEST)
    head.train()
    figures = probe(head)
    assert head.training, "the probe must leave the mode as it was"
    assert probe(head) == figures and stream.num_read == len(rows)
    assert set(figures) == {"mal", "acceptance_rate", "mal@1", "mal@2", "mal@3", "mal@4"}
    assert 1 < figures["mal@1"] <= figures["mal@2"] <= figures["mal"] == figures["mal@4"]


def test_what_cannot_be_replayed_is_refused(scene) -> None:  # type: ignore[no-untyped-def]
    folder, _, frozen, head, rows, _ = scene
    stream = StoredStates(folder, rows, (2, 3, 4))
    one = Row("one", "c", "a", (5, 6), (False, True))
    with pytest.raises(ValueError, match="answers have at least two tokens"):
        make_probe([one], stream, frozen, 2)
    with pytest.raises(ValueError, match=r"needs the target's layers \[1\], the states hold \[2, 3, 4, 7\]"):
        list(batches_of(rows, stream, (1, 2)))
    bare = Row("bare", "c", "a", (5, 6, 7), (True, True, True))
    with pytest.raises(ValueError, match="row bare begins with an answer"):
        replay(head, batches_of([bare], StoredStates(folder, [bare], (2, 3, 4)), (2, 3, 4)), 2)


def test_a_row_whose_answer_is_one_token_has_no_round(scene) -> None:  # type: ignore[no-untyped-def]
    folder, _, _, head, _, _ = scene
    one = Row("one", "c", "a", (5, 6), (False, True))
    found: list[Replayed] = replay(head, batches_of([one], StoredStates(folder, [one], (2, 3, 4)), (2, 3, 4)), 2)
    assert found[0].by_length[1].rounds == 0 and found[0].by_length[1].mal is None
