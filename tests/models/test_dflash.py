"""DFlash against its equations: every training block is the block of a round with a real cache, and sees what it may.

N blocks, S slots, J drafts of a block, H width, F = auxiliary layers * H
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_reference import block_states
from safetensors.torch import save_file
from tiny import tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.models.batch import Batch
from draftsmith.models.checkpoint import save_head
from draftsmith.models.dflash import Config, needs
from draftsmith.models.export import export_head, import_head
from draftsmith.models.head import Context
from draftsmith.models.parts.anchor_blocks import Blocks, training_blocks
from draftsmith.models.parts.losses import dense_loss
from draftsmith.models.target import FrozenTarget

SMALL: dict[str, Any] = {"num_layers": 2, "block_size": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": SMALL,
    "one layer, anchor drafts": {"num_layers": 1, "block_size": 4, "sample_from_anchor": True},
    "window": {**SMALL, "sliding_window": 6},
    "window, anchor drafts": {**SMALL, "sliding_window": 5, "sample_from_anchor": True},
    "trimmed": {**SMALL, "kept_ids": tiny_kept_ids(300)},
    "exponential": {**SMALL, "position_weights": "exponential", "decay_gamma": 2.0},
    "kl": {**SMALL, "position_weights": "exponential", "loss": "kl"},
    "lk_hybrid, trimmed": {
        **SMALL,
        "position_weights": "exponential",
        "loss": "lk_hybrid",
        "kept_ids": tiny_kept_ids(300),
    },
    "other heads": {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "aux_layers": (0, 3, 7)},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


def exported(head: Any, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors as in an exported folder, the tensors perhaps with a graph."""
    layout = head.export_map()["speculators"]
    fields = {**layout.config["transformer_layer_config"], **layout.config}
    return fields, {name: weights[ours] for name, ours in layout.tensors.items()}


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(packed row, start, end) of every document."""
    found = []
    for b, row in enumerate(batch.document_ids_BT):
        for document in row[row >= 0].unique().tolist():
            places = (row == document).nonzero()[:, 0].tolist()
            found.append((b, places[0], places[-1] + 1))
    return found


def reference_states(head: Any, weights: dict[str, Tensor], batch: Batch, b: int, start: int, a: int, s: int) -> Tensor:
    fields, tensors = exported(head, weights)
    aux = batch.aux_BTF[b, start:a]
    return block_states(fields, tensors, head.target.embedding_VH, aux, int(batch.input_ids_BT[b, a]), s)


def draft_rows(head: Any, weights: dict[str, Tensor]) -> Tensor:
    rows: Tensor = head.target.head_VH[weights["t2d"]] if "t2d" in weights else head.target.head_VH
    return rows


def expected_loss(head: Any, weights: dict[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
    """Over all anchors of all documents, draft by draft; and the sum of the static weights."""
    config, total, count = head.config, torch.zeros(()), 0.0
    kept = weights["t2d"] if "t2d" in weights else torch.ones(head.target.vocab_size, dtype=torch.bool)
    first = 0 if config.sample_from_anchor else 1
    for b, start, end in documents(batch):
        for a in range(start, end - 1):
            ids = batch.input_ids_BT[b]
            labels = []
            for j in range(1, config.block_size - first + 1):
                if a + j >= end or not batch.loss_mask_BT[b, a + j] or not kept[ids[a + j]]:
                    break
                labels.append(int(kept[: ids[a + j]].sum()))
            if not labels:
                continue
            states = reference_states(head, weights, batch, b, start, a, config.block_size)[first:]
            logits = states[: len(labels)] @ draft_rows(head, weights).T
            teacher = head.target.logits(batch.last_BTH[b, a : a + len(labels)])
            if config.loss == "ce":
                values = torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="none")
            else:
                lse = teacher.logsumexp(-1) if "t2d" in weights else None
                values = dense_loss(config.loss, logits, teacher[:, kept], lse)
            if config.position_weights == "dpace":
                survival = (1 - config.dpace_alpha) * torch.exp(-values.detach()) + config.dpace_alpha
                reach = survival.cumprod(0)
                w = torch.stack([reach[k:].sum() for k in range(len(reach))])
                count += len(labels)
            else:
                w = torch.exp(-torch.arange(len(labels)) / config.decay_gamma)
                count += float(w.sum())
            total = total + (w * values).sum()
    return total, count


def packed_batch(target: Path, head: Any) -> Batch:
    packs = [tiny_rows([9, 1, 2, 6], prompt=[3, 0, 1, 2]), tiny_rows([8, 5], prompt=[4, 5], seed=1)]
    batch = tiny_batch(target, packs, head.needs.aux_layers, num_tokens=20)
    batch.loss_mask_BT[0, 6] = False  # two islands of supervision in one document
    return batch


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_training_block_equals_the_equations_in_loss_and_gradient(
    variant: str, target: Path, frozen: FrozenTarget
) -> None:
    head = tiny_head("dflash", frozen, **VARIANTS[variant])
    batch = packed_batch(target, head)
    weights = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in head.state_dict().items()}
    expected, count = expected_loss(head, weights, batch)
    expected.backward()

    terms, _ = head.loss(batch)
    terms["tokens"].sum.backward()

    assert float(head.counts(batch)["tokens"]) == pytest.approx(count, rel=1e-6) and count > 5
    torch.testing.assert_close(terms["tokens"].sum, expected, rtol=2e-4, atol=2e-4)
    for name, parameter in head.named_parameters():
        scale = float(weights[name].grad.abs().max())
        assert scale > 0, f"{name} gets no gradient"
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_of_every_length_equal_the_equations(variant: str, target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("dflash", frozen, **VARIANTS[variant])
    batch = tiny_batch(target, [tiny_rows([14, 7])], head.needs.aux_layers, num_tokens=24)
    weights, seen, first = dict(head.state_dict()), set(), 0 if head.config.sample_from_anchor else 1
    kept = weights["t2d"].nonzero()[:, 0] if "t2d" in weights else torch.arange(head.target.vocab_size)
    for n in (1, 3):
        proposals = head.propose(batch, n)[0]
        for _, start, end in documents(batch):
            for a in range(start + 3, end):
                states = reference_states(head, weights, batch, 0, start, a, n + first)[first:]
                drafts = kept[(states @ draft_rows(head, weights).T).argmax(-1)].tolist()
                assert proposals[a - 1].tolist() == drafts, (n, a)
                seen.update(drafts)
    assert len(seen) > 5, "the drafts hardly vary; this test would prove little"


def context_rows(batch: Batch, first: int, last: int) -> Context:
    rows = slice(first, last)
    following = batch.input_ids_BT[:, first + 1 : last + 1]
    return Context(
        following, batch.aux_BTF[:, rows], batch.last_BTH[:, rows], torch.tensor([first]), torch.tensor([last - first])
    )


@pytest.mark.parametrize("variant", ["default", "window", "one layer, anchor drafts", "window, anchor drafts"])
def test_a_training_block_equals_inference_with_a_real_cache(variant: str, target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("dflash", frozen, **VARIANTS[variant])
    batch, size = tiny_batch(target, [tiny_rows([20])], head.needs.aux_layers), head.config.block_size
    anchors = list(range(1, 19))
    context = head.backbone.context_of(batch)
    trained = head.backbone.run(context, batch, Blocks([0] * 18, anchors, [0] * 18), size)
    cache = head.start(1, torch.device("cpu"))
    for first, last in ((0, 4), (4, 5), (5, 9), (9, 16), (16, 18)):
        drafted = head.backbone.draft(cache, context_rows(batch, first, last), size)
        torch.testing.assert_close(drafted[0], trained[last - 1], rtol=1e-4, atol=1e-4)


def test_a_block_sees_its_context_and_nothing_at_or_after_its_anchor(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("dflash", frozen, **SMALL)
    batch = tiny_batch(target, [tiny_rows([14, 9])], head.needs.aux_layers)
    anchors = [2, 5, 6, 7, 15, 17]  # overlapping blocks, two documents
    blocks = Blocks([0, 0, 0, 0, 14, 14], anchors, [0] * 6)

    def run(changed: Batch) -> Tensor:
        out: Tensor = head.backbone.run(head.backbone.context_of(changed), changed, blocks, 5)
        return out

    before = run(batch)
    for changed_at in range(14):
        aux, last, ids = batch.aux_BTF.clone(), batch.last_BTH.clone(), batch.input_ids_BT.clone()
        aux[0, changed_at] += 1.0
        last[0, changed_at] -= 1.0
        if changed_at not in anchors:
            ids[0, changed_at] = (ids[0, changed_at] + 17) % 512
        after = run(replace(batch, aux_BTF=aux, last_BTH=last, input_ids_BT=ids))
        for block, anchor in enumerate(anchors):
            is_seen = anchor < 14 and changed_at < anchor
            assert torch.equal(after[block], before[block]) != is_seen, (changed_at, anchor)


@pytest.mark.parametrize(("window", "expected"), [(None, [0, 1, 2, 3, 4, 5]), (5, [2, 3, 4, 5])])
def test_gradients_reach_exactly_the_states_before_the_anchor(
    window: int | None, expected: list[int], target: Path, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_head("dflash", frozen, **SMALL, sliding_window=window)
    batch = tiny_batch(target, [tiny_rows([14, 9])], head.needs.aux_layers)
    batch = replace(batch, aux_BTF=batch.aux_BTF.requires_grad_(), last_BTH=batch.last_BTH.requires_grad_())
    monkeypatch.setattr(head, "_blocks", lambda _: Blocks([0], [6], [4]))
    head.loss(batch)[0]["tokens"].sum.backward()
    assert batch.aux_BTF.grad is not None and batch.last_BTH.grad is None
    assert batch.aux_BTF.grad[0].abs().sum(-1).nonzero()[:, 0].tolist() == expected
    assert not any(x.requires_grad for x in (frozen.embedding_VH, frozen.head_VH, *frozen.norm.parameters()))


def test_a_blocks_loss_and_gradient_do_not_change_when_other_anchors_are_added(
    target: Path, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_head("dflash", frozen, **SMALL)
    batch = tiny_batch(target, [tiny_rows([14, 9])], head.needs.aux_layers)
    every = training_blocks(batch, 512, 4, None)
    assert len(every) > 10

    def measure(chosen: list[int]) -> tuple[Tensor, list[Tensor]]:
        parts = [[values[i] for i in chosen] for values in (every.starts, every.anchors, every.lengths)]
        monkeypatch.setattr(head, "_blocks", lambda _: Blocks(*parts))
        head.zero_grad()
        value = head.loss(batch)[0]["tokens"].sum
        value.backward()
        return value.detach(), [p.grad.clone() for p in head.parameters()]

    odd, even = list(range(1, len(every), 2)), list(range(0, len(every), 2))
    (a, a_grads), (b, b_grads), (both, grads) = measure(odd), measure(even), measure(list(range(len(every))))
    torch.testing.assert_close(a + b, both, rtol=1e-5, atol=1e-5)
    for x, y, z in zip(a_grads, b_grads, grads, strict=True):
        torch.testing.assert_close(x + y, z, rtol=1e-3, atol=1e-5 * float(z.abs().max()))


def test_anchors_are_sorted_bounded_drawn_anew_for_every_seed_and_equal_for_counts_and_loss(
    target: Path, frozen: FrozenTarget
) -> None:
    head = tiny_head("dflash", frozen, **SMALL, num_anchors=6)
    batch = tiny_batch(target, [tiny_rows([14, 9]), tiny_rows([20], seed=1)], head.needs.aux_layers, num_tokens=23)
    drawn = []
    for seed in range(8):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        count = head.counts(batch)["tokens"]
        torch.rand(3)  # whatever else is drawn in between
        blocks = head._blocks(batch)
        _, metrics = head.loss(batch)
        assert sum(float(number) for _, number in metrics.values()) == float(count) == sum(blocks.lengths)
        torch.manual_seed(seed)
        head.loss(batch)
        assert torch.equal(torch.get_rng_state(), before), "the draw must not move torch's generator"
        assert len(blocks) == 6 and blocks.anchors == sorted(set(blocks.anchors))
        drawn.append(tuple(blocks.anchors))
    assert len(set(drawn)) > 4
    assert {anchor for anchors in drawn for anchor in anchors} > {2, 3}


def test_blocks_end_with_their_document_and_anchors_follow_the_mask(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("dflash", frozen, **SMALL)
    batch = packed_batch(target, head)
    blocks = head._blocks(batch)
    # Documents: 0..8 (prompt 3, token 6 masked), 9, 10..11, 12..17; second row 20..27 (prompt 4), 28..32 (all prompt).
    assert blocks.anchors == [2, 3, 4, 6, 7, 10, 13, 14, 15, 16, 23, 24, 25, 26]
    assert blocks.lengths == [3, 2, 1, 2, 1, 1, 4, 3, 2, 1, 4, 3, 2, 1]
    assert blocks.starts == [0, 0, 0, 0, 0, 10, 12, 12, 12, 12, 20, 20, 20, 20]


def test_a_label_that_the_draft_vocabulary_lacks_ends_the_supervised_part(target: Path, frozen: FrozenTarget) -> None:
    batch = tiny_batch(target, [tiny_rows([12])], (2, 3))
    kept = torch.ones(512, dtype=torch.bool)
    kept[batch.input_ids_BT[0, 7]] = False
    blocks = training_blocks(batch, 512, 4, kept)
    assert blocks.anchors == [2, 3, 4, 5, 7, 8, 9, 10] and blocks.lengths == [4, 3, 2, 1, 4, 3, 2, 1]


def test_the_context_of_all_layers_is_one_product(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("dflash", frozen, num_layers=4)
    batch, products = tiny_batch(target, [tiny_rows([12])], head.needs.aux_layers), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
                products.append(tuple(args[-1].shape))
            return function(*args, **(kwargs or {}))

    with Watch():
        context = head.backbone.context_of(batch)
    assert products == [(head.backbone.fc.in_features, 64), (64, 4 * 2 * 32)]
    fused = head.backbone.hidden_norm(head.backbone.fc(batch.aux_BTF[0]))
    for layer, (keys, values) in zip(head.backbone.layers, context, strict=True):
        expected = layer.self_attn.keys_values(fused, head.backbone.rope.angles(torch.arange(12)))
        torch.testing.assert_close((keys, values), expected)


def test_the_draft_cache_holds_the_context_alone(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head("dflash", frozen, **SMALL)
    batch = tiny_batch(target, [tiny_rows([12])], head.needs.aux_layers)
    cache = head.start(1, torch.device("cpu"))
    head.draft(cache, context_rows(batch, 0, 5), 4, 0.0, None)
    keys = head.backbone.context_of(batch)[0][0]
    torch.testing.assert_close(cache._keys[0][0, :, :5].transpose(0, 1), keys[:5])
    assert not cache._keys[0][0, :, 5:].any()


def test_settings_that_contradict_each_other_are_refused(target: Path, frozen: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"D-PACE needs the cross-entropy"):
        Config(loss="kl")
    with pytest.raises(ValueError, match=r"model\.sliding_window is 8; give at least model\.block_size \(16\)"):
        Config(sliding_window=8)
    with pytest.raises(ValueError, match=r"model\.mask_token_id is 512; the target's embedding ends at 511"):
        tiny_head("dflash", frozen, mask_token_id=512)
    head = tiny_head("dflash", frozen, **SMALL)
    batch = tiny_batch(target, [tiny_rows([12])], head.needs.aux_layers)
    with pytest.raises(ValueError, match="5 tokens are to be drafted, but this head was trained on blocks of 4"):
        head.propose(batch, 5)


def test_default_layers_are_spread_as_the_trainers_of_dflash_do() -> None:
    class Layers:
        num_hidden_layers = 36

    # Output-of ids 1, 9, 17, 25, 33 of 36 layers; and 1, 10, 19, 28, 37 of 40.
    assert needs(Config(), Layers).aux_layers == (2, 10, 18, 26, 34)
    Layers.num_hidden_layers = 40
    assert needs(Config(), Layers).aux_layers == (2, 11, 20, 29, 38)
    assert needs(Config(num_aux_layers=1), Layers).aux_layers == (21,)
    for size in range(1, 9):
        Layers.num_hidden_layers = size
        layers = needs(Config(), Layers).aux_layers
        assert layers and layers[-1] <= size


@pytest.mark.parametrize("layers", [(3, 2), (2, 2), (-1, 2), (2, 8)])
def test_impossible_auxiliary_layers_are_refused_by_name(layers: tuple[int, ...], frozen: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"model\.aux_layers is \("):
        needs(Config(aux_layers=layers), frozen.config)


# ---------------------------------------------------------------- export


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


def test_the_speculators_layout_holds_every_field_that_vllm_reads(frozen: FrozenTarget, tmp_path: Path) -> None:
    head = tiny_head("dflash", frozen, **SMALL, aux_layers=(0, 3, 7), kept_ids=tiny_kept_ids(100), mask_token_id=9)
    config = export(head, tmp_path, "speculators")
    expected = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [0, 3, 7],
        "mask_token_id": 9,
        "block_size": 5,
        "draft_vocab_size": 100,
        "target_hidden_size": 64,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
    }
    assert {name: config[name] for name in expected} == expected
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["layer_types"], layer["is_causal"]) == ("qwen3", ["full_attention"] * 2, False)


def test_the_plain_layout_counts_layers_as_their_outputs(frozen: FrozenTarget, tmp_path: Path) -> None:
    config = export(tiny_head("dflash", frozen, **SMALL, aux_layers=(2, 5)), tmp_path, "plain")
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {
        "mask_token_id": 2,  # the target's end of sequence
        "target_layer_ids": [1, 4],
        "sample_from_anchor": False,
        "causal": False,
    }


@pytest.mark.parametrize("layout", ["speculators", "plain"])
@pytest.mark.parametrize("variant", ["window", "one layer, anchor drafts", "trimmed", "other heads"])
def test_every_variant_survives_export_and_import(
    variant: str, layout: str, frozen: FrozenTarget, tmp_path: Path
) -> None:
    head = tiny_head("dflash", frozen, **VARIANTS[variant])
    export(head, tmp_path, layout)
    found: Any = import_head(tmp_path / "export", frozen, "dflash")
    for name in ("block_size", "sample_from_anchor", "sliding_window"):
        assert getattr(found.config, name) == getattr(head.config, name)
    assert found.needs == head.needs and found.backbone.mask_token_id == head.backbone.mask_token_id


def test_a_folder_as_the_authors_publish_it_is_read(frozen: FrozenTarget, tmp_path: Path) -> None:
    head = tiny_head("dflash", frozen, **SMALL, aux_layers=(2, 5))
    config = export(head, tmp_path, "plain")
    for name in ("is_causal", "draft_vocab_size", "rope_parameters"):
        del config[name]
    config["dflash_config"] = {"mask_token_id": 2, "target_layer_ids": [1, 4]}
    (tmp_path / "export/config.json").write_text(json.dumps(config))
    found: Any = import_head(tmp_path / "export", frozen, "dflash")
    assert found.config.aux_layers == (2, 5) and not found.config.sample_from_anchor
    assert torch.equal(found.backbone.fc.weight, head.backbone.fc.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, "layer_types mixes full"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": True},
            "causal inside a block",
        ),
        ({"attention_bias": True}, "attention_bias is true"),
    ],
)
def test_layers_that_blocks_here_are_not_are_refused(
    change: dict[str, Any], message: str, frozen: FrozenTarget, tmp_path: Path
) -> None:
    config = export(tiny_head("dflash", frozen, **SMALL), tmp_path, "plain")
    (tmp_path / "export/config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        import_head(tmp_path / "export", frozen, "dflash")


def test_a_missing_tensor_is_named(frozen: FrozenTarget, tmp_path: Path) -> None:
    head = tiny_head("dflash", frozen, **SMALL)
    export(head, tmp_path, "plain")
    layout = head.export_map()["plain"]
    state = head.state_dict()
    tensors = {name: state[ours].contiguous() for name, ours in layout.tensors.items() if name != "hidden_norm.weight"}
    save_file(tensors, tmp_path / "export/model.safetensors")
    with pytest.raises(ValueError, match=r"hidden_norm\.weight is missing"):
        import_head(tmp_path / "export", frozen, "dflash")
