"""DSpark against its equations: teacher-forced training equals walking a block on the forced path, token by token.

J drafts of a block, V draft vocabulary, H width
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_reference import block_states, markov_logits
from tiny import tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.checkpoint import save_head
from draftsmith.models.dspark import Config
from draftsmith.models.export import export_head, import_head
from draftsmith.models.head import Context
from draftsmith.models.parts.anchor_blocks import Blocks
from draftsmith.models.target import FrozenTarget

SMALL: dict[str, Any] = {"num_layers": 2, "block_size": 5, "markov_rank": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": SMALL,
    "gated": {**SMALL, "markov_type": "gated"},
    "rnn": {**SMALL, "markov_type": "rnn"},
    "anchor drafts nothing": {**SMALL, "sample_from_anchor": False},
    "trimmed": {**SMALL, "kept_ids": tiny_kept_ids(300)},
    "rnn, trimmed, window": {**SMALL, "markov_type": "rnn", "kept_ids": tiny_kept_ids(300), "sliding_window": 6},
    "confidence of the slot alone": {**SMALL, "confidence_sees_token": False},
    "no confidence": {**SMALL, "has_confidence": False},
    "other weights": {**SMALL, "ce_weight": 0.7, "l1_weight": 0.2, "confidence_weight": 0.5, "decay_gamma": 2.0},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


def walk(
    head: Any, weights: dict[str, Tensor], batch: Batch, start: int, a: int, forced: list[int], num_drafts: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Logits, confidences and drafts of one block by the plain equations."""
    layout, first = head.export_map()["speculators"], 0 if head.config.sample_from_anchor else 1
    fields = {**layout.config["transformer_layer_config"], **layout.config}
    tensors = {name: weights[ours] for name, ours in layout.tensors.items()}
    aux, anchor = batch.aux_BTF[0, start:a], int(batch.input_ids_BT[0, a])
    states = block_states(fields, tensors, head.target.embedding_VH, aux, anchor, num_drafts + first)[first:]
    rows = head.target.head_VH[tensors["t2d"]] if "t2d" in tensors else head.target.head_VH
    return markov_logits(fields, tensors, rows, states, [anchor, *forced])


def expected_terms(head: Any, weights: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor, float]:
    """CE and L1 mixed, and the BCE of the confidences, over all anchors of a packed row; and the sum of the weights."""
    config = head.config
    kept = weights["t2d"] if "t2d" in weights else torch.ones(head.target.vocab_size, dtype=torch.bool)
    tokens, confidence, count = torch.zeros(()), torch.zeros(()), 0.0
    ids, documents = batch.input_ids_BT[0], batch.document_ids_BT[0]
    for a in range(len(ids) - 1):
        start = int((documents == documents[a]).nonzero()[0])
        forced: list[int] = []
        while (
            len(forced) < config.num_drafts
            and (t := a + 1 + len(forced)) < len(ids)
            and documents[t] == documents[a] >= 0
            and batch.loss_mask_BT[0, t]
            and kept[ids[t]]
        ):
            forced.append(int(ids[t]))
        if not forced:
            continue
        logits, sure, _ = walk(head, weights, batch, start, a, forced, config.num_drafts)
        for j, token in enumerate(forced):
            q = torch.zeros(head.target.vocab_size).masked_scatter(kept, logits[j].softmax(-1))
            p = head.target.logits(batch.last_BTH[0, a + j]).softmax(-1)
            l1, weight = (p - q).abs().sum(), float(torch.exp(torch.tensor(-j / config.decay_gamma)))
            tokens = tokens + weight * (-config.ce_weight * q[token].log() + config.l1_weight * l1)
            if config.has_confidence:
                confidence = confidence + weight * F.binary_cross_entropy(sure[j], 1 - l1.detach() / 2)
            count += weight
    return tokens, confidence, count


@pytest.mark.parametrize("variant", VARIANTS)
def test_teacher_forced_training_equals_walking_the_forced_path_in_loss_and_gradient(
    variant: str, target: Path, frozen: FrozenTarget
) -> None:
    head = tiny_head("dspark", frozen, **VARIANTS[variant])
    batch = tiny_batch(target, [tiny_rows([9, 1, 2, 7], prompt=[3, 0, 1, 2])], head.needs.aux_layers, num_tokens=21)
    batch.loss_mask_BT[0, 6] = False
    weights = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in head.state_dict().items()}
    tokens, confidence, count = expected_terms(head, weights, batch)
    (tokens + head.config.confidence_weight * confidence).backward()

    terms, metrics = head.loss(batch)
    torch.autograd.backward(sum(term.weight * term.sum for term in terms.values()))

    assert all(float(x) == pytest.approx(count, rel=1e-6) for x in head.counts(batch).values()) and count > 5
    torch.testing.assert_close(terms["tokens"].sum, tokens, rtol=2e-4, atol=2e-4)
    if head.config.has_confidence:
        assert terms["confidence"].weight == head.config.confidence_weight
        torch.testing.assert_close(terms["confidence"].sum, confidence, rtol=2e-4, atol=2e-4)
    assert ("confidence" in terms) == ("confidence_error" in metrics) == head.config.has_confidence
    for name, parameter in head.named_parameters():
        scale = float(weights[name].grad.abs().max())
        assert scale > 0, f"{name} gets no gradient"
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_and_confidences_equal_the_equations_walking_freely(
    variant: str, target: Path, frozen: FrozenTarget
) -> None:
    head = tiny_head("dspark", frozen, **VARIANTS[variant])
    batch = tiny_batch(target, [tiny_rows([18])], head.needs.aux_layers)
    weights, seen = dict(head.state_dict()), set()
    for n in (1, 4):
        proposals = head.propose(batch, n)[0]
        for a in range(3, 17):
            _, sure, drafts = walk(head, weights, batch, 0, a, [], n)
            context = Context(
                batch.input_ids_BT[:, 1 : a + 1],
                batch.aux_BTF[:, :a],
                batch.last_BTH[:, :a],
                torch.tensor([0]),
                torch.tensor([a]),
            )
            draft = head.draft(head.start(1, torch.device("cpu")), context, n, 0.0, None)
            assert proposals[a - 1].tolist() == draft.tokens_BN[0].tolist() == drafts, (n, a)
            if head.config.has_confidence:
                torch.testing.assert_close(draft.confidence_BN[0], sure, rtol=1e-4, atol=1e-4)
            else:
                assert draft.confidence_BN is None
            seen.update(drafts)
    assert len(seen) > 8, "the drafts hardly vary; this test would prove little"


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_sampled_drafts_state_the_distribution_along_their_own_path(
    kind: str, target: Path, frozen: FrozenTarget
) -> None:
    head = tiny_head("dspark", frozen, **SMALL, markov_type=kind)
    batch, a = tiny_batch(target, [tiny_rows([12])], head.needs.aux_layers), 9
    context = Context(
        batch.input_ids_BT[:, 1 : a + 1], batch.aux_BTF[:, :a], batch.last_BTH[:, :a], *torch.tensor([[0], [a]])
    )
    paths = set()
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        draft = head.draft(head.start(1, torch.device("cpu")), context, 4, 0.8, draw)
        tokens = draft.tokens_BN[0].tolist()
        logits, sure, _ = walk(head, dict(head.state_dict()), batch, 0, a, tokens[:3], 4)
        torch.testing.assert_close(draft.probs_BNV[0], (logits / 0.8).softmax(-1), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(draft.confidence_BN[0], sure, rtol=1e-4, atol=1e-4)
        paths.add(tuple(tokens))
    assert len(paths) > 2


def test_a_confidence_does_not_depend_on_its_own_token_or_later_ones(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("dspark", frozen, **SMALL, markov_type="rnn")
    hidden = torch.randn(1, 5, 64)
    batch = tiny_batch(target, [tiny_rows([12])], head.needs.aux_layers)
    anchor = batch.input_ids_BT[0, :1]
    drafts = [head._walk(hidden, anchor, 1.5, torch.Generator().manual_seed(seed)) for seed in range(20)]
    for place in range(5):
        by_prefix: dict[tuple[int, ...], set[float]] = {}
        for draft in drafts:
            prefix = tuple(draft.tokens_BN[0, :place].tolist())
            by_prefix.setdefault(prefix, set()).add(float(draft.confidence_BN[0, place]))
        assert all(len(values) == 1 for values in by_prefix.values())


def test_the_confidences_target_is_detached(
    target: Path, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_head("dspark", frozen, **SMALL)
    batch = tiny_batch(target, [tiny_rows([12])], head.needs.aux_layers)
    monkeypatch.setattr(head, "_blocks", lambda _: Blocks([0], [5], [4]))
    head.loss(batch)[0]["confidence"].sum.backward()
    # It reaches what the estimate reads, and not what only its target depends on.
    assert head.confidence_head.proj.weight.grad.any() and head.markov_head.markov_w1.weight.grad.any()
    assert head.backbone.fc.weight.grad.any() and head.markov_head.markov_w2.weight.grad is None
    touched = head.markov_head.markov_w1.weight.grad.abs().sum(-1).nonzero()[:, 0].tolist()
    assert touched == sorted(set(batch.input_ids_BT[0, 5:9].tolist()))


def test_a_blocks_loss_does_not_change_when_other_anchors_are_added(
    target: Path, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_head("dspark", frozen, **SMALL, markov_type="rnn")
    batch = tiny_batch(target, [tiny_rows([14, 9])], head.needs.aux_layers)
    every = head._blocks(batch)

    def terms(chosen: range) -> list[float]:
        parts = [[values[i] for i in chosen] for values in (every.starts, every.anchors, every.lengths)]
        monkeypatch.setattr(head, "_blocks", lambda _: Blocks(*parts))
        return [float(term.sum.detach()) for term in head.loss(batch)[0].values()]

    odd, even, both = (terms(range(*r)) for r in ((1, len(every), 2), (0, len(every), 2), (0, len(every))))
    assert [a + b for a, b in zip(odd, even, strict=True)] == pytest.approx(both, rel=1e-5)


def export(head: Any, folder: Path, layout: str) -> dict[str, Any]:
    save_head(head, folder / "head")
    export_head(
        folder / "head",
        folder / "export",
        target=head.target,
        target_name="someone/target",
        num_speculative_tokens=4,
        layout=layout,  # type: ignore[arg-type]
        dtype="float32",
    )
    config: dict[str, Any] = json.loads((folder / "export/config.json").read_text())
    return config


@pytest.mark.parametrize("layout", ["speculators", "plain"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_survives_export_and_import(
    variant: str, layout: str, frozen: FrozenTarget, tmp_path: Path
) -> None:
    head = tiny_head("dspark", frozen, **VARIANTS[variant])
    config = export(head, tmp_path, layout)
    expected = {
        "mask_token_id": 2,
        "block_size": 5,
        "markov_rank": 16,
        "markov_head_type": head.config.markov_type,
        "sample_from_anchor": head.config.sample_from_anchor,
        "enable_confidence_head": head.config.has_confidence,
    }
    assert {name: config[name] for name in expected} == expected
    if layout == "plain":
        assert config["target_layer_ids"] == [i - 1 for i in head.needs.aux_layers]
        assert config["architectures"] == ["Qwen3DSparkModel"]
    else:
        assert config["aux_hidden_state_layer_ids"] == list(head.needs.aux_layers)
        assert config["confidence_head_with_markov"] == (
            head.config.has_confidence and head.config.confidence_sees_token
        )
    found: Any = import_head(tmp_path / "export", frozen, "dspark")
    for name in ("block_size", "sample_from_anchor", "markov_type", "has_confidence", "sliding_window"):
        assert getattr(found.config, name) == getattr(head.config, name)
    for name, x in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], x), name


def test_an_export_that_does_not_say_where_drafting_starts_is_refused(frozen: FrozenTarget, tmp_path: Path) -> None:
    config = export(tiny_head("dspark", frozen, **SMALL), tmp_path, "speculators")
    del config["sample_from_anchor"]
    (tmp_path / "export/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="sample_from_anchor is missing; vLLM takes it as false, speculators as true"):
        import_head(tmp_path / "export", frozen, "dspark")


def test_settings_that_contradict_each_other_are_refused(target: Path, frozen: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"model\.sliding_window is 6; give at least model\.block_size \(7\)"):
        Config(sliding_window=6)
    head = tiny_head("dspark", frozen, **SMALL)
    batch = tiny_batch(target, [tiny_rows([12])], head.needs.aux_layers)
    with pytest.raises(ValueError, match="6 tokens are to be drafted, but this head was trained on blocks of 5"):
        head.propose(batch, 6)


def test_a_softcap_of_the_target_bends_the_teacher_and_not_the_draft(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "gemma3", final_logit_softcapping=4.0)
    frozen = FrozenTarget.load(target, torch.float32)
    head = tiny_head("dspark", frozen, **SMALL)
    batch = tiny_batch(target, [tiny_rows([9])], head.needs.aux_layers)
    scaled = FrozenTarget(
        frozen.config, frozen.embedding_VH * 8.0, frozen.head_VH, frozen.norm, 1.0, frozen.logit_softcap
    )
    head.target, value = scaled, head.loss(batch)[0]["tokens"].sum
    tokens, _, _ = expected_terms(head, dict(head.state_dict()), batch)
    torch.testing.assert_close(value, tokens, rtol=2e-4, atol=2e-4)
