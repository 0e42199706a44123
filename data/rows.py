"""Token rows: what the target answered, as token ids with a loss mask, in an Arrow dataset.

The loss mask is exactly the tokens that the target generated. Ids come from the engine, never from re-tokenised text.

    one turn       prompt_ids                response_ids
    loss mask      0 0 0 0 0 0               1 1 1 1 1            end-of-turn included if the target generated it

    two turns whose second prompt begins with the first prompt and answer become one row with two islands of ones;
    a template that rewrites earlier turns (strips reasoning, say) gives one row per turn, each with its own context.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import BaseModel, Field, ValidationError

from draftsmith.data.artefact import Artefact, read_artefact, write_atomically
from draftsmith.data.target import ResolvedTarget

Split = Literal["train", "eval"]
_SPLITS: tuple[Split, ...] = ("train", "eval")


@dataclass(frozen=True)
class Row:
    """One document for training: a conversation, or one turn of it where the template rewrites earlier turns."""

    row_id: str
    conversation_id: str
    source: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class Turn(BaseModel, frozen=True):
    """One answer of the target: exactly the ids that the engine was given, and exactly those that it generated."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: Literal["stop", "length"]


class Conversation(BaseModel, frozen=True):
    """One line of a responses file."""

    id: str
    source: str
    turns: list[Turn]
    provenance: dict[str, Any]


class RowsConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """How responses become rows."""

    max_row_tokens: int = Field(2048, ge=8, description="longer rows are cut on the right; without an answer: dropped")
    max_dropped_share: float = Field(
        0.2, ge=0, le=1, description="share of a split's rows that may be dropped before the stage fails"
    )


class Rows(Sequence[Row]):
    """The rows of one split, read from Arrow as they are asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self._dataset[index]
        return Row(
            found["row_id"],
            found["conversation_id"],
            found["source"],
            tuple(found["input_ids"]),
            tuple(found["loss_mask"]),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, without reading the rows."""
        return list(self._dataset["num_tokens"])

    def provenance(self, index: int) -> dict[str, Any]:
        """How row `index` came to be: model, weights, engine, sampling, template, finish reason; is it cut."""
        found = self._dataset[index]
        origin: dict[str, Any] = json.loads(found["provenance"])
        return origin | {"finish_reason": found["finish_reason"], "is_cut": found["is_cut"]}


def build_rows(config: RowsConfig, responses_folder: Path, folder: Path) -> Artefact:
    """Responses -> Arrow rows of both splits. Skips when done.

    Raises ValueError when no training row is left, or when more are dropped than `rows.max_dropped_share` allows.
    """
    responses = read_artefact(responses_folder, "responses")
    # The files' digests as well: sampled answers may differ under equal settings.
    files = {split: _sha256(responses_folder / f"{split}.jsonl") for split in _SPLITS}
    key = {"config": config.model_dump(), "responses": responses.fingerprint, "files_sha256": files}
    artefact = Artefact.open(folder, "rows", key)
    if artefact.is_done:
        return artefact
    result: dict[str, Any] = {}
    seen: dict[str, Split] = {}
    try:
        for split in _SPLITS:
            result[split] = _build_split(responses_folder / f"{split}.jsonl", folder, split, config, seen)
    except ValueError:
        artefact.discard()  # so that a rerun with a mended setting is not refused for this empty attempt
        raise
    artefact.finish(result)
    return artefact


def load_rows(folder: Path, split: Split) -> Rows:
    """The rows of a finished rows stage. Raises ValueError when the file is missing, torn, or lacks rows."""
    from datasets import Dataset

    result = read_artefact(folder, "rows").result
    path = _arrow_file(folder, split)
    fix = f"delete {folder} and run the rows stage again"
    try:
        rows = Rows(Dataset.from_file(str(path)))
    except (ValueError, OSError) as error:  # Arrow's own errors are one or the other
        raise ValueError(f"{path} cannot be read ({error}); {fix}") from error
    written = result.get(split, {}).get("rows", len(rows))
    if len(rows) != written:  # Arrow takes a file that ends between two blocks for a whole one
        raise ValueError(f"{path} holds {len(rows)} rows, {written} were written; {fix}")
    return rows


def rows_of_conversation(conversation: Conversation) -> list[Row]:
    """The rows before they are cut to size: consecutive turns share one as long as each prompt extends the last."""
    return [row for row, _ in _rows_and_last_turns(conversation)]


def provenance_mismatches(folder: Path, target: ResolvedTarget) -> list[str]:
    """What in a finished rows stage was not generated by this target, one sentence each; empty when all was.

    Answers of other weights, or under another template, cost about a third of the acceptance: warn, and report it.
    """
    result = read_artefact(folder, "rows").result
    found = []
    for split in _SPLITS:
        for origin in result[split]["provenance"]:
            made_by = f"{origin['rows']} {split} rows were generated by {origin.get('model', 'an unnamed model')!r}"
            for field, wanted in (
                ("weights", target.weights),
                ("tokenizer", target.tokenizer),
                ("chat_template", target.chat_template),
            ):
                actual = origin.get(field)
                if field == "tokenizer" and actual is None:
                    continue  # the weights' fingerprint vouches for it where an importer recorded none
                if actual != wanted:
                    found.append(f"{made_by}: their {field} is {actual or 'unknown'}, the target's is {wanted}")
    return found


def _rows_and_last_turns(conversation: Conversation) -> Iterator[tuple[Row, Turn]]:
    groups: list[list[int]] = []
    turns = conversation.turns
    for number, turn in enumerate(turns):
        before = [*turns[number - 1].prompt_ids, *turns[number - 1].response_ids] if number else None
        if before is not None and turn.prompt_ids[: len(before)] == before:
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        ids: list[int] = []
        mask: list[bool] = []
        for turn in (turns[number] for number in group):
            context = turn.prompt_ids[len(ids) :]
            ids += [*context, *turn.response_ids]
            mask += [*[False] * len(context), *[True] * len(turn.response_ids)]
        row_id = conversation.id if len(groups) == 1 else f"{conversation.id}#{group[0]}"
        yield Row(row_id, conversation.id, conversation.source, tuple(ids), tuple(mask)), turns[group[-1]]


def _build_split(
    source: Path, folder: Path, split: Split, config: RowsConfig, seen: dict[str, Split]
) -> dict[str, Any]:
    """Write the Arrow file of one split; returns its figures. `seen` holds the conversations met so far."""
    from datasets import Features, Value
    from datasets import Sequence as ArrowSequence
    from datasets.arrow_writer import ArrowWriter

    features = Features(
        {
            "row_id": Value("string"),
            "conversation_id": Value("string"),
            "source": Value("string"),
            "input_ids": ArrowSequence(Value("int32")),
            "loss_mask": ArrowSequence(Value("bool")),
            "num_tokens": Value("int32"),
            "finish_reason": Value("string"),
            "is_cut": Value("bool"),
            "provenance": Value("string"),
        }
    )
    figures: Counter[str] = Counter(
        dict.fromkeys(
            ("conversations", "rows", "tokens", "supervised_tokens", "cut_answers", "cut_rows", "dropped_rows"), 0
        )
    )
    origins: Counter[str] = Counter()
    content = hashlib.sha256()

    def write(path: Path) -> None:
        with ArrowWriter(features=features, path=str(path)) as writer:
            for conversation in _conversations(source, split, seen):
                figures["conversations"] += 1
                figures["cut_answers"] += sum(turn.finish_reason == "length" for turn in conversation.turns)
                for stored in _stored_rows(conversation, config, figures):
                    writer.write(stored)
                    origins[stored["provenance"]] += 1
                    content.update(json.dumps([stored["row_id"], stored["input_ids"], stored["loss_mask"]]).encode())
            writer.finalize()

    write_atomically(_arrow_file(folder, split), write)
    _check_losses(source, split, figures, config)
    provenance = [json.loads(origin) | {"rows": count} for origin, count in sorted(origins.items())]
    return {**figures, "content_sha256": content.hexdigest(), "provenance": provenance}


def _conversations(source: Path, split: Split, seen: dict[str, Split]) -> Iterator[Conversation]:
    """The lines of a responses file, checked. Raises ValueError naming file and line."""
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                conversation = Conversation.model_validate_json(line)
            except ValidationError as error:
                fault = error.errors()[0]
                field = ".".join(map(str, fault["loc"]))
                raise ValueError(
                    f"{source}:{number} is not a finished conversation: {field}: {fault['msg']}"
                ) from error
            identity = conversation.id
            if identity in seen:
                where = "twice in" if seen[identity] == split else f"in {seen[identity]} and again in"
                raise ValueError(f"{source}:{number}: conversation {identity!r} is {where} {split}; ids must be unique")
            seen[identity] = split
            yield conversation


def _stored_rows(conversation: Conversation, config: RowsConfig, figures: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of a conversation cut to size, as they are stored; counts what is cut and what is dropped."""
    provenance = json.dumps(conversation.provenance, sort_keys=True)
    for whole, last_turn in _rows_and_last_turns(conversation):
        row = _cut(whole, config.max_row_tokens)
        if not row.input_ids:
            figures["dropped_rows"] += 1
            continue
        # A row that ends early with its last answer whole lost only context that nothing follows.
        is_cut = sum(row.loss_mask) < sum(whole.loss_mask)
        figures["rows"] += 1
        figures["tokens"] += len(row.input_ids)
        figures["supervised_tokens"] += sum(row.loss_mask)
        figures["cut_rows"] += is_cut
        yield {
            "row_id": row.row_id,
            "conversation_id": row.conversation_id,
            "source": row.source,
            "input_ids": list(row.input_ids),
            "loss_mask": list(row.loss_mask),
            "num_tokens": len(row.input_ids),
            "finish_reason": "cut" if is_cut else last_turn.finish_reason,
            "is_cut": is_cut,
            "provenance": provenance,
        }


def _cut(row: Row, max_tokens: int) -> Row:
    """At most `max_tokens`, ending with the last supervised token: what follows it can train nothing. No EOS added."""
    end = max((i + 1 for i, supervised in enumerate(row.loss_mask[:max_tokens]) if supervised), default=0)
    return replace(row, input_ids=row.input_ids[:end], loss_mask=row.loss_mask[:end])


def _check_losses(source: Path, split: Split, figures: Counter[str], config: RowsConfig) -> None:
    dropped, kept = figures["dropped_rows"], figures["rows"]
    if not kept and (dropped or split == "train"):
        raise ValueError(
            f"no {split} row is left of the {figures['conversations']} conversations in {source}: {dropped} rows hold "
            f"no token that the target generated within rows.max_row_tokens = {config.max_row_tokens}; raise it"
        )
    if dropped > config.max_dropped_share * (dropped + kept):
        raise ValueError(
            f"{dropped} of {dropped + kept} {split} rows of {source} hold no answer within rows.max_row_tokens = "
            f"{config.max_row_tokens}; raise it, or allow the loss by rows.max_dropped_share (now "
            f"{config.max_dropped_share})"
        )


def _sha256(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is missing, though its stage is finished; delete {path.parent} and build it anew")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _arrow_file(folder: Path, split: Split) -> Path:
    return folder / split / "rows.arrow"
