"""The contract that every head fulfils, run over every file in models/ that defines one.

B packed rows, T tokens in a packed row, N proposed tokens
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, tiny_batch, tiny_head, tiny_kept_ids, tiny_rows, tiny_target
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.checkpoint import load_head, save_head
from draftsmith.models.export import export_head, import_head
from draftsmith.models.head import Context, available_methods, load_method, method_of
from draftsmith.models.target import FrozenTarget

KEPT = tiny_kept_ids(120)
CASES = [
    pytest.param((method, kept_ids), id=f"{method}-{'full' if kept_ids is None else 'trimmed'}")
    for method in available_methods()
    for kept_ids in (None, KEPT)
    if kept_ids is None or "draft_vocab_size" in load_method(method).Config.model_fields
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a kind that brings what every method wants: an MTP layer, and a width that its heads fill."""
    return tiny_target(tmp_path_factory.mktemp("target"), "mimo")


@pytest.fixture(scope="module")
def frozen(target: Path) -> FrozenTarget:
    return FrozenTarget.load(target, torch.float32)


@pytest.fixture(params=CASES)
def head(request: pytest.FixtureRequest, frozen: FrozenTarget) -> Any:
    method, kept_ids = request.param
    return tiny_head(method, frozen, kept_ids=kept_ids)


def total(head: Any, batch: Batch) -> Tensor:
    """The training objective without its global denominators."""
    value: Tensor = sum(term.weight * term.sum for term in head.loss(batch)[0].values())
    return value


def gradients(head: Any, *batches: Batch) -> dict[str, Tensor]:
    head.zero_grad()
    for batch in batches:
        torch.autograd.backward(total(head, batch))
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters()}


def assert_close_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * scale + 1e-8, msg=name)


def at_row(batch: Batch, b: int, start: int, first: int, last: int) -> Context:
    """What the runtime knows when rows first..last-1 of the document that begins at `start` were committed."""
    span, following = slice(start + first, start + last), slice(start + first + 1, start + last + 1)
    return Context(
        batch.input_ids_BT[b : b + 1, following],
        batch.aux_BTF[b : b + 1, span],
        batch.last_BTH[b : b + 1, span],
        torch.tensor([first]),
        torch.tensor([last - first]),
    )


def together(contexts: list[Context]) -> Context:
    """Contexts of single sequences as one ragged batch; what is padded would be noticed if it were read."""
    width = max(int(c.num_rows_B) for c in contexts)

    def padded(x: Tensor, value: float) -> Tensor:
        filler = torch.full((1, width - x.shape[1], *x.shape[2:]), value, dtype=x.dtype)
        return torch.cat([x, filler], dim=1)

    return Context(
        torch.cat([padded(c.next_ids_BR, 5) for c in contexts]),
        torch.cat([padded(c.aux_BRF, 7.0) for c in contexts]),
        torch.cat([padded(c.last_BRH, 7.0) for c in contexts]),
        torch.cat([c.start_B for c in contexts]),
        torch.cat([c.num_rows_B for c in contexts]),
    )


def test_terms_counts_and_metrics_have_the_promised_shapes(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([20, 9]), tiny_rows([26])], head.needs.aux_layers, num_tokens=32)
    counts = head.counts(batch)
    terms, metrics = head(batch)
    assert terms.keys() == counts.keys() and terms
    assert all(count.shape == () and count.dtype == torch.float32 and count > 0 for count in counts.values())
    assert all(term.sum.shape == () and term.sum.requires_grad for term in terms.values())
    for value, count in metrics.values():
        assert value.shape == count.shape == () and not value.requires_grad
        assert 0 <= float(value) <= float(count)
    proposals_BTN = head.propose(batch, 3)
    assert proposals_BTN.shape == (2, 32, 3) and proposals_BTN.dtype == torch.int64
    assert int(proposals_BTN.min()) >= 0 and int(proposals_BTN.max()) < VOCAB


def test_the_loss_falls_on_one_batch(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([20, 9])], head.needs.aux_layers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = total(head, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    # A trimmed vocabulary bounds some losses from below: what the target puts outside it is lost.
    assert losses[-1] < 0.75 * losses[0]


def test_changing_the_future_changes_no_earlier_proposal(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([20, 9])], head.needs.aux_layers)
    before, changed_at = head.propose(batch, 3), 11
    ids, aux, last = batch.input_ids_BT.clone(), batch.aux_BTF.clone(), batch.last_BTH.clone()
    ids[0, changed_at:20] = (ids[0, changed_at:20] + 17) % VOCAB
    aux[0, changed_at:20] += 1.0
    last[0, changed_at:20] -= 1.0
    after = head.propose(replace(batch, input_ids_BT=ids, aux_BTF=aux, last_BTH=last), 3)
    # Row t sees the states 0..t and the token t+1: rows up to changed_at - 2 see nothing of the change.
    assert torch.equal(after[0, : changed_at - 1], before[0, : changed_at - 1])
    assert not torch.equal(after[0, changed_at - 1 : 19], before[0, changed_at - 1 : 19]), "the change had no effect"
    assert torch.equal(after[0, 20:28], before[0, 20:28]), "the other document saw the change"


def test_changing_the_future_changes_no_earlier_loss(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([20, 9])], head.needs.aux_layers)
    changed_at = 11
    batch.loss_mask_BT[:, changed_at:] = False
    before = gradients(head, batch)
    values = {name: float(term.sum.detach()) for name, term in head.loss(batch)[0].items()}
    ids, aux, last = batch.input_ids_BT.clone(), batch.aux_BTF.clone(), batch.last_BTH.clone()
    ids[0, changed_at:] = (ids[0, changed_at:] + 17) % VOCAB
    aux[0, changed_at:] += 1.0
    last[0, changed_at:] -= 1.0
    changed = replace(batch, input_ids_BT=ids, aux_BTF=aux, last_BTH=last)
    assert values == {name: float(term.sum.detach()) for name, term in head.loss(changed)[0].items()}
    assert sum(values.values()) > 0
    for name, gradient in gradients(head, changed).items():
        assert torch.equal(gradient, before[name]), name


def test_the_loss_of_a_packed_row_is_the_sum_over_its_documents(head: Any, target: Path) -> None:
    layers, rows = head.needs.aux_layers, tiny_rows([13, 1, 9, 2, 16], prompt=[3, 0, 4, 0, 5])
    packed = tiny_batch(target, [rows[:3], rows[3:]], layers, num_tokens=24)
    alone = [tiny_batch(target, [[row]], layers) for row in rows]
    for name, count in head.counts(packed).items():
        assert float(count) == pytest.approx(sum(float(head.counts(one)[name]) for one in alone), rel=1e-6)
    for name, term in head.loss(packed)[0].items():
        torch.testing.assert_close(term.sum, sum(head.loss(one)[0][name].sum for one in alone), rtol=1e-4, atol=1e-4)
    assert_close_gradients(gradients(head, packed), gradients(head, *alone))
    assert torch.equal(head.propose(packed, 2)[0, :12], head.propose(alone[0], 2)[0, :12])


def test_padding_changes_nothing(head: Any, target: Path) -> None:
    layers, rows = head.needs.aux_layers, tiny_rows([13, 9])
    exact, padded = (tiny_batch(target, [rows], layers, num_tokens=width) for width in (22, 40))
    torch.testing.assert_close(total(head, padded), total(head, exact))
    assert_close_gradients(gradients(head, padded), gradients(head, exact))
    assert torch.equal(head.propose(padded, 3)[:, :12], head.propose(exact, 3)[:, :12])


@pytest.mark.parametrize("lengths", [[], [1], [2], [1, 2, 3]], ids=str)
def test_short_documents_give_a_finite_loss_and_gradient(lengths: list[int], head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows(lengths, prompt=0)], head.needs.aux_layers, num_tokens=8)
    terms, metrics = head.loss(batch)
    for name, count in head.counts(batch).items():
        assert count > 0 or float(terms[name].sum.detach()) == 0.0
    assert all(torch.isfinite(value) for value, _ in metrics.values())
    assert all(torch.isfinite(gradient).all() for gradient in gradients(head, batch).values())
    assert head.propose(batch, 3).shape == (1, 8, 3)


def test_a_fully_masked_batch_gives_zero_loss_and_a_zero_gradient_for_every_parameter(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([12, 8], prompt=20)], head.needs.aux_layers, num_tokens=24)
    assert all(float(count) == 0 for count in head.counts(batch).values())
    assert float(total(head, batch).detach()) == 0.0
    for name, parameter in head.named_parameters():
        assert parameter.requires_grad, name
    assert all(not gradient.any() for gradient in gradients(head, batch).values())


def test_proposals_equal_drafting_round_by_round(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([20]), tiny_rows([17], seed=1)], head.needs.aux_layers, num_tokens=20)
    proposals_BTN = head.propose(batch, 4)
    state = head.start(2, torch.device("cpu"))
    # Rounds that committed different numbers of rows; each ends at the row whose proposal it must equal.
    for rounds in ([(0, 5), (0, 3)], [(5, 6), (3, 8)], [(6, 10), (8, 9)], [(10, 13), (9, 14)], [(13, 18), (14, 16)]):
        context = together([at_row(batch, b, 0, first, last) for b, (first, last) in enumerate(rounds)])
        draft = head.draft(state, context, 4, 0.0, None)
        assert draft.probs_BNV is None
        for b, (_, last) in enumerate(rounds):
            assert draft.tokens_BN[b].tolist() == proposals_BTN[b, last - 1].tolist(), (b, last)


def test_a_draft_state_keeps_the_selected_sequences_in_the_given_order(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([16], seed=s) for s in range(3)], head.needs.aux_layers)
    proposals_BTN, state = head.propose(batch, 3), head.start(3, torch.device("cpu"))
    head.draft(state, together([at_row(batch, b, 0, 0, 6) for b in range(3)]), 3, 0.0, None)
    state.select(torch.tensor([2, 0]))
    draft = head.draft(state, together([at_row(batch, b, 0, 6, 9) for b in (2, 0)]), 3, 0.0, None)
    assert torch.equal(draft.tokens_BN, proposals_BTN[[2, 0], 8])


def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([9])], head.needs.aux_layers)
    context, first = at_row(batch, 0, 0, 0, 8), []
    for seed in range(200):
        state = head.start(1, torch.device("cpu"))
        draft = head.draft(state, context, 2, 0.7, torch.Generator().manual_seed(seed))
        probs_NV = draft.probs_BNV[0]
        assert probs_NV.shape == (2, VOCAB)
        torch.testing.assert_close(probs_NV.sum(-1), torch.ones(2))
        assert (probs_NV.gather(-1, draft.tokens_BN[0][:, None]) > 0).all()
        first.append(int(draft.tokens_BN[0, 0]))
    seen = torch.bincount(torch.tensor(first), minlength=VOCAB) / len(first)
    # 200 draws of a distribution with a few likely tokens; 0.2 is more than four standard errors of this distance.
    likely = probs_NV[0].topk(5).indices
    assert (seen[likely] - probs_NV[0][likely]).abs().max() < 0.2
    greedy = head.draft(head.start(1, torch.device("cpu")), context, 2, 0.0, None)
    assert int(greedy.tokens_BN[0, 0]) == int(probs_NV[0].argmax())


def test_a_trimmed_head_proposes_only_kept_tokens(frozen: FrozenTarget, target: Path) -> None:
    for method in available_methods():
        if "draft_vocab_size" not in load_method(method).Config.model_fields:
            continue
        head = tiny_head(method, frozen, kept_ids=KEPT)
        batch = tiny_batch(target, [tiny_rows([20])], head.needs.aux_layers)
        assert set(head.propose(batch, 3)[0, 2:19].flatten().tolist()) <= set(KEPT.tolist())
        context, state = at_row(batch, 0, 0, 0, 9), head.start(1, torch.device("cpu"))
        probs_BNV = head.draft(state, context, 2, 1.0, torch.Generator().manual_seed(0)).probs_BNV
        outside = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, KEPT, False)
        assert not probs_BNV[..., outside].any()


def test_a_saved_head_loads_with_equal_loss_and_drafts(head: Any, target: Path, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head", {"step": 3})
    assert_equal_heads(load_head(tmp_path / "head", head.target), head, target)


def test_an_exported_head_imports_with_equal_loss_and_drafts(head: Any, target: Path, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head")
    layouts = list(head.export_map())
    assert "plain" in layouts and set(layouts) <= {"speculators", "plain"}
    for layout in layouts:
        export_head(
            tmp_path / "head",
            tmp_path / layout,
            target=head.target,
            target_name=str(target),
            num_speculative_tokens=3,
            layout=layout,  # type: ignore[arg-type]
            dtype="float32",
        )
        assert_equal_heads(import_head(tmp_path / layout, head.target, method_of(head)), head, target)


def assert_equal_heads(found: Any, head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([20, 9])], head.needs.aux_layers)
    assert torch.equal(found.propose(batch, 4), head.propose(batch, 4))
    torch.testing.assert_close(total(found, batch), total(head, batch), rtol=0, atol=0)
    drafts = []
    for each in (found, head):
        generator, state = torch.Generator().manual_seed(0), each.start(1, torch.device("cpu"))
        drafts.append(each.draft(state, at_row(batch, 0, 0, 0, 12), 3, 1.0, generator))
    assert torch.equal(drafts[0].probs_BNV, drafts[1].probs_BNV)
    assert torch.equal(drafts[0].tokens_BN, drafts[1].tokens_BN)


def test_training_in_bfloat16_stays_close_to_float32(head: Any, target: Path) -> None:
    batch = tiny_batch(target, [tiny_rows([20, 9])], head.needs.aux_layers)
    exact = total(head, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = total(head, batch)
    torch.autograd.backward(rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0)
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())
