"""A trained head -> a Hugging Face folder that serving engines load as it is, and back.

    speculators   the layout of vllm-project/speculators; carries its target and N, so `vllm serve FOLDER` is enough
    plain         the layout of the EAGLE authors and other engines; N and method are given on the command line

What a layout holds is the method's to say (`export_map`, `read_export`); here it is written, audited, loaded again and
compared: a folder appears only when what a fresh reader finds in it drafts exactly as the head does (fault 30).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.models.card import Card, model_card
from draftsmith.models.checkpoint import CONFIG, WEIGHTS, fill, load_head, read_head_config, read_tensors, write_folder
from draftsmith.models.head import Context, Layout, load_method, method_of
from draftsmith.models.parts.draft_vocabulary import ids_of
from draftsmith.models.target import FrozenTarget

LayoutName = Literal["speculators", "plain"]
DType = Literal["bfloat16", "float16", "float32"]
# The version of vllm-project/speculators whose configuration is written; vLLM 0.32 reads it.
_SPECULATORS_VERSION = "0.9.0"
# Of log-probabilities, in fp32 on both sides with equal weights: only the order of sums may differ.
_LOG_TOLERANCE = 1e-3
_SMALLEST = 1e-30


@dataclass(frozen=True)
class ExportReport:
    """What was written, and what rounding the weights to `dtype` did to the drafts of a random probe."""

    num_tensors: int
    num_bytes: int
    rounding_tv: float  # mean total variation between the head's drafts before and after rounding


def export_head(
    head_folder: Path,
    folder: Path,
    *,
    target: FrozenTarget,
    target_name: str,
    num_speculative_tokens: int,
    layout: LayoutName = "speculators",
    dtype: DType = "bfloat16",
    card: Card | None = None,
) -> ExportReport:
    """Export a head that `save_head` wrote. `num_speculative_tokens` is the N that the evaluation recommends.

    `target_name` is what a server resolves: a Hugging Face id or a path. Raises ValueError, and writes nothing, when
    the layout does not exist or the written folder does not reproduce the head.
    """
    head = load_head(head_folder, target)
    parts = _layout_of(head, layout)
    torch_dtype = getattr(torch, dtype)
    tensors = _exported_tensors(head, parts, torch_dtype)
    config = {**parts.config, "torch_dtype": dtype, "dtype": dtype}
    if layout == "speculators":
        config |= _speculators_fields(parts.config, target, target_name, num_speculative_tokens)
    method = read_head_config(head_folder).method
    found = 0.0

    def write(temporary: Path) -> None:
        nonlocal found
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        text = model_card(card or Card(), config, target_name, method, num_speculative_tokens, layout)
        (temporary / "README.md").write_text(text)
        found = _compare(head, head_folder, temporary, torch_dtype)

    write_folder(folder, write)
    num_bytes = sum(x.numel() * x.element_size() for x in tensors.values())
    return ExportReport(len(tensors), num_bytes, found)


def import_head(folder: Path, target: FrozenTarget, method: str, device: torch.device | str = "cpu") -> nn.Module:
    """Read an exported folder of either layout, ours or another trainer's, into a head in fp32.

    Raises ValueError naming every tensor that is missing, unexpected, misshapen or not the target's own.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no exported head: {CONFIG} is missing")
    fields, tensors = json.loads(path.read_text()), read_tensors(folder)
    module = load_method(method)
    kept_ids = ids_of(tensors["d2t"]) if "d2t" in tensors else None
    head: nn.Module = module.Head(module.read_export(fields, tensors, target), target, kept_ids)
    parts = _layout_of(head, "speculators" if "speculators_model_type" in fields else "plain")
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copy = {**parts.copies, **parts.optional_copies}.get(name)
        if name in parts.learnt_rows and copy is not None and tensor.shape == copy.shape:
            row, ours = parts.learnt_rows[name]
            renamed[ours] = tensor[row].clone()
            tensor = tensor.index_copy(0, torch.tensor([row]), copy[row : row + 1].to(tensor))
        if copy is None:
            renamed[parts.tensors.get(name, name)] = tensor
        elif tensor.shape != copy.shape or not torch.equal(tensor, copy.to(tensor)):
            raise ValueError(f"{folder}: {name} is not the target's own; is it the head of another target?")
    absent = sorted(parts.copies.keys() - tensors.keys())
    if absent:
        raise ValueError(f"{folder}: {', '.join(absent)} are missing")
    fill(head, renamed, str(folder))
    return head.to(device)


def continue_head(folder: Path, config: BaseModel, target: FrozenTarget, method: str) -> nn.Module:
    """A head that goes on from an exported folder's weights (and draft vocabulary), to be trained further.

    What `config` leaves at its default is as in the folder. Raises ValueError as `import_head` does, and naming every
    tensor that `config` would give another shape.
    """
    start: Any = import_head(folder, target, method)
    given = {name: value for name, value in config if value != type(config).model_fields[name].get_default()}
    state = start.state_dict()
    kept_ids = ids_of(state["d2t"]) if "d2t" in state else None
    head: nn.Module = load_method(method).Head(type(config)(**(dict(start.config) | given)), target, kept_ids)
    fill(head, state, str(folder))
    return head


class Hub(Protocol):
    """The part of huggingface_hub.HfApi that pushing needs."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...
    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any: ...


def push_to_hub(folder: Path, repo_id: str, *, is_private: bool = True, hub: Hub | None = None) -> str:
    """Upload an exported folder to USER/REPO; returns its URL. Raises ValueError when the folder is no export."""
    missing = [name for name in (CONFIG, WEIGHTS, "README.md") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not an exported head: {', '.join(missing)} missing; run `draftsmith export`")
    if repo_id.count("/") != 1:
        raise ValueError(f"--push is {repo_id!r}; write USER/REPO")
    if hub is None:
        from huggingface_hub import HfApi

        hub = HfApi()
    hub.create_repo(repo_id, private=is_private, exist_ok=True)
    hub.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message="Upload draft head")
    return f"https://huggingface.co/{repo_id}"


def _layout_of(head: Any, name: str) -> Layout:
    layouts: dict[str, Layout] = head.export_map()
    if name not in layouts:
        raise ValueError(f"export.layout is {name!r}; {method_of(head)} can be written as {', '.join(layouts)}")
    learnt = {ours for _, ours in layouts[name].learnt_rows.values()}
    unmapped = head.state_dict().keys() - set(layouts[name].tensors.values()) - learnt
    assert not unmapped, f"layout {name} would drop {sorted(unmapped)}"
    return layouts[name]


def _exported_tensors(head: nn.Module, parts: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    state = head.state_dict()
    chosen = {name: state[ours] for name, ours in parts.tensors.items()} | parts.copies
    for name, (row, ours) in parts.learnt_rows.items():
        learnt = state[ours].to(chosen[name])[None]
        chosen[name] = chosen[name].index_copy(0, torch.tensor([row], device=learnt.device), learnt)
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in chosen.items()}
    return {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in cast.items()}


def _speculators_fields(
    config: Mapping[str, Any], target: FrozenTarget, target_name: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """What every head in the speculators layout carries: the target and how to draft for it."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": config["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(getattr(target.config, "architectures", None) or []),
            },
        },
    }


def _compare(head: Any, head_folder: Path, exported: Path, dtype: torch.dtype) -> float:
    """Draft with the head and with what was read back. Returns the effect of rounding; ValueError on any other.

    Head and target are rounded to `dtype` for it, as a server that runs in `dtype` rounds both.
    """
    target = _rounded_target(head.target, dtype)
    rounded = load_head(head_folder, target)
    rounded.load_state_dict({name: _rounded(x, dtype) for name, x in rounded.state_dict().items()})
    written = import_head(exported, target, method_of(head))
    before, wanted, found = (_draft_probe(each) for each in (head, rounded, written))
    difference = float((torch.log(wanted.clamp_min(_SMALLEST)) - torch.log(found.clamp_min(_SMALLEST))).abs().max())
    if not difference <= _LOG_TOLERANCE:  # also for NaN
        raise ValueError(
            f"the exported folder does not reproduce the head: draft log-probabilities differ by {difference:.3g}; "
            "nothing was written"
        )
    return float(0.5 * (before - wanted).abs().sum(-1).mean())


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype) if x.is_floating_point() else x


def _rounded_target(target: FrozenTarget, dtype: torch.dtype) -> FrozenTarget:
    embedding_VH = _rounded(target.embedding_VH, dtype)
    is_tied = target.head_VH is target.embedding_VH
    head_VH = embedding_VH if is_tied else _rounded(target.head_VH, dtype)
    return replace(target, embedding_VH=embedding_VH, head_VH=head_VH)


@torch.no_grad()
def _draft_probe(head: Any) -> Tensor:
    """Draft probabilities [rows, V] on random states: the first draft after each of 12 committed rows."""
    target: FrozenTarget = head.target
    generator = torch.Generator().manual_seed(0)
    num_rows, num_features = 12, len(head.needs.aux_layers) * target.hidden_size
    ids_R = torch.randint(0, target.vocab_size, (num_rows,), generator=generator)
    aux_RF = torch.randn(num_rows, num_features, generator=generator)
    last_RH = torch.randn(num_rows, target.hidden_size, generator=generator)
    kv_RE = torch.randn(num_rows, head.needs.kv_width, generator=generator)
    state = head.start(1, torch.device("cpu"))
    probs = []
    for row in range(num_rows):
        one = slice(row, row + 1)
        start_B, num_rows_B = torch.tensor([[row], [1]])
        context = Context(
            ids_R[None, one], aux_RF[None, one], last_RH[None, one], start_B, num_rows_B, kv_BRE=kv_RE[None, one]
        )
        draft = head.draft(state, context, 2, 1.0, torch.Generator().manual_seed(row))
        probs.append(draft.probs_BNV[0])
    return torch.cat(probs).float()
