"""P-EAGLE against its equations: every training row is a row of drafting in one pass, whatever was sampled beside it.

R rows, K depths, H width, V draft vocabulary, F = auxiliary layers * H
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peagle_reference import draft_logits
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import export_head, import_head
from draftsmith.models.parts.document_rows import supervised_segments
from draftsmith.models.parts.losses import dense_loss
from draftsmith.models.peagle import Config, needs, read_export
from draftsmith.models.target import FrozenTarget

EVERYTHING: dict[str, Any] = {"keep_ratio": 1.0, "num_depths": 4, "num_layers": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "one layer": {"num_layers": 1},
    "four layers, qwen3": {"num_layers": 4, "layer_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2},
    "no norm, frozen embeddings": {"fc_norm": False, "train_embeddings": "none", "mask_token_id": 7},
    "normed residual": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
    "one auxiliary layer": {"aux_layers": (7,)},
    "trimmed vocabulary": {"kept_ids": tiny_kept_ids(120)},
    "own embeddings and lm_head": {"train_embeddings": "all", "train_lm_head": True, "kept_ids": tiny_kept_ids(120)},
    "two depths": {"num_depths": 2},
    "sampled": {"keep_ratio": 0.6, "min_keep_ratio": 0.3},
}
PACKS = ([9, 1, 2, 6], [8, 5])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


def make(frozen: FrozenTarget, **settings: Any) -> Any:
    """A head whose trained copies of the target's tensors differ from them, as after training."""
    head = tiny_head("peagle", frozen, **{**EVERYTHING, **settings})
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name in ("mask_embedding", "lm_head.weight"):
                parameter.add_(0.03 * torch.randn_like(parameter))
    return head


def make_batch(target: Path, head: Any) -> Batch:
    packs = [tiny_rows(PACKS[0], prompt=[3, 0, 1, 2]), tiny_rows(PACKS[1], prompt=[4, 5], seed=1)]
    batch = tiny_batch(target, packs, head.needs.aux_layers, num_tokens=20)
    batch.loss_mask_BT[0, 6] = False  # two islands of supervision in one document
    return batch


def reference(head: Any, weights: dict[str, Tensor], ids: list[int], aux: Tensor, bonus: int, k: int) -> Tensor:
    exported = head.export_map()["speculators"].config
    fields = {**exported["transformer_layer_config"], **exported}
    head_VH, table = head.target.head_VH, head.target.embedding_VH
    head_VH = weights.get("lm_head.weight", head_VH[weights["t2d"]] if "t2d" in weights else head_VH)
    table = weights.get("embed_tokens.weight", table)
    if "mask_embedding" in weights:
        is_mask_V1 = (torch.arange(table.shape[0]) == head.mask_token_id)[:, None]
        table = torch.where(is_mask_V1, weights["mask_embedding"], table)
    return draft_logits(fields, weights, table, head_VH, ids, aux, bonus, k)


def trainable(batch: Batch, num_depths: int) -> list[tuple[int, int, int]]:
    """(packed row, position, depth) whose tokens t[i+1] .. t[i+1+d] are all supervised and of one document."""
    found = []
    for b, i in torch.nonzero(batch.document_ids_BT >= 0).tolist():
        for depth in range(num_depths):
            span = slice(i, i + 2 + depth)
            is_whole = i + 1 + depth < batch.document_ids_BT.shape[1]
            if not is_whole or (batch.document_ids_BT[b, span] != batch.document_ids_BT[b, i]).any():
                break
            if not batch.loss_mask_BT[b, i + 1 + depth]:
                break
            found.append((b, i, depth))
    return found


def sampled(head: Any, batch: Batch) -> list[tuple[int, int, int]]:
    """The same for what the head trains."""
    segments = supervised_segments(batch)
    places = [row for segment in segments for row in range(segment.first, segment.last)]
    width = batch.input_ids_BT.shape[1]
    return sorted(
        (places[row] // width, places[row] % width, depth)
        for depth, rows in enumerate(head.sampled_rows(batch, segments))
        for row in rows.tolist()
    )


def expected_loss(head: Any, weights: dict[str, Tensor], batch: Batch, rows: list[tuple[int, int, int]]) -> Tensor:
    total = torch.zeros(())
    for b, i, depth in rows:
        start = int((batch.document_ids_BT[b] == batch.document_ids_BT[b, i]).nonzero()[0])
        ids, aux = batch.input_ids_BT[b, start : i + 1].tolist(), batch.aux_BTF[b, start : i + 1]
        logits_V = reference(head, weights, ids, aux, int(batch.input_ids_BT[b, i + 1]), depth + 1)[depth]
        teacher_V = head.target.logits(batch.last_BTH[b, i + 1 + depth])
        lse = teacher_V.logsumexp(-1)[None] if "t2d" in weights else None
        teacher_V = teacher_V[weights["t2d"]] if "t2d" in weights else teacher_V
        total = total + dense_loss(head.config.loss, logits_V[None], teacher_V[None], lse)[0]
    return total


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_training_row_equals_drafting_in_one_pass(variant: str, target: Path, frozen: FrozenTarget) -> None:
    head = make(frozen, **VARIANTS[variant])
    batch = make_batch(target, head)
    weights = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in head.state_dict().items()}
    everything, rows = trainable(batch, head.config.num_depths), sampled(head, batch)
    assert set(rows) < set(everything) if variant == "sampled" else rows == everything
    expected = expected_loss(head, weights, batch, rows)
    expected.backward()

    terms, metrics = head.loss(batch)
    terms["rows"].sum.backward()

    assert float(head.counts(batch)["rows"]) == len(rows)
    for depth in range(head.config.num_depths):
        assert float(metrics[f"top1_depth{depth}"][1]) == sum(each[2] == depth for each in rows)
    torch.testing.assert_close(terms["rows"].sum, expected, rtol=2e-4, atol=2e-4)
    for name, parameter in head.named_parameters():
        gradient = weights[name].grad if weights[name].grad is not None else torch.zeros_like(parameter)
        scale = float(gradient.abs().max())
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_equal_drafts_of_the_reference(variant: str, target: Path, frozen: FrozenTarget) -> None:
    head = make(frozen, **VARIANTS[variant])
    batch = tiny_batch(target, [tiny_rows([14, 7])], head.needs.aux_layers, num_tokens=24)
    batch.input_ids_BT[0, [3, 9, 16]] = head.mask_token_id  # a text that holds the mask token, as a server sees it
    proposals, weights, seen = head.propose(batch, 5)[0], dict(head.state_dict()), set()
    for start, end in ((0, 14), (14, 21)):
        ids = batch.input_ids_BT[0, start:end].tolist()
        for i in range(len(ids) - 1):
            aux = batch.aux_BTF[0, start : start + i + 1]
            best = reference(head, weights, ids[: i + 1], aux, ids[i + 1], 5).argmax(-1)
            drafts = (best + weights["d2t"][best]).tolist() if "d2t" in weights else best.tolist()
            assert proposals[start + i].tolist() == drafts, (start, i)
            seen.update(drafts)
    assert len(seen) > 8, "the drafts hardly vary; this test would prove little"


def test_a_row_reads_nothing_of_later_states_other_documents_or_other_rows_masks(
    target: Path, frozen: FrozenTarget
) -> None:
    head = make(frozen, num_depths=3)
    batch = tiny_batch(target, [tiny_rows([9, 7], prompt=0)], head.needs.aux_layers)
    for document, anchor in ((0, 0), (0, 4), (1, 9), (1, 12)):
        for depth in range(3):
            aux = batch.aux_BTF.clone().requires_grad_()
            only = Batch(**{**vars(batch), "aux_BTF": aux})
            mask = torch.zeros_like(batch.loss_mask_BT)
            mask[0, anchor + 1 : anchor + 2 + depth] = True
            only = Batch(**{**vars(only), "loss_mask_BT": mask})
            head.loss(only)[0]["rows"].sum.backward()
            reach = aux.grad[0].abs().sum(-1) > 0
            # Rows anchor .. anchor+depth are trained; the last of them sees the states up to its own.
            first, last = (0, 9)[document], anchor + depth
            assert reach.nonzero()[:, 0].tolist() == list(range(first, last + 1)), (anchor, depth)


def test_what_is_sampled_changes_with_the_seed_and_is_nested_with_the_wanted_shares(
    target: Path, frozen: FrozenTarget
) -> None:
    head = make(frozen, keep_ratio=0.5, min_keep_ratio=0.2, num_depths=5)
    batch = tiny_batch(target, [tiny_rows([1500], prompt=0)], head.needs.aux_layers)
    segments, draws = supervised_segments(batch), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        rows = [set(kept.tolist()) for kept in head.sampled_rows(batch, segments)]
        assert rows == [set(kept.tolist()) for kept in head.sampled_rows(batch, segments)], "counts and loss must agree"
        assert rows[0] == set(range(1499))
        for depth, share in enumerate((1.0, 0.5, 0.25, 0.2, 0.2)):
            valid = 1499 - depth
            # Four standard deviations of a binomial share.
            assert abs(len(rows[depth]) / valid - share) <= 4 * (share * (1 - share) / valid) ** 0.5 + 1e-9
            assert depth == 0 or rows[depth] <= rows[depth - 1]
            assert max(rows[depth]) < valid
        draws.append(rows[1])
    assert draws[0] != draws[1]


def test_gradients_reach_the_mask_only_through_later_depths_and_the_target_never(
    target: Path, frozen: FrozenTarget
) -> None:
    for prompts in ([8, 0, 1, 5], [3, 0, 1, 2]):  # answers of one token have no later depth
        head = make(frozen, num_depths=2)
        batch = tiny_batch(target, [tiny_rows(PACKS[0], prompt=prompts)], head.needs.aux_layers)
        head.loss(batch)[0]["rows"].sum.backward()
        for name, parameter in head.named_parameters():
            is_reached = prompts[0] == 3 or name not in ("mask_hidden", "mask_embedding")
            assert bool(parameter.grad.any()) == is_reached, name
    frozen_tensors = (frozen.embedding_VH, frozen.head_VH, *frozen.norm.parameters())
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in frozen_tensors)
    names = dict(make(frozen, train_embeddings="none").named_parameters())
    assert "mask_embedding" not in names and "mask_hidden" in names


def test_every_loss_equals_its_definition_row_by_row(target: Path, frozen: FrozenTarget) -> None:
    for loss in ("ce", "tv", "lk_hybrid"):
        for kept_ids in (None, tiny_kept_ids(120)):
            head = make(frozen, loss=loss, kept_ids=kept_ids, num_layers=1)
            batch = tiny_batch(target, [tiny_rows([9, 6])], head.needs.aux_layers)
            expected = expected_loss(head, dict(head.state_dict()), batch, trainable(batch, 4))
            torch.testing.assert_close(head.loss(batch)[0]["rows"].sum, expected, rtol=2e-4, atol=2e-4)


def test_drafting_more_tokens_changes_no_earlier_one(target: Path, frozen: FrozenTarget) -> None:
    head = make(frozen, num_depths=2)  # also beyond the depths that were trained
    batch = make_batch(target, head)
    assert torch.equal(head.propose(batch, 6)[..., :3], head.propose(batch, 3))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("layout", ["speculators", "plain"])
def test_an_export_carries_the_embedding_table_with_the_learnt_row(layout: Any, kind: str, tmp_path: Path) -> None:
    target = FrozenTarget.load(tiny_target(tmp_path / "target", kind), torch.float32)
    head = make(target, mask_token_id=5)
    save_head(head, tmp_path / "head")
    export_head(
        tmp_path / "head",
        tmp_path / "export",
        target=target,
        target_name="t",
        num_speculative_tokens=3,
        layout=layout,
        dtype="float32",
    )
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    table, expected = tensors["embed_tokens.weight"], target.embedding_VH * target.embedding_scale
    assert torch.equal(table[5], head.mask_embedding) and not torch.equal(table[5], expected[5])
    others = torch.arange(VOCAB) != 5
    assert torch.equal(table[others], expected[others]) and "mask_embedding" not in tensors
    found = import_head(tmp_path / "export", target, "peagle")
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in found.state_dict().items())
    assert found.config.train_embeddings == "mask" and found.config.mask_token_id == 5

    table[9] += 1.0  # a published head, whose trainer trained the whole table
    save_file(tensors, tmp_path / "export" / "model.safetensors")
    found = import_head(tmp_path / "export", target, "peagle")
    assert found.config.train_embeddings == "all" and torch.equal(found.embed_tokens.weight, table)


def test_default_layers_are_those_of_vllm_and_impossible_settings_are_refused(frozen: FrozenTarget) -> None:
    assert needs(Config(), frozen.config).aux_layers == (2, 3, 4)  # 2, n//2, n-3 of 7 layers
    assert make(frozen).mask_token_id == VOCAB - 1
    with pytest.raises(ValueError, match=r"model\.aux_layers is \(3, 2\)"):
        needs(Config(aux_layers=(3, 2)), frozen.config)
    with pytest.raises(ValueError, match=r"fc_norm and model\.norm_before_fc"):
        Config(fc_norm=True, norm_before_fc=True)
    with pytest.raises(ValueError, match=r"model\.mask_token_id is 512; the target's embedding table has only 512"):
        make(frozen, mask_token_id=512)


def test_a_folder_without_a_mask_token_is_refused(frozen: FrozenTarget) -> None:
    head = make(frozen)
    fields = {k: v for k, v in head.export_map()["plain"].config.items() if k not in ("mask_token_id", "ptd_token_id")}
    with pytest.raises(ValueError, match="none of mask_token_id, pard_token, ptd_token_id"):
        read_export(fields, dict(head.state_dict()), frozen)
