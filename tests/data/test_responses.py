"""Responses: what the target answers is written once, exactly, and survives interruptions and failures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from completion_server import answer, server
from tiny import EOS, tiny_target
from tiny_prompts import lines, prompt, prompts_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data import responses as module
from draftsmith.data.chat import answer_text, prompt_ids
from draftsmith.data.prompt_sources import PromptSource
from draftsmith.data.prompts import PromptsConfig, build_prompts
from draftsmith.data.responses import ResponsesConfig, generate_responses
from draftsmith.data.rows import RowsConfig, build_rows
from draftsmith.data.target import ResolvedTarget, TargetConfig, resolve_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ResolvedTarget:
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=2)
    return resolve_target(TargetConfig(model=str(folder), dtype="float32"), tmp_path_factory.mktemp("cache"))


def config(**changes: Any) -> ResponsesConfig:
    return ResponsesConfig(**({"max_new_tokens": 12, "batch_size": 3} | changes))


def served(**changes: Any) -> ResponsesConfig:
    return config(**({"engine": "vllm", "max_retries": 0, "concurrency": 4} | changes))


class Interrupted(BaseException):
    """As a Ctrl-C."""


class StopsAfter:
    """A progress that interrupts after so many."""

    def __init__(self, count: int) -> None:
        self.count = count

    def advance(self, count: int = 1, /) -> None:
        self.count -= count
        if self.count == 0:
            raise Interrupted


def test_each_answer_is_the_targets_own_with_its_provenance(target: ResolvedTarget, tmp_path: Path) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(i) for i in range(5)], [prompt(9)])
    artefact = generate_responses(config(), target, folder, tmp_path / "responses")
    found = lines(tmp_path / "responses" / "train.jsonl")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target.path), AutoTokenizer.from_pretrained(target.path)
    for number in range(5):
        (turn,) = found[f"p{number}"]["turns"]
        assert turn["prompt_ids"] == prompt_ids(tokenizer, prompt(number)["messages"])
        expected = model.generate(torch.tensor([turn["prompt_ids"]]), max_new_tokens=12, do_sample=False)
        assert turn["response_ids"] == expected[0, len(turn["prompt_ids"]) :].tolist()
        assert turn["finish_reason"] == ("stop" if turn["response_ids"][-1] == EOS else "length")
    provenance = found["p0"]["provenance"]
    assert provenance.items() >= {"model": target.name, "engine": "transformers", **target.key()}.items()
    assert provenance["sampling"]["temperature"] == 0 and provenance["engine_version"]
    assert artefact.result["train"]["answered"] == 5 and artefact.result["eval"]["answered"] == 1
    assert build_rows(RowsConfig(), tmp_path / "responses", tmp_path / "rows").is_done


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rerun_after_a_torn_line_answers_the_rest_and_ends_with_the_same_content(
    temperature: float, target: ResolvedTarget, tmp_path: Path
) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(i) for i in range(9)])
    settings = config(temperature=temperature, seed=3)
    whole = generate_responses(settings, target, folder, tmp_path / "whole")
    with pytest.raises(Interrupted):
        generate_responses(settings, target, folder, tmp_path / "cut", progress=StopsAfter(5))
    path = tmp_path / "cut" / "train.jsonl"
    assert len(lines(path)) == 5
    path.write_bytes(path.read_bytes()[:-7])
    resumed = generate_responses(settings, target, folder, tmp_path / "cut")
    assert lines(path) == lines(tmp_path / "whole" / "train.jsonl")
    assert resumed.fingerprint == whole.fingerprint


def test_a_finished_stage_is_not_run_again(
    target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(1)])
    first = generate_responses(config(), target, folder, tmp_path / "responses")
    monkeypatch.setattr(module, "load_model", None)
    again = generate_responses(config(batch_size=7), target, folder, tmp_path / "responses")
    assert again.fingerprint == first.fingerprint
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate_responses(config(max_new_tokens=5), target, folder, tmp_path / "responses")


def test_each_turn_is_asked_with_the_decoded_answers_before_it(target: ResolvedTarget, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    stop = 40  # so that some answers end

    def reply(body: dict[str, Any], _: int) -> tuple[int, dict[str, Any]]:
        ids = [200 + len(body["prompt"]) % 50, 100, stop]
        return 200, answer(body, token_ids=ids)

    two = prompt(1, followups=["and then", "why"])
    with server(reply) as (url, _):
        folder = prompts_folder(tmp_path / "prompts", [two, prompt(2)])
        generate_responses(served(), target, folder, tmp_path / "responses", [url])
    found = lines(tmp_path / "responses" / "train.jsonl")
    assert [len(found[name]["turns"]) for name in ("p1", "p2")] == [3, 1]
    messages = list(two["messages"])
    for turn, followup in zip(found["p1"]["turns"], ["and then", "why", None], strict=True):
        assert turn["prompt_ids"] == prompt_ids(tokenizer, messages)
        messages.append({"role": "assistant", "content": answer_text(tokenizer, turn["response_ids"])})
        messages.append({"role": "user", "content": followup})


def test_the_engine_in_process_answers_later_turns_too(
    target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "stop_token_ids", lambda target: tuple(range(0, 512, 2)))
    conversations = [prompt(i, followups=["and then"] * (i % 3)) for i in range(6)]
    folder = prompts_folder(tmp_path / "prompts", conversations)
    generate_responses(config(max_new_tokens=60), target, folder, tmp_path / "responses")
    found = lines(tmp_path / "responses" / "train.jsonl")
    for i in range(6):
        assert len(found[f"p{i}"]["turns"]) == 1 + i % 3
        assert all(turn["response_ids"][-1] % 2 == 0 for turn in found[f"p{i}"]["turns"][:-1])


def test_a_cut_answer_ends_its_conversation_and_is_kept(target: ResolvedTarget, tmp_path: Path) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(1, followups=["and then"])])
    artefact = generate_responses(config(max_new_tokens=1), target, folder, tmp_path / "responses")
    line = lines(tmp_path / "responses" / "train.jsonl")["p1"]
    assert [len(turn["response_ids"]) for turn in line["turns"]] == [1]
    assert line["ended_early"] == "answer_cut" and artefact.result["train"]["ended_early"] == {"answer_cut": 1}


def test_long_and_refused_prompts_are_skipped_and_counted(target: ResolvedTarget, tmp_path: Path) -> None:
    odd = prompt(2) | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    folder = prompts_folder(tmp_path / "prompts", [prompt(1, "the " * 500), odd, prompt(3), prompt(4)])
    settings = config(max_prompt_tokens=100, failure_budget=0.5)
    artefact = generate_responses(settings, target, folder, tmp_path / "responses")
    assert artefact.result["train"]["left_out"] == {"prompt_too_long": 1, "refused_by_template": 1}
    assert set(lines(tmp_path / "responses" / "train.jsonl")) == {"p3", "p4"}


def test_skips_beyond_the_budget_stop_the_stage_before_the_engine_starts(
    target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_model", None)
    folder = prompts_folder(tmp_path / "prompts", [prompt(1, "the " * 2000), prompt(2), prompt(3)])
    with pytest.raises(RuntimeError, match=r"1 of 3 .*prompt_too_long.*failure_budget 0\.1"):
        generate_responses(config(failure_budget=0.1), target, folder, tmp_path / "responses")
    assert not (tmp_path / "responses").exists()  # nothing was answered: another setting may use the folder


def failing(*numbers: int) -> Any:
    """A reply that refuses requests number so and so."""
    return lambda body, count: (400, {"error": "no"}) if count in numbers else (200, answer(body))


def test_failures_within_the_budget_are_counted(target: ResolvedTarget, tmp_path: Path) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(i) for i in range(10)])
    with server(failing(2, 5)) as (url, _):
        artefact = generate_responses(served(failure_budget=0.2), target, folder, tmp_path / "responses", [url])
    assert artefact.result["train"]["left_out"] == {"failed": 2} and artefact.result["train"]["answered"] == 8


def test_failures_beyond_the_budget_stop_the_stage_and_a_rerun_continues(
    target: ResolvedTarget, tmp_path: Path
) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(i) for i in range(12)])
    settings = served(concurrency=1, failure_budget=0.1)
    with (
        server(failing(5, 7)) as (url, _),
        pytest.raises(RuntimeError, match=r"2 of 12 .*failure_budget 0\.1.*the last was p6.*HTTP 400"),
    ):
        generate_responses(settings, target, folder, tmp_path / "responses", [url])
    assert set(lines(tmp_path / "responses" / "train.jsonl")) == {"p0", "p1", "p2", "p3", "p5"}
    with server(failing()) as (url, bodies):
        artefact = generate_responses(settings, target, folder, tmp_path / "responses", [url])
    assert len(bodies) == 7 and artefact.result["train"]["answered"] == 12
    provenance = lines(tmp_path / "responses" / "train.jsonl")["p4"]["provenance"]
    assert provenance["engine_version"] == "9.9" and provenance["served_model"] == "tiny"


def test_a_server_is_told_every_sampling_setting(target: ResolvedTarget, tmp_path: Path) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(1), prompt(2)])
    settings = served(temperature=0.7, top_p=0.9, top_k=20, seed=1)
    with server(failing()) as (url, bodies):
        generate_responses(settings, target, folder, tmp_path / "responses", [url])
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 12, "stop_token_ids": [EOS]}
    assert all(body.items() >= wanted.items() for body in bodies)
    assert bodies[0]["seed"] != bodies[1]["seed"] and bodies[0]["repetition_penalty"] == 1.0


def test_no_answer_at_all_is_an_error(target: ResolvedTarget, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="answered no training prompt"):
        generate_responses(config(), target, prompts_folder(tmp_path / "prompts", []), tmp_path / "responses")


def test_an_answer_that_would_not_fit_the_context_is_refused_by_name(target: ResolvedTarget, tmp_path: Path) -> None:
    folder = prompts_folder(tmp_path / "prompts", [prompt(1)])
    with pytest.raises(ValueError, match=r"responses\.max_new_tokens is 1024.*context of 1024"):
        generate_responses(config(max_new_tokens=1024), target, folder, tmp_path / "responses")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoints": ("http://x",)}, "set engine to vllm"),
        ({"top_p": 0.5}, "ignores top_p"),
        ({"chat_template_args": {"tools": []}}, "tools"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResponsesConfig(**settings)


def test_prompts_that_changed_since_their_stage_wrote_them_are_refused(target: ResolvedTarget, tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(f'{{"prompt": "{word} please"}}\n' for word in ("apples", "pears", "plums", "figs")))
    prompts = PromptsConfig(sources=(PromptSource(jsonl=source),), eval_count=1)
    build_prompts(prompts, tmp_path / "prompts")
    path = tmp_path / "prompts" / "train.jsonl"
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    with pytest.raises(ValueError, match=r"train\.jsonl has changed since.*delete .*prompts"):
        generate_responses(config(), target, tmp_path / "prompts", tmp_path / "responses")


def test_a_tokenizer_with_more_ids_than_the_model_is_an_error_that_names_both(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target", num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<|extra{number}|>" for number in range(512)])
    tokenizer.save_pretrained(folder)
    added = resolve_target(TargetConfig(model=str(folder), dtype="float32"), tmp_path / "cache")
    asked = prompts_folder(tmp_path / "prompts", [prompt(1, "what is <|extra511|>")])
    with pytest.raises(ValueError, match=r"tokenizer gives the id .* in prompt 'p1'.* knows 512 ids"):
        generate_responses(config(), added, asked, tmp_path / "responses")
