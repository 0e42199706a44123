"""The stages of a run: skipped when done, continued when killed, refused when their inputs are others."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_target

from draftsmith.data.artefact import read_artefact
from draftsmith.hidden_states.vllm_server import ServerConfig, launch, vllm_python
from draftsmith.recipes import stages
from draftsmith.recipes.run import summary
from draftsmith.recipes.schema import load_recipe
from draftsmith.recipes.stages import STAGES, Run, only_writer, read_report, run_stages, train_stage

# Ends the process with SIGKILL the first time that METHOD of CLASS in MODULE returns in a stage named STAGE.
_KILLED_RUN = """
import importlib, os, signal, sys
from pathlib import Path
module, name, method, number, stage, recipe = sys.argv[1:]
owner = getattr(importlib.import_module(module), name)
whole, calls = getattr(owner, method), 0
def then_die(self, *args, **kwargs):
    global calls
    if stage in ("", getattr(self, "manifest", {}).get("stage")):
        calls += 1
        if calls == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, *args, **kwargs)
setattr(owner, method, then_die)
from draftsmith.recipes.schema import load_recipe
from draftsmith.recipes.stages import run_stages
run_stages(load_recipe(Path(recipe)))
"""
# What is killed: the second checkpoint of the training, or a stage between its last output and its manifest.
_FINISH = ("draftsmith.data.artefact", "Artefact", "finish", "1")


def killed(recipe: Path, *where: str) -> None:
    """Run the recipe in a process that is killed at the given place."""
    done = subprocess.run([sys.executable, "-c", _KILLED_RUN, *where, str(recipe)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]


def content(folder: Path) -> dict[str, Any]:
    """What a run made, without times: answers, weights, and the acceptance that was measured."""
    answers = (folder / "responses" / "train.jsonl").read_text().splitlines()
    return {
        "answers": sorted(json.dumps(json.loads(line), sort_keys=True) for line in answers),
        "weights": (folder / "export" / "model" / "model.safetensors").read_bytes(),
        "acceptance": read_artefact(folder / "eval", "eval").result["acceptance"],
    }


@pytest.fixture(scope="module")
def finished(settings: Callable[[Path], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that went through; its output lies in `run` beside it."""
    folder = tmp_path_factory.mktemp("finished")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings(folder / "run")))
    run_stages(load_recipe(path))
    return path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A recipe whose run is finished, to be changed."""
    shutil.copytree(finished.parent / "run", tmp_path / "run")
    data = yaml.safe_load(finished.read_text()) | {"output_dir": str(tmp_path / "run")}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_run_leaves_every_stage_with_a_manifest_and_ends_with_its_figures(finished: Path) -> None:
    folder = finished.parent / "run"
    for stage in ("prompts", "responses", "rows", "train", "export", "eval"):
        assert read_artefact(folder / stage, stage).manifest["versions"]["torch"]
    assert json.loads((folder / "hidden_states" / "parity.json").read_text())["spec"]
    assert load_recipe(folder / "train" / "recipe.yaml") == load_recipe(finished)
    card = (folder / "export" / "model" / "README.md").read_text()
    assert "| mal | mal_low | mal_high |" in card and "Not measured" not in card
    assert all(f"\n| {workload} | runtime | 3 |" in card for workload in read_report(folder)["workloads"])
    report = folder / "eval" / "report.html"
    text = summary(read_report(folder), report)
    assert str(report) in text and "mean acceptance length" in text and "95 % interval" in text and "speed-up" in text


def test_the_export_proposes_what_the_evaluation_recommends(finished: Path) -> None:
    folder = finished.parent / "run"
    config = json.loads((folder / "export" / "model" / "config.json").read_text())
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == read_report(folder)["recommended"]["num_speculative_tokens"]


def test_a_refused_run_leaves_the_recorded_recipe_as_it_was(copied: Path) -> None:
    recorded = copied.parent / "run" / "recipe.yaml"
    before = recorded.read_bytes()
    with pytest.raises(ValueError, match="eval_count"):
        run_stages(load_recipe(copied, ["prompts.eval_count=3"]))
    assert recorded.read_bytes() == before


def test_a_finished_run_is_not_done_again(finished: Path) -> None:
    folder = finished.parent / "run"

    def times() -> dict[Path, int]:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "recipe.yaml")]
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    run_stages(load_recipe(finished))
    assert times() == before


@pytest.mark.parametrize("mode", ["online", "hybrid"])
def test_every_mode_of_the_hidden_states_gives_the_same_training_losses(mode: str, copied: Path) -> None:
    def losses() -> list[float]:
        lines = map(json.loads, (copied.parent / "run" / "train" / "log.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    recipe = load_recipe(copied, [f"hidden_states.mode={mode}"])
    offline = losses()
    shutil.rmtree(recipe.output_dir / "train")
    shutil.rmtree(recipe.output_dir / "hidden_states")
    run_stages(recipe, "hidden_states", "train")
    assert losses() == offline and len(offline) == 6
    kept = recipe.output_dir / "hidden_states" / "train"
    assert any(kept.glob("*.safetensors")) == (mode == "hybrid")


@pytest.mark.parametrize(
    ("override", "stage", "words"),
    [
        ("responses.max_new_tokens=11", "responses", "config.max_new_tokens: was 12, wanted 11"),
        ("rows.max_row_tokens=500", "rows", "config.max_row_tokens: was 512, wanted 500"),
        ("hidden_states.dtype=bfloat16", "hidden_states", "dtype"),
        ("train.learning_rate=0.5", "train", "config.learning_rate: was 0.001, wanted 0.5"),
        ("model.ttt_steps=1", "train", "model.ttt_steps: was 2, wanted 1"),
        ("export.num_speculative_tokens=2", "export", "config.num_speculative_tokens: was None, wanted 2"),
        ("eval.max_new_tokens=9", "eval", "config.max_new_tokens: was 8, wanted 9"),
    ],
)
def test_artefacts_of_other_settings_are_not_mixed_in(override: str, stage: str, words: str, copied: Path) -> None:
    with pytest.raises(ValueError, match="artefact of other inputs") as error:
        run_stages(load_recipe(copied, [override]))
    assert words in str(error.value) and f"run/{stage}" in str(error.value)


def test_answers_of_another_target_are_not_mixed_in(copied: Path, tmp_path: Path) -> None:
    other = tiny_target(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match=r"run/responses holds .*target\.weights: was"):
        run_stages(load_recipe(copied, [f"target.model={other}"]))


def test_a_wider_evaluation_adds_to_the_report_and_to_the_model_card(copied: Path) -> None:
    recipe = load_recipe(copied, ["eval.num_speculative_tokens=[1,2,3]"])
    run_stages(recipe)
    lengths = {
        cell["num_speculative_tokens"]
        for cells in read_report(recipe.output_dir)["workloads"].values()
        for cell in cells
    }
    assert lengths == {1, 2, 3}
    shown = json.loads((recipe.output_dir / "export" / "card.json").read_text())
    assert {cell["num_speculative_tokens"] for cell in shown} == {1, 2, 3}


def test_a_damaged_record_of_the_cache_is_named_by_verify(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.recipes.run import main

    shard = next((copied.parent / "run" / "hidden_states" / "train").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-100] ^= 1
    shard.write_bytes(damaged)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["draftsmith", "hidden-states", "verify", str(shard.parent)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1


@pytest.mark.slow
def test_a_run_that_is_killed_in_one_stage_after_another_ends_with_the_same_head(
    finished: Path, recipe_file: Path
) -> None:
    killed(recipe_file, *_FINISH, "responses")
    killed(recipe_file, *_FINISH, "hidden_states")
    killed(recipe_file, "draftsmith.train.resume", "Checkpoints", "save", "2", "")
    killed(recipe_file, *_FINISH, "train")
    killed(recipe_file, *_FINISH, "eval")
    run_stages(load_recipe(recipe_file))
    assert content(recipe_file.parent / "run") == content(finished.parent / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_its_code_its_checkpoint_saved(
    number: signal.Signals, code: int, recipe_file: Path
) -> None:
    command = [sys.executable, "-c", "from draftsmith.recipes.run import main; main()", "run", str(recipe_file)]
    command += ["--set", "train.max_steps=100000", "--to", "train"]
    checkpoints = recipe_file.parent / "run" / "train" / "checkpoints"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("== train"))
        while process.poll() is None and not any(checkpoints.glob("*/*")):
            time.sleep(0.01)
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(60) == code, rest
    assert "run the same command to continue" in rest and any(checkpoints.glob("*/*"))


def test_two_runs_do_not_write_to_one_folder(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    with only_writer(recipe.output_dir):
        words = rf"another run is writing to .*process {os.getpid()} on .*use another output_dir"
        with pytest.raises(ValueError, match=words):
            run_stages(recipe, "prompts", "prompts")
        with pytest.raises(ValueError, match=words):
            train_stage(recipe)
    run_stages(recipe, "prompts", "prompts")


def test_stages_run_in_their_order_only(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert list(STAGES) == ["target", "prompts", "responses", "rows", "hidden_states", "train", "export", "eval"]
    with pytest.raises(ValueError, match="--from is 'tran'; the stages are target, prompts"):
        run_stages(recipe, first="tran")
    with pytest.raises(ValueError, match="--from rows comes after --to prompts"):
        run_stages(recipe, "rows", "prompts")
    with pytest.raises(ValueError, match=r"holds no finished responses stage.*Run that stage first"):
        run_stages(recipe, "rows", "rows")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.draft_vocab_size=513"], "model.draft_vocab_size is 513, but the vocabulary of .* has 512"),
        (
            ["model.aux_layers=[2,9]"],
            r"model\.aux_layers is \(2, 9\); give ascending, different layer ids between 0 and 7",
        ),
        (["responses.engine=vllm"], "responses.engine is vllm: .*which does not exist. Run `make setup-vllm`"),
        (["hidden_states.device=auto", "hidden_states.source=vllm"], "hidden_states.source is vllm: .*make setup-vllm"),
        (["eval.engines=[vllm]"], "an engine in eval.engines is vllm: .*make setup-vllm"),
        (["target.model=/no/such/folder"], "target.model is '/no/such/folder'"),
    ],
)
def test_what_does_not_go_with_the_target_or_the_machine_is_refused_before_any_stage(
    overrides: list[str], words: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", str(tmp_path / "no" / "python"))
    with pytest.raises(ValueError, match=words):
        run_stages(load_recipe(recipe_file, overrides))
    assert not (recipe_file.parent / "run" / "prompts").exists()


def test_several_processes_do_not_launch_a_server_each(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["hidden_states.device=auto", "hidden_states.source=vllm", "hidden_states.mode=online"]
    recipe = load_recipe(copied, overrides)
    shutil.rmtree(recipe.output_dir / "train")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(Run, "endpoints", lambda self: pytest.fail("a server was launched"))
    with pytest.raises(ValueError, match=r"in a run of 8 processes.*hidden_states\.endpoints"):
        train_stage(recipe)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_vllm_server_answers_and_captures_and_gives_what_transformers_gives(
    recipe_file: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        vllm_python(ServerConfig())
    except ValueError as error:
        pytest.skip(str(error))
    launched = []

    def counted(*arguments: Any) -> Any:
        launched.append(arguments)
        return launch(*arguments)

    monkeypatch.setattr(stages, "launch", counted)
    server = "{max_model_len: 1024, max_num_batched_tokens: 1024, kv_cache_gib: 1}"
    overrides = ["responses.engine=vllm", "hidden_states.source=vllm", f"hidden_states.server={server}"]
    data = yaml.safe_load(recipe_file.read_text())
    del data["hidden_states"]["device"]
    recipe_file.write_text(yaml.safe_dump(data))
    run_stages(load_recipe(recipe_file, overrides))
    assert len(launched) == 1
    found, expected = content(recipe_file.parent / "run"), content(finished.parent / "run")
    answers = [{json.loads(a)["id"]: json.loads(a)["turns"] for a in each["answers"]} for each in (found, expected)]
    assert answers[0] == answers[1]
    lengths = [[cell["mal"] for cell in each["acceptance"]] for each in (found, expected)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)


@pytest.mark.parametrize("place", ["train/manifest.json", "hidden_states/parity.json", "export/card.json"])
def test_a_damaged_file_of_a_run_is_named(place: str, copied: Path) -> None:
    path = copied.parent / "run" / place
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match=rf"{place} is not readable JSON.*[Dd]elete"):
        run_stages(load_recipe(copied))


def test_a_lost_report_is_written_again(copied: Path) -> None:
    report = copied.parent / "run" / "eval" / "report.json"
    report.unlink()
    run_stages(load_recipe(copied))
    assert read_report(copied.parent / "run")["workloads"]


@pytest.mark.parametrize("setting", ["hidden_states.device", "eval.device"])
def test_a_device_that_this_machine_lacks_is_refused_before_any_stage(setting: str, recipe_file: Path) -> None:
    with pytest.raises(ValueError, match=rf"{setting} is 'nothing'.*write auto, cpu"):
        run_stages(load_recipe(recipe_file, [f"{setting}=nothing"]))
    assert not (recipe_file.parent / "run" / "prompts").exists()


def test_a_lost_export_is_written_again(copied: Path) -> None:
    model = copied.parent / "run" / "export" / "model"
    weights = (model / "model.safetensors").read_bytes()
    shutil.rmtree(model)
    run_stages(load_recipe(copied))
    assert (model / "model.safetensors").read_bytes() == weights
    assert "Not measured" not in (model / "README.md").read_text()
