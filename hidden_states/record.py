"""One record: the target's hidden states of one token row, and the spec that says exactly which states those are.

T tokens, H target width, L captured layers: ascending input-of ids, of which the last is n, the output of the last
    layer before the final norm, E features of keys and values
"""

from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.data.rows import Row


@dataclass(frozen=True)
class CaptureSpec:
    """What a capture holds. Two caches with equal specs are interchangeable; anything else must not be mixed."""

    layers: tuple[int, ...]  # ascending input-of layer ids; the last is n, the output of the last layer, pre-norm
    dtype: str  # "bfloat16" | "float32": of the stored states
    hidden_size: int
    target_weights: str  # fingerprint of the target's weights
    tokenizer: str  # fingerprint of the tokenizer files
    chat_template: str  # fingerprint of the chat template
    target_dtype: str  # dtype in which the target ran
    norm: str = "pre_norm"  # the last layer is stored before the final norm, in every source
    # Decoder layers whose keys and values are stored too, ascending, and how many features they are per token.
    kv_layers: tuple[int, ...] = ()
    kv_width: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, for manifests and error messages. Without keys and values it does not speak of them, so that
        caches from before they could be captured keep their key."""
        fields = asdict(self)
        return fields if self.kv_layers else {name: x for name, x in fields.items() if not name.startswith("kv_")}

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "CaptureSpec":
        """The spec that `to_json` wrote."""
        read: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
        return cls(**read)


@dataclass(frozen=True)
class Record:
    """The states of one row. `token_ids_T` is echoed by the source, to be compared with the row's own ids."""

    row_id: str
    token_ids_T: Tensor  # int64
    states_TLH: Tensor  # spec.dtype
    # Of each layer of spec.kv_layers its keys, all heads side by side, then its values, as the target's cache holds
    # them; spec.dtype. None where the spec asks for none.
    kv_TE: Tensor | None = None

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.states_TLH, self.kv_TE) if x is not None)


class Source(Protocol):
    """Where records come from: transformers in this process, or running vLLM servers."""

    spec: CaptureSpec

    def capture(self, rows: Iterable[Row]) -> Generator[Record, None, None]:
        """Records in the order of `rows`; closing it stops the work. RuntimeError when the target cannot be run."""


def check_record(record: Record, row: Row, spec: CaptureSpec) -> None:
    """Refuse a record that cannot be the states of this row (faults 13 and 14).

    Raises ValueError naming the row: other token ids, another length, shape or dtype, non-finite values, a layer
    whose states are all zero or all equal, or a token without any state (the zeroed tail of a torn file).
    """
    tokens, states = record.token_ids_T, record.states_TLH
    if record.row_id != row.row_id:
        raise ValueError(f"record {record.row_id} was given for row {row.row_id}; the source broke the order of rows")
    if tokens.tolist() != list(row.input_ids):
        raise ValueError(
            f"record {row.row_id}: its token ids are not those of the row; the states are of another request"
        )
    expected = (len(row.input_ids), len(spec.layers), spec.hidden_size)
    if tuple(states.shape) != expected or str(states.dtype).removeprefix("torch.") != spec.dtype:
        found = f"{states.dtype} {tuple(states.shape)}"
        raise ValueError(f"record {row.row_id}: states are {found}, expected {spec.dtype} {expected}")
    if not torch.isfinite(states).all():
        raise ValueError(f"record {row.row_id}: states hold NaN or Inf")
    for index, layer in enumerate(spec.layers):
        values = states[:, index]
        if (values == values[:1, :1]).all():
            constant = values[0, 0].item()
            raise ValueError(f"record {row.row_id}: layer {layer} is constant ({constant}); the capture is broken")
    empty_T = ~states.any(dim=2).any(dim=1)
    if empty_T.any():
        first = int(empty_T.nonzero()[0])
        raise ValueError(f"record {row.row_id}: the states of token {first} are all zero; the capture is broken")
    _check_keys_and_values(record, spec)


def _check_keys_and_values(record: Record, spec: CaptureSpec) -> None:
    kv_TE, expected = record.kv_TE, (len(record.token_ids_T), spec.kv_width)
    if not spec.kv_layers:
        if kv_TE is not None:
            raise ValueError(f"record {record.row_id}: it holds keys and values, which were not asked for")
        return
    if kv_TE is None or tuple(kv_TE.shape) != expected or kv_TE.dtype != record.states_TLH.dtype:
        found = "missing" if kv_TE is None else f"{kv_TE.dtype} {tuple(kv_TE.shape)}"
        raise ValueError(f"record {record.row_id}: keys and values are {found}, expected {spec.dtype} {expected}")
    if not torch.isfinite(kv_TE).all():
        raise ValueError(f"record {record.row_id}: keys or values hold NaN or Inf")
    if not kv_TE.any(dim=1).all():
        raise ValueError(f"record {record.row_id}: a token has neither keys nor values; the capture is broken")
