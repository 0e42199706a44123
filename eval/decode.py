"""The speculative runtime: prompts -> answers in rounds of draft, one target pass, verify and roll back.

    B running sequences, Q = 1 bonus + N drafts, V target vocabulary, F = auxiliary layers * H, H target width,
    E features of keys and values

        committed     x0 x1 x2 | x3           lengths_B = 3: the target's cache holds x0..x2; x3 is the bonus
        target reads             x3 d1 d2 d3  writes 4 cache slots, gives 4 rows of states and logits
        accepted = 1             x3 d1        lengths_B += 2; the slots of d2, d3 are overwritten next round
        context rows             g3 g4        the states of x3, d1, whose next tokens are d1, x5 (x5: the new bonus)

Plain decoding is the same loop without drafts, in the same process and on the same cache: the baseline of a speed-up.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from draftsmith.data.generate import Engine, Sampling, target_distribution
from draftsmith.data.kv_cache import RowCache
from draftsmith.eval.drafters import Drafter
from draftsmith.eval.verify import Verdict, confident_length, verify_greedy, verify_sampled
from draftsmith.hidden_states.transformers_source import text_decoder
from draftsmith.models.head import Context, DraftState

# Keeps the random stream of the drafts apart from the verifier's; any odd number does.
_DRAFT_STREAM = 0x9E3779B1


@dataclass(frozen=True)
class Decoding:
    """How one batch is decoded. `num_speculative_tokens` 0 is plain decoding."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    num_speculative_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    is_draft_greedy: bool = False
    min_confidence: float | None = None


@dataclass
class Decoded:
    """One answer, and per round how many tokens were drafted, accepted by the verifier, and emitted.

    A round's `accepted` is the verifier's word, as vLLM counts it: the last round may have accepted more than was
    emitted, behind a stop token or the limit. `emitted` counts the token after the accepted prefix too.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length", ""] = ""
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    def take(self, new_ids: list[int], settings: Decoding) -> int:
        """Append up to the limit and up to the first stop token, which belongs to the answer; how many were taken."""
        new_ids = new_ids[: settings.max_new_tokens - len(self.token_ids)]
        for count, token in enumerate(new_ids, 1):
            if token in settings.stop_ids:
                self.finish_reason, new_ids = "stop", new_ids[:count]
                break
        self.token_ids += new_ids
        if not self.finish_reason and len(self.token_ids) == settings.max_new_tokens:
            self.finish_reason = "length"
        return len(new_ids)


@dataclass(frozen=True)
class DecodedBatch:
    """The answers of one batch in the order of its prompts, and the time that they took."""

    answers: list[Decoded]
    prefill_s: float
    seconds: float  # prefill included


class RunningTarget:
    """The target, prepared for decoding, with hooks that keep the states a head needs. Leave the context to unhook."""

    def __init__(self, model: Any, aux_layers: Sequence[int] = (), kv_layers: Sequence[int] = ()) -> None:
        self.engine = Engine(model)
        self.aux_layers, self.kv_layers = tuple(aux_layers), tuple(kv_layers)
        self._found: dict[int, Tensor] = {}
        layers = list(text_decoder(model)[0].layers)
        self._last = len(layers)
        self._hooks = [
            layers[j].register_forward_pre_hook(self._keep_input(j), with_kwargs=True)
            for j in self.aux_layers
            if j < self._last
        ]
        if self.aux_layers:
            self._hooks.append(layers[-1].register_forward_hook(self._keep_output))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def captured(self) -> tuple[Tensor, Tensor]:
        """Of the last pass: auxiliary states [B, Q, F] and the last pre-norm states [B, Q, H]."""
        return torch.cat([self._found[j] for j in self.aux_layers], dim=-1), self._found[self._last]

    def _keep_input(self, layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._found[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _keep_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._found[self._last] = output[0] if isinstance(output, tuple) else output


@torch.inference_mode()
def decode(
    target: RunningTarget, head: Drafter | None, prompts: Sequence[Sequence[int]], settings: Decoding
) -> DecodedBatch:
    """Answer one batch of prompts. With a head, `settings.num_speculative_tokens` tokens are drafted every round."""
    assert (head is None) == (settings.num_speculative_tokens == 0), "a head drafts, plain decoding has none"
    if min(map(len, prompts)) == 0:
        raise ValueError("a prompt has no tokens; the target needs at least one to start from")
    started = time.perf_counter()
    answers = [Decoded() for _ in prompts]
    batch = _Batch(target, head, settings)
    batch.prefill(prompts, answers)
    prefilled = time.perf_counter()
    while batch.running:
        batch.round()
    return DecodedBatch(answers, prefilled - started, time.perf_counter() - started)


class _Batch:
    """The running sequences of one batch: cache, bonus tokens, draft state and what the head has not seen yet."""

    def __init__(self, target: RunningTarget, head: Drafter | None, settings: Decoding) -> None:
        self.target, self.head, self.settings = target, head, settings
        self.running: list[Decoded] = []
        device = target.engine.device
        seed = settings.sampling.seed
        self.verify_draws = torch.Generator(device).manual_seed(seed)
        self.draft_draws = torch.Generator(device).manual_seed(seed ^ _DRAFT_STREAM)
        self.cache: RowCache
        self.state: DraftState
        self.context: Context
        self.bonus_B: Tensor

    def prefill(self, prompts: Sequence[Sequence[int]], answers: list[Decoded]) -> None:
        """Run the prompts and sample every first token."""
        engine, device = self.target.engine, self.target.engine.device
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        rows_B = torch.arange(len(prompts), device=device)
        ids_BT = torch.zeros(len(prompts), int(lengths_B.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, : len(prompt)] = torch.tensor(list(prompt))
        ids_BT = ids_BT.to(device)
        self.cache = engine.cache(len(prompts))
        states_BTH = engine.forward(ids_BT, self.cache)  # causal: right padding is invisible to real tokens
        verdict = self._verify(engine.logits(states_BTH[rows_B, lengths_B - 1])[:, None], ids_BT[:, :0], None, None)
        self.bonus_B = verdict.next_BQ[:, 0]
        self.cache.lengths_B = lengths_B
        self.running = answers
        if self.head is not None:
            self.state = self.head.start(len(prompts), device)
            next_BT = torch.cat([ids_BT[:, 1:], ids_BT[:, :1]], dim=1)
            next_BT[rows_B, lengths_B - 1] = self.bonus_B
            self._remember_rows(next_BT, torch.zeros_like(lengths_B), lengths_B, ids_BT)
        for answer, token in zip(answers, self.bonus_B.tolist(), strict=True):
            answer.take([token], self.settings)
        self._drop_finished()

    def round(self) -> None:
        """Draft, run the target once, verify, emit, and roll back what was not accepted."""
        drafted_BN, draft_BNV, num_drafted_B = self._draft()
        ids_BQ = torch.cat([self.bonus_B[:, None], drafted_BN], dim=1)
        states_BQH = self.target.engine.forward(ids_BQ, self.cache)
        verdict = self._verify(self.target.engine.logits(states_BQH), drafted_BN, draft_BNV, num_drafted_B)
        accepted, next_ids = verdict.accepted_B.tolist(), verdict.next_BQ.tolist()
        lengths = [drafted_BN.shape[1]] * len(accepted) if num_drafted_B is None else num_drafted_B.tolist()
        for row, answer in enumerate(self.running):
            emitted = answer.take(next_ids[row][: accepted[row] + 1], self.settings)
            if lengths[row]:  # a pass without drafts is no round
                answer.drafted.append(lengths[row])
                answer.accepted.append(accepted[row])
                answer.emitted.append(emitted)
        self._commit(verdict, ids_BQ[:, : max(accepted) + 1])
        self._drop_finished()

    def _draft(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens [B, N], their distributions, and ragged lengths where a draft ends early."""
        if self.head is None:
            return self.bonus_B.new_empty(len(self.running), 0), None, None
        settings = self.settings
        temperature = 0.0 if settings.is_draft_greedy else settings.sampling.temperature
        draft = self.head.draft(
            self.state, self.context, settings.num_speculative_tokens, temperature, self.draft_draws
        )
        num_drafted_B = draft.num_tokens_B
        if settings.min_confidence is not None:
            if draft.confidence_BN is None:
                raise ValueError("eval.min_confidence is set, but this head gives no confidences; remove it")
            confident_B = confident_length(draft.confidence_BN, settings.min_confidence)
            num_drafted_B = confident_B if num_drafted_B is None else torch.minimum(num_drafted_B, confident_B)
        if num_drafted_B is None:
            return draft.tokens_BN, draft.probs_BNV, None
        longest = int(num_drafted_B.max())
        probs_BNV = None if draft.probs_BNV is None else draft.probs_BNV[:, :longest]
        return draft.tokens_BN[:, :longest], probs_BNV, num_drafted_B

    def _verify(
        self, logits_BQV: Tensor, drafted_BN: Tensor, draft_BNV: Tensor | None, num_drafted_B: Tensor | None
    ) -> Verdict:
        sampling = self.settings.sampling
        if sampling.temperature == 0:
            return verify_greedy(logits_BQV, drafted_BN, num_drafted_B)
        probs_BQV = target_distribution(logits_BQV, sampling)
        return verify_sampled(probs_BQV, drafted_BN, draft_BNV, num_drafted_B, self.verify_draws)

    def _commit(self, verdict: Verdict, ids_BR: Tensor) -> None:
        """Keep the accepted slots, and gather the newly committed rows for the head."""
        if self.head is not None:
            next_BR = verdict.next_BQ[:, : ids_BR.shape[1]]
            self._remember_rows(next_BR, self.cache.lengths_B, verdict.accepted_B + 1, ids_BR)
        self.bonus_B = verdict.next_BQ.gather(1, verdict.accepted_B[:, None])[:, 0]
        self.cache.lengths_B = self.cache.lengths_B + (verdict.accepted_B + 1)

    def _remember_rows(self, next_BR: Tensor, start_B: Tensor, num_rows_B: Tensor, ids_BR: Tensor) -> None:
        """The context of the next draft, with the states of the last pass, if the target keeps any."""
        num_rows = ids_BR.shape[1]
        if self.target.aux_layers:
            aux_BRF, last_BRH = (states[:, :num_rows] for states in self.target.captured())
        else:
            aux_BRF = last_BRH = torch.empty(*ids_BR.shape, 0, device=ids_BR.device)
        kv_BRE = None
        if self.target.kv_layers:  # the pass has just written them into its cache
            positions_BR = start_B[:, None] + torch.arange(num_rows, device=ids_BR.device)
            kv_BRE = self.cache.rows(self.target.kv_layers, positions_BR)
        self.context = Context(next_BR, aux_BRF, last_BRH, start_B, num_rows_B, ids_BR, kv_BRE)

    def _drop_finished(self) -> None:
        kept = [row for row, answer in enumerate(self.running) if not answer.finish_reason]
        if len(kept) == len(self.running):
            return
        self.running = [self.running[row] for row in kept]
        if not kept:
            return
        rows_B = torch.tensor(kept, device=self.bonus_B.device)
        self.cache.select(rows_B)
        self.bonus_B = self.bonus_B[rows_B]
        if self.head is not None:
            self.state.select(rows_B)
            chosen = {name: value[rows_B] for name, value in vars(self.context).items() if value is not None}
            self.context = replace(self.context, **chosen)
