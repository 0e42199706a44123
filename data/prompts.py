"""Prompts: read from several sources, cleaned of duplicates, mixed, and split by conversation into train and eval.

    sources -> exact duplicates -> overlap with evaluation sets -> near duplicates -> weights -> split by group

Out come train.jsonl and eval.jsonl, one prompt a line ({"id", "source", "messages", ["followups"], ["tools"]}), and
left_out.jsonl, which says of every prompt that was read and not used why.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from draftsmith.data.artefact import Artefact, write_atomically
from draftsmith.data.duplicates import LikenessIndex, conversation_keys, sketch_of, text_key
from draftsmith.data.prompt_sources import Prompt, PromptSource, read_source


class PromptsConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Where prompts come from and how they are cleaned and split."""

    sources: tuple[PromptSource, ...] = Field(min_length=1)
    eval_count: int = Field(0, ge=0, description="conversations of the mix that are held out of training")
    eval_sources: dict[str, Path] = Field(
        default_factory=dict, description="evaluation workloads of their own: name -> JSONL; overlap leaves train"
    )
    eval_limit: int | None = Field(None, ge=1, description="first so many prompts of each of eval_sources")
    near_duplicate_similarity: float = Field(
        0.8, gt=0, le=1, description="Jaccard similarity of 3-token shingles from which on prompts are near duplicates"
    )
    near_duplicates: Literal["drop", "group"] = Field(
        "drop", description="drop all but the first, or keep all on the same side of the split"
    )
    max_malformed_share: float = Field(
        0.0, ge=0, lt=1, description="share of a source's lines that may be malformed (then counted); 0: an error"
    )
    seed: int = Field(0, description="of the mix and of the split")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.eval_count and not self.eval_sources:
            raise ValueError(
                "prompts.eval_count is 0 and there are no prompts.eval_sources, so acceptance could not be measured on "
                "held-out prompts; give eval_count (40, say) or eval_sources"
            )
        if self.eval_limit and not self.eval_sources:
            raise ValueError("prompts.eval_limit limits eval_sources, of which there are none; use eval_count")
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("prompts.sources: some sources have a weight and some have none; give all of them one")
        return self


@dataclass
class _LeftOut:
    """What was read and not used: a line each for prompts, counts for everything."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[dict[str, str]] = field(default_factory=list)

    def add(self, prompt: Prompt, reason: str, because_of: Prompt | None = None) -> None:
        self.counts[reason] += 1
        line = {"id": prompt["id"], "source": prompt["source"], "reason": reason}
        self.lines.append(line | ({"because_of": because_of["id"]} if because_of else {}))


def build_prompts(config: PromptsConfig, folder: Path) -> Artefact:
    """Write train.jsonl and eval.jsonl. Skips when done. Raises ValueError when nothing is left for training."""
    key = {"config": config.model_dump(mode="json"), "files": _input_digests(config)}
    artefact = Artefact.open(folder, "prompts", key)
    if artefact.is_done:
        return artefact
    left_out = _LeftOut()
    try:
        train, evaluation = _prepare(config, left_out)
    except ValueError:
        artefact.discard()  # so that a rerun with a mended setting is not refused for this empty attempt
        raise
    digests = {
        f"{split}_sha256": _write_lines(folder / f"{split}.jsonl", prompts)
        for split, prompts in (("train", train), ("eval", evaluation))
    }
    _write_lines(folder / "left_out.jsonl", left_out.lines)
    artefact.finish(
        {
            "train": len(train),
            "eval": len(evaluation),
            "train_by_source": dict(sorted(Counter(prompt["source"] for prompt in train).items())),
            "eval_by_source": dict(sorted(Counter(prompt["source"] for prompt in evaluation).items())),
            "left_out": dict(sorted(left_out.counts.items())),
            **digests,
        }
    )
    return artefact


def read_prompts(path: Path, sha256: str | None = None) -> list[Prompt]:
    """The prompts of a finished stage's file. Raises ValueError when it is missing, or not what the stage wrote."""
    fix = f"delete {path.parent} and run the prompts stage again"
    if not path.is_file():
        raise ValueError(f"{path} is missing, though its stage is finished; {fix}")
    content = path.read_bytes()
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path} has changed since it was written (sha256 differs); {fix}")
    return [json.loads(line) for line in content.split(b"\n") if line]


def _prepare(config: PromptsConfig, left_out: _LeftOut) -> tuple[list[Prompt], list[Prompt]]:
    """Everything between reading and writing: (train, eval)."""
    pools = [read_source(source, config.max_malformed_share, left_out.counts) for source in config.sources]
    num_read = sum(map(len, pools))
    workloads = [_read_workload(name, path, config, left_out) for name, path in config.eval_sources.items()]
    held_out = [prompt for workload in workloads for prompt in workload]
    _make_ids_unique([*held_out, *(prompt for pool in pools for prompt in pool)])
    sketches = {prompt["id"]: sketch_of(prompt) for pool in [*pools, held_out] for prompt in pool}
    pools = _without_exact_duplicates(pools, left_out)
    pools = _without_overlap(pools, held_out, sketches, config, left_out)
    if config.near_duplicates == "drop":
        pools = _without_near_duplicates(pools, sketches, config, left_out)
    mixed = _mixed(pools, config, left_out)
    if not mixed:
        raise ValueError(
            f"prompts: of {num_read} prompts none is left for training: {dict(sorted(left_out.counts.items()))}"
        )
    train, split_off = _split(_groups(mixed, sketches, config), config)
    random.Random(config.seed).shuffle(train)
    return train, [*split_off, *held_out]


def _read_workload(name: str, path: Path, config: PromptsConfig, left_out: _LeftOut) -> list[Prompt]:
    source = PromptSource(jsonl=path, limit=config.eval_limit)
    prompts = read_source(source, config.max_malformed_share, left_out.counts)
    return [prompt | {"source": name, "id": f"{name}/{prompt['id']}"} for prompt in prompts]


def _make_ids_unique(prompts: Iterable[Prompt]) -> None:
    """Number repeated ids: several sources may each count from 1, and all later stages go by id."""
    taken: set[str] = set()
    for prompt in prompts:
        identity, number = prompt["id"], 2
        while prompt["id"] in taken:
            prompt["id"] = f"{identity}~{number}"
            number += 1
        taken.add(prompt["id"])


def _without_exact_duplicates(pools: Sequence[list[Prompt]], left_out: _LeftOut) -> list[list[Prompt]]:
    first: dict[str, Prompt] = {}
    kept: list[list[Prompt]] = [[] for _ in pools]
    for number, pool in enumerate(pools):
        for prompt in pool:
            twin = first.setdefault(text_key(prompt), prompt)
            if twin is prompt:
                kept[number].append(prompt)
            else:
                left_out.add(prompt, "exact_duplicates", twin)
    return kept


def _without_overlap(
    pools: Sequence[list[Prompt]],
    held_out: Sequence[Prompt],
    sketches: dict[str, Any],
    config: PromptsConfig,
    left_out: _LeftOut,
) -> list[list[Prompt]]:
    """Drop from training what an evaluation set holds: the same text, nearly the same, or the same conversation."""
    index = LikenessIndex(config.near_duplicate_similarity)
    by_id = {prompt["id"]: prompt for prompt in held_out}
    by_text = {text_key(prompt): prompt for prompt in held_out}
    by_conversation = {key: prompt for prompt in held_out for key in conversation_keys(prompt)}
    for prompt in held_out:
        index.add(prompt["id"], sketches[prompt["id"]])

    def is_clean(prompt: Prompt) -> bool:
        near = index.find(sketches[prompt["id"]])
        shared = [by_conversation[key] for key in conversation_keys(prompt) if key in by_conversation]
        if text_key(prompt) in by_text:
            left_out.add(prompt, "exact_overlap_with_eval", by_text[text_key(prompt)])
        elif near:
            left_out.add(prompt, "near_overlap_with_eval", by_id[near[0]])
        elif shared:
            left_out.add(prompt, "same_conversation_as_eval", shared[0])
        return not (near or shared or text_key(prompt) in by_text)

    return [[prompt for prompt in pool if is_clean(prompt)] for pool in pools]


def _without_near_duplicates(
    pools: Sequence[list[Prompt]], sketches: dict[str, Any], config: PromptsConfig, left_out: _LeftOut
) -> list[list[Prompt]]:
    """Keep a prompt only if no prompt that was kept before it is similar."""
    index = LikenessIndex(config.near_duplicate_similarity)
    by_id = {prompt["id"]: prompt for pool in pools for prompt in pool}
    kept: list[list[Prompt]] = [[] for _ in pools]
    for number, pool in enumerate(pools):
        for prompt in pool:
            similar = index.find(sketches[prompt["id"]])
            if similar:
                left_out.add(prompt, "near_duplicates", by_id[similar[0]])
                continue
            index.add(prompt["id"], sketches[prompt["id"]])
            kept[number].append(prompt)
    return kept


def _mixed(pools: Sequence[list[Prompt]], config: PromptsConfig, left_out: _LeftOut) -> list[Prompt]:
    """All prompts; where sources have weights, as many of each as keep the proportions without repeating any."""
    weights = [source.weight for source in config.sources if source.weight is not None]
    if not weights:
        return [prompt for pool in pools for prompt in pool]
    total = min(len(pool) / weight for pool, weight in zip(pools, weights, strict=True))
    mixed: list[Prompt] = []
    for number, (pool, weight) in enumerate(zip(pools, weights, strict=True)):
        size = min(len(pool), round(total * weight))
        taken = set(random.Random(f"{config.seed}-{number}").sample(range(len(pool)), size))
        for position, prompt in enumerate(pool):
            if position in taken:
                mixed.append(prompt)
            else:
                left_out.add(prompt, "over_weight")
    return mixed


def _groups(prompts: Sequence[Prompt], sketches: dict[str, Any], config: PromptsConfig) -> list[list[Prompt]]:
    """Prompts that must stay on one side of the split: of one conversation, or linked by a chain of near duplicates."""
    parent = list(range(len(prompts)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    index = LikenessIndex(config.near_duplicate_similarity)
    position = {prompt["id"]: number for number, prompt in enumerate(prompts)}
    first_of: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        related = [first_of.setdefault(key, number) for key in conversation_keys(prompt)]
        if config.near_duplicates == "group":
            related += [position[other] for other in index.find(sketches[prompt["id"]])]
            index.add(prompt["id"], sketches[prompt["id"]])
        for other in related:
            parent[root(number)] = root(other)
    groups: dict[int, list[Prompt]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(root(number), []).append(prompt)
    return list(groups.values())


def _split(groups: Sequence[list[Prompt]], config: PromptsConfig) -> tuple[list[Prompt], list[Prompt]]:
    """An exact, seeded split by whole groups: exactly eval_count prompts are held out."""
    num_prompts = sum(map(len, groups))
    if config.eval_count >= num_prompts:
        raise ValueError(f"prompts.eval_count is {config.eval_count}, but only {num_prompts} prompts are left to split")
    order = list(range(len(groups)))
    random.Random(config.seed).shuffle(order)
    chosen = {order[position] for position in _adding_up_to(config.eval_count, [len(groups[n]) for n in order])}
    split_off = [prompt for number in order if number in chosen for prompt in groups[number]]
    if len(split_off) != config.eval_count:
        raise ValueError(
            f"prompts.eval_count is {config.eval_count}, but related prompts stay together and their groups do not add "
            f"up to it; {len(split_off)} works"
        )
    return [prompt for number in order if number not in chosen for prompt in groups[number]], split_off


def _adding_up_to(wanted: int, sizes: Sequence[int]) -> list[int]:
    """Positions, the earliest possible, whose sizes add up to exactly `wanted`, else to the most below it."""
    reachable = [1]  # bit s of entry i: some of the first i sizes add up to s
    for size in sizes:
        if reachable[-1] >> wanted & 1:
            break
        reachable.append((reachable[-1] | reachable[-1] << size) & ((2 << wanted) - 1))
    total = reachable[-1].bit_length() - 1
    positions = []
    for position in range(len(reachable) - 2, -1, -1):
        if not reachable[position] >> total & 1:
            positions.append(position)
            total -= sizes[position]
    return positions


def _write_lines(path: Path, lines: Sequence[Prompt]) -> str:
    """Write JSON lines; returns their digest, by which later stages notice other content under equal settings."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomically(path, text)
    return hashlib.sha256(text.encode()).hexdigest()


def _input_digests(config: PromptsConfig) -> dict[str, str]:
    """Digests of the files that are read, so that an edited file is not taken for the old one."""
    paths = [source.file for source in config.sources if source.file is not None]
    found = {}
    for path in [*paths, *config.eval_sources.values()]:
        if not path.is_file():
            raise ValueError(f"prompts: {path} does not exist (looked for from {Path.cwd()})")
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
