"""A tiny byte-level tokenizer with the template that a test asks for, made without any download."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>", "<pad>")


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer(template) -> bytes are tokens, "ab" is one merge; as many tokenizers do, it puts <s> first."""

    def make(template: str | None = CHATML) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {symbol: number for number, symbol in enumerate([*SPECIAL, *alphabet, "ab"])}
        core = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
        )
        tokenizer.chat_template = template
        return tokenizer

    return make
