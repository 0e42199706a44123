"""The proof, before any training, that captured states are the target's own; and if not, which convention is off.

In go a source (transformers, vLLM or a finished cache) and rows, of which a few are tried; out come figures, or an
error that names the convention (parity_causes.py). The reference shares no code with the capture: it is the target run
by transformers with `output_hidden_states`, its own logits, and a hook on its final norm.

    T tokens, H target width, V vocabulary

        captured layer j                         must be the reference's layer j      (layer ids, order, RoPE, dtype)
        last captured state -> norm -> lm_head   must give the target's logits        (pre-norm, gain, softcap)
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget, load_model
from draftsmith.hidden_states.parity_causes import (
    Fit,
    Tolerance,
    better_layer,
    explain_layer,
    explain_logits,
    fit,
    kl_nats,
    own_logits,
    run_reference,
    tolerance_of,
)
from draftsmith.hidden_states.record import Source, check_record
from draftsmith.hidden_states.transformers_source import TransformersSource

# A few short rows suffice: every convention that can be wrong shows on any row of more than a few tokens.
_MAX_ROWS = 3
_LENGTHS = range(8, 513)

Teacher = Callable[[Tensor], Tensor]  # pre-norm last states [T, H] in the stored dtype -> logits [T, V]


@dataclass(frozen=True)
class LayerFigures:
    """How well one captured layer fits the reference, over all rows tried."""

    layer: int
    median_error: float  # median over tokens of |captured - reference| / |reference|
    frobenius_error: float  # the largest over rows
    min_cosine: float


@dataclass(frozen=True)
class ParityReport:
    """The figures of a check that passed."""

    num_rows: int
    num_tokens: int
    layers: tuple[LayerFigures, ...]
    kl_nats: float
    top1_agreement: float  # share of tokens for which both logits have the same argmax
    tolerance: Tolerance

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for the log and the report."""
        return asdict(self)


def check_parity(
    source: Source, rows: Sequence[Row], target: ResolvedTarget, device: str = "cpu", teacher: Teacher | None = None
) -> ParityReport:
    """Compare a source with the target on a few of the rows.

    `teacher` is what training uses to get logits from the last state (FrozenTarget.logits), and is checked with it;
    without one, the target's own norm and lm_head are used. Raises ValueError that names the convention that is off.
    """
    model = source.model if isinstance(source, TransformersSource) else load_model(target, device)
    chosen = _short_rows(rows)
    tolerance = tolerance_of(source.spec)
    fits: dict[int, list[Fit]] = {layer: [] for layer in source.spec.layers}
    logits: list[tuple[Tensor, Tensor]] = []
    with closing(source.capture(chosen)) as captured:
        for row, record in zip(chosen, captured, strict=True):
            check_record(record, row, source.spec)
            ids_T = record.token_ids_T.to(next(model.parameters()).device)
            reference = run_reference(model, ids_T)
            for layer, states_TH in zip(source.spec.layers, record.states_TLH.to(ids_T.device).unbind(1), strict=True):
                states_TH = states_TH.float()
                found = fit(states_TH, reference.layers_NTH[layer])
                if not found.error <= tolerance.layer_error or better_layer(layer, states_TH, reference) is not None:
                    cause = explain_layer(layer, states_TH, reference, source.spec, model, ids_T)
                    raise ValueError(_words(row, f"layer {layer}", found.error, tolerance.layer_error, cause))
                fits[layer].append(found)
            last_TH = record.states_TLH[:, -1].to(ids_T.device)
            logits_TV = own_logits(model, last_TH) if teacher is None else teacher(last_TH).to(ids_T.device)
            kl = kl_nats(reference.logits_TV, logits_TV)
            if not kl <= tolerance.kl_nats:
                cause = explain_logits(last_TH.float(), logits_TV, model, tolerance)
                raise ValueError(_words(row, "logits from the last state", kl, tolerance.kl_nats, cause))
            logits.append((reference.logits_TV, logits_TV))
    return ParityReport(
        num_rows=len(chosen),
        num_tokens=sum(len(row.input_ids) for row in chosen),
        layers=tuple(_figures(layer, found) for layer, found in fits.items()),
        kl_nats=max(kl_nats(*pair) for pair in logits),
        top1_agreement=float(torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in logits]).float().mean()),
        tolerance=tolerance,
    )


def _short_rows(rows: Sequence[Row]) -> list[Row]:
    """The first few rows of a handy length; else the shortest ones."""
    if not rows:
        raise ValueError("the parity check needs at least one row; the rows stage produced nothing")
    handy: list[Row] = []
    for row in rows:
        if len(row.input_ids) in _LENGTHS:
            handy.append(row)
        if len(handy) == _MAX_ROWS:
            return handy
    return handy or sorted(rows, key=lambda row: len(row.input_ids))[:_MAX_ROWS]


def _figures(layer: int, fits: Sequence[Fit]) -> LayerFigures:
    return LayerFigures(
        layer=layer,
        median_error=float(torch.cat([found.error_T for found in fits]).median()),
        frobenius_error=max(found.frobenius for found in fits),
        min_cosine=float(torch.cat([found.cosine_T for found in fits]).min()),
    )


def _words(row: Row, what: str, figure: float, limit: float, cause: str) -> str:
    return (
        f"hidden states of row {row.row_id}: {what} does not match the target (difference {figure:.3g}, limit "
        f"{limit:.3g}). Cause: {cause}. Training on these states would fail silently; nothing was trained."
    )
