"""A tiny target, its own greedy answers as rows, and a head fitted to them: often right, and often wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiny import capture, tiny_batch, tiny_head, tiny_kept_ids, tiny_target
from transformers import AutoModelForCausalLM

from draftsmith.data.rows import Row
from draftsmith.eval.decode import Decoding, RunningTarget, decode
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.models.target import FrozenTarget

AUX_LAYERS = (2, 3, 4)
MAX_NEW_TOKENS = 20
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [400, 3], [77, 88, 99], [21, 22]]
_STEPS = 25


class StoredStates:
    """States captured by tests/tiny.py, as a stream."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        self.spec = CaptureSpec((*AUX_LAYERS, 7), "float32", 64, "w", "t", "c", "float32")
        self.rows = {row.row_id: row for row in rows}
        self.capture = partial(capture, folder, aux_layers=AUX_LAYERS)
        self.num_read = 0

    def records(self, row_ids: Sequence[str]) -> Iterator[Record]:
        for row_id in row_ids:
            self.num_read += 1
            ids = self.rows[row_id].input_ids
            aux_TF, last_TH = self.capture(ids)
            yield Record(row_id, torch.tensor(ids), torch.cat([aux_TF, last_TH], dim=1).view(len(ids), -1, 64))


@dataclass(frozen=True)
class Scene:
    folder: Path
    model: Any
    frozen: FrozenTarget
    head: Any
    rows: list[Row]
    stop_id: int


def make_scene(folder: Path, kept: int | None, prompts: Sequence[list[int]] = PROMPTS) -> Scene:
    """`kept`: size of the draft vocabulary, None for the target's own."""
    tiny_target(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    frozen = FrozenTarget.load(folder, torch.float32)
    with RunningTarget(model) as target:
        plain = decode(target, None, prompts, Decoding(MAX_NEW_TOKENS, frozenset(), 0)).answers
    stop_id = plain[2].token_ids[11]
    rows = []
    for index, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
        ids = answer.token_ids
        ids = ids[: ids.index(stop_id) + 1] if stop_id in ids else ids
        mask = [False] * len(prompt) + [True] * len(ids)
        rows.append(Row(f"row{index}", f"c{index}", "ab"[index % 2], (*prompt, *ids), tuple(mask)))
    head = tiny_head("eagle3", frozen, kept_ids=None if kept is None else tiny_kept_ids(kept))
    batch = tiny_batch(folder, [rows], AUX_LAYERS)
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-3)
    for _ in range(_STEPS):
        terms, _ = head.loss(batch)
        sum(term.sum for term in terms.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Scene(folder, model, frozen, head, rows, stop_id)
