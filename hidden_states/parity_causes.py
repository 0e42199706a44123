"""Why captured states do not fit the target: tries the known mistakes one by one and names the one that explains it.

    T tokens, H target width, V vocabulary, N the target's layers plus one

Measures states against a reference run of the target. Used by parity.py only when its figures are out of tolerance.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.logits import target_logits
from draftsmith.hidden_states.record import CaptureSpec
from draftsmith.hidden_states.transformers_source import text_decoder

# Another layer that fits this many times better than the declared one is the one that was captured, whatever the
# tolerance says: in bf16, neighbouring layers of a deep target may differ by less than the tolerance.
_CLEARLY_BETTER = 3.0


@dataclass(frozen=True)
class Tolerance:
    """Upper limits of what numerics explain."""

    layer_error: float  # median over tokens of |captured - reference| / |reference|
    kl_nats: float  # mean over tokens of KL(target's logits, logits from the captured last state)


# fp32 against fp32, vLLM against transformers (SmolLM2, 30 layers): up to 1.4e-5 (Frobenius).
# bf16, vLLM against transformers on SmolLM2: median up to 1.7e-2 (last layer), KL 2.2e-3; and transformers against
# itself in another batch shape: 1.6e-2 and 2.0e-3. The limits leave a factor of about four.
# fp32 run stored in bf16: rounding to 8 bits gives at most 2^-9 per value.
_FLOAT32 = Tolerance(1e-4, 1e-6)
_BFLOAT16 = Tolerance(0.07, 1e-2)
_ROUNDED = Tolerance(2**-8, 1e-3)


@dataclass(frozen=True)
class Fit:
    """How captured states compare with reference states, token by token."""

    error_T: Tensor
    cosine_T: Tensor
    frobenius: float

    @property
    def error(self) -> float:
        return float(self.error_T.median())


@dataclass(frozen=True)
class Reference:
    """One row through the target."""

    layers_NTH: list[Tensor]  # input-of ids 0..n, float32; the last one is pre-norm
    logits_TV: Tensor  # float32


def tolerance_of(spec: CaptureSpec) -> Tolerance:
    """What the dtypes of a capture allow."""
    if spec.target_dtype != "float32":
        return _BFLOAT16
    return _FLOAT32 if spec.dtype == "float32" else _ROUNDED


def run_reference(model: Any, ids_T: Tensor, **inputs: Tensor) -> Reference:
    """The target's own states and logits of one row."""
    decoder, config = text_decoder(model)
    before_norm: list[Tensor] = []
    handle = decoder.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    try:
        with torch.no_grad():
            output = model(input_ids=ids_T[None], use_cache=False, output_hidden_states=True, **inputs)
    finally:
        handle.remove()
    states = [state[0].float() for state in output.hidden_states]
    assert len(states) == config.num_hidden_layers + 1, f"{len(states)} states of {config.num_hidden_layers} layers"
    return Reference([*states[:-1], before_norm[0][0].float()], output.logits[0].float())


def fit(states_TH: Tensor, reference_TH: Tensor) -> Fit:
    """Compare two sets of states of the same tokens."""
    states_TH, reference_TH = states_TH.float(), reference_TH.float()
    difference_TH = states_TH - reference_TH
    norm_T = reference_TH.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return Fit(
        error_T=difference_TH.norm(dim=-1) / norm_T,
        cosine_T=F.cosine_similarity(states_TH, reference_TH, dim=-1),
        frobenius=float(difference_TH.norm() / reference_TH.norm().clamp_min(torch.finfo(torch.float32).tiny)),
    )


def kl_nats(reference_TV: Tensor, logits_TV: Tensor) -> float:
    """Mean over tokens of KL(reference, logits)."""
    log_p_TV, log_q_TV = reference_TV.float().log_softmax(-1), logits_TV.float().log_softmax(-1)
    return float((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1).mean())


def own_logits(model: Any, last_TH: Tensor) -> Tensor:
    """Pre-norm last states through the target's own norm and lm_head."""
    decoder, _ = text_decoder(model)
    with torch.no_grad():
        return _head(model, decoder.norm(last_TH.to(_dtype(model))))


def better_layer(layer: int, states_TH: Tensor, reference: Reference) -> int | None:
    """The layer whose reference states are clearly nearer to these than those of the declared one, if there is any."""
    errors = [fit(states_TH, reference_TH).error for reference_TH in reference.layers_NTH]
    best = min(range(len(errors)), key=errors.__getitem__)
    return best if errors[best] * _CLEARLY_BETTER < errors[layer] else None


def explain_layer(
    layer: int, states_TH: Tensor, reference: Reference, spec: CaptureSpec, model: Any, ids_T: Tensor
) -> str:
    """The mistake that explains why the states of a layer are not the reference's, in words."""
    tolerance = tolerance_of(spec)
    for cause, explained in _layer_causes(layer, states_TH, reference, spec, model, ids_T):
        if explained.error <= tolerance.layer_error:
            return cause
    error_T = fit(states_TH, reference.layers_NTH[layer]).error_T
    if len(error_T) > 1 and error_T[0] <= tolerance.layer_error:
        return (
            "RoPE, positions or attention mask: the first token, which attends only to itself, agrees and later ones "
            "do not. Compare rope_parameters, position ids and sliding windows"
        )
    if spec.target_dtype == "float32" and float(error_T.median()) <= _BFLOAT16.layer_error:
        if torch.equal(states_TH, states_TH.bfloat16().float()):
            return "dtype: every value is a bfloat16 number, but the spec says that target and states are float32"
        return "dtype: the difference is that of 16-bit arithmetic, but the spec says that the target runs in float32"
    if layer == 0:
        return "the embeddings differ: other weights, another embedding scale, or other token ids"
    return "no known convention explains it. If layer 0 agrees, suspect other weights or an attention variant"


def explain_logits(last_TH: Tensor, logits_TV: Tensor, model: Any, tolerance: Tolerance) -> str:
    """Why the logits that training would use are not the target's, given that the last state itself is right."""
    for cause, variant_TV in _logit_causes(last_TH, model):
        if kl_nats(variant_TV, logits_TV) <= tolerance.kl_nats:
            return cause
    return "no known convention explains it: the norm or the lm_head used for training is not the target's"


def _layer_causes(
    layer: int, states_TH: Tensor, reference: Reference, spec: CaptureSpec, model: Any, ids_T: Tensor
) -> Iterator[tuple[str, Fit]]:
    expected_TH = reference.layers_NTH[layer]
    other = better_layer(layer, states_TH, reference)
    if other is not None:
        yield _layer_words(layer, other), fit(states_TH, reference.layers_NTH[other])
    decoder, _ = text_decoder(model)
    with torch.no_grad():
        normed_TH = decoder.norm(expected_TH.to(_dtype(model)))
        yield "norm: the states are post-norm (after the final norm) and must be pre-norm", fit(states_TH, normed_TH)
        input_norm = getattr(decoder.layers[layer], "input_layernorm", None) if layer < spec.layers[-1] else None
        if input_norm is not None:
            normed_TH = input_norm(expected_TH.to(_dtype(model)))
            cause = "norm: the states are those after the layer's input norm and must be those before it"
            yield cause, fit(states_TH, normed_TH)
    yield "token shift: the states are those of the next token", fit(states_TH[:-1], expected_TH[1:])
    yield "token shift: the states are those of the previous token", fit(states_TH[1:], expected_TH[:-1])
    scale = float((states_TH * expected_TH).sum() / expected_TH.square().sum())
    cause = f"scale: the states are {scale:.4g} times the target's (embedding scale?)"
    yield cause, fit(states_TH / scale, expected_TH)
    # With a mask of ones: without one, transformers takes repeated positions for packed documents.
    positions_BT, mask_BT = torch.zeros_like(ids_T)[None], torch.ones_like(ids_T)[None]
    unrotated = run_reference(model, ids_T, position_ids=positions_BT, attention_mask=mask_BT)
    yield "positions: every token was given the same position", fit(states_TH, unrotated.layers_NTH[layer])
    with _plain_rope(decoder):
        plain = run_reference(model, ids_T)
    yield (
        "RoPE: the source rotates with theta 10000 and no scaling; the target's rope_parameters were lost",
        fit(states_TH, plain.layers_NTH[layer]),
    )


@contextmanager
def _plain_rope(decoder: Any) -> Generator[None, None, None]:
    """The decoder with RoPE as a config without rope settings would give it."""
    rotary: Any = getattr(decoder, "rotary_emb", None)
    kept = getattr(rotary, "inv_freq", None)
    if kept is None:
        yield
        return
    exponents = torch.arange(len(kept), device=kept.device, dtype=torch.float32) / len(kept)
    rotary.inv_freq = 10000.0**-exponents
    try:
        yield
    finally:
        rotary.inv_freq = kept


def _logit_causes(last_TH: Tensor, model: Any) -> Iterator[tuple[str, Tensor]]:
    """(cause, the logits that this mistake gives)."""
    decoder, config = text_decoder(model)
    dtype, norm = _dtype(model), decoder.norm
    weight_H: Tensor = norm.weight.float()
    scaled_TH = last_TH * torch.rsqrt(last_TH.square().mean(-1, keepdim=True) + float(config.rms_norm_eps))
    with torch.no_grad():
        normed_TH = norm(last_TH.to(dtype)).float()
        gains = {"w": weight_H, "1+w": 1 + weight_H}
        own = min(gains, key=lambda gain: fit(scaled_TH * gains[gain], normed_TH).error)
        for gain in gains.keys() - {own}:
            cause = f"norm: its gain is taken as {gain}, the target's norm multiplies by {own}"
            yield cause, _head(model, (scaled_TH * gains[gain]).to(dtype))
        yield "norm: the final norm is left out", _head(model, last_TH.to(dtype))
        twice_TH = norm(normed_TH.to(dtype))
        yield "norm: the final norm is applied twice", _head(model, twice_TH)
        if getattr(config, "final_logit_softcapping", None):
            uncapped_TV = model.get_output_embeddings()(normed_TH.to(dtype)).float()
            yield "final_logit_softcapping is left out", uncapped_TV


def _layer_words(layer: int, other: int) -> str:
    if other == layer + 1:
        return (
            f"layer index: the states are those of input-of id {other}, that is the output of layer {layer}; "
            "output-of ids were used, so ask for one less"
        )
    if other == layer - 1:
        return f"layer index: the states are those of input-of id {other}; the source's ids are one too low"
    return f"layer index: the states are those of input-of id {other}; the layers are in another order"


def _head(model: Any, normed_TH: Tensor) -> Tensor:
    return target_logits(model, normed_TH).float()


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype
