"""A tiny Gemma 4 target with its packaged drafter, both of transformers' own classes, and the drafter run by them.

T tokens of one sequence, H target width, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM

WINDOW = 8
_NUM_CENTROIDS, _TOP_K = 32, 5
_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def packaged_drafter(folder: Path, *, has_centroids: bool = False, **text: Any) -> Path:
    """Save a random drafter for `tiny_target(..., "gemma4")`; `text` overrides fields of its text config."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": len(_TYPES), "layer_types": _TYPES}
    sizes |= {"num_kv_shared_layers": len(_TYPES), "final_logit_softcapping": None}
    config = Gemma4AssistantConfig(
        text_config=tiny_config("gemma4", **(sizes | text)),
        backbone_hidden_size=64,
        use_ordered_embeddings=has_centroids,
        num_centroids=_NUM_CENTROIDS,
        centroid_intermediate_top_k=_TOP_K,
    )
    torch.manual_seed(3)
    model = Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        for layer in model.model.layers:
            layer.layer_scalar.uniform_(0.5, 1.5)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(config.text_config.vocab_size))
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """The pair as transformers runs it."""

    target: Any
    drafter: Any

    @classmethod
    def load(cls, target: Path, drafter: Path) -> "Reference":
        """From their folders."""
        models = (AutoModelForCausalLM.from_pretrained(target), Gemma4AssistantForCausalLM.from_pretrained(drafter))
        return cls(*(model.eval().requires_grad_(False) for model in models))

    def logits(self, ids: Sequence[int], num_seen: int, forced: Sequence[int], position: int) -> Tensor:
        """The drafter's logits [len(forced), V] after the target has seen `num_seen` of `ids`, one token at a time.

        It starts from the state of the last token seen and is fed `forced`, of which the first is the bonus. One query
        at a time its masks are right, but for sliding layers, which show one token more than the target's own: so they
        are given the last WINDOW tokens. Outside the clusters that centroids choose, -inf.
        """
        states_TH, shared = self._run(tuple(ids))
        seen = {
            name: tuple(
                x[:, :, max(0, num_seen - WINDOW) if name == "sliding_attention" else 0 : num_seen] for x in pair
            )
            for name, pair in shared.items()
        }
        hidden, found = states_TH[None, num_seen - 1 : num_seen], []
        for token in forced:
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            output = self.drafter(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=seen,
            )
            logits_V, hidden = output.logits[0, 0], output.last_hidden_state
            if self.drafter.masked_embedding is not None:  # the rest are all one less than the lowest chosen
                logits_V = logits_V.masked_fill(logits_V == logits_V.min(), float("-inf"))
            found.append(logits_V)
        return torch.stack(found)

    @lru_cache(maxsize=64)  # noqa: B019 - as short-lived as a test
    def _run(self, ids: tuple[int, ...]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Post-norm states [T, H], and the keys and values that the target hands to drafters."""
        output = self.target.model(torch.tensor([ids]), use_cache=False, return_shared_kv_states=True)
        return output.last_hidden_state[0], dict(output.shared_kv_states)

    def __hash__(self) -> int:
        return id(self)
