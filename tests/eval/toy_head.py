"""A draft head that needs no training: a table of the next token's distribution given the last token, and its target.

B sequences, N drafted tokens, V vocabulary
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models.head import Context, Draft, Needs


@dataclass
class ToyState:
    """Checks that the runtime hands over every position exactly once, in order, and the target's states with it."""

    lengths_B: Tensor
    tokens: list[list[int]] = field(default_factory=list)

    def select(self, rows_B: Tensor) -> None:
        self.lengths_B = self.lengths_B[rows_B]
        self.tokens = [self.tokens[row] for row in rows_B.tolist()]


class BigramHead(nn.Module):
    """Drafts from table_VV; `confidence_V`, if given, is that of a token by the token before it."""

    def __init__(self, table_VV: Tensor, confidence_V: Tensor | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(table_VV, requires_grad=False)
        self.confidence_V = confidence_V
        self.needs = Needs((1,))

    def start(self, batch_size: int, device: torch.device) -> ToyState:
        return ToyState(torch.zeros(batch_size, dtype=torch.int64), [[] for _ in range(batch_size)])

    def draft(
        self,
        state: ToyState,
        context: Context,
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Draft:
        assert torch.equal(state.lengths_B, context.start_B) and (context.num_rows_B >= 1).all()
        state.lengths_B = context.start_B + context.num_rows_B
        rows_B = torch.arange(len(state.tokens))
        for row, (ids, count) in enumerate(zip(context.next_ids_BR.tolist(), context.num_rows_B.tolist(), strict=True)):
            state.tokens[row] += ids[:count]
        token_B = context.next_ids_BR[rows_B, context.num_rows_B - 1]
        tokens, probs, confidences = [], [], []
        for _ in range(num_tokens):
            if self.confidence_V is not None:
                confidences.append(self.confidence_V[token_B])
            row_BV = self.table[token_B]
            if temperature > 0:
                row_BV = row_BV ** (1 / temperature)
                row_BV = row_BV / row_BV.sum(-1, keepdim=True)
                token_B = torch.multinomial(row_BV, 1, generator=generator)[:, 0]
                probs.append(row_BV)
            else:
                token_B = row_BV.argmax(-1)
            tokens.append(token_B)
        return Draft(
            torch.stack(tokens, 1),
            torch.stack(probs, 1) if probs else None,
            torch.stack(confidences, 1) if confidences else None,
        )


class RecitingHead(BigramHead):
    """Drafts one known continuation of one prompt, right to the end of it and token 0 behind."""

    def __init__(self, prompt: list[int], continuation: list[int], vocab_size: int) -> None:
        super().__init__(torch.eye(vocab_size))
        self.prompt, self.continuation = prompt, continuation

    def draft(
        self,
        state: ToyState,
        context: Context,
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Draft:
        super().draft(state, context, num_tokens, 0.0, None)
        done = int(state.lengths_B[0]) - len(self.prompt) + 1
        return Draft(torch.tensor([(self.continuation[done:] + [0] * num_tokens)[:num_tokens]]), None)


def small_model(vocab_size: int = 6, seed: int = 0, **config: object) -> LlamaForCausalLM:
    """A random two-layer fp32 target."""
    torch.manual_seed(seed)
    sizes: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | config)).eval().requires_grad_(False)


def greedy_table(model: LlamaForCausalLM, share_right: float, seed: int = 0) -> Tensor:
    """A table that holds the target's own greedy next token of every one-token context, or for some a random one."""
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        best_V = model(torch.arange(vocab)[:, None]).logits[:, -1].argmax(-1)
    is_wrong = torch.rand(vocab, generator=generator) > share_right
    best_V = torch.where(is_wrong, torch.randint(0, vocab, (vocab,), generator=generator), best_V)
    return 0.01 * torch.rand(vocab, vocab, generator=generator) + nn.functional.one_hot(best_V, vocab)


def plain_greedy(model: LlamaForCausalLM, prompt: list[int], max_new_tokens: int, stop_ids: set[int]) -> list[int]:
    """Token by token, without a cache: the reference."""
    ids = list(prompt)
    while len(ids) - len(prompt) < max_new_tokens:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]
