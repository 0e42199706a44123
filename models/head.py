"""What a draft head must offer, and how a method is found: `model.method: foo` is the file models/foo.py.

A method file defines

    Config          a frozen, strict pydantic model: every knob of the method, and only here
    needs(config, target)   -> Needs: which states of the target it trains and drafts on. Raises ValueError for a
                    target (its text config) that the method cannot serve
    Head(config, target, kept_ids=None) -> a module that fulfils the `Head` protocol below; kept_ids is the trimmed
                    draft vocabulary (ascending target ids), where the config asks for one
    read_export(fields, tensors, target)    -> Config: the settings of an exported folder, from its config.json and
                    tensors; what serving does not know (losses, schedules) is left at its default
    SERVED_AS       only where vLLM knows the method by another name: the fields of its speculative config that say so

`target` is a `models.target.FrozenTarget`. It is not a module: nothing of it is registered, trained or checkpointed.
"""

import importlib
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.target import FrozenTarget


@dataclass(frozen=True)
class Needs:
    """Which hidden states of the target a head wants.

    Layer ids are *input-of* ids: id j is the residual stream before layer j, 0 the embeddings, n (the number of layers)
    the output of the last layer before the final norm. Capture always adds n, as the teacher's logits need it.
    """

    aux_layers: tuple[int, ...]
    # Decoder layers (0 is the first) whose keys and values are wanted too, ascending, as the target's cache holds them:
    # normed and rotated. Per token and layer, the keys of all key/value heads side by side, then the values.
    kv_layers: tuple[int, ...] = ()
    kv_width: int = 0  # how many features these are per token, over all kv_layers


@dataclass(frozen=True)
class Term:
    """One term of a loss: a differentiable sum over its rows and the weight it has in the total."""

    sum: Tensor
    weight: float


@dataclass(frozen=True)
class Context:
    """What the runtime knows since the last round, one ragged slice per sequence, padded on the right to R rows.

        committed   x0  x1  x2  x3          the target has processed x0..x3 and sampled the bonus x4
        rows        g0  g1  g2  g3          row p holds the target's states of position p
        next tokens x1  x2  x3  x4          next_ids[p] = x[p+1]; the last valid one is the bonus

    Rows 0..num_rows-1 are the positions start..start+num_rows-1 that were committed since the last call.
    """

    next_ids_BR: Tensor  # int64
    aux_BRF: Tensor
    last_BRH: Tensor  # pre-norm
    start_B: Tensor  # int64, position of row 0
    num_rows_B: Tensor  # int64, at least 1 for a live sequence
    ids_BR: Tensor | None = None  # int64, x[p] of row p; the runtime always gives it, learned heads do not need it
    kv_BRE: Tensor | None = None  # keys and values of needs.kv_layers, where there are any


@dataclass(frozen=True)
class Draft:
    """N proposed tokens per sequence, in target ids, and what the verifier needs to stay lossless."""

    tokens_BN: Tensor  # int64
    probs_BNV: Tensor | None  # the exact distribution each token was drawn from (target vocabulary); None = greedy
    confidence_BN: Tensor | None = None  # probability that the token is accepted, given that its prefix was
    num_tokens_B: Tensor | None = None  # int64, ragged lengths, 0 included: what lies behind is padding; None = all N


@dataclass(frozen=True)
class Layout:
    """One file format that serving engines load, for one head: what models/export.py writes and reads back."""

    config: dict[str, Any]  # config.json, except for what only the export knows: the target's name, dtype, proposals
    tensors: dict[str, str]  # exported name -> name in the head's state_dict; covers all of it
    copies: dict[str, Tensor]  # exported name -> a tensor of the target that the engine needs a copy of
    optional_copies: dict[str, Tensor]  # as `copies`: never written, but accepted when they are the target's
    # exported name, one of `copies` -> (row, name in the head's state_dict): a row of the copy that the head has learnt
    learnt_rows: dict[str, tuple[int, str]] = field(default_factory=dict)


class DraftState(Protocol):
    """A head's own cache between rounds (KV of committed rows). Opaque to the runtime, except for selecting rows."""

    def select(self, rows_B: Tensor) -> None:
        """Keep only these sequences (int64 indices), in this order."""


class Head(Protocol):
    """A draft head: a torch module with these attributes and methods."""

    config: Any  # the method's Config
    target: FrozenTarget
    needs: Needs  # what the method's `needs` said for this head

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Term name -> its number of supervised rows in this batch (float32 scalar), without running the model."""

    def loss(self, batch: Batch) -> tuple[dict[str, Term], dict[str, tuple[Tensor, Tensor]]]:
        """Forward and loss: the terms of `counts`, and detached metrics as name -> (sum, count).

        The training objective is sum over terms of weight * sum / (global count of the term).
        """

    def forward(self, batch: Batch) -> tuple[dict[str, Term], dict[str, tuple[Tensor, Tensor]]]:
        """`loss`, through the module's call, so that the hooks of DeepSpeed and DDP see it. Training calls this."""

    def start(self, batch_size: int, device: torch.device) -> DraftState:
        """An empty draft cache for `batch_size` sequences."""

    def draft(
        self,
        state: DraftState,
        context: Context,
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Draft:
        """Take the newly committed rows into the cache and propose `num_tokens` tokens for each sequence.

        temperature 0 drafts greedily; above 0 samples from the draft distribution at that temperature.
        """

    def propose(self, batch: Batch, num_tokens: int) -> Tensor:
        """int64 [B, T, N]: at every row t, the tokens a greedy round would draft after x[t+1] was the bonus.

        Row t sees states 0..t of its document and token t+1, exactly as in `draft`; rows without a next token in the
        same document hold arbitrary values. Used by replay.
        """

    def export_map(self) -> dict[str, Layout]:
        """Layout name -> how this head is written in it; see models/export.py."""


def load_method(name: str) -> ModuleType:
    """The module of a method. Raises ValueError that lists the methods there are."""
    if name not in available_methods():
        raise ValueError(f"model.method is {name!r}; the methods are {', '.join(available_methods())}")
    return importlib.import_module(f"draftsmith.models.{name}")


def served_as(method: str) -> dict[str, Any]:
    """What vLLM's speculative config says beside the model and the number of tokens."""
    return dict(getattr(load_method(method), "SERVED_AS", {"method": method}))


def method_of(head: object) -> str:
    """The method of a head: the name of the file that defines its class."""
    return type(head).__module__.rpartition(".")[2]


def available_methods() -> list[str]:
    """Every file in models/ that defines a Head and a Config, by name."""
    folder = Path(__file__).parent
    return [
        module.name
        for module in pkgutil.iter_modules([str(folder)])
        if not module.ispkg
        and "\nclass Head(" in (source := (folder / f"{module.name}.py").read_text())
        and "\nclass Config(" in source
    ]
