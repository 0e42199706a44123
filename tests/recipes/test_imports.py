"""`draftsmith import`: exported folders come back as heads that draft the same, and what is no head is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target

from draftsmith.data.artefact import read_artefact
from draftsmith.models.checkpoint import load_head, save_head
from draftsmith.models.export import export_head, find_method, import_head
from draftsmith.models.head import available_methods, load_method, methods_recognising
from draftsmith.models.parts.rope import Rope, RopeSettings
from draftsmith.models.target import FrozenTarget
from draftsmith.recipes.imports import import_folder
from draftsmith.recipes.run import _exit_code
from draftsmith.recipes.schema import RecipeError, parse_recipe
from draftsmith.recipes.stages import read_report, run_stages


@pytest.fixture(scope="module")
def frozen(target_folder: Path) -> FrozenTarget:
    return FrozenTarget.load(target_folder, torch.float32)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that brings what every method wants: an MTP layer, too."""
    return tiny_target(tmp_path_factory.mktemp("mimo"), "mimo")


def a_head(method: str, frozen: FrozenTarget, **config: Any) -> Any:
    trims = "draft_vocab_size" in load_method(method).Config.model_fields
    head = tiny_head(method, frozen, kept_ids=tiny_kept_ids(100) if trims else None, **config)
    with torch.no_grad():  # what has been learnt differs from what it began as
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return head


def exported(head: Any, folder: Path, method: str, layout: str) -> Path:
    save_head(head, folder / "head")
    names = {"target_name": "someone/target", "num_speculative_tokens": 3, "dtype": "float32"}
    export_head(folder / "head", folder / "export", target=head.target, layout=layout, **names)  # type: ignore[arg-type]
    return folder / "export"


@pytest.mark.parametrize("method", available_methods())
def test_an_exported_head_is_recognised_and_drafts_as_before(method: str, mimo: Path, tmp_path: Path) -> None:
    frozen = FrozenTarget.load(mimo, torch.float32)
    head = a_head(method, frozen)
    batch = tiny_batch(mimo, [tiny_rows([12])], head.needs.aux_layers)
    layouts = list(head.export_map())
    assert "plain" in layouts
    for layout in layouts:
        folder = exported(head, tmp_path / layout, method, layout)
        assert methods_recognising(json.loads((folder / "config.json").read_text())) == [method]
        found = import_folder(folder, tmp_path / layout / "imported", str(mimo))
        assert found.method == method and found.num_parameters == sum(p.numel() for p in head.parameters())
        imported: Any = load_head(tmp_path / layout / "imported", frozen)
        assert torch.equal(imported.propose(batch, 3), head.propose(batch, 3))


def test_a_published_head_with_a_rope_of_its_own_and_the_older_file_format_is_read(
    frozen: FrozenTarget, target_folder: Path, tmp_path: Path
) -> None:
    """As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B is: pytorch_model.bin, and a config that leaves RoPE to the default."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    switches = {"fc_norm": False, "norm_output": False, "rope_parameters": rope, "train_lm_head": True}
    head = a_head("eagle3", frozen, **switches)
    folder = exported(head, tmp_path, "eagle3", "plain")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "rope_scaling", "head_dim", "num_aux_hidden_states", "eagle_config", *switches):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    import_folder(folder, tmp_path / "imported", str(target_folder))
    imported: Any = load_head(tmp_path / "imported", frozen)
    assert imported.config.rope_parameters == rope
    assert not torch.equal(imported.rope.inv_freq, Rope.of_target(frozen.config, 32).inv_freq)
    batch = tiny_batch(target_folder, [tiny_rows([12])], head.needs.aux_layers)
    assert torch.equal(imported.propose(batch, 3), head.propose(batch, 3))
    # LlamaConfig's base where the file names none.
    config.pop("rope_theta")
    (folder / "config.json").write_text(json.dumps(config))
    default: Any = import_head(folder, frozen, "eagle3")
    expected = Rope.of_target(RopeSettings({"rope_theta": 10_000.0}, 1024), 32)
    assert torch.equal(default.rope.inv_freq, expected.inv_freq)


def test_what_is_no_head_is_refused_and_nothing_is_written(
    frozen: FrozenTarget, target_folder: Path, tmp_path: Path
) -> None:
    into, target = tmp_path / "imported", str(target_folder)
    head = a_head("eagle3", frozen)
    folder = exported(head, tmp_path, "eagle3", "speculators")
    other = tiny_target(tmp_path / "other", hidden_size=96, num_hidden_layers=5)
    cases: list[tuple[Path, str, str | None, str]] = [
        (tmp_path / "none", target, None, "there is no folder .* hf download OWNER/NAME"),
        (tmp_path, target, None, "holds no exported head: config.json is missing"),
        (
            target_folder,
            target,
            None,
            r"no draft head that is known here .* LlamaForCausalLM\); the methods are .*eagle3",
        ),
        (target_folder, target, "eagle3", r"a head of method eagle3 cannot have num_layers 7 \(Input should be less"),
        (tmp_path / "head", target, None, "holds a trained head of method eagle3, not an exported one"),
        (folder, str(other), None, "hidden_size is 64, the target's is 96"),
        (folder, target, "eagle4", "'eagle4'; the methods are"),
    ]
    for where, whose, method, message in cases:
        with pytest.raises(ValueError, match=message):
            import_folder(where, into, whose, method)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if name != "fc.weight"}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight is missing"):
        import_folder(folder, into, target)
    config = json.loads((folder / "config.json").read_text())
    del config["transformer_layer_config"]["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json lacks num_hidden_layers"):
        import_folder(folder, into, target)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        find_method(folder)
    assert not into.exists()
    with pytest.raises(ValueError, match="which exists already"):
        import_folder(folder, tmp_path / "head", target)


def test_the_command_says_how_to_use_what_it_read(
    frozen: FrozenTarget, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(a_head("eagle3", frozen, ttt_steps=2), tmp_path, "eagle3", "speculators")
    into = tmp_path / "imported"
    assert _exit_code(["import", str(folder), "--into", str(into), "--target", str(target_folder)]) == 0
    printed = capsys.readouterr().out
    assert "imported a eagle3 head" in printed and "names someone/target as its target" in printed
    assert "draft_vocab_size: 100" in printed and f"start_from: {into}" in printed
    assert _exit_code(["import", str(tmp_path), "--into", str(into), "--target", str(target_folder)]) == 1


@pytest.fixture
def started(frozen: FrozenTarget, settings: Callable[[Path], dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """A recipe that begins from a head that was trained with another loss."""
    save_head(a_head("eagle3", frozen, loss="ce"), tmp_path / "given")
    data = settings(tmp_path / "run")
    data["model"] = {"method": "eagle3", "ttt_steps": 2, "draft_vocab_size": 100}
    data["train"] |= {"start_from": str(tmp_path / "given"), "max_steps": 1, "learning_rate": 1e-9}
    return data


def test_training_begins_from_the_given_head(started: dict[str, Any], frozen: FrozenTarget, tmp_path: Path) -> None:
    run_stages(parse_recipe(started, "a recipe"), last="train")
    trained = tmp_path / "run/train" / read_artefact(tmp_path / "run/train", "train").result["weights"]
    before, after = load_file(tmp_path / "given/model.safetensors"), load_file(trained / "model.safetensors")
    assert before.keys() == after.keys() and not torch.equal(before["fc.weight"], after["fc.weight"])
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, rtol=0, atol=1e-6)
    # The same recipe from another head is another run.
    save_head(a_head("eagle3", frozen, seed=7), tmp_path / "given")
    with pytest.raises(ValueError, match="start_from"):
        run_stages(parse_recipe(started, "a recipe"), first="train", last="train")


def test_a_given_head_is_measured_as_it_is(started: dict[str, Any], tmp_path: Path) -> None:
    started["train"]["max_steps"] = 0
    run_stages(parse_recipe(started, "a recipe"))
    result = read_artefact(tmp_path / "run/train", "train").result
    given, kept = tmp_path / "given/model.safetensors", tmp_path / "run/train" / result["weights"] / "model.safetensors"
    assert result["steps"] == 0 and given.read_bytes() == kept.read_bytes()
    assert all(
        cell["divergences"] == []
        for cells in read_report(tmp_path / "run")["workloads"].values()
        for cell in cells
        if cell["engine"] == "runtime"
    )
    del started["train"]["start_from"]
    with pytest.raises(RecipeError, match=r"train\.max_steps is 0 and train\.start_from is unset"):
        parse_recipe(started, "a recipe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_output": False}, "norm_output False, there True"),
        ({"draft_vocab_size": 50}, r"model\.draft_vocab_size is 50, but .* has 100; give the same"),
        ({"aux_layers": [1, 2, 3]}, r"layer_ids \[1, 2, 3\], there \[2, 3, 4\]"),
        ({"method": "peagle"}, "a head of method eagle3, but model.method is peagle"),
    ],
)
def test_a_head_that_the_model_section_does_not_describe_is_refused(
    change: dict[str, Any], message: str, started: dict[str, Any]
) -> None:
    started["model"] |= change
    if "method" in change:
        del started["model"]["ttt_steps"]
    started["hidden_states"] |= {"mode": "online"}
    with pytest.raises(ValueError, match=message):
        run_stages(parse_recipe(started, "a recipe"), last="train")


def test_an_exported_folder_is_not_a_place_to_start_from(
    started: dict[str, Any], frozen: FrozenTarget, tmp_path: Path
) -> None:
    folder = exported(a_head("eagle3", frozen), tmp_path / "there", "eagle3", "plain")
    started["train"]["start_from"] = str(folder)
    with pytest.raises(ValueError, match=r"train\.start_from: .*draftsmith import"):
        run_stages(parse_recipe(started, "a recipe"), last="train")
