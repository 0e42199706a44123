"""Calibration finds the temperatures that were put in, leaves calibrated confidences alone, and stays with the head.

R rounds, N draft positions
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from fitted_head import AUX_LAYERS, MAX_NEW_TOKENS, PROMPTS, StoredStates, make_scene
from tiny import tiny_head
from torch import Tensor

from draftsmith.eval.calibrate import calibrate, calibrated, describe_calibration, fit_temperatures, is_for_fitting
from draftsmith.eval.decode import Decoding, RunningTarget, decode
from draftsmith.eval.replay import Rounds, batches_of, observe
from draftsmith.models.checkpoint import load_head, read_head_config, save_head
from draftsmith.models.export import export_head, import_head


def rounds_of(stated_RN: Tensor, true_RN: Tensor, seed: int = 0) -> Rounds:
    """Rounds whose drafts are accepted with the true chances, of a head that states others; some end early."""
    draws = torch.Generator().manual_seed(seed + 1000)  # not those of the chances
    num_rounds, num_tokens = stated_RN.shape
    accepted_R = (torch.rand(true_RN.shape, generator=draws) < true_RN).long().cumprod(1).sum(1)
    known_R = torch.randint(1, 3 * num_tokens, (num_rounds,), generator=draws).clamp_max(num_tokens)
    return Rounds(stated_RN, torch.minimum(accepted_R, known_R), known_R)


def chances(seed: int, num_rounds: int = 4000, num_tokens: int = 3) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.sigmoid(1 + 1.5 * torch.randn(num_rounds, num_tokens, generator=draws))


@pytest.mark.parametrize("seed", range(5))
def test_calibrated_confidences_keep_a_temperature_of_one(seed: int) -> None:
    true_RN = chances(seed)
    assert fit_temperatures(rounds_of(true_RN, true_RN, seed)) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_temperatures_that_confidences_lack_are_found_and_lower_the_error_on_other_rounds(seed: int) -> None:
    wanted = torch.tensor([3.0, 0.5, 2.0])

    def rounds(seed: int) -> Rounds:
        true_RN = chances(seed)
        return rounds_of(torch.sigmoid(torch.logit(true_RN) * wanted), true_RN, seed)

    found = fit_temperatures(rounds(seed))
    assert all(abs(got / float(want) - 1) < 0.35 for got, want in zip(found, wanted, strict=True)), found
    report = describe_calibration(rounds(seed + 50), found)
    assert report["ece_after"] < 0.5 * report["ece_before"]
    for each in report["positions"]:
        assert each["ece_after"] < each["ece_before"] and each["ece_after"] < 0.04
    assert [each["temperature"] for each in report["positions"]] == list(found)
    counts = [each["rounds"] for each in report["positions"]]
    assert counts == sorted(counts, reverse=True) and counts[0] == report["rounds"] == 4000
    for bins in report["reliability"].values():
        assert sum(each["count"] for each in bins) == sum(counts)


def test_drafts_behind_an_answers_end_count_neither_way() -> None:
    confidence = torch.full((200, 2), 0.9)
    rounds = Rounds(confidence, torch.ones(200, dtype=torch.int64), torch.ones(200, dtype=torch.int64))
    report = describe_calibration(rounds, ())
    assert [each["rounds"] for each in report["positions"]] == [200, 0] and report["ece_before"] == pytest.approx(0.1)
    assert fit_temperatures(rounds)[1] == 1.0


def test_temperatures_keep_order_and_later_positions_take_the_last() -> None:
    confidence = torch.tensor([[0.2, 0.5, 0.99, 0.7], [0.3, 0.5, 1.0, 0.6]])
    assert torch.equal(calibrated(confidence, ()), confidence)
    torch.testing.assert_close(calibrated(confidence, (1.0,)), confidence, atol=2e-6, rtol=0)
    found = calibrated(confidence, (2.0, 3.0, 0.5))
    assert torch.equal(found.sort(dim=0, stable=True).indices, confidence.sort(dim=0, stable=True).indices)
    torch.testing.assert_close(found[:, 3], torch.sigmoid(2 * torch.logit(confidence[:, 3])))
    assert float(found[0, 1]) == 0.5 and 0.2 < float(found[0, 0]) < 0.5


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_scene(tmp_path_factory.mktemp("target"), None)


@pytest.fixture
def head(scene: Any) -> Any:
    return tiny_head("dspark", scene.frozen, aux_layers=AUX_LAYERS, num_layers=1, markov_rank=8)


def test_observed_rounds_are_the_runtimes_with_its_confidences(scene: Any, head: Any) -> None:
    given, draft = [], head.draft

    def recording(*arguments: Any) -> Any:
        given.append(draft(*arguments))
        return given[-1]

    stream, expected, accepted = StoredStates(scene.folder, scene.rows), [], []
    with RunningTarget(scene.model, AUX_LAYERS) as target:
        head.draft = recording
        for row, prompt in zip(scene.rows, PROMPTS, strict=True):
            done = decode(target, head, [prompt], Decoding(MAX_NEW_TOKENS, frozenset([scene.stop_id]), 3)).answers[0]
            assert tuple(done.token_ids) == row.input_ids[len(prompt) :]
            accepted += [min(pair) for pair in zip(done.accepted, done.emitted, strict=True)]
            expected.append(torch.cat([torch.empty(0, 3), *(one.confidence_BN for one in given)]))
            given.clear()
        del head.draft
    found = [observe(head, batches_of([row], stream, AUX_LAYERS), 3) for row in scene.rows]
    assert torch.cat([each.accepted_R for each in found]).tolist() == accepted
    for each, wanted_RN in zip(found, expected, strict=True):
        torch.testing.assert_close(each.confidence_RN, wanted_RN, atol=1e-5, rtol=1e-4)
        assert (each.accepted_R <= each.known_R).all()
    assert max(len(each.accepted_R) for each in found) > 3


def test_a_head_without_confidences_is_not_calibrated(scene: Any, tmp_path: Path) -> None:
    stream = StoredStates(scene.folder, scene.rows)
    plain = tiny_head("dspark", scene.frozen, aux_layers=AUX_LAYERS, num_layers=1, has_confidence=False)
    for each in (scene.head, plain):
        assert observe(each, batches_of(scene.rows, stream, AUX_LAYERS), 3) is None
    save_head(scene.head, tmp_path)
    before = (tmp_path / "config.json").read_text()
    assert calibrate(tmp_path, scene.frozen, scene.rows, stream, 3, torch.device("cpu")) == ()
    assert (tmp_path / "config.json").read_text() == before and "temperatures" not in before


@pytest.mark.parametrize("layout", ["speculators", "plain"])
def test_temperatures_are_written_beside_the_weights_and_survive_export_and_import(
    layout: Any, scene: Any, head: Any, tmp_path: Path
) -> None:
    with torch.no_grad():
        head.confidence_head.proj.bias.fill_(4.0)  # sure of everything, and mostly wrong
    save_head(head, tmp_path / "head", {"step": 7})
    stream, chosen = StoredStates(scene.folder, scene.rows), [row for row in scene.rows if is_for_fitting(row)]
    assert 0 < len(chosen) < len(scene.rows), "the test wants conversations of both halves"
    found = calibrate(tmp_path / "head", scene.frozen, scene.rows, stream, 3, torch.device("cpu"))
    stream.num_read = 0
    assert calibrate(tmp_path / "head", scene.frozen, scene.rows, stream, 3, torch.device("cpu")) == found
    assert stream.num_read == len(chosen), "only the half for fitting is read"
    rounds = observe(head, batches_of(chosen, stream, AUX_LAYERS), 3)
    assert rounds is not None and found == fit_temperatures(rounds) != (1.0, 1.0, 1.0)
    assert read_head_config(tmp_path / "head").extra == {"step": 7}
    loaded: Any = load_head(tmp_path / "head", scene.frozen)
    target_name, export = str(scene.folder), tmp_path / "export"
    export_head(
        tmp_path / "head", export, target=scene.frozen, target_name=target_name, num_speculative_tokens=3, layout=layout
    )
    imported: Any = import_head(export, scene.frozen, "dspark")
    assert loaded.confidence_temperatures == imported.confidence_temperatures == found


def test_what_is_no_temperature_is_refused(scene: Any, head: Any, tmp_path: Path) -> None:
    head.confidence_temperatures = (1.0, 0.0)
    save_head(head, tmp_path)
    with pytest.raises(ValueError, match=r"confidence_temperatures is \[1\.0, 0\.0\]; give positive numbers"):
        load_head(tmp_path, scene.frozen)
