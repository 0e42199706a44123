"""The target answers every prompt, turn by turn; a finished conversation is one line of responses/{train,eval}.jsonl.

    {"id", "source", "turns": [{"prompt_ids", "response_ids", "finish_reason"}, ...], ["ended_early"], "provenance"}

Ids are the engine's own. The answer to a turn, decoded, is part of the next turn's messages, which the template renders
anew. A rerun skips what is finished and asks for the rest.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from draftsmith.data.artefact import Artefact, fingerprint, read_artefact
from draftsmith.data.chat import TemplateRefusal, answer_text, check_template_args, prompt_ids
from draftsmith.data.endpoint import AsyncEndpoints, EndpointError, RetryPolicy
from draftsmith.data.generate import Answer, Sampling, generate
from draftsmith.data.jsonl_log import JsonlLog, read_jsonl_log
from draftsmith.data.progress import Progress
from draftsmith.data.progress import progress as show_progress
from draftsmith.data.prompt_sources import Prompt
from draftsmith.data.prompts import read_prompts
from draftsmith.data.target import (
    ResolvedTarget,
    load_model,
    load_tokenizer,
    room_for_prompts,
    stop_token_ids,
    vocabulary_size,
)

_SPLITS = ("train", "eval")
_CHUNK = 4096  # conversations rendered at a time: bounds the memory that their ids take
_SEED_STRIDE = 1_000_003  # as in generate.py: runs with neighbouring seeds share no prompt's draws


class ResponsesConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """How the target answers."""

    engine: Literal["transformers", "vllm"] = Field("transformers", description="transformers: in this process")
    endpoints: tuple[str, ...] = Field((), description="vllm: URLs of running servers; empty = launch one")
    max_new_tokens: int = Field(1024, ge=1, description="per turn")
    max_prompt_tokens: int = Field(4096, ge=1, description="longer prompts are skipped and counted")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="the most likely tokens that reach this probability; 1 = all")
    top_k: int = Field(0, ge=0, description="the most likely tokens; 0 = all")
    seed: int = Field(0, ge=0, lt=2**32, description="of the samples; a prompt's draws follow from it and the id")
    chat_template_args: dict[str, Any] = Field(default_factory=dict, description="e.g. enable_thinking: false")
    batch_size: int = Field(48, ge=1, description="transformers: sequences at once")
    concurrency: int = Field(64, ge=1, description="vllm: requests in flight, over all endpoints")
    timeout_s: float = Field(600.0, gt=0, description="vllm: of one request")
    max_retries: int = Field(5, ge=0, description="vllm: further tries of one request")
    failure_budget: float = Field(0.02, ge=0, lt=1, description="share of conversations that may fail or be skipped")

    @property
    def sampling(self) -> Sampling:
        """As the engines take it."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.seed)

    @model_validator(mode="after")
    def _nothing_is_unused(self) -> Self:
        if self.engine == "transformers" and self.endpoints:
            raise ValueError(f"endpoints is {self.endpoints}, but engine is transformers; set engine to vllm")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k):
            raise ValueError(
                f"temperature 0 is greedy and ignores top_p {self.top_p} and top_k {self.top_k}; "
                "set a temperature above 0 or remove them"
            )
        check_template_args(self.chat_template_args)
        return self


def generate_responses(
    config: ResponsesConfig,
    target: ResolvedTarget,
    prompts_folder: Path,
    folder: Path,
    endpoints: Sequence[str] = (),
    progress: Progress | None = None,
) -> Artefact:
    """Answer the prompts of both splits. Skips when done, continues when not.

    `endpoints` are servers that the caller launched; else those of the config. `progress` is told of each finished
    conversation; by default it is shown. Raises RuntimeError when more conversations fail or are skipped than the
    budget allows, and ValueError when nothing was answered.
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
    try:
        run = _Run(config, target, folder, tuple(endpoints) or config.endpoints, progress)
        asked = {
            split: read_prompts(prompts_folder / f"{split}.jsonl", prompts.result.get(f"{split}_sha256"))
            for split in _SPLITS
        }
        result = {split: run.split(split, asked[split]) for split in _SPLITS}
        if not result["train"]["answered"]:
            raise ValueError(f"responses: the target answered no training prompt: {result['train']}")
    except (RuntimeError, ValueError):
        if not any(True for split in _SPLITS for _ in read_jsonl_log(folder / f"{split}.jsonl")):
            artefact.discard()  # so that a rerun with a mended setting is not refused for this empty attempt
        raise
    artefact.finish({**result, "is_greedy": config.temperature == 0, "engine": config.engine})
    return artefact


@dataclass
class _Conversation:
    """A prompt on its way: messages so far, user turns to come, answered turns, and the next turn's ids."""

    prompt: Prompt
    messages: list[dict[str, Any]]
    followups: list[str]
    turns: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    ended_early: str = ""

    @property
    def seed(self) -> int:
        """Depends on the prompt's id and the turn only, so that a resumed run draws the same samples."""
        text = f"{self.prompt['id']}#{len(self.turns)}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % _SEED_STRIDE


class _Run:
    """One run of the stage: the engine, what it is asked, and where its answers go."""

    def __init__(
        self,
        config: ResponsesConfig,
        target: ResolvedTarget,
        folder: Path,
        endpoints: tuple[str, ...],
        progress: Progress | None,
    ) -> None:
        self.config, self.target, self.folder = config, target, folder
        self.endpoints, self.progress = endpoints, progress
        if config.engine == "vllm" and not endpoints:
            raise ValueError(
                "responses.endpoints is empty and no server was launched; give the URL of a running server"
            )
        self.tokenizer = load_tokenizer(target)
        self.stop_ids = stop_token_ids(target)
        room = room_for_prompts(target, config.max_new_tokens, "responses")
        self.max_prompt_tokens = min(config.max_prompt_tokens, room)
        self.vocab_size = vocabulary_size(target)
        self._model: Any = None
        self.provenance: dict[str, Any] = {
            "model": target.name,
            **target.key(),
            "engine": config.engine,
            "engine_version": version("transformers"),
            "sampling": {
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": config.top_k,
                "seed": config.seed,
                "max_new_tokens": config.max_new_tokens,
            },
            "chat_template_args": config.chat_template_args,
        }

    def split(self, name: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Answer one split; returns what happened to its prompts."""
        path = self.folder / f"{name}.jsonl"
        counts: Counter[str] = Counter()
        budget = _Budget(len(prompts), self.config.failure_budget, counts)
        with JsonlLog(path) as log:
            finished = {str(line["id"]) for line in read_jsonl_log(path)}
            waiting = (prompt for prompt in prompts if str(prompt["id"]) not in finished)
            bar = show_progress(f"responses/{name}", len(prompts), "conversations", len(finished))
            with nullcontext(self.progress) if self.progress else bar as shown:
                for chunk in _chunks(waiting):
                    started = [found for prompt in chunk if (found := self._begin(prompt, budget)) is not None]
                    self._answer(started, _Finished(log, shown, self.provenance), budget)
        return {"prompts": len(prompts), "left_out": dict(sorted(counts.items())), **_summary(path)}

    def _answer(self, conversations: list[_Conversation], finished: "_Finished", budget: "_Budget") -> None:
        if not conversations:
            return
        if self.config.engine == "transformers":
            self._answer_in_process(conversations, finished)
        else:
            asyncio.run(self._answer_by_servers(conversations, finished, budget))

    def _begin(self, prompt: Prompt, budget: "_Budget") -> _Conversation | None:
        conversation = _Conversation(prompt, list(prompt["messages"]), list(prompt.get("followups") or ()))
        obstacle = self._render(conversation)
        if obstacle:
            budget.lose(obstacle, str(prompt["id"]), obstacle.replace("_", " "))
            return None
        return conversation

    def _render(self, conversation: _Conversation) -> str:
        """Set the ids of the next turn; the obstacle, if there is one."""
        tools, template_args = conversation.prompt.get("tools"), self.config.chat_template_args
        try:
            conversation.ids = prompt_ids(self.tokenizer, conversation.messages, tools, template_args)
        except TemplateRefusal:
            return "refused_by_template"
        if max(conversation.ids, default=0) >= self.vocab_size:
            raise ValueError(
                f"target.model is {self.target.name!r}: its tokenizer gives the id {max(conversation.ids)} in prompt "
                f"{conversation.prompt['id']!r}, but by its config.json the model knows {self.vocab_size} ids; "
                "resize its embeddings (resize_token_embeddings), or remove the added tokens from the tokenizer"
            )
        return "prompt_too_long" if len(conversation.ids) > self.max_prompt_tokens else ""

    def _takes(self, conversation: _Conversation, token_ids: Sequence[int], reason: str) -> bool:
        """Record a turn; True when another one is to be asked for. What was answered is kept in any case."""
        conversation.turns.append(
            {"prompt_ids": conversation.ids, "response_ids": list(token_ids), "finish_reason": reason}
        )
        if not conversation.followups:
            return False
        if reason == "length":  # the template would put an end of turn that the target never generated
            conversation.ended_early = "answer_cut"
            return False
        conversation.messages.append({"role": "assistant", "content": answer_text(self.tokenizer, token_ids)})
        conversation.messages.append({"role": "user", "content": conversation.followups.pop(0)})
        conversation.ended_early = self._render(conversation)
        return not conversation.ended_early

    def _answer_in_process(self, conversations: list[_Conversation], finished: "_Finished") -> None:
        """All first turns, then all second turns of those that have one, and so on."""
        if self._model is None:
            self._model = load_model(self.target, _device())
        while conversations:
            more: list[_Conversation] = []
            generate(
                self._model,
                [conversation.ids for conversation in conversations],
                max_new_tokens=self.config.max_new_tokens,
                stop_ids=self.stop_ids,
                sampling=self.config.sampling,
                batch_size=self.config.batch_size,
                on_finished=self._sorter(conversations, more, finished),
                seeds=[conversation.seed for conversation in conversations],
            )
            conversations = more

    def _sorter(
        self, asked: list[_Conversation], more: list[_Conversation], finished: "_Finished"
    ) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            conversation = asked[answer.index]
            if self._takes(conversation, answer.token_ids, answer.finish_reason):
                more.append(conversation)
            else:
                finished.add(conversation)

        return take

    async def _answer_by_servers(
        self, conversations: list[_Conversation], finished: "_Finished", budget: "_Budget"
    ) -> None:
        config = self.config
        policy = RetryPolicy(config.timeout_s, config.max_retries)
        waiting = iter(conversations)  # shared: each worker takes the next
        async with AsyncEndpoints(self.endpoints, config.concurrency, policy) as servers:
            model = await servers.model_name()
            self.provenance |= {"engine_version": await servers.server_version(), "served_model": model}

            async def work() -> None:
                for conversation in waiting:
                    try:
                        await self._converse(servers, model, conversation)
                    except EndpointError as error:
                        budget.lose("failed", str(conversation.prompt["id"]), str(error))
                    else:
                        finished.add(conversation)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(config.concurrency, len(conversations))):
                        group.create_task(work())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _converse(self, servers: AsyncEndpoints, model: str, conversation: _Conversation) -> None:
        """All turns of one conversation."""
        config = self.config
        while True:
            # The penalties are spelt out because a server may take other defaults from generation_config.json.
            sampling = {
                "max_tokens": config.max_new_tokens,
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": config.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "seed": config.seed * _SEED_STRIDE + conversation.seed,
                "stop_token_ids": list(self.stop_ids),
            }
            done = await servers.complete(model, conversation.ids, sampling)
            if not self._takes(conversation, done.token_ids, done.finish_reason):
                return


class _Finished:
    """Where finished conversations go."""

    def __init__(self, log: JsonlLog, progress: Progress, provenance: Mapping[str, Any]) -> None:
        self.log, self.progress, self.provenance = log, progress, provenance

    def add(self, conversation: _Conversation) -> None:
        """Write one line."""
        line = {"id": conversation.prompt["id"], "source": conversation.prompt["source"], "turns": conversation.turns}
        if conversation.ended_early:
            line["ended_early"] = conversation.ended_early
        self.log.append(line | {"provenance": self.provenance})
        self.progress.advance(1)


class _Budget:
    """Counts the conversations that are left out, and stops the stage past the budget."""

    def __init__(self, total: int, share: float, counts: Counter[str]) -> None:
        self.total, self.share, self.counts = total, share, counts

    def lose(self, kind: str, identity: str, reason: str) -> None:
        """Count one conversation. Raises RuntimeError past the budget."""
        self.counts[kind] += 1
        lost = sum(self.counts.values())
        if lost > self.share * self.total:
            raise RuntimeError(
                f"responses: {lost} of {self.total} conversations failed or were skipped ({dict(self.counts)}), more "
                f"than responses.failure_budget {self.share} allows; the last was {identity}: {reason}. What was "
                "answered is kept; mend the cause and run the same command again."
            )


def _chunks(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    iterator = iter(prompts)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def _summary(path: Path) -> dict[str, Any]:
    """Counts over a finished file, and a digest that does not depend on the order in which answers came."""
    ended_early: Counter[str] = Counter()
    turns, tokens, digests = 0, 0, []
    for line in read_jsonl_log(path):
        digests.append(fingerprint([line["id"], line["turns"]]))
        turns += len(line["turns"])
        tokens += sum(len(turn["response_ids"]) for turn in line["turns"])
        if "ended_early" in line:
            ended_early[line["ended_early"]] += 1
    return {
        "answered": len(digests),
        "turns": turns,
        "response_tokens": tokens,
        "ended_early": dict(sorted(ended_early.items())),
        "content": fingerprint(sorted(digests)),
    }


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
