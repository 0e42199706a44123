"""The in-process engine: many prompts through one transformers model, with a batch that is refilled as answers end.

B slots, V vocabulary. A slot holds one prompt's sequence; all slots decode one token per step. Slots whose answer has
ended take the next prompts, prefilled together. Token ids are what the model produced; the stop token is included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.data.grouped_attention import use_grouped_attention
from draftsmith.data.kv_cache import RowCache, attention_masks
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


@dataclass
class _Slot:
    index: int
    draws: torch.Generator
    limit: int
    token_ids: list[int] = field(default_factory=list)


class Engine:
    """A transformers causal LM prepared for decoding: its decoder, its lm_head, grouped attention, packed weights."""

    def __init__(self, model: Any) -> None:
        self.config = model.config.get_text_config()
        unknown = set(getattr(self.config, "layer_types", None) or ()) - _KNOWN_LAYERS
        if unknown or getattr(self.config, "num_kv_shared_layers", 0):
            raise ValueError(
                f"the engine `transformers` cannot run a target with {', '.join(sorted(unknown)) or 'shared kv layers'}"
                "; set responses.engine to vllm"
            )
        use_grouped_attention(model)
        pack_linears(model, _PACKED_ROWS)
        self.decoder = getattr(model, model.base_model_prefix)
        # transformers 5.24 renamed the argument.
        self._cache_name = "cache" if "cache" in signature(self.decoder.forward).parameters else "past_key_values"
        self.head = model.get_output_embeddings()
        self.softcap = getattr(self.config, "final_logit_softcapping", None)
        self.device = self.head.weight.device

    def cache(self, batch_size: int) -> RowCache:
        """An empty cache for this model."""
        return RowCache(int(self.config.num_hidden_layers), batch_size, self.device)

    def forward(self, ids_BQ: Tensor, cache: RowCache) -> Tensor:
        """Run the decoder over the next Q tokens of every sequence; post-norm states [B, Q, H]. Lengths stay as they are."""
        positions_BQ, mask = cache.begin(ids_BQ.shape[1])
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
        logits: Tensor = self.head(states)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


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
    engine = Engine(model)
    waiting = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    cache = engine.cache(min(batch_size, len(prompts)))
    slots: list[_Slot | None] = [None] * min(batch_size, len(prompts))
    tokens_B = torch.zeros(len(slots), dtype=torch.int64, device=engine.device)
    stops = set(stop_ids)

    def take(rows: Sequence[int], logits_RV: Tensor) -> None:
        """Choose a token for each of these slots; end the answers that it ends."""
        chosen_R = _choose(logits_RV, [slots[row] for row in rows], sampling)
        tokens_B[torch.tensor(rows, device=engine.device)] = chosen_R
        for row, token in zip(rows, chosen_R.tolist(), strict=True):
            slot = slots[row]
            assert slot is not None
            slot.token_ids.append(token)
            if token in stops or len(slot.token_ids) == slot.limit:
                on_finished(Answer(slot.index, slot.token_ids, "stop" if token in stops else "length"))
                slots[row] = None

    while True:
        free = [row for row, slot in enumerate(slots) if slot is None]
        # A prefill costs a pass of its own: wait until a quarter of the slots is free, unless nothing else is running.
        while waiting and (len(free) >= max(1, len(slots) // 4)):
            rows = free[: min(len(free), len(waiting))]
            indices = [waiting.pop() for _ in rows]
            for row, index in zip(rows, indices, strict=True):
                seed = sampling.seed * 1_000_003 + (seeds[index] if seeds else index)
                slots[row] = _Slot(index, torch.Generator().manual_seed(seed), max_new_tokens)
            take(rows, _prefill(engine, cache, rows, [prompts[index] for index in indices]))
            free = [row for row, slot in enumerate(slots) if slot is None]
        running = [row for row, slot in enumerate(slots) if slot is not None]
        if not running:
            return
        if not waiting and len(running) <= 0.75 * len(slots):
            cache.select(torch.tensor(running, device=engine.device))
            slots, tokens_B = [slots[row] for row in running], tokens_B[running]
            running = list(range(len(slots)))
        states_BH = engine.forward(tokens_B[:, None], cache)[:, 0]
        cache.lengths_B += 1
        if len(running) < len(slots):
            cache.lengths_B[[row for row, slot in enumerate(slots) if slot is None]] = 0
            states_BH = states_BH[running]
        take(running, engine.logits(states_BH))


def _prefill(engine: Engine, cache: RowCache, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
    """Run new prompts and put them into their slots; logits [R, V] after each prompt's last token."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=engine.device)
    ids_RT = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=engine.device)
    for row, prompt in enumerate(prompts):
        ids_RT[row, : len(prompt)] = torch.tensor(list(prompt))
    fresh = engine.cache(len(prompts))
    states_RTH = engine.forward(ids_RT, fresh)  # right padding is invisible to real tokens: attention is causal
    fresh.lengths_B = lengths
    cache.put(torch.tensor(rows, device=engine.device), fresh)
    return engine.logits(states_RTH[torch.arange(len(prompts), device=engine.device), lengths - 1])


def _choose(logits_RV: Tensor, slots: Sequence[_Slot | None], sampling: Sampling) -> Tensor:
    if sampling.temperature == 0:
        return greedy(logits_RV)
    probs_RV = target_distribution(logits_RV, sampling)
    draws = [torch.rand((), generator=slot.draws) for slot in slots if slot is not None]
    points_R1 = torch.stack(draws).to(probs_RV.device)[:, None]
    cumulative_RV = probs_RV.double().cumsum(-1)
    return torch.searchsorted(cumulative_RV, points_R1.double() * cumulative_RV[:, -1:], right=True)[:, 0].clamp_max(
        probs_RV.shape[-1] - 1
    )


def greedy(logits: Tensor) -> Tensor:
    """argmax over the last dimension, in two levels: torch's argmax is not vectorised on a CPU (9 times as slow)."""
    vocab_size = logits.shape[-1]
    block = 128
    if logits.device.type != "cpu" or vocab_size % block:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, block))  # type: ignore[no-untyped-call]
    best = blocks.amax(-1).float().argmax(-1)
    chosen = blocks.gather(-2, best[..., None, None].expand(*best.shape, 1, block))[..., 0, :]
    return best * block + chosen.float().argmax(-1)


def target_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from: temperature, then top-k, then top-p; fp32 [..., V]."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        is_beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(is_beyond).scatter(-1, order, is_beyond), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs
