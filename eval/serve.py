"""The same measurement through a real vLLM: the exported folder is served, its acceptance counters are read.

What vLLM counts (0.32: v1/core/sched/scheduler.py update_from_output, v1/spec_decode/metrics.py observe_draft): every
step in which a request had drafts scheduled is a round. Its accepted tokens are what the rejection sampler returned
minus one, taken *before* the stop tokens and max_tokens are looked at; always all N drafts are scheduled, also when
fewer tokens are left to max_tokens. So in greedy fp32 decoding

    vLLM's counters == the sums of the runtime's `accepted` (not of `min(accepted, emitted)`), round for round

with two exceptions, which `_server` excludes by the room it asks for: within N tokens of max_model_len vLLM shortens
drafts, and where the drafter does not fit it schedules zeros as drafts. The prefix cache is off: a hit would change no
count, but the time of the prefill.
"""

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from draftsmith.data.endpoint import Completion, Endpoints
from draftsmith.data.progress import progress
from draftsmith.data.target import ResolvedTarget
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measurements import Cell, Measurement, MeasurementLog
from draftsmith.eval.workloads import Question
from draftsmith.hidden_states.vllm_server import Server, launch
from draftsmith.models.head import served_as
from draftsmith.models.target import StoredTensors

_COUNTER = re.compile(r"^vllm:(spec_decode_num_\w+|generation_tokens)_total\{([^}]*)\}\s+(\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
# The counters follow the answer by one pass of the server's output loop.
_SETTLE_S = 20.0
_POLL_S = 0.02
# vLLM's engine and tokenizer warm up on the first requests.
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DraftCounters:
    """vLLM's speculative counters at one moment, or their difference between two."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]
    generated: int  # tokens of all answers

    def __sub__(self, earlier: "DraftCounters") -> "DraftCounters":
        before = (*earlier.per_position, *[0] * len(self.per_position))
        return DraftCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.per_position, before, strict=False)),
            self.generated - earlier.generated,
        )


def parse_counters(metrics: str) -> DraftCounters:
    """From the text of GET /metrics; engines are summed."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(metrics):
        place = _POSITION.search(labels)
        if name == "spec_decode_num_accepted_tokens_per_pos" and place:
            positions[int(place[1])] = positions.get(int(place[1]), 0) + int(float(value))
        else:
            sums[name] = sums.get(name, 0) + int(float(value))
    return DraftCounters(
        sums.get("spec_decode_num_drafts", 0),
        sums.get("spec_decode_num_draft_tokens", 0),
        sums.get("spec_decode_num_accepted_tokens", 0),
        tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
        sums.get("generation_tokens", 0),
    )


def serve_sweep(
    config: EvalConfig,
    target: ResolvedTarget,
    export_folder: Path,
    method: str,
    stop_ids: Sequence[int],
    workloads: Mapping[str, Sequence[Question]],
    log: MeasurementLog,
    folder: Path,
) -> None:
    """Measure what the log lacks: a server for plain decoding, then one for each proposal length. Greedy only."""
    cells = [
        Cell("vllm", name, 0.0, batch_size, n)
        for n in (0, *config.num_speculative_tokens)
        for batch_size in config.batch_sizes
        for name in workloads
    ]
    missing = [cell for cell in cells if log.get(cell, _ids(workloads[cell.workload])) is None]
    if not missing:
        return
    with progress("eval/vllm", len(cells), "cells", len(cells) - len(missing)) as bar:
        for n in dict.fromkeys(cell.n for cell in missing):
            with _server(config, target, export_folder, method, n, workloads, folder) as server:
                client = _Client(server, config, stop_ids)
                client.warm_up(next(iter(workloads.values()))[0])
                for cell in (cell for cell in missing if cell.n == n):
                    log.add(client.measure(cell, workloads[cell.workload]))
                    bar.advance()


def _server(
    config: EvalConfig,
    target: ResolvedTarget,
    export_folder: Path,
    method: str,
    n: int,
    workloads: Mapping[str, Sequence[Question]],
    folder: Path,
) -> AbstractContextManager[Server]:
    """A server for one proposal length, with room for every answer and a whole draft behind it."""
    longest = max(len(question.token_ids) for questions in workloads.values() for question in questions)
    room = longest + config.max_new_tokens + 2 * (config.longest + 1)
    server = config.server.model_copy(
        update={
            "max_model_len": max(room, config.server.max_model_len),
            "extra_args": (*config.server.extra_args, "--no-enable-prefix-caching"),
        }
    )
    speculative: dict[str, Any] = {**served_as(method), "num_speculative_tokens": n}
    served = replace(target, dtype=config.dtype)
    if StoredTensors(export_folder).is_whole_model:  # the head is a part of the target: the export is what is served
        served = replace(served, path=export_folder.absolute())
    else:
        speculative["model"] = str(export_folder.absolute())
    return launch(served, server, folder / f"vllm-n{n}.log", speculative=speculative if n else None)


class _Client:
    """Sends prompts and reads counters, before and after."""

    def __init__(self, server: Server, config: EvalConfig, stop_ids: Sequence[int]) -> None:
        self._server, self._config = server, config
        self._stop_ids = list(stop_ids)

    def warm_up(self, question: Question) -> None:
        """Returns only when its tokens are counted, so that no measurement gets them."""
        before = self._counters()
        with Endpoints([self._server.url]) as endpoints:
            found, _ = self._ask(endpoints, question, _WARM_UP_TOKENS)
        self._settled(before, len(found.token_ids))

    def measure(self, cell: Cell, questions: Sequence[Question]) -> Measurement:
        """All prompts of a workload, `batch_size` at a time. With one at a time every answer has its own counts."""
        answers: list[dict[str, Any]] = []
        with Endpoints([self._server.url]) as endpoints:
            started = time.perf_counter()
            spent_s = 0.0
            if cell.batch_size == 1:
                for question in questions:
                    before = self._counters()
                    found, seconds = self._ask(endpoints, question, self._config.max_new_tokens)
                    spent_s += seconds
                    counts = self._settled(before, len(found.token_ids))
                    answers.append(_answer(found, seconds) | {"counts": vars(counts)})
                return Measurement(cell, _ids(questions), spent_s, tuple(answers))
            before = self._counters()
            with ThreadPoolExecutor(cell.batch_size) as pool:
                asked = pool.map(lambda q: self._ask(endpoints, q, self._config.max_new_tokens), questions)
                answers = [_answer(found, seconds) for found, seconds in asked]
            spent_s = time.perf_counter() - started
        counts = self._settled(before, sum(len(answer["token_ids"]) for answer in answers))
        answers[0]["counts"] = vars(counts)  # of all answers together
        return Measurement(cell, _ids(questions), spent_s, tuple(answers))

    def _ask(self, endpoints: Endpoints, question: Question, max_tokens: int) -> tuple[Completion, float]:
        started = time.perf_counter()
        found = endpoints.complete(
            self._server.model,
            question.token_ids,
            max_tokens=max_tokens,
            temperature=0,
            stop_token_ids=self._stop_ids,
        )
        return found, time.perf_counter() - started

    def _counters(self) -> DraftCounters:
        response = httpx.get(f"{self._server.url}/metrics", trust_env=False, timeout=30)
        response.raise_for_status()
        return parse_counters(response.text)

    def _settled(self, before: DraftCounters, num_tokens: int) -> DraftCounters:
        """The difference since `before`, once the server has counted all tokens that it sent."""
        deadline = time.monotonic() + _SETTLE_S
        while (difference := self._counters() - before).generated < num_tokens:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._server.url}/metrics counts {difference.generated} tokens, {num_tokens} were received"
                )
            time.sleep(_POLL_S)
        if difference.generated > num_tokens:
            raise RuntimeError(
                f"{self._server.url}/metrics counts {difference.generated} tokens, only {num_tokens} were received: "
                "somebody else uses this server, so its counters are not this measurement's"
            )
        return difference


def _answer(found: Completion, seconds: float) -> dict[str, Any]:
    return {"token_ids": found.token_ids, "finish_reason": found.finish_reason, "seconds": seconds}


def _ids(questions: Sequence[Question]) -> tuple[str, ...]:
    return tuple(question.id for question in questions)
