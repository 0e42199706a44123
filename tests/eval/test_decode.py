"""The runtime is lossless in greedy decoding, whatever the drafts are; and its records of rounds are right."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_head, tiny_kept_ids, tiny_target
from toy_head import BigramHead, RecitingHead, greedy_table, plain_greedy, small_model
from transformers import AutoModelForCausalLM

from draftsmith.eval.decode import Decoded, DecodedBatch, Decoding, RunningTarget, decode
from draftsmith.eval.sweep import explain_divergence
from draftsmith.eval.workloads import Question
from draftsmith.models.target import FrozenTarget

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [8, 4]]


def settings(num_tokens: int, max_new_tokens: int = 24, stops: tuple[int, ...] = (), **more: object) -> Decoding:
    return Decoding(max_new_tokens, frozenset(stops), num_tokens, **more)  # type: ignore[arg-type]


def run(model: object, head: object, wanted: Decoding, prompts: list[list[int]] = PROMPTS) -> list[Decoded]:
    layers = () if head is None else head.needs.aux_layers  # type: ignore[attr-defined]
    with RunningTarget(model, layers) as target:
        return decode(target, head, prompts, wanted).answers  # type: ignore[arg-type]


@pytest.mark.parametrize("share_right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_greedy_output_is_the_targets_own_for_ragged_prompts(share_right: float, num_tokens: int) -> None:
    model = small_model(vocab_size=16)
    head = BigramHead(greedy_table(model, share_right))
    answers = run(model, head, settings(num_tokens, stops=(2,)))
    assert [a.token_ids for a in answers] == [plain_greedy(model, p, 24, {2}) for p in PROMPTS]
    assert len({len(a.token_ids) for a in answers}) > 1, "the test wants sequences that finish at different times"
    for answer in answers:
        assert 1 + sum(answer.emitted) == len(answer.token_ids)
        assert all(e <= a + 1 <= num_tokens + 1 for a, e in zip(answer.accepted, answer.emitted, strict=True))
        assert all(e == a + 1 for a, e in zip(answer.accepted[:-1], answer.emitted[:-1], strict=True))


def test_plain_decoding_is_the_same_loop_without_rounds() -> None:
    model = small_model(vocab_size=16)
    answers = run(model, None, settings(0, stops=(2,)))
    assert [a.token_ids for a in answers] == [plain_greedy(model, p, 24, {2}) for p in PROMPTS]
    assert all(a.accepted == [] for a in answers)


@pytest.mark.parametrize("kept", [None, 60])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_a_real_head_on_every_kind_of_target_is_lossless(kind: str, kept: int | None, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    frozen = FrozenTarget.load(folder, torch.float32)
    head = tiny_head("eagle3", frozen, kept_ids=None if kept is None else tiny_kept_ids(kept))
    prompts = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]
    answers = run(model, head, settings(3, max_new_tokens=12), prompts)
    assert [a.token_ids for a in answers] == [plain_greedy(model, p, 12, set()) for p in prompts]


def test_a_stop_token_inside_the_accepted_prefix_ends_the_answer_there() -> None:
    model = small_model(vocab_size=16)
    whole = plain_greedy(model, PROMPTS[2], 12, set())
    at = next(i for i in range(2, 9) if whole.index(whole[i]) == i)
    head = RecitingHead(PROMPTS[2], whole, 16)
    (answer,) = run(model, head, settings(8, 12, stops=(whole[at],)), PROMPTS[2:3])
    assert answer.token_ids == whole[: at + 1] and answer.finish_reason == "stop"
    assert (answer.accepted, answer.emitted) == ([8], [at]), "the verifier accepted beyond the stop token"


def test_one_token_prompts_and_one_token_answers() -> None:
    model = small_model(vocab_size=16)
    head = BigramHead(greedy_table(model, 1.0))
    (answer,) = run(model, head, settings(3, max_new_tokens=1), [[7]])
    assert answer.token_ids == plain_greedy(model, [7], 1, set())
    assert (answer.finish_reason, answer.accepted) == ("length", [])
    first = answer.token_ids[0]
    (answer,) = run(model, head, settings(3, stops=(first,)), [[7]])
    assert (answer.token_ids, answer.finish_reason, answer.accepted) == ([first], "stop", [])


def test_the_limit_clips_what_is_emitted_but_not_what_the_verifier_accepted() -> None:
    model = small_model(vocab_size=16)
    whole = plain_greedy(model, [3], 12, set())
    (answer,) = run(model, RecitingHead([3], whole, 16), settings(8, max_new_tokens=4), [[3]])
    assert answer.token_ids == whole[:4] and answer.finish_reason == "length"
    assert (answer.drafted, answer.accepted, answer.emitted) == ([8], [8], [3])


def test_a_draft_that_ends_early_by_confidence_stays_lossless_and_counts_only_what_was_drafted() -> None:
    model = small_model(vocab_size=16)
    confidence_V = torch.linspace(0, 1, 16)
    head = BigramHead(greedy_table(model, 0.7), confidence_V)
    answers = run(model, head, settings(4, stops=(2,), min_confidence=0.4))
    assert [a.token_ids for a in answers] == [plain_greedy(model, p, 24, {2}) for p in PROMPTS]
    drafted = [d for a in answers for d in a.drafted]
    assert 0 not in drafted and len(set(drafted)) > 1
    assert all(a <= d for x in answers for a, d in zip(x.accepted, x.drafted, strict=True))


def test_an_empty_prompt_and_a_head_without_confidences_are_refused() -> None:
    model = small_model(vocab_size=16)
    head = BigramHead(greedy_table(model, 1.0))
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        run(model, head, settings(1), [[3], []])
    with pytest.raises(ValueError, match=r"eval\.min_confidence is set, but this head gives no confidences"):
        run(model, head, settings(1, min_confidence=0.5), [[3]])


def test_a_batch_reports_its_times() -> None:
    model = small_model(vocab_size=16)
    with RunningTarget(model) as target:
        batch = decode(target, None, PROMPTS, settings(0))
    assert isinstance(batch, DecodedBatch) and 0 < batch.prefill_s < batch.seconds


def test_a_divergence_is_located_and_measured() -> None:
    model = small_model(vocab_size=16)
    plain = plain_greedy(model, PROMPTS[2], 6, set())
    other = [*plain[:3], (plain[3] + 1) % 16, *plain[4:]]
    with RunningTarget(model) as target:
        question = Question("p", tuple(PROMPTS[2]))
        assert explain_divergence(target, question, plain, plain) is None
        found = explain_divergence(target, question, plain, other)
    assert found is not None and (found["position"], found["plain"]) == (3, plain[3]) and found["margin"] > 0
