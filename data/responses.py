"""The target answers every prompt, turn by turn; a finished conversation is one line of responses/{train,eval}.jsonl.

    {"id", "source", "turns": [{"prompt_ids", "response_ids", "finish_reason"}, ...], "provenance": {...}}

Ids are the engine's own. Lines are appended and synced to disk in small groups; a rerun drops a torn last line, skips
what is finished and asks for the rest.
"""

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from draftsmith.data.artefact import Artefact, read_artefact
from draftsmith.data.chat import TemplateRefusal, answer_text, prompt_ids
from draftsmith.data.endpoint import EndpointError, Endpoints
from draftsmith.data.generate import Answer, Sampling, generate
from draftsmith.data.progress import Progress, progress
from draftsmith.data.prompt_sources import Prompt
from draftsmith.data.prompts import read_prompts
from draftsmith.data.target import ResolvedTarget, load_model, load_tokenizer, stop_token_ids

_SYNC_SECONDS = 2.0  # the longest that finished answers wait for the disk


class ResponsesConfig(BaseModel, extra="forbid", frozen=True):
    """How the target answers."""

    engine: Literal["transformers", "vllm"] = Field("transformers", description="transformers: in this process")
    endpoints: tuple[str, ...] = Field((), description="vllm: URLs of running servers; empty = launch one")
    max_new_tokens: int = Field(1024, ge=1, description="per turn")
    max_prompt_tokens: int = Field(4096, ge=1, description="longer prompts are skipped and counted")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 = all")
    seed: int = Field(0, ge=0)
    chat_template_args: dict[str, Any] = Field(default_factory=dict, description="e.g. enable_thinking: false")
    batch_size: int = Field(32, ge=1, description="transformers: sequences at once")
    concurrency: int = Field(64, ge=1, description="vllm: requests in flight")
    timeout_s: float = Field(600.0, gt=0, description="vllm: of one request")
    max_retries: int = Field(5, ge=0, description="vllm: of one request")
    failure_budget: float = Field(0.02, ge=0, lt=1, description="share of conversations that may fail or be skipped")

    @property
    def sampling(self) -> Sampling:
        """As the engines take it."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.seed)


@dataclass
class _Conversation:
    """A prompt on its way: messages so far, and the turns that are answered."""

    prompt: Prompt
    messages: list[dict[str, Any]]
    followups: list[str]
    turns: list[dict[str, Any]]
    ids: list[int]


def generate_responses(
    config: ResponsesConfig,
    target: ResolvedTarget,
    prompts_folder: Path,
    folder: Path,
    endpoints: Sequence[str] = (),
) -> Artefact:
    """Answer the prompts of both splits. Skips when done, continues when not.

    `endpoints` are servers that the caller launched; else those of the config. Raises RuntimeError when more
    conversations fail than the budget allows, and ValueError when nothing was answered (fault 9).
    """
    prompts = read_artefact(prompts_folder, "prompts")
    # Where the servers are, how many requests fly and how often they are retried changes no answer.
    settings = config.model_dump(
        exclude={"endpoints", "concurrency", "timeout_s", "max_retries", "batch_size", "failure_budget"}
    )
    key = {"config": settings, "target": target.key(), "prompts": prompts.fingerprint}
    artefact = Artefact.open(folder, "responses", key)
    if artefact.is_done:
        return artefact
    run = _Run(config, target, folder, tuple(endpoints) or config.endpoints)
    result = {split: run.split(split, read_prompts(prompts_folder / f"{split}.jsonl")) for split in ("train", "eval")}
    if not result["train"]["answered"]:
        raise ValueError(f"the target answered no training prompt: {result['train']}")
    artefact.finish({**result, "is_greedy": config.temperature == 0, "engine": run.provenance["engine"]})
    return artefact


class _Run:
    """One stage run: the tokenizer, the engine's provenance and the files."""

    def __init__(
        self, config: ResponsesConfig, target: ResolvedTarget, folder: Path, endpoints: tuple[str, ...]
    ) -> None:
        self.config, self.target, self.folder, self.endpoints = config, target, folder, endpoints
        self.tokenizer = load_tokenizer(target)
        self.stop_ids = stop_token_ids(target)
        self._model: Any = None
        self.provenance = {
            "model": target.name,
            **target.key(),
            "engine": config.engine,
            "engine_version": version("transformers") if config.engine == "transformers" else "unknown",
            "sampling": {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k},
            "seed": config.seed,
            "chat_template_args": config.chat_template_args,
        }

    def split(self, name: str, prompts: Sequence[Prompt]) -> dict[str, int]:
        """Answer one split; returns what happened to its prompts."""
        path = self.folder / f"{name}.jsonl"
        finished = _finished_ids(path)
        counts: Counter[str] = Counter()
        waiting = [self._begin(prompt, counts) for prompt in prompts if prompt["id"] not in finished]
        started = [conversation for conversation in waiting if conversation is not None]
        budget = _Budget(len(prompts), self.config.failure_budget, counts)
        budget.check()
        with _Writer(path) as writer, progress(f"responses/{name}", len(prompts), "answers", len(finished)) as bar:
            answer = self._in_process if self.config.engine == "transformers" else self._by_servers
            answer(started, writer, bar, budget)
        return {"prompts": len(prompts), "answered": len(_finished_ids(path)), **dict(sorted(counts.items()))}

    def _begin(self, prompt: Prompt, counts: Counter[str]) -> _Conversation | None:
        conversation = _Conversation(prompt, list(prompt["messages"]), list(prompt.get("followups", ())), [], [])
        return conversation if self._render(conversation, counts) else None

    def _render(self, conversation: _Conversation, counts: Counter[str]) -> bool:
        """Set the ids of the next turn; False, and counted, when the template refuses or the prompt is too long."""
        prompt = conversation.prompt
        try:
            conversation.ids = prompt_ids(
                self.tokenizer, conversation.messages, prompt.get("tools"), self.config.chat_template_args
            )
        except TemplateRefusal:
            counts["refused_by_template"] += 1
            return False
        if len(conversation.ids) > self.config.max_prompt_tokens:
            counts["prompt_too_long"] += 1
            return False
        return True

    def _answered(
        self, conversation: _Conversation, token_ids: Sequence[int], reason: str, counts: Counter[str]
    ) -> bool:
        """Record a turn; True when another turn is to be asked for. A later turn that cannot be rendered ends it."""
        conversation.turns.append(
            {"prompt_ids": conversation.ids, "response_ids": list(token_ids), "finish_reason": reason}
        )
        if not conversation.followups or reason == "length":
            return False
        conversation.messages.append({"role": "assistant", "content": answer_text(self.tokenizer, token_ids)})
        conversation.messages.append({"role": "user", "content": conversation.followups.pop(0)})
        return self._render(conversation, counts)

    def _line(self, conversation: _Conversation) -> dict[str, Any]:
        prompt = conversation.prompt
        return {
            "id": prompt["id"],
            "source": prompt["source"],
            "turns": conversation.turns,
            "provenance": self.provenance,
        }

    def _in_process(
        self, conversations: list[_Conversation], writer: "_Writer", bar: Progress, budget: "_Budget"
    ) -> None:
        """One pass of the engine per turn number."""
        if conversations and self._model is None:
            self._model = load_model(self.target, _device())
        while conversations:
            more: list[_Conversation] = []

            def take(
                answer: Answer, asked: list[_Conversation] = conversations, more: list[_Conversation] = more
            ) -> None:
                conversation = asked[answer.index]
                if self._answered(conversation, answer.token_ids, answer.finish_reason, budget.counts):
                    more.append(conversation)
                else:
                    writer.write(self._line(conversation))
                    bar.advance()

            generate(
                self._model,
                [conversation.ids for conversation in conversations],
                max_new_tokens=self.config.max_new_tokens,
                stop_ids=self.stop_ids,
                sampling=self.config.sampling,
                batch_size=self.config.batch_size,
                on_finished=take,
                seeds=[_seed_of(conversation) for conversation in conversations],
            )
            conversations = more

    def _by_servers(
        self, conversations: list[_Conversation], writer: "_Writer", bar: Progress, budget: "_Budget"
    ) -> None:
        config = self.config
        if not conversations:
            return
        with (
            Endpoints(self.endpoints, config.timeout_s, config.max_retries) as servers,
            ThreadPoolExecutor(config.concurrency) as pool,
        ):
            model = servers.model_name()
            self.provenance["engine_version"] = servers.server_version()
            flying: dict[Future[None], _Conversation] = {}
            waiting = list(reversed(conversations))
            try:
                while waiting or flying:
                    while waiting and len(flying) < config.concurrency:
                        conversation = waiting.pop()
                        flying[pool.submit(self._converse, servers, model, conversation, budget.counts)] = conversation
                    for future in wait(flying, return_when=FIRST_COMPLETED).done:
                        conversation = flying.pop(future)
                        try:
                            future.result()
                        except EndpointError as error:
                            budget.failed(conversation.prompt["id"], str(error))
                            continue
                        writer.write(self._line(conversation))
                        bar.advance()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _converse(self, servers: Endpoints, model: str, conversation: _Conversation, counts: Counter[str]) -> None:
        """All turns of one conversation, in a worker thread."""
        config = self.config
        while True:
            done = servers.complete(
                model,
                conversation.ids,
                max_tokens=config.max_new_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k or -1,
                seed=config.seed * 1_000_003 + _seed_of(conversation),
                stop_token_ids=list(self.stop_ids),
            )
            if not self._answered(conversation, done.token_ids, done.finish_reason, counts):
                return


class _Budget:
    """Counts what fails and stops the stage past the budget."""

    def __init__(self, total: int, share: float, counts: Counter[str]) -> None:
        self.total, self.share, self.counts = total, share, counts
        self.last = ""

    def failed(self, identity: str, reason: str) -> None:
        """Count one failed conversation. Raises RuntimeError past the budget."""
        self.counts["failed"] += 1
        self.last = f"; the last was {identity}: {reason}"
        self.check()

    def check(self) -> None:
        """Raise RuntimeError when more failed or were skipped than the budget allows."""
        lost = sum(self.counts.values())
        if self.total and lost > self.share * self.total:
            raise RuntimeError(
                f"{lost} of {self.total} conversations failed or were skipped ({dict(self.counts)}), more than "
                f"responses.failure_budget {self.share} allows{self.last}. What was answered is kept; mend the cause "
                "and run the same command again."
            )


class _Writer:
    """Appends lines; whatever was written is on disk after at most two seconds, or on close."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._synced = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._sync()
            self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Append one finished conversation."""
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def _finished_ids(path: Path) -> set[str]:
    """Ids of the complete lines; a torn last line (after a kill) is cut off."""
    if not path.is_file():
        return set()
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    return {_id_of(path, number, line) for number, line in enumerate(complete.splitlines(), 1)}


def _id_of(path: Path, number: int, line: bytes) -> str:
    try:
        return str(json.loads(line)["id"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}:{number} is damaged; delete that line and run the same command again") from error


def _seed_of(conversation: _Conversation) -> int:
    """A seed that depends on the conversation and the turn only, so that a resumed run samples the same answers."""
    text = f"{conversation.prompt['id']}#{len(conversation.turns)}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 1_000_003


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
