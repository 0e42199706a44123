"""Exported folders: every field that serving engines read, reload equality, refusals, model card, push."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_reference import draft_logits
from safetensors.torch import load_file, save_file
from tiny import tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target
from transformers import LlamaConfig, Qwen3Config

from draftsmith.models import export
from draftsmith.models.card import Card
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head, import_head, push_to_hub
from draftsmith.models.parts.rope import Rope
from draftsmith.models.target import FrozenTarget

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 3e4},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


def exported(head: Any, folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Export a head; return config.json and the tensors."""
    save_head(head, folder / "head")
    settings = {"target": head.target, "target_name": "someone/target", "num_speculative_tokens": 4, "dtype": "float32"}
    export_head(folder / "head", folder / "export", **settings | options)
    return json.loads((folder / "export/config.json").read_text()), load_file(folder / "export/model.safetensors")


def test_the_speculators_layout_holds_every_field_that_vllm_reads(frozen: FrozenTarget, tmp_path: Path) -> None:
    head = tiny_head("eagle3", frozen, kept_ids=tiny_kept_ids(100), aux_layers=(1, 3, 5, 7), norm_before_residual=True)
    config, tensors = exported(head, tmp_path)
    assert config["speculators_model_type"] == "eagle3"
    switches = [config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")]
    assert switches == [True, False, True, True]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5, 7]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (100, 64)
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert config["transformer_layer_config"]["model_type"] == "llama"
    proposals = config["speculators_config"]
    assert proposals["proposal_methods"][0]["speculative_tokens"] == 4
    assert proposals["verifier"] == {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]}
    assert tensors["fc.weight"].shape == (64, 4 * 64) and tensors["fc_norm.3.weight"].shape == (64,)
    assert torch.equal(tensors["lm_head.weight"], frozen.head_VH[tensors["t2d"]])
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert "layers.0.hidden_norm.weight" in tensors


def test_the_plain_layout_is_that_of_the_eagle_authors(frozen: FrozenTarget, tmp_path: Path) -> None:
    config, tensors = exported(tiny_head("eagle3", frozen), tmp_path, layout="plain")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["num_aux_hidden_states"] == 3 and config["draft_vocab_size"] == 512
    assert "midlayer.hidden_norm.weight" in tensors
    # Engines share the target's embedding and lm_head with a draft that brings none.
    assert not {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"} & tensors.keys()


def test_a_qwen3_layer_names_its_own_architecture(frozen: FrozenTarget, tmp_path: Path) -> None:
    config, tensors = exported(tiny_head("eagle3", frozen, layer_type="qwen3"), tmp_path, layout="plain")
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    read = Qwen3Config(**config)
    assert read.layer_types == ["full_attention"] and read.sliding_window is None
    assert tensors["midlayer.self_attn.q_norm.weight"].shape == (32,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["speculators", "plain"])
def test_the_plain_equations_draft_from_the_written_files_what_the_head_drafts(
    layout: str, dtype: str, target: Path, frozen: FrozenTarget, tmp_path: Path
) -> None:
    head = tiny_head("eagle3", frozen, kept_ids=tiny_kept_ids(100))
    config, tensors = exported(head, tmp_path, layout=layout, dtype=dtype)
    fields = {**config.get("transformer_layer_config", {}), **config}
    w = {name.replace("midlayer", "layers.0"): x for name, x in tensors.items()}
    w = {name: x.float() if x.is_floating_point() else x for name, x in w.items()}
    batch = tiny_batch(target, [tiny_rows([9])], (2, 3, 4))
    ids, aux = batch.input_ids_BT[0].tolist(), batch.aux_BTF[0, :6]
    logits = draft_logits(fields, w, frozen.embedding_VH, w["lm_head.weight"], ids[:6], aux, [ids[6]], 3)
    drafts = [int(x.argmax() + w["d2t"][x.argmax()]) for x in logits]
    imported: Any = import_head(tmp_path / "export", frozen, "eagle3")
    assert imported.propose(batch, 3)[0, 5].tolist() == drafts
    if dtype == "float32":
        assert head.propose(batch, 3)[0, 5].tolist() == drafts
    else:
        assert w["fc.weight"].sub(head.fc.weight).abs().max() < 0.01


@pytest.mark.parametrize("rope", ROPES)
def test_rope_is_the_targets_for_old_and_new_readers(rope: str, tmp_path: Path) -> None:
    frozen = FrozenTarget.load(tiny_target(tmp_path / "target", rope_parameters=ROPES[rope]), torch.float32)
    head = tiny_head("eagle3", frozen)
    config, _ = exported(head, tmp_path)
    layer = config["transformer_layer_config"]
    new = LlamaConfig(**{k: v for k, v in layer.items() if k not in ("rope_theta", "rope_scaling")})
    old = LlamaConfig(**{k: v for k, v in layer.items() if k != "rope_parameters"})
    for read in (new, old, LlamaConfig(**layer)):
        found = Rope.of_target(read, 32)
        assert torch.equal(found.inv_freq, head.rope.inv_freq) and found.scaling == head.rope.scaling


def test_gemma_targets_bring_their_scaled_embeddings(tmp_path: Path) -> None:
    frozen = FrozenTarget.load(tiny_target(tmp_path / "target", "gemma3"), torch.float32)
    _, tensors = exported(tiny_head("eagle3", frozen), tmp_path)
    torch.testing.assert_close(tensors["embed_tokens.weight"], frozen.embedding_VH * 8.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_residual": None}, "norm_before_residual is missing"),
        ({"transformer_layer_config": {"rope_theta": 77.0}}, "rope_theta with rope_scaling give other frequencies"),
        (
            {"transformer_layer_config": {"rope_parameters": LLAMA3}},
            "rope_parameters and rope_theta with rope_scaling give",
        ),
        ({"transformer_layer_config": {"attention_bias": True}}, "attention_bias is true"),
        ({"transformer_layer_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"transformer_layer_config": {"rms_norm_eps": 0.1}}, r"rms_norm_eps is 0\.1, the target's is"),
        (
            {"transformer_layer_config": {"layer_types": ["sliding_attention"], "sliding_window": 8}},
            "sliding_attention of 8 tokens",
        ),
        ({"fc_norm": False}, "fc_norm.0.weight is unexpected"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "fc.weight has shape"),
    ],
)
def test_a_config_that_the_head_cannot_honour_is_refused(
    change: dict[str, Any], message: str, frozen: FrozenTarget, tmp_path: Path
) -> None:
    config, _ = exported(tiny_head("eagle3", frozen), tmp_path)
    for name, value in change.items():
        if value is None:
            del config[name]
        else:
            config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (tmp_path / "export/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        import_head(tmp_path / "export", frozen, "eagle3")


def test_a_missing_or_unexpected_tensor_is_refused(frozen: FrozenTarget, tmp_path: Path) -> None:
    _, tensors = exported(tiny_head("eagle3", frozen, kept_ids=tiny_kept_ids(100)), tmp_path)
    path = tmp_path / "export/model.safetensors"
    for change, message in [
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"surprise": torch.zeros(2)}, "surprise is unexpected"),
        ({"embed_tokens.weight": torch.zeros(512, 64)}, "embed_tokens.weight is not the target's own"),
        ({"lm_head.weight": None}, "lm_head.weight are missing"),
    ]:
        save_file({name: x for name, x in (tensors | change).items() if x is not None}, path)  # type: ignore[operator]
        with pytest.raises(ValueError, match=message):
            import_head(tmp_path / "export", frozen, "eagle3")
    # A copy of the target's embedding, as other trainers write it, and a lm_head of its own are fine.
    own = {"embed_tokens.weight": frozen.embedding_VH.clone(), "lm_head.weight": torch.ones(100, 64)}
    save_file(tensors | own, path)
    imported: Any = import_head(tmp_path / "export", frozen, "eagle3")
    assert imported.config.train_lm_head


def test_an_export_that_does_not_reproduce_the_head_is_refused_and_not_written(
    frozen: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = export._exported_tensors

    def loses_a_norm(*args: Any) -> dict[str, torch.Tensor]:
        tensors = original(*args)
        return tensors | {"norm.weight": torch.ones_like(tensors["norm.weight"])}

    monkeypatch.setattr(export, "_exported_tensors", loses_a_norm)
    with pytest.raises(ValueError, match="does not reproduce the head"):
        exported(tiny_head("eagle3", frozen), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_unknown_layout_lists_those_there_are(frozen: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export\.layout is 'gguf'; eagle3 can be written as speculators, plain"):
        exported(tiny_head("eagle3", frozen), tmp_path, layout="gguf")


def test_the_model_card_states_recipe_data_and_measurements(frozen: FrozenTarget, tmp_path: Path) -> None:
    card = Card(
        recipe="model:\n  method: eagle3\n",
        data={"prompts": "gsm8k, 700", "engine": "vllm 0.32.0"},
        acceptance=[{"workload": "gsm8k", "N": 3, "MAL": 2.1034}, {"workload": "chat", "N": 3, "MAL": 1.7}],
    )
    exported(tiny_head("eagle3", frozen), tmp_path, card=card)
    text = (tmp_path / "export/README.md").read_text()
    assert text.startswith("---\nlibrary_name: vllm\nbase_model: someone/target\n")
    for line in ("| gsm8k | 3 | 2.1 |", "- engine: vllm 0.32.0", "  method: eagle3", "vllm serve someone/target"):
        assert line in text


class FakeHub:
    """Records what would be sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create", {"repo_id": repo_id, "private": private, "exist_ok": exist_ok}))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.calls.append(("upload", {"repo_id": repo_id, "folder_path": folder_path}))


def test_push_creates_the_repository_and_uploads_the_folder(frozen: FrozenTarget, tmp_path: Path) -> None:
    exported(tiny_head("eagle3", frozen), tmp_path)
    hub = FakeHub()
    url = push_to_hub(tmp_path / "export", "someone/draft", hub=hub)
    assert url == "https://huggingface.co/someone/draft"
    assert hub.calls == [
        ("create", {"repo_id": "someone/draft", "private": True, "exist_ok": True}),
        ("upload", {"repo_id": "someone/draft", "folder_path": str(tmp_path / "export")}),
    ]


def test_push_refuses_what_is_no_export(tmp_path: Path) -> None:
    hub = FakeHub()
    with pytest.raises(ValueError, match="is not an exported head"):
        push_to_hub(tmp_path, "someone/draft", hub=hub)
    assert hub.calls == []
