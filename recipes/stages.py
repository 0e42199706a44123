"""The stages of a run in their order, each a function that is skipped when its artefact exists.

    target -> prompts -> responses -> rows -> hidden_states -> train -> export -> eval

`Run` holds what several stages share: the resolved target, the head's needs, and the vLLM server, which is launched at
most once and serves both generation and extraction. Stage folders lie under the recipe's output_dir.
"""

import fcntl
import json
import os
import platform
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from draftsmith.data.artefact import (
    MANIFEST,
    Artefact,
    fingerprint,
    is_done,
    read_artefact,
    read_json,
    write_atomically,
)
from draftsmith.data.progress import Progress, progress
from draftsmith.data.prompts import build_prompts
from draftsmith.data.responses import generate_responses
from draftsmith.data.rows import Rows, Split, build_rows, load_rows, provenance_mismatches
from draftsmith.data.target import ResolvedTarget, resolve_target
from draftsmith.data.vocab import DraftVocabulary, build_draft_vocab
from draftsmith.eval.calibrate import calibrate
from draftsmith.eval.replay import make_probe
from draftsmith.eval.run import evaluate
from draftsmith.hidden_states.cache import Cache
from draftsmith.hidden_states.parity import check_parity
from draftsmith.hidden_states.record import CaptureSpec, Record
from draftsmith.hidden_states.stream import HiddenStatesConfig, build_states, open_source, open_stream, spec_for
from draftsmith.hidden_states.vllm_server import ServerConfig, launch, vllm_python
from draftsmith.models.card import Card
from draftsmith.models.checkpoint import save_head
from draftsmith.models.export import ExportReport, export_head
from draftsmith.models.head import Needs, load_method
from draftsmith.models.target import FrozenTarget
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.started_head import fingerprint_of_start, started_head
from draftsmith.train.engine import device_of_this_process
from draftsmith.train.loop import fit

_UNMEASURED_N = 3  # what an export proposes before anything was measured

_CARD_COLUMNS = (
    "engine",
    "num_speculative_tokens",
    "mal",
    "mal_low",
    "mal_high",
    "acceptance_rate",
    "speedup",
)


class Run:
    """One recipe being run in this process."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folder = recipe.output_dir
        self._opened = ExitStack()
        self._server_url: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @cached_property
    def target(self) -> ResolvedTarget:
        """The target, fetched or converted on first use."""
        return resolve_target(self.recipe.target)

    @cached_property
    def needs(self) -> Needs:
        """Which layers the head wants. Raises ValueError when the target does not have them."""
        needs: Needs = load_method(self.recipe.method).needs(self.recipe.model, self.frozen_config)
        return needs

    @cached_property
    def frozen_config(self) -> Any:
        """The text part of the target's transformers config."""
        from transformers import AutoConfig

        trust = self.target.trust_remote_code
        return AutoConfig.from_pretrained(
            self.target.path, local_files_only=True, trust_remote_code=trust
        ).get_text_config()

    def frozen(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> FrozenTarget:
        """The target's frozen ends."""
        return FrozenTarget.load(self.target.path, dtype, device)

    def endpoints(self) -> tuple[str, ...]:
        """The URL of the server that this run launches, when first asked, for generation and extraction alike."""
        if self._server_url is None:
            recipe = self.recipe
            capture = recipe.hidden_states.source == "vllm" and not recipe.hidden_states.endpoints
            layers = spec_for(recipe.hidden_states, self.target, self.needs.aux_layers).layers if capture else None
            log = self.folder / "logs" / "vllm.log"
            server = self._opened.enter_context(launch(self.target, recipe.hidden_states.server, log, layers))
            self._server_url = server.url
        return (self._server_url,)

    def stop_server(self) -> None:
        """Stop the launched server, if any: training and evaluation need its memory."""
        self._opened.close()
        self._server_url = None

    @property
    def eval_states(self) -> HiddenStatesConfig:
        """Held-out states are always kept: training's probe reads them while its own stream captures."""
        return self.recipe.hidden_states.model_copy(update={"mode": "offline"})

    def states_folder(self, split: str) -> Path:
        """The cache of one split."""
        return self.folder / "hidden_states" / split


def refuse_what_does_not_go_together(run: Run) -> None:
    """Raise ValueError for settings that this target, or this machine, cannot follow."""
    vocab_size = int(run.frozen_config.vocab_size)
    draft_vocab_size = getattr(run.recipe.model, "draft_vocab_size", None)
    if draft_vocab_size is not None and draft_vocab_size > vocab_size:
        raise ValueError(
            f"model.draft_vocab_size is {draft_vocab_size}, but the vocabulary of {run.target.name} has {vocab_size} "
            "tokens; give at most that, or leave it out to draft from all of them"
        )
    for setting, device in (
        ("hidden_states.device", run.recipe.hidden_states.device),
        ("eval.device", run.recipe.eval.device),
    ):
        try:
            torch.empty(0, device="cpu" if device == "auto" else device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA fails an assertion
            raise ValueError(
                f"{setting} is {device!r}, which torch cannot use here ({str(error).splitlines()[0][:200]}); "
                "write auto, cpu or cuda:0"
            ) from error


def target_stage(run: Run) -> None:
    """Find the target, and refuse what does not go with it, or with this machine, before hours of work."""
    refuse_what_does_not_go_together(run)
    for setting, server in _servers_to_launch(run):
        try:
            vllm_python(server)
        except ValueError as error:
            raise ValueError(f"{setting} is vllm: {error}") from error
    layers = ", ".join(map(str, run.needs.aux_layers))
    print(f"target {run.target.name}: {run.target.path}, layers {layers}", flush=True)


def _servers_to_launch(run: Run) -> list[tuple[str, ServerConfig]]:
    """Which settings still ask this machine for a vLLM server."""
    recipe, found = run.recipe, []
    if recipe.responses.engine == "vllm" and not recipe.responses.endpoints and not is_done(run.folder / "responses"):
        found.append(("responses.engine", recipe.hidden_states.server))
    captures = recipe.hidden_states.source == "vllm" and not recipe.hidden_states.endpoints
    if captures and not is_done(run.folder / "train"):
        found.append(("hidden_states.source", recipe.hidden_states.server))
    if "vllm" in recipe.eval.engines and not is_done(run.folder / "eval"):
        found.append(("an engine in eval.engines", recipe.eval.server))
    return found


def prompts_stage(run: Run) -> None:
    """Read, clean and split the prompts."""
    build_prompts(run.recipe.prompts, run.folder / "prompts")


def responses_stage(run: Run) -> None:
    """Let the target answer them."""
    config, folder = run.recipe.responses, run.folder / "responses"
    launches = config.engine == "vllm" and not config.endpoints and not is_done(folder)
    generate_responses(config, run.target, run.folder / "prompts", folder, run.endpoints() if launches else ())


def rows_stage(run: Run) -> None:
    """Token rows with loss masks."""
    build_rows(run.recipe.rows, run.folder / "responses", run.folder / "rows")
    for warning in provenance_mismatches(run.folder / "rows", run.target):
        print(f"warning: {warning}", flush=True)


def hidden_states_stage(run: Run) -> None:
    """Prove that captured states are the target's own, then build what the mode keeps."""
    config = run.recipe.hidden_states
    splits: list[tuple[Split, HiddenStatesConfig]] = [("eval", run.eval_states), ("train", config)]
    rows = {split: load_rows(run.folder / "rows", split) for split, _ in splits}
    parity = run.folder / "hidden_states" / "parity.json"
    spec = spec_for(config, run.target, run.needs.aux_layers)
    wanted = fingerprint([spec.to_json(), config.source])
    again = "Delete it to check parity again."
    is_proven = parity.is_file() and read_json(parity, again).get("spec") == wanted
    todo = [
        (split, mode)
        for split, mode in splits
        if rows[split] and not _holds(run.states_folder(split), mode, spec, rows[split])
    ]
    if is_proven and not todo:
        return
    launches = config.source == "vllm" and not config.endpoints
    endpoints = run.endpoints() if launches else ()
    with open_source(config, run.target, run.needs.aux_layers, run.folder / "logs", endpoints) as source:
        if not is_proven:
            frozen = run.frozen(torch.float32)
            report = check_parity(source, rows["train"], run.target, teacher=lambda last: frozen.logits(last.float()))
            write_atomically(parity, json.dumps({"spec": wanted, **report.to_json()}, indent=1, default=str))
        for split, mode in todo:
            with progress(f"hidden states/{split}", len(rows[split]), "rows") as bar:
                build_states(mode, source, rows[split], run.states_folder(split), _advance(bar))


def _advance(bar: Progress) -> Callable[[Record], None]:
    return lambda _record: bar.advance()


def train_stage(recipe: Recipe) -> None:
    """Train the head. Under `accelerate launch` every rank calls this; rank 0 alone writes the manifest."""
    with only_writer(recipe.output_dir) if _is_main() else nullcontext(), Run(recipe) as run:
        _train(run)


def _train(run: Run) -> None:
    recipe, folder = run.recipe, run.folder / "train"
    train_rows, eval_rows = (load_rows(run.folder / "rows", split) for split in ("train", "eval"))
    spec = spec_for(recipe.hidden_states, run.target, run.needs.aux_layers)
    key = {
        "config": recipe.train.model_dump(mode="json"),
        "method": recipe.method,
        "model": recipe.model.model_dump(mode="json"),
        "target": run.target.key(),
        "states": spec.to_json(),
        "rows": read_artefact(run.folder / "rows", "rows").fingerprint,
    }
    if recipe.train.start_from is not None:
        key["start_from"] = fingerprint_of_start(recipe.train.start_from)
    is_main = _is_main()
    if is_main:
        artefact = Artefact.open(folder, "train", key)
        write_atomically(folder / "recipe.yaml", recipe.to_yaml())
        if artefact.is_done:
            return
    elif is_done(folder):
        return
    device = device_of_this_process()
    frozen = run.frozen(torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32, device)
    torch.manual_seed(recipe.train.seed)
    extra = {"target": run.target.key(), "target_name": run.target.name, "recipe": recipe.name}
    vocabulary = None
    if recipe.train.start_from is not None:
        head = started_head(recipe, recipe.train.start_from, frozen)
        if recipe.train.max_steps == 0:
            _keep_as_it_is(head, artefact if is_main else None, extra)
            return
    else:
        vocabulary = _draft_vocabulary(recipe, train_rows, frozen)
        kept_ids = None if vocabulary is None else vocabulary.kept_ids
        head = load_method(recipe.method).Head(recipe.model, frozen, kept_ids)
    endpoints = run.endpoints() if _launches_while_training(recipe) else ()
    layers = run.needs.aux_layers
    with ExitStack() as opened:
        stream = opened.enter_context(
            open_stream(recipe.hidden_states, run.target, layers, train_rows, run.states_folder("train"), endpoints)
        )
        probe = None
        if len(eval_rows):
            held_out = opened.enter_context(
                open_stream(run.eval_states, run.target, layers, eval_rows, run.states_folder("eval"))
            )
            probe = make_probe(list(eval_rows), held_out, frozen, max(recipe.eval.num_speculative_tokens))

        def save_weights(trained: nn.Module, into: Path) -> None:
            save_head(trained, into, extra)

        result = fit(recipe.train, head, frozen, train_rows, stream, folder, probe, save_weights=save_weights)
        temperatures: tuple[float, ...] = ()
        if is_main and len(eval_rows):
            longest, exact = recipe.eval.longest, run.frozen(torch.float32, device)
            temperatures = calibrate(result.weights, exact, list(eval_rows), held_out, longest, device)
    if is_main:
        artefact.finish(
            {
                "weights": str(result.weights.relative_to(folder)),
                "best_step": result.best_step,
                "best_score": result.best_score,
                "steps": result.steps,
                "ended_by": result.ended_by,
                "tokens": result.num_tokens,
                "skipped_steps": result.num_skipped_steps,
                "rows_too_long": result.num_rows_too_long,
                "confidence_temperatures": list(temperatures),
                "draft_vocabulary_coverage": None if vocabulary is None else round(vocabulary.coverage, 6),
            }
        )


def _keep_as_it_is(head: Any, artefact: Artefact | None, extra: dict[str, Any]) -> None:
    """The result of a training of no steps."""
    if artefact is not None:
        save_head(head, artefact.folder / "best" / "step-0", extra)
        artefact.finish({"weights": "best/step-0", "best_step": 0, "steps": 0, "ended_by": "steps"})


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _launches_while_training(recipe: Recipe) -> bool:
    states = recipe.hidden_states
    launches = states.source == "vllm" and states.mode != "offline" and not states.endpoints
    if launches and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"hidden_states.mode is {states.mode} with source vllm in a run of {os.environ['WORLD_SIZE']} processes, "
            "each of which would launch a server; give the URLs of running ones as hidden_states.endpoints, or set "
            "hidden_states.mode: offline"
        )
    return launches


def export_stage(run: Run) -> None:
    """Write the Hugging Face folder `export/model`."""
    trained = read_artefact(run.folder / "train", "train")
    key = {"config": run.recipe.export.model_dump(mode="json"), "head": trained.fingerprint}
    artefact = Artefact.open(run.folder / "export", "export", key)
    if artefact.is_done and (run.folder / "export" / "model" / "config.json").is_file():
        return
    (run.folder / "export" / "card.json").unlink(missing_ok=True)  # the card to come has no figures yet
    report = _export(run, [])
    artefact.finish({"tensors": report.num_tensors, "bytes": report.num_bytes, "rounding_tv": report.rounding_tv})


def _export(run: Run, acceptance: Sequence[dict[str, Any]], recommended: int | None = None) -> ExportReport:
    recipe = run.recipe
    trained = read_artefact(run.folder / "train", "train")
    card = Card(
        recipe=(run.folder / "train" / "recipe.yaml").read_text(),  # today's may differ in stages that ran before
        data=_provenance(run),
        acceptance=acceptance,
        license=recipe.export.license,
    )
    return export_head(
        run.folder / "train" / trained.result["weights"],
        run.folder / "export" / "model",
        target=run.frozen(torch.float32),
        target_name=recipe.export.target_name or _served_name(run),
        num_speculative_tokens=recipe.export.num_speculative_tokens or recommended or _UNMEASURED_N,
        layout=recipe.export.layout,
        dtype=recipe.export.dtype,
        card=card,
    )


def _served_name(run: Run) -> str:
    """What a server can load: a Hub id as it is, anything else by its folder."""
    name = run.target.name
    return name if name.count("/") == 1 and not Path(name).exists() else str(run.target.path)


def eval_stage(run: Run) -> None:
    """Measure, report, and write what was measured into the exported model card."""
    run.stop_server()
    recipe, folder = run.recipe, run.folder
    trained = read_artefact(folder / "train", "train")
    weights, exported = folder / "train" / trained.result["weights"], folder / "export" / "model"
    rows = list(load_rows(folder / "rows", "eval"))
    with ExitStack() as opened:
        stream = None
        if rows:
            states = run.states_folder("eval")
            stream = opened.enter_context(open_stream(run.eval_states, run.target, run.needs.aux_layers, rows, states))
        evaluate(recipe.eval, run.target, weights, exported, rows, stream, folder)
    report = read_report(folder)
    measured = [(name, cell) for name, cells in report["workloads"].items() for cell in cells]
    acceptance = [
        {"workload": name, **{column: cell.get(column) for column in _CARD_COLUMNS}} for name, cell in measured
    ]
    note = folder / "export" / "card.json"  # which figures the card shows, so that it follows a wider evaluation
    if not note.is_file() or read_json(note, "Delete it to write the card again.") != acceptance:
        _export(run, acceptance, report["recommended"]["num_speculative_tokens"])
        write_atomically(note, json.dumps(acceptance, indent=1))


def read_report(folder: Path) -> dict[str, Any]:
    """report.json of a finished evaluation."""
    path = folder / "eval" / "report.json"
    found: dict[str, Any] = read_json(path, "Delete it and run `draftsmith eval` to write it again.")
    return found


def _provenance(run: Run) -> dict[str, dict[str, Any]]:
    """What the data and the head came from, for the report and the model card."""
    stages = {"Prompts": "prompts", "Responses": "responses", "Rows": "rows", "Training": "train"}
    artefacts = {title: read_artefact(run.folder / name, name) for title, name in stages.items()}
    facts: dict[str, dict[str, Any]] = {title: dict(found.result) for title, found in artefacts.items()}
    facts["Responses"] |= artefacts["Responses"].manifest["key"]["config"]
    settings = artefacts["Training"].manifest["key"]["config"]
    facts["Training"] |= {name: value for name, value in settings.items() if value is not None}
    return facts


STAGES: dict[str, Callable[[Run], None]] = {
    "target": target_stage,
    "prompts": prompts_stage,
    "responses": responses_stage,
    "rows": rows_stage,
    "hidden_states": hidden_states_stage,
    "train": _train,
    "export": export_stage,
    "eval": eval_stage,
}


def run_stages(recipe: Recipe, first: str = "target", last: str = "eval") -> None:
    """Run the stages from `first` to `last`. Raises ValueError for unknown names or the wrong order."""
    names = list(STAGES)
    first, last = (name.replace("-", "_") for name in (first, last))  # `draftsmith hidden-states` is the command's name
    for option, name in (("--from", first), ("--to", last)):
        if name not in STAGES:
            raise ValueError(f"{option} is {name!r}; the stages are {', '.join(names)}")
    chosen = names[names.index(first) : names.index(last) + 1]
    if not chosen:
        raise ValueError(f"--from {first} comes after --to {last}; the order is {', '.join(names)}")
    with only_writer(recipe.output_dir), Run(recipe) as run:
        if chosen[0] not in ("target", "prompts"):
            target_stage(run)
        for name in chosen:
            print(f"== {name}", flush=True)
            captures_later = recipe.hidden_states.source == "vllm" and recipe.hidden_states.mode != "offline"
            if name == "train" and not captures_later:
                run.stop_server()
            STAGES[name](run)
        # Only now: a stage may have refused these settings, and the file tells with which ones the folder was made.
        write_atomically(recipe.output_dir / "recipe.yaml", recipe.to_yaml())


@contextmanager
def only_writer(folder: Path) -> Generator[None]:
    """One run per output_dir at a time; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"another run is writing to {folder} (process {file.read().strip() or 'unknown'}); wait for it, or use "
                "another output_dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _draft_vocabulary(recipe: Recipe, rows: Rows, frozen: FrozenTarget) -> DraftVocabulary | None:
    size = getattr(recipe.model, "draft_vocab_size", None)
    if size is None or size == frozen.vocab_size:
        return None
    return build_draft_vocab(rows, frozen.vocab_size, size)


def _holds(folder: Path, config: HiddenStatesConfig, spec: CaptureSpec, rows: Rows) -> bool:
    """Whether this split's cache needs nothing more before training. Raises ValueError when it is of another spec:
    before the target is loaded, and before the parity of the new one is recorded."""
    if config.mode == "online" or not (folder / MANIFEST).is_file():
        return config.mode == "online"
    cache = Cache.create(folder, spec, config.cache)
    return cache.artefact.is_done and all(row.row_id in cache for row in rows)
