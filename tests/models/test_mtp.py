"""MTP against servers' computation: every training row is a step of cached drafting, and the export is a whole target.

K steps, H width, V vocabulary
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtp_reference import draft_logits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_rope import ROPES
from tiny import capture, tiny_batch, tiny_head, tiny_rows, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data.generate import Sampling
from draftsmith.eval.decode import Decoding, RunningTarget, decode
from draftsmith.models.batch import Batch
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head, import_head, push_to_hub
from draftsmith.models.mtp import Config, Head, needs
from draftsmith.models.parts.losses import dense_loss
from draftsmith.models.target import FrozenTarget, StoredTensors

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
YARN |= {"mscale": 0.7, "mscale_all_dim": 1.0}
# name -> (kind of target, its settings, settings of the head)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mimo": ("mimo", {}, {}),
    "qwen3.5": ("qwen3_5", {"num_attention_heads": 4, "num_key_value_heads": 2}, {}),
    "qwen3.5, tied": ("qwen3_5", {"tie_word_embeddings": True}, {}),
    "qwen3.5 moe": ("qwen3_5_moe", {}, {}),
    "qwen3-next": ("qwen3_next", {"norm_topk_prob": False}, {}),
    "glm4 moe": ("glm4_moe", {}, {}),
    "deepseek v3": ("deepseek_v3", {"rope_parameters": YARN}, {}),
    "deepseek v3, plain rope, no query latent": ("deepseek_v3", {"q_lora_rank": None}, {}),
    "fresh on llama": ("llama", {}, {"init": "fresh"}),
    "fresh on llama, tied, with its rope": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": ROPES["llama3"], "num_key_value_heads": 2},
        {"init": "fresh"},
    ),
}


class Scene:
    """A target of one variant, a head for it with random weights, and the whole target as the server would have it."""

    def __init__(self, variant: str, folder: Path, **changes: Any) -> None:
        kind, settings, self.head_settings = VARIANTS[variant]
        self.folder = tiny_target(folder, kind, **settings | changes)
        self.frozen = FrozenTarget.load(self.folder, torch.float32)

    def head(self, **settings: Any) -> Any:
        return tiny_head("mtp", self.frozen, **self.head_settings | settings)

    def served(self, head: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of the target with this head in it; the head's tensors may get a gradient."""
        layout, state = head.export_map()["plain"], head.state_dict()
        fields = json.loads((self.folder / "config.json").read_text()) | layout.config
        own = {theirs: state[ours].detach().clone().requires_grad_() for theirs, ours in layout.tensors.items()}
        return fields, {**load_file(self.folder / "model.safetensors"), **layout.copies, **own}


@pytest.fixture(scope="module", params=VARIANTS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(request.param, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene("mimo", tmp_path_factory.mktemp("mimo"))


def expected_loss(head: Any, served: tuple[Any, Any], batch: Batch) -> tuple[list[Tensor], list[int]]:
    """Per step: the summed loss over rows whose forced tokens are all supervised and of one document; their number."""
    steps, total, count = head.config.ttt_steps, [torch.zeros(()) for _ in range(head.config.ttt_steps)], [0] * 16
    for b, i in torch.nonzero(batch.document_ids_BT >= 0).tolist():
        document = batch.document_ids_BT[b] == batch.document_ids_BT[b, i]
        start, end = int(document.nonzero()[0]), int(document.nonzero()[-1]) + 1
        forced: list[int] = []
        while i + 1 + len(forced) < end and batch.loss_mask_BT[b, i + 1 + len(forced)] and len(forced) < steps:
            forced.append(int(batch.input_ids_BT[b, i + 1 + len(forced)]))
        if not forced:
            continue
        ids = batch.input_ids_BT[b, start : i + 1].tolist()
        logits = draft_logits(*served, ids, batch.last_BTH[b, start : i + 1], forced, len(forced))
        for k, logits_V in enumerate(logits):
            teacher_V = head.target.logits(batch.last_BTH[b, i + 1 + k])
            total[k] = total[k] + dense_loss(head.config.loss, logits_V[None], teacher_V[None], None)[0]
            count[k] += 1
    return total, count[:steps]


def two_packs(scene: Scene, head: Any) -> Batch:
    """Packed rows, one of them supervised from its first token on, so that position 0 is a row."""
    packs = [tiny_rows([9, 1, 2, 6], prompt=[0, 0, 1, 2]), tiny_rows([8, 5], prompt=[4, 5], seed=1)]
    batch = tiny_batch(scene.folder, packs, head.needs.aux_layers, num_tokens=20)
    batch.loss_mask_BT[0, 6] = False  # two islands of supervision in one document
    return batch


def test_each_training_row_equals_cached_drafting_step_by_step_with_forced_tokens(scene: Scene) -> None:
    head = scene.head(ttt_steps=4)
    batch = two_packs(scene, head)
    fields, tensors = scene.served(head)
    expected, count = expected_loss(head, (fields, tensors), batch)
    sum(expected).backward()  # type: ignore[union-attr]

    terms, metrics = head.loss(batch)
    sum(term.sum for term in terms.values()).backward()

    assert [float(x) for x in head.counts(batch).values()] == count and count[3] > 0
    assert [float(metrics[f"top1_step{k}"][1]) for k in range(4)] == count
    for k, value in enumerate(expected):
        torch.testing.assert_close(terms[f"step{k}"].sum, value, rtol=2e-4, atol=2e-4)
    parameters = dict(head.named_parameters())
    for theirs, ours in head.export_map()["plain"].tensors.items():
        wanted, found = tensors[theirs].grad, parameters[ours].grad
        is_left_out = ".experts." in theirs and not wanted.any()  # an expert that no row chose
        assert is_left_out or wanted.any(), f"{theirs} has no gradient; this test would prove little"
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-4 * float(wanted.abs().max()), msg=theirs)


def test_gradients_reach_every_tensor_of_the_layer_and_none_of_the_target(scene: Scene) -> None:
    head = scene.head()
    sum(term.sum for term in head.loss(two_packs(scene, head))[0].values()).backward()
    prefixes = ("model.mtp_layers.0.", "mtp.", "model.layers.7.")
    stored = head.export_map()["plain"].tensors
    assert set(stored.values()) == {name for name, _ in head.named_parameters()} == set(head.state_dict())
    assert all(name.startswith(prefixes) for name in stored)
    reached = {name for name, parameter in head.named_parameters() if parameter.grad.any()}
    left_out = set(stored.values()) - reached
    assert all(".experts." in name for name in left_out), "only experts that no row chose may have no gradient"
    assert not left_out or any(".experts." in name for name in reached)
    frozen = [scene.frozen.embedding_VH, scene.frozen.head_VH, *scene.frozen.norm.parameters()]
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in frozen)


def test_proposals_equal_free_running_drafts_of_the_reference(scene: Scene) -> None:
    head = scene.head()
    batch = tiny_batch(scene.folder, [tiny_rows([14, 7])], head.needs.aux_layers, num_tokens=24)
    proposals, served, seen = head.propose(batch, 4)[0], scene.served(head), set()
    with torch.no_grad():
        for start, end in ((0, 14), (14, 21)):
            ids = batch.input_ids_BT[0, start:end].tolist()
            for i in range(len(ids) - 1):
                last = batch.last_BTH[0, start : start + i + 1]
                drafts = [int(x.argmax()) for x in draft_logits(*served, ids[: i + 1], last, [ids[i + 1]], 4)]
                assert proposals[start + i].tolist() == drafts, (start, i)
                seen.update(drafts)
    assert len(seen) > 8, "the drafts hardly vary; this test would prove little"


def test_states_after_a_row_change_nothing_of_its_drafts_at_any_step(scene: Scene) -> None:
    head = scene.head()
    batch = tiny_batch(scene.folder, [tiny_rows([12])], head.needs.aux_layers)
    before, row = head.propose(batch, 5), 5
    batch.last_BTH[0, row + 1 :] += torch.randn(6, 64)
    batch.aux_BTF[0, row + 1 :] += 1.0
    after = head.propose(batch, 5)
    assert torch.equal(after[0, : row + 1], before[0, : row + 1])
    assert not torch.equal(after[0, row + 1 :], before[0, row + 1 :]), "the states have no effect at all"


@pytest.mark.parametrize("loss", ["kl", "ce", "tv", "lk_hybrid"])
def test_every_loss_equals_its_definition_row_by_row(loss: str, mimo: Scene) -> None:
    head = mimo.head(loss=loss, ttt_steps=2)
    batch = two_packs(mimo, head)
    expected, _ = expected_loss(head, mimo.served(head), batch)
    for k, value in enumerate(expected):
        torch.testing.assert_close(head.loss(batch)[0][f"step{k}"].sum, value, rtol=2e-4, atol=2e-4)


def test_later_steps_weigh_less_by_step_decay(mimo: Scene) -> None:
    head = mimo.head(step_decay=0.5)
    terms, _ = head.loss(two_packs(mimo, head))
    assert [term.weight for term in terms.values()] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("variant", ["mimo", "qwen3.5"])
def test_training_starts_from_the_targets_own_layer(variant: str, tmp_path: Path) -> None:
    scene = Scene(variant, tmp_path)
    head = Head(Config(), scene.frozen)
    stored, state = load_file(scene.folder / "model.safetensors"), head.state_dict()
    names = head.export_map()["plain"].tensors
    assert {name for name in stored if "mtp" in name} == set(names)
    assert all(torch.equal(stored[theirs], state[ours]) for theirs, ours in names.items())


def test_a_fresh_layer_starts_with_the_targets_final_norm_and_small_weights(tmp_path: Path) -> None:
    scene = Scene("fresh on llama", tmp_path)
    head = Head(Config(init="fresh"), scene.frozen)
    assert torch.equal(head.norm.weight, scene.frozen.norm.weight)
    assert not head.self_attn.q_proj.bias.any() and 0.015 < float(head.proj.weight.detach().std()) < 0.025


# ---------------------------------------------------------------- export


def exported(scene: Scene, head: Any, folder: Path, dtype: str = "float32") -> Path:
    """Export a head; the folder is the whole target."""
    save_head(head, folder / "head")
    export_head(
        folder / "head",
        folder / "model",
        target=head.target,
        target_name=str(scene.folder),
        num_speculative_tokens=3,
        layout="plain",
        dtype=dtype,  # type: ignore[arg-type]
    )
    return folder / "model"


def test_the_export_is_the_same_target_with_the_layer_in_it(scene: Scene, tmp_path: Path) -> None:
    head = scene.head()
    folder = exported(scene, head, tmp_path)
    fields, tensors = scene.served(head)
    assert json.loads((folder / "config.json").read_text()) == fields
    found = StoredTensors(folder)
    assert set(found) == set(tensors) and all(torch.equal(found[name], x.detach()) for name, x in tensors.items())
    prompt = torch.tensor([tiny_rows([20])[0].input_ids])
    with torch.no_grad():
        one, other = (AutoModelForCausalLM.from_pretrained(path)(prompt).logits for path in (scene.folder, folder))
    assert torch.equal(one, other)
    assert (
        AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(scene.folder).chat_template
    )


def test_the_export_is_a_target_whose_own_layer_drafts_the_same(scene: Scene, tmp_path: Path) -> None:
    head = scene.head()
    folder = exported(scene, head, tmp_path)
    again: Any = Head(Config(), FrozenTarget.load(folder, torch.float32))
    imported: Any = import_head(folder, scene.frozen, "mtp")
    batch = tiny_batch(scene.folder, [tiny_rows([20, 9])], head.needs.aux_layers)
    assert torch.equal(again.propose(batch, 4), head.propose(batch, 4))
    assert torch.equal(imported.propose(batch, 4), head.propose(batch, 4))


def test_of_a_sharded_target_only_the_files_that_held_the_layer_are_written_again(tmp_path: Path) -> None:
    scene = Scene("mimo", tmp_path / "target")
    tensors = load_file(scene.folder / "model.safetensors")
    halves = [
        {n: x for n, x in tensors.items() if ("mtp" in n or "embed" in n) == is_first} for is_first in (True, False)
    ]
    (scene.folder / "model.safetensors").unlink()
    for number, half in enumerate(halves):
        save_file(half, scene.folder / f"part{number}.safetensors")
    places = {name: f"part{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (scene.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    scene.frozen = FrozenTarget.load(scene.folder, torch.float32)
    head = scene.head()
    folder = exported(scene, head, tmp_path)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 3 and files[1].samefile(scene.folder / "part1.safetensors")
    held = []
    for file in files:
        with safe_open(file, "pt") as opened:
            held += list(opened.keys())
    assert sorted(held) == sorted(tensors), "every tensor is in exactly one file"
    layer = head.export_map()["plain"].tensors
    assert all(torch.equal(StoredTensors(folder)[theirs], head.state_dict()[ours]) for theirs, ours in layer.items())


def test_in_bfloat16_only_the_layer_is_rounded(mimo: Scene, tmp_path: Path) -> None:
    head = mimo.head()
    found = StoredTensors(exported(mimo, head, tmp_path, "bfloat16"))
    layer = head.export_map()["plain"].tensors
    assert {name for name in found if found[name].dtype == torch.bfloat16} == set(layer)


def test_the_card_serves_the_folder_itself_and_the_folder_can_be_pushed(mimo: Scene, tmp_path: Path) -> None:
    folder = exported(mimo, mimo.head(), tmp_path)
    command = """vllm serve THIS_FOLDER --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
    assert command in (folder / "README.md").read_text()

    class Hub:
        def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None: ...
        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None: ...

    assert push_to_hub(folder, "someone/target", hub=Hub()).endswith("someone/target")


def test_the_speculators_layout_is_refused_with_the_one_there_is(mimo: Scene, tmp_path: Path) -> None:
    save_head(mimo.head(), tmp_path / "head")
    with pytest.raises(ValueError, match=r"export\.layout is 'speculators'; mtp can be written as plain"):
        export_head(
            tmp_path / "head", tmp_path / "model", target=mimo.frozen, target_name="t", num_speculative_tokens=1
        )


# ---------------------------------------------------------------- decoding


PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]


def fitted(scene: Scene, loss: str) -> Any:
    """A head that often drafts right on the target's own answers, so that drafts are accepted and rejected."""
    head, rows = scene.head(loss=loss), []
    model = AutoModelForCausalLM.from_pretrained(scene.folder, dtype=torch.float32).eval()
    with RunningTarget(model) as target:
        answers = decode(target, None, PROMPTS, Decoding(24, frozenset(), 0)).answers
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        row = tiny_rows([len(prompt) + 24])[0]
        mask = (False,) * len(prompt) + (True,) * 24
        rows.append(type(row)(row.row_id, row.conversation_id, row.source, (*prompt, *answer.token_ids), mask))
    batch = tiny_batch(scene.folder, [rows], head.needs.aux_layers)
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-3)
    for _ in range(25):
        optimizer.zero_grad()
        sum(term.sum for term in head.loss(batch)[0].values()).backward()
        optimizer.step()
    return head, model, [answer.token_ids for answer in answers]


def test_greedy_decoding_with_the_layer_gives_the_targets_own_tokens(scene: Scene) -> None:
    head, model, plain = fitted(scene, "ce")
    with RunningTarget(model, head.needs.aux_layers) as target:
        answers = decode(target, head, PROMPTS, Decoding(24, frozenset(), 3)).answers
    assert [answer.token_ids for answer in answers] == plain
    accepted = [count for answer in answers for count in answer.accepted]
    assert sum(accepted) > len(accepted) / 4 and {0, 3} <= set(accepted), (
        "rounds are hardly accepted, or never rejected"
    )


def test_sampled_decoding_keeps_the_targets_distribution(tmp_path: Path) -> None:
    head, model, _ = fitted(Scene("mimo", tmp_path, vocab_size=24), "kl")
    prompts, counts = [[5, 6, 7, 8]] * 600, []
    for drafter, num_tokens in ((None, 0), (head, 2)):
        wanted = Decoding(3, frozenset(), num_tokens, Sampling(temperature=0.7, seed=num_tokens))
        with RunningTarget(model, head.needs.aux_layers) as target:
            answers = decode(target, drafter, prompts, wanted).answers
        counts.append(torch.bincount(torch.tensor([answer.token_ids[1] for answer in answers]), minlength=24).float())
    accepted = [count for answer in answers for count in answer.accepted]
    assert 0.1 * len(accepted) < sum(accepted) < 1.9 * len(accepted), "drafts are always or never accepted"
    one, other = counts
    # Chi-square of two samples of one size: its mean is the number of tokens seen, less one; six deviations are a bug.
    freedom = int((one + other > 0).sum()) - 1
    statistic = float(((one - other) ** 2 / (one + other).clamp_min(1)).sum())
    assert freedom >= 8 and statistic < freedom + 6 * (2 * freedom) ** 0.5


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "init", "message"),
    [
        ({"model_type": "llama"}, "target", r"model\.init is target, but this llama target has no MTP layer"),
        ({"model_type": "qwen2"}, "target", r"set model\.init: fresh"),
        ({"model_type": "ernie", "num_nextn_predict_layers": 1}, "target", "no MTP layer that is known here"),
        ({"model_type": "qwen2", "num_nextn_predict_layers": 3}, "target", "has 3 MTP layers"),
        ({"model_type": "qwen2", "num_nextn_predict_layers": 1}, "fresh", r"set model\.init: target"),
        ({"model_type": "qwen3"}, "fresh", "a qwen3 target cannot be served with an added MTP layer"),
        ({"model_type": "llama", "attention_bias": True}, "fresh", "the target has attention_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "fresh", "the target has use_sliding_window"),
        ({"model_type": "llama", "head_dim": 48}, "fresh", "2 heads of 48 do not make its width 64"),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 0}, "target", "this glm4_moe target has no MTP layer"),
        ({"model_type": "qwen3_5_text", "mtp_use_dedicated_embeddings": True}, "target", "embeddings of its own"),
        ({"model_type": "qwen3_next"}, "fresh", r"set model\.init: target"),
    ],
)
def test_targets_that_cannot_be_trained_or_served_are_refused_by_name(
    fields: dict[str, Any], init: Any, message: str
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 7}
    with pytest.raises(ValueError, match=message):
        needs(Config(init=init), SimpleNamespace(**sizes | fields))


def test_a_checkpoint_without_the_layer_that_its_config_promises_is_refused(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "qwen2", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"the target's checkpoint lacks .*model\.mtp_layers\.0\.input_proj\.weight"):
        Head(Config(), FrozenTarget.load(folder, torch.float32))


def test_a_quantised_layer_is_refused_by_name(tmp_path: Path) -> None:
    scene = Scene("mimo", tmp_path)
    tensors, name = load_file(scene.folder / "model.safetensors"), "model.mtp_layers.0.input_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, scene.folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"input_proj\.weight is stored as torch\.float8_e4m3fn"):
        Head(Config(), FrozenTarget.load(scene.folder, torch.float32))


def test_the_only_state_that_is_needed_is_the_last_one(mimo: Scene) -> None:
    head = mimo.head()
    assert head.needs.aux_layers == (7,)
    aux, last = capture(mimo.folder, [5, 6, 7], head.needs.aux_layers)
    assert torch.equal(aux, last)
