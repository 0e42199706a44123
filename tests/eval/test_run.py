"""A whole evaluation on a tiny target: its engines agree, and what was measured is not measured again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fitted_head import AUX_LAYERS, MAX_NEW_TOKENS, Scene, StoredStates, make_scene
from tiny import tiny_head, tiny_tokenizer

from draftsmith.data.chat import prompt_ids
from draftsmith.data.target import ResolvedTarget, TargetConfig, resolve_target
from draftsmith.eval import run as run_module
from draftsmith.eval import sweep as sweep_module
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.ngram import NgramConfig
from draftsmith.eval.run import evaluate
from draftsmith.eval.summary import ALL
from draftsmith.hidden_states.vllm_server import ServerConfig, vllm_python
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head

TEXTS = ["hello", "the a of", "you are with that", "tool", "is it in the user", "and for this be"]
EXACT = EvalConfig(
    num_speculative_tokens=(1, 3), max_new_tokens=MAX_NEW_TOKENS, engines=("runtime", "replay"), baselines=()
)


@dataclass(frozen=True)
class Trained:
    """A run that has trained and exported."""

    scene: Scene
    target: ResolvedTarget
    folder: Path

    def evaluate(self, config: EvalConfig) -> dict[str, Any]:
        stream = StoredStates(self.scene.folder, self.scene.rows)
        head, export = self.folder / "train" / "head", self.folder / "export" / "model"
        evaluate(config, self.target, head, export, self.scene.rows, stream, self.folder)
        report: dict[str, Any] = json.loads((self.folder / "eval" / "report.json").read_text())
        return report


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Trained]:
    """make_run() -> a run of its own on one fitted head."""
    base = tmp_path_factory.mktemp("base")
    prompts = [
        {"id": f"p{index}", "source": "ab"[index % 2], "messages": [{"role": "user", "content": text}]}
        for index, text in enumerate(TEXTS)
    ]
    ids = [prompt_ids(tiny_tokenizer(), prompt["messages"]) for prompt in prompts]  # type: ignore[arg-type]
    scene = make_scene(base / "target", None, ids)
    (scene.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [scene.stop_id]}))
    target = resolve_target(TargetConfig(model=str(scene.folder), dtype="float32"), base / "cache")

    def make() -> Trained:
        folder = tmp_path_factory.mktemp("run")
        (folder / "prompts").mkdir()
        (folder / "prompts" / "eval.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        save_head(scene.head, folder / "train" / "head")
        log = '{"step": 1, "loss": 5.0, "elapsed_s": 1}\n{"step": 1, "probe": {"mal": 1.5}, "probe/mal": 1.5}\n{"st'
        (folder / "train" / "log.jsonl").write_text(log)
        export_head(
            folder / "train" / "head",
            folder / "export" / "model",
            target=scene.frozen,
            target_name=str(scene.folder),
            num_speculative_tokens=3,
            dtype="float32",
        )
        return Trained(scene, target, folder)

    return make


def test_runtime_and_replay_agree_and_the_report_holds_everything(make_run: Callable[[], Trained]) -> None:
    run = make_run()
    report = run.evaluate(EXACT)
    assert set(report["workloads"]) == {"a", "b", ALL}
    for cells in report["workloads"].values():
        by_engine = {(c["engine"], c["num_speculative_tokens"]): c for c in cells}
        assert set(by_engine) == {("runtime", 1), ("runtime", 3), ("replay", 1), ("replay", 3)}
        for n in (1, 3):
            runtime, replayed = by_engine["runtime", n], by_engine["replay", n]
            assert runtime["mal_clipped"] == replayed["mal"] > 1 and runtime["rounds"] == replayed["rounds"]
            assert runtime["mal"] >= runtime["mal_clipped"] and runtime["divergences"] == []
            assert runtime["mal_low"] < runtime["mal"] < runtime["mal_high"] and runtime["speedup"] > 0
    assert (
        report["recommended"]["num_speculative_tokens"] in (1, 3)
        and "plain decoding" in report["recommended"]["reason"]
    )
    assert report["training"] == [{"step": 1, "loss": 5.0, "elapsed_s": 1}, {"step": 1, "probe/mal": 1.5}]
    assert report["warnings"] == [] and report["target"]["weights"] == run.target.weights
    assert all((run.folder / "eval" / f"report.{kind}").is_file() for kind in ("md", "html"))


def test_a_rerun_measures_nothing_and_a_wider_one_only_what_is_new(
    make_run: Callable[[], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    first = run.evaluate(EXACT)
    log = run.folder / "eval" / "measurements.jsonl"
    lines = log.read_text().splitlines()
    assert len(lines) == 6 * 3  # prompts one by one: plain, N=1, N=3
    monkeypatch.setattr(run_module, "replay", _never)
    monkeypatch.setattr(sweep_module, "decode", _never)
    assert run.evaluate(EXACT) == first
    monkeypatch.undo()
    run.evaluate(EXACT.model_copy(update={"num_speculative_tokens": (1, 2, 3)}))
    wider = log.read_text().splitlines()
    assert wider[: len(lines)] == lines and {json.loads(line)["cell"]["n"] for line in wider[len(lines) :]} == {2}


def test_a_killed_evaluation_continues_after_its_last_whole_measurement(make_run: Callable[[], Trained]) -> None:
    run = make_run()
    config = EXACT.model_copy(update={"engines": ("runtime",), "batch_sizes": (4,)})
    whole = run.evaluate(config)
    log = run.folder / "eval" / "measurements.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]) + lines[3][:50])
    manifest = run.folder / "eval" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"state": "running"}))
    again = run.evaluate(config)
    assert log.read_text().splitlines(keepends=True)[:3] == lines[:3]
    figures = ("mal", "per_position", "rounds", "tokens")
    for name, cells in whole["workloads"].items():
        for before, after in zip(cells, again["workloads"][name], strict=True):
            assert {f: before[f] for f in figures} == {f: after[f] for f in figures}


def test_baselines_are_measured_at_the_longest_length_and_shown_beside_the_head(
    make_run: Callable[[], Trained],
) -> None:
    run = make_run()
    config = EXACT.model_copy(
        update={
            "baselines": ("ngram", "suffix"),
            "ngram": NgramConfig(min_match=1),
            "workloads": {"echo": run.folder / "echo.jsonl"},
        }
    )
    # A random target rarely repeats its prompt: these prompts hold what it is about to answer.
    lines = []
    for index, row in enumerate(run.scene.rows):
        answer = tiny_tokenizer().decode(row.input_ids[row.loss_mask.index(True) :], skip_special_tokens=True)
        message = {"role": "user", "content": f"{TEXTS[index]} {answer}"}
        lines.append(json.dumps({"id": f"e{index}", "messages": [message]}) + "\n")
    (run.folder / "echo.jsonl").write_text("".join(lines))
    report = run.evaluate(config)
    beside = {cell["engine"]: cell for cell in report["baselines"]["echo"]}
    assert set(beside) == {"ngram", "suffix"}
    assert {cell["engine"] for cell in report["workloads"]["echo"]} == {"runtime"}
    for name, cell in beside.items():
        assert cell["num_speculative_tokens"] == 3 and cell["speedup"] > 0 and cell["divergences"] == []
        assert cell["rounds"] > 0 and 1 <= cell["tokens_per_pass"] < cell["mal"], name
        assert f"{name} {cell['speedup']:.2f}x" in report["recommended"]["reason"]
        assert report["recommended"]["baselines"][name]["n"] == 3
    for head in (cell for cell in report["workloads"]["echo"] if cell["engine"] == "runtime"):
        assert head["tokens_per_pass"] == head["mal"], "a head drafts for every pass"
    text = (run.folder / "eval" / "report.md").read_text()
    assert "| ngram | 3 |" in text and "| suffix | 3 |" in text


def test_an_interrupted_baseline_remembers_what_an_uninterrupted_one_would(
    make_run: Callable[[], Trained],
) -> None:
    run = make_run()
    update = {"engines": ("runtime",), "baselines": ("suffix",), "temperatures": (0.0, 0.9)}
    config = EXACT.model_copy(update=update)
    whole = run.evaluate(config)
    log = run.folder / "eval" / "measurements.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    manifest = run.folder / "eval" / "manifest.json"
    log.write_text("".join(lines[:10]))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"state": "running"}))
    again = run.evaluate(config)
    for name, cells in whole["baselines"].items():
        for before, after in zip(cells, again["baselines"][name], strict=True):
            assert before["drafted"] == after["drafted"] and before["accepted"] == after["accepted"]
    assert sum(cell["drafted"] for cell in whole["baselines"][ALL]) > 0


def test_sampling_is_measured_too_and_another_setting_is_refused(make_run: Callable[[], Trained]) -> None:
    run = make_run()
    config = EXACT.model_copy(update={"engines": ("runtime",), "temperatures": (0.8,), "limit": 2})
    report = run.evaluate(config)
    assert {cell["temperature"] for cell in report["workloads"][ALL]} == {0.8}
    with pytest.raises(ValueError, match=r"config\.max_new_tokens: was 20, wanted 10"):
        run.evaluate(config.model_copy(update={"max_new_tokens": 10}))


def test_scheduled_drafts_leave_a_profile_and_a_calibration_in_the_report(make_run: Callable[[], Trained]) -> None:
    run = make_run()
    head = tiny_head("dspark", run.scene.frozen, aux_layers=AUX_LAYERS, num_layers=1, markov_rank=8)
    head.confidence_temperatures = (2.0, 1.5)
    save_head(head, run.folder / "confident")
    config = EXACT.model_copy(update={"schedule": "throughput", "num_speculative_tokens": (3,)})

    def report() -> dict[str, Any]:
        stream = StoredStates(run.scene.folder, run.scene.rows)
        evaluate(config, run.target, run.folder / "confident", None, run.scene.rows, stream, run.folder)
        found: dict[str, Any] = json.loads((run.folder / "eval" / "report.json").read_text())
        return found

    first = report()
    cells = [cell for cell in first["workloads"][ALL] if cell["engine"] == "runtime"]
    assert all(cell["divergences"] == [] for cell in cells)
    assert [profile["setting"]["n"] for profile in first["profiles"]] == [3]
    assert first["profiles"][0]["tokens"] == [1, 2, 3, 4] and min(first["profiles"][0]["seconds"]) > 0
    assert first["profiles"] == json.loads((run.folder / "eval" / "profiles.json").read_text())
    assert first["calibration"]["temperatures"] == [2.0, 1.5] and first["calibration"]["rounds"] > 0
    (run.folder / "eval" / "report.html").unlink()
    assert report()["profiles"] == first["profiles"], "a profile is measured once"


def test_bf16_runs_and_every_differing_answer_is_accounted_for(make_run: Callable[[], Trained]) -> None:
    report = make_run().evaluate(EXACT.model_copy(update={"dtype": "bfloat16", "batch_sizes": (4,)}))
    cells = [cell for cell in report["workloads"][ALL] if cell["engine"] == "runtime"]
    assert all(cell["mal"] > 1 for cell in cells)
    assert bool(report["warnings"]) == any(cell["divergences"] for cell in cells)


def test_what_an_engine_lacks_is_said_before_anything_runs(make_run: Callable[[], Trained]) -> None:
    run = make_run()
    head = run.folder / "train" / "head"
    with pytest.raises(ValueError, match=r"eval\.engines holds replay, but there are no held-out rows"):
        evaluate(EXACT, run.target, head, None, [], None, run.folder)
    with pytest.raises(ValueError, match=r"eval\.engines holds vllm, which serves an exported head"):
        evaluate(EvalConfig(engines=("vllm",)), run.target, head, None, [], None, run.folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_speculative_tokens": (3, 1)}, "eval.num_speculative_tokens is .3, 1.; give ascending"),
        ({"temperatures": (-1.0,)}, "eval.temperatures is"),
        ({"top_k": 5}, "eval.top_p and eval.top_k do nothing at temperature 0"),
        ({"num_speculative_tokens": (40,)}, "give at most 31"),
        ({"schedule": "throughput", "min_confidence": 0.5}, "remove eval.min_confidence"),
        ({"schedule": "throughput", "engines": ("replay",)}, "eval.schedule is for the runtime"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EvalConfig(**settings)


def _never(*_: object, **__: object) -> None:
    raise AssertionError("it was measured again")


def _has_vllm() -> bool:
    try:
        vllm_python(ServerConfig())
    except ValueError:
        return False
    return True


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not _has_vllm(), reason="no vLLM environment")
def test_a_real_vllm_accepts_at_every_position_exactly_what_the_runtime_accepts(
    make_run: Callable[[], Trained],
) -> None:
    run = make_run()
    server = ServerConfig(max_model_len=128, max_num_batched_tokens=128, kv_cache_gib=1)
    config = EXACT.model_copy(update={"engines": ("runtime", "vllm"), "batch_sizes": (1, 4), "server": server})
    config = config.model_copy(update={"num_speculative_tokens": (3,)})
    report = run.evaluate(config)
    compared = 0
    for cells in report["workloads"].values():
        by_engine = {(cell["engine"], cell["batch_size"]): cell for cell in cells}
        for batch_size in (1, 4):
            ours, theirs = by_engine["runtime", batch_size], by_engine["vllm", batch_size]
            for figure in ("rounds", "drafted", "accepted", "per_position_accepted", "tokens"):
                assert ours[figure] == theirs[figure], figure
            assert ours["mal"] == theirs["mal"] > 1
            compared += ours["accepted"]
    assert compared > 50
    log = (run.folder / "eval" / "measurements.jsonl").read_text().splitlines()
    answers: dict[tuple[str, str], list[int]] = {}
    for line in map(json.loads, log):
        for identity, answer in zip(line["ids"], line["answers"], strict=True):
            known = answers.setdefault((line["cell"]["workload"], identity), answer["token_ids"])
            assert known == answer["token_ids"], "plain, speculative, ours and vLLM's answers are the same tokens"
