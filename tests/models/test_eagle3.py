"""EAGLE-3 against its equations: every training row is a step of drafting with forced tokens, and draft() is that too.

K steps, H width, V draft vocabulary, F = auxiliary layers * H
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_reference import draft_logits
from tiny import tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.eagle3 import Config, needs
from draftsmith.models.parts.losses import dense_loss
from draftsmith.models.target import FrozenTarget

VARIANTS: dict[str, dict[str, Any]] = {
    "eagle-3.1": {},
    "eagle-3": {"fc_norm": False, "norm_output": False},
    "normed residual": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
    "qwen3 layer": {"layer_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2},
    "two layers": {"num_layers": 2},
    "two layers, pre-norm feedback": {"num_layers": 2, "norm_output": False, "norm_before_residual": True},
    "one auxiliary layer": {"aux_layers": (7,)},
    "four auxiliary layers": {"aux_layers": (0, 2, 5, 6)},
    "trimmed vocabulary": {"kept_ids": tiny_kept_ids(120)},
    "trained lm_head": {"kept_ids": tiny_kept_ids(120), "train_lm_head": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


def reference(head: Any, weights: dict[str, Tensor], ids: list[int], aux: Tensor, forced: list[int], k: int) -> Any:
    """Logits of steps 0..k by the plain equations; `weights` are those of the head, perhaps with a graph."""
    target, exported = head.target, head.export_map()["speculators"].config
    fields = {**exported["transformer_layer_config"], **exported}
    head_VH = weights.get("lm_head.weight", target.head_VH)
    if "d2t" in weights and "lm_head.weight" not in weights:
        head_VH = target.head_VH[weights["t2d"]]
    return draft_logits(fields, weights, target.embedding_VH, head_VH, ids, aux, forced, k + 1)


def expected_loss(head: Any, weights: dict[str, Tensor], batch: Batch) -> tuple[list[Tensor], list[int]]:
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
        logits = reference(head, weights, ids, batch.aux_BTF[b, start : i + 1], forced, len(forced) - 1)
        for k, logits_V in enumerate(logits):
            teacher_V = head.target.logits(batch.last_BTH[b, i + 1 + k])
            lse = teacher_V.logsumexp(-1)[None] if "t2d" in weights else None
            teacher_V = teacher_V[weights["t2d"]] if "t2d" in weights else teacher_V
            total[k] = total[k] + dense_loss(head.config.loss, logits_V[None], teacher_V[None], lse)[0]
            count[k] += 1
    return total, count[:steps]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_training_row_equals_drafting_step_by_step_with_forced_tokens(
    variant: str, target: Path, frozen: FrozenTarget
) -> None:
    head = tiny_head("eagle3", frozen, **VARIANTS[variant])
    packs = [tiny_rows([9, 1, 2, 6], prompt=[3, 0, 1, 2]), tiny_rows([8, 5], prompt=[4, 5], seed=1)]
    batch = tiny_batch(target, packs, head.needs.aux_layers, num_tokens=20)
    batch.loss_mask_BT[0, 6] = False  # two islands of supervision in one document
    weights = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in head.state_dict().items()}
    expected, count = expected_loss(head, weights, batch)
    sum(expected).backward()  # type: ignore[union-attr]

    terms, metrics = head.loss(batch)
    sum(term.sum for term in terms.values()).backward()

    assert [float(x) for x in head.counts(batch).values()] == count
    assert [float(metrics[f"top1_step{k}"][1]) for k in range(3)] == count
    for k, value in enumerate(expected):
        torch.testing.assert_close(terms[f"step{k}"].sum, value, rtol=2e-4, atol=2e-4)
    for name, parameter in head.named_parameters():
        scale = float(weights[name].grad.abs().max())
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_equal_free_running_drafts_of_the_reference(variant: str, target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("eagle3", frozen, **VARIANTS[variant])
    batch = tiny_batch(target, [tiny_rows([14, 7])], head.needs.aux_layers, num_tokens=24)
    proposals = head.propose(batch, 4)[0]
    weights = dict(head.state_dict())
    seen = set()
    for start, end in ((0, 14), (14, 21)):
        ids = batch.input_ids_BT[0, start:end].tolist()
        for i in range(len(ids) - 1):
            aux = batch.aux_BTF[0, start : start + i + 1]
            best = [int(x.argmax()) for x in reference(head, weights, ids[: i + 1], aux, [ids[i + 1]], 3)]
            drafts = [b + int(weights["d2t"][b]) if "d2t" in weights else b for b in best]
            assert proposals[start + i].tolist() == drafts, (start, i)
            seen.update(drafts)
    assert len(seen) > 8, "the drafts hardly vary; this test would prove little"


def test_a_one_token_answer_gives_one_supervised_row_at_step_zero(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("eagle3", frozen)
    batch = tiny_batch(target, [tiny_rows([6], prompt=5)], head.needs.aux_layers)
    assert {name: float(x) for name, x in head.counts(batch).items()} == {"step0": 1, "step1": 0, "step2": 0}
    terms, _ = head.loss(batch)
    expected, _ = expected_loss(head, dict(head.state_dict()), batch)
    torch.testing.assert_close(terms["step0"].sum, expected[0])
    assert float(terms["step1"].sum.detach()) == float(terms["step2"].sum.detach()) == 0.0


@pytest.mark.parametrize("loss", ["kl", "ce", "tv", "lk_hybrid"])
@pytest.mark.parametrize("kept_ids", [None, tiny_kept_ids(120)], ids=["full", "trimmed"])
def test_every_loss_equals_its_definition_row_by_row(
    loss: str, kept_ids: Tensor | None, target: Path, frozen: FrozenTarget
) -> None:
    head = tiny_head("eagle3", frozen, kept_ids=kept_ids, loss=loss, ttt_steps=2)
    batch = tiny_batch(target, [tiny_rows([9, 6])], head.needs.aux_layers)
    expected, _ = expected_loss(head, dict(head.state_dict()), batch)
    terms, _ = head.loss(batch)
    for k, value in enumerate(expected):
        torch.testing.assert_close(terms[f"step{k}"].sum, value, rtol=2e-4, atol=2e-4)


def test_a_teacher_with_a_logit_softcap_and_scaled_embeddings_is_followed(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "gemma3", final_logit_softcapping=4.0)
    frozen = FrozenTarget.load(target, torch.float32)
    head = tiny_head("eagle3", frozen, ttt_steps=1)
    batch = tiny_batch(target, [tiny_rows([9])], head.needs.aux_layers)
    ids, total = batch.input_ids_BT[0].tolist(), torch.zeros(())
    exported = head.export_map()["speculators"]
    for i in range(2, 8):
        logits = draft_logits(
            {**exported.config["transformer_layer_config"], **exported.config},
            dict(head.state_dict()),
            exported.copies["embed_tokens.weight"],
            frozen.head_VH,
            ids[: i + 1],
            batch.aux_BTF[0, : i + 1],
            [ids[i + 1]],
            1,
        )[0]
        capped = 4.0 * torch.tanh(logits / 4.0)
        total += dense_loss("kl", capped[None], frozen.logits(batch.last_BTH[0, i + 1])[None], None)[0]
    torch.testing.assert_close(head.loss(batch)[0]["step0"].sum, total, rtol=2e-4, atol=2e-4)


def test_later_steps_weigh_less_by_step_decay(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("eagle3", frozen, step_decay=0.5)
    batch = tiny_batch(target, [tiny_rows([9])], head.needs.aux_layers)
    assert [term.weight for term in head.loss(batch)[0].values()] == [1.0, 0.5, 0.25]


def test_a_frozen_lm_head_is_no_parameter_and_a_trained_one_starts_from_the_targets_rows(
    frozen: FrozenTarget,
) -> None:
    kept_ids = tiny_kept_ids(50)
    assert "lm_head.weight" not in dict(tiny_head("eagle3", frozen, kept_ids=kept_ids).named_parameters())
    trained = tiny_head("eagle3", frozen, kept_ids=kept_ids, train_lm_head=True)
    assert torch.equal(trained.lm_head.weight, frozen.head_VH[kept_ids])


def test_default_auxiliary_layers_are_those_of_vllm(frozen: FrozenTarget) -> None:
    assert needs(Config(), frozen.config).aux_layers == (2, 3, 4)  # 2, n//2, n-3 of 7 layers


@pytest.mark.parametrize("layers", [(3, 2), (2, 2), (-1, 2), (2, 8), ()])
def test_impossible_auxiliary_layers_are_refused_by_name(layers: tuple[int, ...], frozen: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"model\.aux_layers is \("):
        needs(Config(aux_layers=layers), frozen.config)


def test_both_norms_before_fc_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fc_norm and model\.norm_before_fc"):
        Config(fc_norm=True, norm_before_fc=True)
