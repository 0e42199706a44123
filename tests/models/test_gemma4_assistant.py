"""The Gemma 4 assistant drafts and trains as its package means it, by transformers' own classes run step by step.

T tokens, N proposed tokens, V vocabulary, E key/value features
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_pair import WINDOW, Reference, packaged_drafter
from tiny import VOCAB, fitting_kind, keys_and_values, tiny_batch, tiny_config, tiny_head, tiny_rows, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

from draftsmith.eval.decode import Decoding, RunningTarget, decode
from draftsmith.models import gemma4_assistant
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import continue_head, export_head, import_head
from draftsmith.models.gemma4_assistant import Config, needs
from draftsmith.models.head import Context, served_as
from draftsmith.models.target import FrozenTarget

METHOD = gemma4_assistant.__name__.rpartition(".")[2]
PACKS = [tiny_rows([21, 9]), tiny_rows([17, 2, 1], seed=1)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), "gemma4")


@pytest.fixture(scope="module")
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


@pytest.fixture(scope="module", params=[False, True], ids=["whole head", "centroids"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packaged_drafter(tmp_path_factory.mktemp("drafter"), has_centroids=request.param)


@pytest.fixture(scope="module")
def reference(target: Path, drafter: Path) -> Reference:
    return Reference.load(target, drafter)


@pytest.fixture(params=["vllm", "transformers"])
def head(request: pytest.FixtureRequest, drafter: Path, frozen: FrozenTarget) -> Any:
    return continue_head(drafter, Config(position=request.param), frozen, METHOD)


def offset(head: Any) -> int:
    """How far behind the last state's position a draft's queries stand."""
    return {"vllm": 0, "transformers": 1}[head.config.position]


def test_drafts_of_a_packaged_drafter_are_those_of_transformers(head: Any, target: Path, reference: Reference) -> None:
    ids, num_tokens = list(tiny_rows([30])[0].input_ids), 3
    batch = tiny_batch(target, [tiny_rows([30])], head.needs)
    state, first = head.start(1, torch.device("cpu")), 0
    for last in (3, 4, 9, 16, 29):  # rounds that committed different numbers of rows, beyond the window too
        context = Context(
            batch.input_ids_BT[:, first + 1 : last + 1],
            batch.aux_BTF[:, first:last],
            batch.last_BTH[:, first:last],
            torch.tensor([first]),
            torch.tensor([last - first]),
            kv_BRE=batch.kv_BTE[:, first:last],
        )
        draft = head.draft(state, context, num_tokens, 0.8, torch.Generator().manual_seed(last))
        forced = [ids[last], *draft.tokens_BN[0, :-1].tolist()]
        logits_NV = reference.logits(ids, last, forced, last - 1 + offset(head))
        torch.testing.assert_close(draft.probs_BNV[0], (logits_NV / 0.8).softmax(-1), rtol=1e-3, atol=1e-6)
        first = last


def test_a_training_row_is_the_step_by_step_draft_on_the_forced_path(
    head: Any, target: Path, reference: Reference
) -> None:
    batch = tiny_batch(target, PACKS, head.needs, num_tokens=32)
    terms, expected = head.loss(batch)[0], dict.fromkeys(head.counts(batch), 0.0)
    for row in (row for pack in PACKS for row in pack):
        ids, mask = list(row.input_ids), row.loss_mask
        for i in range(len(ids) - 1):
            steps = [k for k in range(3) if i + 1 + k < len(ids) and all(mask[i + 1 : i + 2 + k])]
            if not steps:
                continue
            forced = ids[i + 1 : i + 2 + steps[-1]]
            whole = reference_head_logits(reference, ids, i + 1, forced, i + offset(head))
            teacher = reference.target(torch.tensor([ids])).logits[0].log_softmax(-1)
            for k in steps:
                p = teacher[i + 1 + k]
                expected[f"step{k}"] += float((p.exp() * (p - whole[k].log_softmax(-1))).sum())
    for name, value in expected.items():
        torch.testing.assert_close(float(terms[name].sum.detach()), value, rtol=2e-4, atol=1e-4)
        assert value > 0


def reference_head_logits(
    reference: Reference, ids: list[int], num_seen: int, forced: list[int], position: int
) -> Tensor:
    """As `Reference.logits`, over the whole lm_head, on which training goes also where centroids choose."""
    kept, reference.drafter.masked_embedding = reference.drafter.masked_embedding, None
    reference.drafter.config.use_ordered_embeddings, had = False, kept is not None
    try:
        return reference.logits(ids, num_seen, forced, position)
    finally:
        reference.drafter.masked_embedding = kept
        reference.drafter.config.use_ordered_embeddings = had


@pytest.mark.parametrize("step", [0, 2])
def test_a_row_reads_exactly_the_keys_and_values_that_its_document_has_shown_it(
    step: int, head: Any, target: Path
) -> None:
    batch, row = tiny_batch(target, [tiny_rows([5, 25], prompt=0)], head.needs), 14  # of the second document
    mask_BT = torch.zeros_like(batch.loss_mask_BT)
    mask_BT[0, 5 + row + 1 : 5 + row + 2 + step] = True
    kv_BTE = (0.1 * batch.kv_BTE).requires_grad_()  # so that no weight of the softmax is so small that it is 0
    only = replace(batch, loss_mask_BT=mask_BT, kv_BTE=kv_BTE)
    torch.autograd.backward(head.loss(only)[0][f"step{step}"].sum)
    touched_TE = kv_BTE.grad[0] != 0
    for name, source in head.sources.items():
        start = 0 if source.layer == min(head.needs.kv_layers) else head.needs.kv_width - source.width
        touched_T = touched_TE[:, start : start + source.width].any(dim=1)
        first = max(0, row - WINDOW + 1) if name == "sliding_attention" else 0
        assert touched_T.nonzero()[:, 0].tolist() == list(range(5 + first, 5 + row + 1)), name


def test_transformers_forward_on_several_rows_at_once_would_show_them_the_future(
    drafter: Path, target: Path, reference: Reference
) -> None:
    """Why the head has a mask of its own. When this fails, transformers has one too."""
    ids = list(tiny_rows([12])[0].input_ids)
    eager = Gemma4AssistantForCausalLM.from_pretrained(drafter, attn_implementation="eager").eval()
    output = reference.target.model(torch.tensor([ids]), use_cache=False, return_shared_kv_states=True)
    embedded = reference.target.get_input_embeddings()(torch.tensor([ids]))
    found = []
    for changed_by in (0.0, 1.0):
        shared = {name: (k.clone(), v.clone()) for name, (k, v) in dict(output.shared_kv_states).items()}
        shared["full_attention"][1][:, :, 8:] += changed_by
        inputs = torch.cat([embedded, output.last_hidden_state], dim=-1)
        found.append(
            eager(
                inputs_embeds=inputs,
                position_ids=torch.arange(12)[None],
                shared_kv_states=shared,
                output_hidden_states=True,  # else it drops rows
            ).last_hidden_state[0, :8]
        )
    assert not torch.allclose(*found)


def test_gradients_reach_every_parameter_of_the_draft_and_nothing_else(head: Any, target: Path) -> None:
    batch = tiny_batch(target, PACKS, head.needs, num_tokens=32)
    torch.autograd.backward(sum(term.sum for term in head.loss(batch)[0].values()))
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    for name, buffer in head.named_buffers():
        assert buffer.grad is None and not buffer.requires_grad, name
    kept = {name.rpartition(".")[2] for name, _ in head.named_buffers()}
    assert kept == {"layer_scalar"} | ({"weight", "token_ordering"} if head.config.num_centroids else set())
    assert head.target.embedding_VH.grad is None and not head.target.embedding_VH.requires_grad


def test_what_a_setting_freezes_is_not_trained(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head(METHOD, frozen, ttt_steps=1, train_lm_head=False)
    batch = tiny_batch(target, PACKS, head.needs, num_tokens=32)
    torch.autograd.backward(head.loss(batch)[0]["step0"].sum)
    assert {name for name, x in head.named_parameters() if x.grad is None} == {
        "post_projection.weight",  # one step never feeds its output on
        "lm_head.weight",
    }


def test_a_packaged_drafter_drafts_in_the_runtime_without_changing_the_targets_answers(head: Any, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target).eval().requires_grad_(False)
    prompts = [list(row.input_ids) for row in tiny_rows([4, 13, 1])]
    with RunningTarget(model, head.needs.aux_layers, head.needs.kv_layers) as running:
        answers = decode(running, head, prompts, Decoding(24, frozenset(), 3)).answers
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids


def test_the_runtime_gives_drafts_the_keys_and_values_of_the_committed_rows(target: Path, frozen: FrozenTarget) -> None:
    head = tiny_head(METHOD, frozen)
    model = AutoModelForCausalLM.from_pretrained(target).eval().requires_grad_(False)
    given: list[Context] = []
    draft = head.draft

    def spy(state: Any, context: Context, *rest: Any) -> Any:
        given.append(context)
        return draft(state, context, *rest)

    head.draft = spy
    prompt = list(tiny_rows([11])[0].input_ids)
    with RunningTarget(model, head.needs.aux_layers, head.needs.kv_layers) as running:
        (answer,) = decode(running, head, [prompt], Decoding(16, frozenset(), 3)).answers
    seen_TE = torch.cat([c.kv_BRE[0, : int(c.num_rows_B)] for c in given])
    whole = keys_and_values(target, [*prompt, *answer.token_ids], head.needs.kv_layers)
    assert len(seen_TE) > len(prompt) + 8
    torch.testing.assert_close(seen_TE, whole[: len(seen_TE)], rtol=1e-3, atol=1e-3)


def test_a_packaged_drafter_is_exported_as_it_was_packaged(drafter: Path, frozen: FrozenTarget, tmp_path: Path) -> None:
    head = import_head(drafter, frozen, METHOD)
    save_head(head, tmp_path / "head")
    export_head(
        tmp_path / "head",
        tmp_path / "export",
        target=frozen,
        target_name="tiny",
        num_speculative_tokens=3,
        layout="plain",
        dtype="float32",
    )
    packaged, exported = (Gemma4AssistantForCausalLM.from_pretrained(f) for f in (drafter, tmp_path / "export"))
    assert exported.state_dict().keys() == packaged.state_dict().keys()
    for name, tensor in packaged.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    ours, theirs = (model.config.to_dict() for model in (exported, packaged))
    ignored = {
        "draft_position",
        "transformers_version",
        "_name_or_path",
        "num_centroids",
        "centroid_intermediate_top_k",
    }
    if packaged.config.use_ordered_embeddings:
        ignored -= {"num_centroids", "centroid_intermediate_top_k"}
    assert {k: v for k, v in ours["text_config"].items() if k != "dtype"} == {
        k: v for k, v in theirs["text_config"].items() if k != "dtype"
    }
    assert {k: v for k, v in ours.items() if k not in ignored | {"text_config"}} == {
        k: v for k, v in theirs.items() if k not in ignored | {"text_config"}
    }
    assert served_as(METHOD) == {"method": "mtp"}


def test_an_export_keeps_the_position_that_was_trained_for(head: Any, frozen: FrozenTarget, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head")
    export_head(
        tmp_path / "head",
        tmp_path / "export",
        target=frozen,
        target_name="tiny",
        num_speculative_tokens=3,
        layout="plain",
        dtype="float32",
    )
    found: Any = import_head(tmp_path / "export", frozen, METHOD)
    assert found.config == head.config


def test_what_the_recipe_says_of_training_goes_onto_a_continued_head(drafter: Path, frozen: FrozenTarget) -> None:
    start: Any = import_head(drafter, frozen, METHOD)
    head: Any = continue_head(drafter, Config(ttt_steps=5, loss="lk_hybrid"), frozen, METHOD)
    assert head.config == start.config.model_copy(update={"ttt_steps": 5, "loss": "lk_hybrid"})
    assert head.config.hidden_size == 24
    for name, tensor in start.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match=r"pre_projection\.weight"):
        continue_head(drafter, Config(hidden_size=48), frozen, METHOD)


@pytest.mark.parametrize(
    "text, words",
    [
        ({"sliding_window": 16}, "sliding_window 16"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
        ({"num_key_value_heads": 4}, "key/value heads of layer 0: 4 of 32"),
        ({"final_logit_softcapping": 20.0}, r"final_logit_softcapping 20\.0"),
        ({"vocab_size": 256}, "vocab_size 256"),
    ],
    ids=str,
)
def test_the_drafter_of_another_target_is_refused_by_field(
    text: dict[str, Any], words: str, frozen: FrozenTarget, tmp_path: Path
) -> None:
    packaged_drafter(tmp_path, **text)
    with pytest.raises(ValueError, match=words):
        import_head(tmp_path, frozen, METHOD)


def test_it_reads_the_last_layer_of_each_type_that_has_keys_of_its_own() -> None:
    assert needs(Config(), tiny_config("gemma4")).kv_layers == (4, 6)
    shared = tiny_config("gemma4", num_kv_shared_layers=3)
    assert needs(Config(), shared).kv_layers == (2, 3)
    assert needs(Config(), shared).kv_width == 2 * 64 + 2 * 2 * 32
    assert fitting_kind(METHOD) == "gemma4"
    with pytest.raises(ValueError, match="keys and values of a Gemma 4 target, and this one is llama"):
        needs(Config(), tiny_config("llama"))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"layer_types": ("full_attention",)}, "servers want both types"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "full_attention as the last"),
        ({"num_centroids": 4, "centroid_top_k": 8}, "of 4 centroids"),
    ],
)
def test_settings_that_no_server_runs_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config(**settings)


@pytest.mark.parametrize(
    "settings, words", [({"num_attention_heads": 3}, "multiple"), ({"num_centroids": 500}, "divide")]
)
def test_sizes_that_do_not_go_with_the_target_are_refused(
    settings: dict[str, Any], words: str, frozen: FrozenTarget
) -> None:
    assert VOCAB % 500
    with pytest.raises(ValueError, match=words):
        tiny_head(METHOD, frozen, **settings)
