"""Replay from stored states gives the runtime's counts, number for number, and refuses what it cannot replay."""

import pytest
from fitted_head import AUX_LAYERS, MAX_NEW_TOKENS, PROMPTS, Scene, StoredStates, make_scene

from draftsmith.data.rows import Row
from draftsmith.eval.decode import Decoded, Decoding, RunningTarget, decode
from draftsmith.eval.metrics import Counts
from draftsmith.eval.replay import Replayed, batches_of, make_probe, replay

LONGEST = 4


def answers_of(scene: Scene, num_tokens: int) -> list[Decoded]:
    wanted = Decoding(MAX_NEW_TOKENS, frozenset([scene.stop_id]), num_tokens)
    with RunningTarget(scene.model, AUX_LAYERS) as target:
        return decode(target, scene.head, PROMPTS, wanted).answers


@pytest.fixture(scope="module", params=[None, 200], ids=["full", "trimmed"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("target"), request.param)


def test_replay_equals_the_runtimes_clipped_counts_for_every_length(scene: Scene) -> None:
    stream = StoredStates(scene.folder, scene.rows)
    found = {row.row_id: row for row in replay(scene.head, batches_of(scene.rows, stream, AUX_LAYERS), LONGEST)}
    accepted = 0
    for n in range(1, LONGEST + 1):
        answers = answers_of(scene, n)
        for row, answer in zip(scene.rows, answers, strict=True):
            assert tuple(answer.token_ids) == row.input_ids[-len(answer.token_ids) :]
            clipped = [min(pair) for pair in zip(answer.accepted, answer.emitted, strict=True)]
            expected = Counts.of_rounds([n] * len(clipped), clipped, n)
            assert found[row.row_id].by_length[n - 1] == expected
            accepted += expected.accepted
    rounds = sum(row.by_length[-1].rounds for row in found.values())
    assert accepted > 10 and rounds > 15, "the head must be sometimes right and sometimes wrong"


def test_a_row_of_two_answers_counts_as_two_generations(scene: Scene) -> None:
    first = max(scene.rows, key=lambda row: len(row.input_ids))
    mask = list(first.loss_mask)
    mask[9] = False  # a template's token between two answers
    split = Row("split", "c", "a", first.input_ids, tuple(mask))
    (found,) = replay(scene.head, batches_of([split], StoredStates(scene.folder, [split]), AUX_LAYERS), 2)
    shorter = Row("short", "c", "a", first.input_ids[:9], first.loss_mask[:9])
    (begin,) = replay(scene.head, batches_of([shorter], StoredStates(scene.folder, [shorter]), AUX_LAYERS), 2)
    late = tuple(position > 9 for position in range(len(mask)))
    (end,) = replay(
        scene.head,
        batches_of(
            [late_row := Row("late", "c", "a", first.input_ids, late)],
            StoredStates(scene.folder, [late_row]),
            AUX_LAYERS,
        ),
        2,
    )
    assert found.by_length[1] == Counts.total([begin.by_length[1], end.by_length[1]])


def test_the_probe_reports_every_length_and_reads_the_states_once(scene: Scene) -> None:
    stream = StoredStates(scene.folder, scene.rows)
    probe = make_probe(scene.rows, stream, scene.frozen, LONGEST)
    scene.head.train()
    figures = probe(scene.head)
    assert scene.head.training, "the probe must leave the mode as it was"
    assert probe(scene.head) == figures and stream.num_read == len(scene.rows)
    assert set(figures) == {"mal", "acceptance_rate", "mal@1", "mal@2", "mal@3", "mal@4"}
    assert 1 < figures["mal@1"] <= figures["mal@2"] <= figures["mal"] == figures["mal@4"]


def test_what_cannot_be_replayed_is_refused(scene: Scene) -> None:
    stream = StoredStates(scene.folder, scene.rows)
    one = Row("one", "c", "a", (5, 6), (False, True))
    with pytest.raises(ValueError, match="answers have at least two tokens"):
        make_probe([one], stream, scene.frozen, 2)
    with pytest.raises(ValueError, match=r"needs the target's layers \[1\], the states hold \[2, 3, 4, 7\]"):
        list(batches_of(scene.rows, stream, (1, 2)))
    bare = Row("bare", "c", "a", (5, 6, 7), (True, True, True))
    with pytest.raises(ValueError, match="row bare begins with an answer"):
        replay(scene.head, batches_of([bare], StoredStates(scene.folder, [bare]), AUX_LAYERS), 2)


def test_a_row_whose_answer_is_one_token_has_no_round(scene: Scene) -> None:
    one = Row("one", "c", "a", (5, 6), (False, True))
    found: list[Replayed] = replay(scene.head, batches_of([one], StoredStates(scene.folder, [one]), AUX_LAYERS), 2)
    assert found[0].by_length[1].rounds == 0 and found[0].by_length[1].mal is None
