"""The frozen parts of a target that a head needs: embedding, final norm, lm_head, RoPE, and the target's dimensions.

Only these tensors are read from the checkpoint, so a head can be trained from cached states on a machine that could
not hold the target. The norm is the target's own class from transformers: gemma's and Qwen3.5's (1+w) gain included.

    V target vocabulary, H target width
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

INDEX = "model.safetensors.index.json"
_EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
_NORM_NAMES = ("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight")


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint folder, single file or sharded, by name; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, _tensor_files(folder)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def is_whole_model(self) -> bool:
        """Whether these are a language model's, and not those of a draft head alone."""
        return any(name in self.files for name in _NORM_NAMES)


@dataclass(frozen=True)
class FrozenTarget:
    """A target's frozen ends. Plain tensors, deliberately outside any module: no rank trains or checkpoints them."""

    config: Any  # the text part of the transformers config
    embedding_VH: Tensor
    head_VH: Tensor  # the same tensor as embedding_VH where the target ties them
    norm: nn.Module  # the target's final norm; its weight is frozen
    embedding_scale: float
    logit_softcap: float | None
    stored: StoredTensors | None = None  # the checkpoint behind it, for heads that begin as a part of the target

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "FrozenTarget":
        """Read the frozen parts of a local checkpoint (single file or sharded).

        Raises ValueError naming the tensors that are missing; nothing is ever left random (fault 25).
        """
        from transformers import AutoConfig

        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = whole.get_text_config()
        stored = StoredTensors(folder)
        embedding = _read(stored, _EMBEDDING_NAMES, dtype, device)
        tied = bool(getattr(config, "tie_word_embeddings", False) or getattr(whole, "tie_word_embeddings", False))
        head = embedding if tied else _read(stored, _HEAD_NAMES, dtype, device)
        norm = _final_norm(config, _read(stored, _NORM_NAMES, torch.float32, device)).to(device)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(config, embedding, head, norm, _embedding_scale(config), softcap, stored)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.head_VH.shape[0])

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> the target's own input embeddings [..., H], scaled as the target scales them."""
        embedded = F.embedding(ids, self.embedding_VH)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def normalise(self, last: Tensor) -> Tensor:
        """Pre-norm last states [..., H] -> post-norm states [..., H], computed in fp32, in the dtype of `last`."""
        with torch.no_grad():
            return self.norm(last.float()).to(last.dtype)  # type: ignore[no-any-return]

    def logits(self, last: Tensor) -> Tensor:
        """Pre-norm last states [..., H] -> the target's own logits [..., V] in fp32. For small inputs: it is dense."""
        with torch.no_grad():
            logits = F.linear(self.normalise(last).to(self.head_VH.dtype), self.head_VH).float()
            return softcap(logits, self.logit_softcap)


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """final_logit_softcapping, as Gemma applies it: cap * tanh(logits / cap)."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _final_norm(config: Any, weight_H: Tensor) -> nn.Module:
    """The target's own norm class, found in its transformers modelling file, with the checkpoint's weight.

    Where the target scales its logits (Cohere, Granite), the norm scales its output: the two are the same.
    """
    import transformers

    module_name = type(config).__module__.replace("configuration_", "modeling_")
    modelling = __import__(module_name, fromlist=["_"]) if module_name.startswith("transformers.") else transformers
    classes = {name: value for name, value in vars(modelling).items() if isinstance(value, type)}
    prefix = type(config).__name__.removesuffix("Config").removesuffix("Text")
    others = [name for suffix in ("RMSNorm", "LayerNorm") for name in classes if name.endswith(suffix)]
    name = next((name for name in (f"{prefix}RMSNorm", f"{prefix}LayerNorm", *others) if name in classes), None)
    if name is None:
        raise ValueError(f"target {config.model_type!r}: no RMSNorm and no LayerNorm class found in {module_name}")
    norm: nn.Module = classes[name](weight_H.shape[0], eps=norm_eps(config))
    norm.load_state_dict({"weight": weight_H})
    scale = _logit_scale(config)
    return (norm if scale == 1.0 else _ScaledNorm(norm, scale)).requires_grad_(False)


class _ScaledNorm(nn.Module):
    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.norm(x) * self.scale
        return scaled


def norm_eps(config: Any) -> float:
    """The epsilon of a target's norms, whichever of their two names it has."""
    return float(getattr(config, "rms_norm_eps", None) or config.layer_norm_eps)


def _logit_scale(config: Any) -> float:
    """What the target multiplies its logits by; HyperCLOVA X multiplies by the field that Granite divides by."""
    scaling = getattr(config, "logits_scaling", None)
    if scaling:
        return float(scaling) if str(config.model_type).startswith("hyperclovax") else 1.0 / float(scaling)
    return float(getattr(config, "logit_scale", None) or 1.0)


def _embedding_scale(config: Any) -> float:
    """What the target multiplies its embeddings by.

    Gemma: sqrt(H), stated per family since no config field says it; Granite and others name it; most have none.
    """
    if str(config.model_type).startswith("gemma"):
        return math.sqrt(config.hidden_size)
    return float(getattr(config, "embedding_multiplier", None) or 1.0)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index = folder / INDEX
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"target folder {folder} has no model.safetensors and no {INDEX}")
    with safe_open(single, "pt") as file:
        return {name: single for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping


def _read(stored: StoredTensors, names: tuple[str, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    for name in names:
        if name in stored:
            return stored[name].to(device=device, dtype=dtype)
    raise ValueError(f"the target's checkpoint holds none of {', '.join(names)}; is it a causal language model?")
