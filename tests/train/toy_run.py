"""A toy head, target and stream for the training tests; as a script it runs a list of fits in one or more processes.

python toy_run.py FITS.json     [{"folder": ..., "config": {...}, "inject": {...}}, ...], one after another
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.data.rows import Row
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.models.batch import Batch, shift_left
from draftsmith.models.head import Needs, Term, load_method
from draftsmith.models.target import FrozenTarget
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import FitResult, fit

VOCAB, WIDTH, LAYERS = 40, 16, (1, 2, 4)
POISON = 39  # a row that holds this token has a NaN loss
HUGE = 38  # a row that holds this token has a finite loss with a NaN gradient
SPEC = CaptureSpec(LAYERS, "float32", WIDTH, "w", "t", "c", "float32")


class ToyHead(nn.Module):
    """Predicts the next two tokens from the states; dropout-like noise makes it depend on the random state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.needs = Needs(LAYERS[:-1])
        self.fc = nn.Linear(2 * WIDTH, 24, bias=False)
        self.mix = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.token_embed = nn.Embedding(VOCAB, 24)
        self.lm_head = nn.Linear(24, VOCAB, bias=False)
        self.register_buffer("frequencies", torch.tensor([1.0, 1 / 3, 1e-3]))
        self.noise = 0.0

    def supervised(self, batch: Batch, step: int) -> Tensor:
        return batch.same_document(step + 1) & shift_left(batch.loss_mask_BT, step + 1)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {f"step{k}": self.supervised(batch, k).sum().float() for k in range(2)}

    def loss(self, batch: Batch) -> tuple[dict[str, Term], dict[str, tuple[Tensor, Tensor]]]:
        hidden = self.norm(self.fc(batch.aux_BTF.to(self.fc.weight.dtype)) + self.token_embed(batch.input_ids_BT))
        hidden = hidden + self.noise * torch.randn_like(hidden) + 0 * self.frequencies.sum()
        terms, metrics = {}, {}
        for step in range(2):
            hidden = torch.tanh(self.mix(hidden))
            mask_BT = self.supervised(batch, step)
            # The weight is used outside of its module's forward, as chunked losses do.
            logits = F.linear(hidden[mask_BT], self.lm_head.weight).float()
            labels = shift_left(batch.input_ids_BT, step + 1)[mask_BT]
            total = F.cross_entropy(logits, labels, reduction="sum")
            if (batch.input_ids_BT == POISON).any():
                total = total * float("inf")
            if (batch.input_ids_BT == HUGE).any():
                total = total + torch.sqrt(0 * self.mix.bias.sum())
            terms[f"step{step}"] = Term(total, 1.0 - 0.25 * step)
            hits = (logits.argmax(-1) == labels).float().sum()
            metrics[f"accuracy{step}"] = (hits, mask_BT.sum().float())
        return terms, metrics


class ToyStream:
    """Records by row id, from memory."""

    spec = SPEC

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.row_id: row for row in rows}

    def records(self, row_ids: Sequence[str]) -> Iterator[Record]:
        for row_id in row_ids:
            ids = torch.tensor(self._rows[row_id].input_ids)
            generator = torch.Generator().manual_seed(sum(self._rows[row_id].input_ids))
            yield Record(row_id, ids, torch.randn(len(ids), len(LAYERS), WIDTH, generator=generator))


def toy_rows(count: int = 30, seed: int = 0) -> list[Row]:
    """Rows of 4 to 20 tokens, the second half of each supervised."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(4, 21, (), generator=generator))
        ids = torch.randint(0, HUGE, (length,), generator=generator).tolist()
        mask = tuple(position >= length // 2 for position in range(length))
        rows.append(Row(f"row-{index}", f"conversation-{index}", "toy", tuple(ids), mask))
    return rows


def with_token(rows: list[Row], index: int, token: int) -> list[Row]:
    """The rows with one token of one row replaced."""
    row = rows[index]
    changed = Row(row.row_id, row.conversation_id, row.source, (token, *row.input_ids[1:]), row.loss_mask)
    return [*rows[:index], changed, *rows[index + 1 :]]


def toy_target() -> FrozenTarget:
    """Only its dimensions are looked at."""
    config = SimpleNamespace(hidden_size=WIDTH, num_hidden_layers=LAYERS[-1])
    return FrozenTarget(config, torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH), nn.Identity(), 1.0, None)


def toy_config(**changes: Any) -> TrainConfig:
    """Six fp32 steps or fewer, unless told otherwise."""
    settings = {
        "max_steps": 6,
        "learning_rate": 5e-3,
        "tokens_per_batch": 40,
        "precision": "fp32",
        "weight_decay": 0.05,
        "warmup_ratio": 0.3,
        "checkpoint_every_minutes": None,
        "log_every_s": 1e9,
    }
    return TrainConfig(**(settings | changes))


def save_toy(head: nn.Module, folder: Path) -> None:
    """The weights, as the caller of `fit` would save them."""
    folder.mkdir(parents=True)
    torch.save({name: value.detach().clone() for name, value in head.state_dict().items()}, folder / "weights.pt")


REAL_HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"train_lm_head": True, "ttt_steps": 2},
    "dflash": {"num_layers": 2, "block_size": 4},
    "dspark": {"num_layers": 1, "block_size": 3, "markov_rank": 4, "markov_type": "gated"},
}


def real_head(method: str) -> tuple[nn.Module, FrozenTarget]:
    """A real head on the frozen ends of a tiny random target whose width is the toy stream's."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=LAYERS[-1],
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ends = torch.randn(2, VOCAB, WIDTH)
    target = FrozenTarget(config, ends[0], ends[1], LlamaRMSNorm(WIDTH), 1.0, None)
    module = load_method(method)
    settings = module.Config(aux_layers=LAYERS[:-1], **REAL_HEADS[method])
    return module.Head(settings, target), target


def run_real(method: str, folder: Path, config: TrainConfig) -> FitResult:
    """One fit of a real head on the toy rows."""
    head, target = real_head(method)
    rows = toy_rows()
    return fit(config, head, target, rows, ToyStream(rows), folder, None, save_weights=save_toy)


def run(
    folder: Path, config: TrainConfig, rows: list[Row] | None = None, probe: Any = None, noise: float = 0.0
) -> FitResult:
    """One fit of a fresh toy head; continues what is in `folder`."""
    rows = rows or toy_rows()
    head = ToyHead()
    head.noise = noise
    return fit(config, head, toy_target(), rows, ToyStream(rows), folder, probe, save_weights=save_toy)


def weights_of(result_folder: Path) -> dict[str, Tensor]:
    """The weights of the newest saved folder."""
    return torch.load(max(result_folder.glob("weights/step-*")) / "weights.pt")


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def losses_of(folder: Path) -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in log_of(folder)]


def _inject(faults: dict[str, Any]) -> None:
    """Break something at a known point: kill -9 around the renaming of a checkpoint."""
    from draftsmith.train import resume

    if "kill_publish_of_step" in faults:
        publish = resume.Checkpoints._publish

        def killed(self: Any, state: Any, temporary: Path, final: Path) -> None:
            if state.step == faults["kill_publish_of_step"]:
                if faults["after_rename"]:
                    write = resume.write_atomically

                    def write_or_die(path: Path, content: Any) -> None:
                        if path.name == "LATEST":
                            os.kill(os.getpid(), signal.SIGKILL)
                        write(path, content)

                    resume.write_atomically = write_or_die
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            publish(self, state, temporary, final)

        resume.Checkpoints._publish = killed


def main() -> None:
    """Run the fits of a file; write each result, or the exit code of a stopped one, beside its log."""
    from accelerate.state import AcceleratorState

    for item in json.loads(Path(sys.argv[1]).read_text()):
        AcceleratorState._reset_state(reset_partial_state=False)
        _inject(item.get("inject", {}))
        rows = toy_rows(item.get("rows", 30))
        for index, token in item.get("tokens", []):
            rows = with_token(rows, index, token)
        folder = Path(item["folder"])
        probe = None
        if item.get("signal_in_probe"):

            def probe(head: nn.Module) -> dict[str, float]:
                os.kill(os.getpid(), signal.SIGTERM)
                return {"mal": 1.0}

        try:
            config = toy_config(**item["config"])
            method = item.get("method")
            result = run_real(method, folder, config) if method else run(folder, config, rows, probe)
        except SystemExit as stop:
            (folder / "stopped.json").write_text(json.dumps(stop.code))
            continue
        if os.environ.get("RANK", "0") == "0":
            (folder / "result.json").write_text(json.dumps(asdict(result), default=str))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
