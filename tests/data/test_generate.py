"""Continuous batching answers every prompt as the target answers it alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EOS, tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from draftsmith.data.generate import Answer, Engine, Sampling, generate, greedy, target_distribution
from draftsmith.data.packed_linear import pack_linears


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval().requires_grad_(False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny_target(tmp_path_factory.mktemp("llama"), num_hidden_layers=3))


def some_prompts(count: int, longest: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in lengths]


def answers(model: Any, prompts: Sequence[Sequence[int]], **settings: Any) -> list[Answer]:
    defaults: dict[str, Any] = {"max_new_tokens": 20, "stop_ids": (EOS,), "sampling": Sampling(), "batch_size": 4}
    found: dict[int, Answer] = {}
    generate(model, prompts, on_finished=lambda answer: found.update({answer.index: answer}), **defaults | settings)
    assert sorted(found) == list(range(len(prompts)))
    return [found[index] for index in range(len(prompts))]


def one_by_one(model: Any, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], count: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=0,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def mistral() -> Any:
    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=7, initializer_range=0.1, eos_token_id=EOS,
    )  # fmt: skip
    return MistralForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral"])
def test_a_refilled_ragged_batch_equals_generate_one_by_one_token_for_token(kind: str, tmp_path: Path) -> None:
    window = {"sliding_window": 8} if kind == "gemma3" else {}
    model = mistral() if kind == "mistral" else load(tiny_target(tmp_path, kind, **window))
    prompts = some_prompts(11)
    never_stopped = one_by_one(model, prompts, [513], 20)
    stops = sorted({EOS, never_stopped[0][4], never_stopped[3][9]})  # so that answers end at different places
    expected = one_by_one(model, prompts, stops, 20)
    found = answers(model, prompts, stop_ids=stops)
    assert [answer.token_ids for answer in found] == expected
    assert len({len(answer.token_ids) for answer in found}) > 1


def test_the_stop_token_is_part_of_the_answer_and_names_the_reason(llama: Any) -> None:
    prompts = some_prompts(3)
    free = answers(llama, prompts, stop_ids=())
    assert [answer.finish_reason for answer in free] == ["length"] * 3
    stop = free[1].token_ids[2]
    stopped = answers(llama, prompts, stop_ids=(stop,))[1]
    assert stopped.token_ids == free[1].token_ids[: free[1].token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_an_answer_of_one_token_ends_in_the_prefill(llama: Any) -> None:
    prompts = some_prompts(9)
    first = [answer.token_ids[0] for answer in answers(llama, prompts, max_new_tokens=1)]
    assert first == [ids[0] for ids in one_by_one(llama, prompts, [513], 1)]
    stopped = answers(llama, prompts, stop_ids=set(first))
    assert [answer.token_ids for answer in stopped] == [[token] for token in first]
    assert {answer.finish_reason for answer in stopped} == {"stop"}


def test_samples_depend_on_the_prompts_seed_and_not_on_the_batch(llama: Any) -> None:
    prompts, seeds = some_prompts(7), [5, 3, 8, 1, 9, 2, 7]
    sampling = Sampling(temperature=1.2, top_p=0.95, top_k=80, seed=4)
    all_at_once = [a.token_ids for a in answers(llama, prompts, sampling=sampling, seeds=seeds, batch_size=7)]
    two_by_two = [a.token_ids for a in answers(llama, prompts, sampling=sampling, seeds=seeds, batch_size=2)]
    resumed = [a.token_ids for a in answers(llama, prompts[4:], sampling=sampling, seeds=seeds[4:])]
    other = [a.token_ids for a in answers(llama, prompts, sampling=Sampling(1.2, 0.95, 80, 5), seeds=seeds)]
    assert all_at_once == two_by_two
    assert resumed == all_at_once[4:]
    assert all(a != b for a, b in zip(all_at_once, other, strict=True))


def test_samples_follow_the_targets_distribution(llama: Any) -> None:
    prompt = some_prompts(1)[0]
    sampling = Sampling(temperature=0.8, top_k=4)
    count = 2000
    drawn = answers(llama, [prompt] * count, sampling=sampling, max_new_tokens=1, batch_size=500)
    expected = target_distribution(llama(torch.tensor([prompt])).logits[0, -1], sampling)
    frequency = torch.bincount(torch.tensor([answer.token_ids[0] for answer in drawn]), minlength=len(expected)) / count
    assert (frequency - expected).abs().max() < 4 * (0.25 / count) ** 0.5
    assert set(frequency.nonzero()[:, 0].tolist()) <= set(expected.nonzero()[:, 0].tolist())


def test_top_p_keeps_the_fewest_tokens_that_reach_it_also_beyond_the_first_candidates() -> None:
    flat = torch.zeros(2, 2048)
    flat[0, :3] = torch.tensor([9.0, 8.0, 7.0]) + 10
    kept = (target_distribution(flat, Sampling(1.0, top_p=0.9)) > 0).sum(-1).tolist()
    assert kept[0] == 2  # 0.665 + 0.245
    assert kept[1] == pytest.approx(0.9 * 2048, abs=2)


def test_greedy_is_argmax_with_the_first_of_equals() -> None:
    logits = torch.randn(5, 3, 1024).bfloat16()
    logits[0, 0, [7, 900]] = 50.0
    assert greedy(logits).equal(logits.float().argmax(-1))
    assert greedy(logits[..., :1000]).equal(logits[..., :1000].float().argmax(-1))


def test_a_prompt_without_tokens_is_refused_and_no_prompts_are_no_work(llama: Any) -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        answers(llama, [[5], []])
    assert answers(llama, []) == []


def test_prompts_beyond_one_prefills_memory_are_prefilled_in_groups(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some_prompts(8)
    whole = answers(llama, prompts, batch_size=8)
    monkeypatch.setattr("draftsmith.data.generate._MAX_PREFILL_TOKENS", 40)
    assert answers(llama, prompts, batch_size=8) == whole


def test_a_target_whose_layers_need_another_cache_is_refused(llama: Any) -> None:
    config = LlamaConfig(**llama.config.to_dict())
    config.layer_types = ["linear_attention"]
    with pytest.raises(ValueError, match=r"linear_attention.*responses\.engine"):
        Engine(type("Model", (), {"config": config}))


def test_packed_weights_give_the_same_products() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=2, attention_bias=True))  # fmt: skip
    model = model.bfloat16().eval().requires_grad_(False)
    ids = torch.randint(0, 256, (3, 17))
    plain = model(ids).logits
    if not pack_linears(model, 48):
        pytest.skip("this CPU has no bf16 products")
    assert pack_linears(model, 48) == 15
    torch.testing.assert_close(model(ids).logits, plain, atol=0.02, rtol=0.02)


def test_weights_that_may_change_are_not_packed() -> None:
    assert pack_linears(torch.nn.Linear(8, 8), 1) == 0
    assert pack_linears(torch.nn.Linear(8, 8).bfloat16(), 1) == 0
