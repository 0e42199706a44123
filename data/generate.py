"""The in-process engine: many prompts through one transformers model, with a batch that is refilled as answers end.

B slots, V vocabulary. A slot holds one prompt's sequence; all slots decode one token per step. Slots whose answer has
ended take the next prompts, prefilled together. Token ids are what the model produced; the stop token is included.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.data.grouped_attention import use_grouped_attention
from draftsmith.data.kv_cache import RowCache, attention_masks, mask_BHQS
from draftsmith.data.logits import target_logits
from draftsmith.data.packed_linear import pack_linears

_MAX_PREFILL_TOKENS = 8192  # padding included, in one pass: bounds its memory
_PACKED_ROWS = 48  # measured: a good layout from 1 to 4096 rows
_TOP_CANDIDATES = 512  # of top-p, before the whole vocabulary is sorted
_SEED_STRIDE = 1_000_003  # a prime: runs with neighbouring seeds share no prompt's draws
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """One finished generation."""

    index: int  # of the prompt
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


class Engine:
    """A transformers causal LM prepared for decoding: its decoder, its lm_head, grouped attention, packed weights."""

    def __init__(self, model: Any) -> None:
        self.config = model.config.get_text_config()
        unknown = set(getattr(self.config, "layer_types", None) or ()) - _KNOWN_LAYERS
        if unknown or bool(getattr(self.config, "num_kv_shared_layers", 0)):
            raise ValueError(
                f"the engine `transformers` cannot run a target with {', '.join(sorted(unknown)) or 'shared kv layers'}"
                "; set responses.engine to vllm"
            )
        use_grouped_attention(model)
        pack_linears(model, _PACKED_ROWS)
        self.decoder = getattr(model, model.base_model_prefix)
        # transformers 5.24 renamed the argument.
        self._cache_name = "cache" if "cache" in signature(self.decoder.forward).parameters else "past_key_values"
        self.model, self.head = model, model.get_output_embeddings()
        # gpt-oss, whose sinks sdpa lacks; no mask means causal to sdpa, and to eager attention that nothing is hidden.
        self.needs_masks = model.config._attn_implementation == "eager"
        self.device = self.head.weight.device

    def cache(self, batch_size: int) -> RowCache:
        """An empty cache for this model."""
        return RowCache(int(self.config.num_hidden_layers), batch_size, self.device)

    def forward(self, ids_BQ: Tensor, cache: RowCache) -> Tensor:
        """Run the decoder over the next Q tokens of every sequence; post-norm states [B, Q, H]. Lengths stay."""
        positions_BQ, mask = cache.begin(ids_BQ.shape[1])
        if mask is None and self.needs_masks:
            mask = mask_BHQS(positions_BQ, cache.end)
        output = self.decoder(
            input_ids=ids_BQ,
            position_ids=positions_BQ,
            attention_mask=attention_masks(self.config, mask, positions_BQ, cache.end, self.head.weight.dtype),
            use_cache=True,
            **{self._cache_name: cache},
        )
        states: Tensor = output.last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Post-norm states [..., H] -> logits [..., V] in the model's dtype."""
        return target_logits(self.model, states)


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    batch_size: int,
    on_finished: Callable[[Answer], None],
    seeds: Sequence[int] | None = None,
) -> None:
    """Answer all prompts; `on_finished` is called as each ends, in no particular order.

    Prompts are taken longest first, so that a prefill's prompts are of similar length and the last slots to run are
    short. A prompt's draws depend on its own seed only (`seeds`, else its index), never on its neighbours.
    """
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ValueError(f"prompt {empty[0]} has no tokens; the target needs at least one to start from")
    waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index])))
    slots = _Slots(Engine(model), min(batch_size, len(prompts)), max_new_tokens, set(stop_ids), sampling, on_finished)
    while waiting or slots.running:
        # A prefill costs a pass of its own, so wait until a quarter of the slots is free.
        while waiting and 4 * len(slots.free) >= len(slots.answers) and slots.free:
            indices = _prefill_group(waiting, prompts, len(slots.free))
            slots.fill(indices, [prompts[i] for i in indices], [seeds[i] if seeds else i for i in indices])
        if not waiting:
            slots.shrink()
        if slots.running:
            slots.step()


def _prefill_group(waiting: deque[int], prompts: Sequence[Sequence[int]], num_free: int) -> list[int]:
    """Take the next prompts off the queue: as many as there are free slots, within a pass's memory."""
    longest = len(prompts[waiting[0]])
    count = min(num_free, len(waiting), max(1, _MAX_PREFILL_TOKENS // longest))
    return [waiting.popleft() for _ in range(count)]


@dataclass
class _Running:
    """An answer that is being generated."""

    index: int
    draws: torch.Generator
    token_ids: list[int] = field(default_factory=list)


class _Slots:
    """The batch: one row of the cache per slot, each with the answer that runs in it or None."""

    def __init__(
        self,
        engine: Engine,
        size: int,
        max_new_tokens: int,
        stop_ids: set[int],
        sampling: Sampling,
        on_finished: Callable[[Answer], None],
    ) -> None:
        self.engine, self.max_new_tokens, self.stop_ids = engine, max_new_tokens, stop_ids
        self.sampling, self.on_finished = sampling, on_finished
        self.cache = engine.cache(size)
        self.answers: list[_Running | None] = [None] * size
        self.tokens_B = torch.zeros(size, dtype=torch.int64, device=engine.device)  # each slot's last token

    @property
    def free(self) -> list[int]:
        """Slots without an answer."""
        return [slot for slot, answer in enumerate(self.answers) if answer is None]

    @property
    def running(self) -> list[int]:
        """Slots with an answer."""
        return [slot for slot, answer in enumerate(self.answers) if answer is not None]

    def fill(self, indices: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Prefill these prompts together, put them into free slots, and choose their first tokens."""
        slots = self.free[: len(indices)]
        for slot, index, seed in zip(slots, indices, seeds, strict=True):
            draws = torch.Generator().manual_seed(self.sampling.seed * _SEED_STRIDE + seed)
            self.answers[slot] = _Running(index, draws)
        device = self.engine.device
        lengths_R = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids_RT = torch.zeros(len(prompts), int(lengths_R.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_RT[row, : len(prompt)] = torch.tensor(list(prompt))
        fresh = self.engine.cache(len(prompts))
        states_RTH = self.engine.forward(ids_RT.to(device), fresh)  # causal: right padding is invisible to real tokens
        fresh.advance(lengths_R)
        self.cache.put(torch.tensor(slots, device=device), fresh)
        self._take(slots, states_RTH[torch.arange(len(prompts), device=device), lengths_R - 1])

    def step(self) -> None:
        """Decode one token in every running slot."""
        running = self.running
        states_BH = self.engine.forward(self.tokens_B[:, None], self.cache)[:, 0]
        self.cache.advance(1)
        if len(running) < len(self.answers):  # a free slot is run along, on one token and without logits
            self.cache.reset_rows(torch.tensor(self.free, device=self.engine.device))
            states_BH = states_BH[running]
        self._take(running, states_BH)

    def shrink(self) -> None:
        """Drop free slots when enough are free to repay copying the cache."""
        running = self.running
        if running and len(running) <= 0.75 * len(self.answers):
            self.cache.select(torch.tensor(running, device=self.engine.device))
            self.answers, self.tokens_B = [self.answers[slot] for slot in running], self.tokens_B[running]

    def _take(self, slots: Sequence[int], states_RH: Tensor) -> None:
        """Choose a token for each of these slots; end the answers that it ends."""
        answers = [answer for slot in slots if (answer := self.answers[slot]) is not None]
        chosen_R = _choose(self.engine.logits(states_RH), [answer.draws for answer in answers], self.sampling)
        self.tokens_B[list(slots)] = chosen_R
        for slot, answer, token in zip(slots, answers, chosen_R.tolist(), strict=True):
            answer.token_ids.append(token)
            if token in self.stop_ids or len(answer.token_ids) == self.max_new_tokens:
                self.answers[slot] = None
                reason: Literal["stop", "length"] = "stop" if token in self.stop_ids else "length"
                self.on_finished(Answer(answer.index, answer.token_ids, reason))


def _choose(logits_RV: Tensor, draws: Sequence[torch.Generator], sampling: Sampling) -> Tensor:
    """The next token of each row, by inversion of the cumulative distribution at the row's own draw."""
    if sampling.temperature == 0:
        return greedy(logits_RV)
    cumulative_RV = target_distribution(logits_RV, sampling).double().cumsum(-1)
    points_R = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in draws])
    # Scaled by the sum, which rounding keeps off 1; `right` never lands on a token of probability 0.
    points_R1 = points_R.to(logits_RV.device)[:, None] * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, points_R1, right=True)[:, 0].clamp_max(logits_RV.shape[-1] - 1)


def greedy(logits: Tensor) -> Tensor:
    """argmax over the last dimension, in two levels: torch's argmax is not vectorised on a CPU (9 times as slow)."""
    vocab_size = logits.shape[-1]
    block = 128
    if logits.device.type != "cpu" or vocab_size % block:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, block))  # type: ignore[no-untyped-call]
    best = blocks.amax(-1).float().argmax(-1)
    chosen = blocks.gather(-2, best[..., None, None].expand(*best.shape, 1, block))[..., 0, :]
    index: Tensor = best * block + chosen.float().argmax(-1)
    return index


def target_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from: temperature, then top-k, then top-p; fp32 [..., V]."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    return _nucleus(probs, sampling.top_p) if sampling.top_p < 1 else probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The most likely tokens that first reach `top_p` together, normalised. A full sort is slow and seldom needed."""
    ordered, order = probs.topk(min(_TOP_CANDIDATES, probs.shape[-1]), dim=-1)
    if bool((ordered.sum(-1) < top_p).any()):
        ordered, order = probs.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered / ordered.sum(-1, keepdim=True))
