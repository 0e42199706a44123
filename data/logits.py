"""Post-norm states -> logits as the target itself makes them: its lm_head, its scale and its softcap."""

from typing import Any

import torch
from torch import Tensor


def target_logits(model: Any, states: Tensor) -> Tensor:
    """Post-norm states [..., H] -> logits [..., V] of a transformers causal LM, in its dtype."""
    config = model.config.get_text_config()
    logits: Tensor = model.get_output_embeddings()(states)
    scale, cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1.0 else logits * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)


def logit_scale(config: Any) -> float:
    """What a target multiplies its logits by: Cohere's logit_scale, 1/logits_scaling of Granite; most have none.

    HyperCLOVA X multiplies by the field that Granite divides by (transformers, modeling_hyperclovax.py).
    """
    scaling = getattr(config, "logits_scaling", None)
    if scaling:
        return float(scaling) if str(config.model_type).startswith("hyperclovax") else 1.0 / float(scaling)
    return float(getattr(config, "logit_scale", None) or 1.0)
