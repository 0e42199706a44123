"""One EAGLE-3 training step of draftsmith on the shared workload: the head's own `loss`, as training calls it.

Prints one JSON line. The head is plain EAGLE-3 without the optional norms, as the peer's is here.
"""

import torch
from measurement import measure, parse_arguments
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from workload import (
    AUX_LAYERS,
    DOCUMENT_LENGTHS,
    HEAD_DIM,
    MLP_WIDTH,
    MODES,
    NORM_EPS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    ROPE_THETA,
    TTT_STEPS,
    VOCAB_SIZE,
    WIDTH,
    Mode,
    head_weights,
    loss_mask_of,
    read_workload,
)

from draftsmith.models import eagle3
from draftsmith.models.batch import Batch
from draftsmith.models.target import FrozenTarget


def build_head(mode: Mode, tensors: dict[str, Tensor]) -> eagle3.Head:
    """The head with the workload's weights; the frozen target in the mode's dtype, as training loads it."""
    target_config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    embedding_VH = tensors["embedding_VH"].to(mode.dtype)
    norm = LlamaRMSNorm(WIDTH, eps=NORM_EPS).requires_grad_(False)
    target = FrozenTarget(target_config, embedding_VH, embedding_VH, norm, embedding_scale=1.0, logit_softcap=None)
    config = eagle3.Config(
        aux_layers=AUX_LAYERS,
        draft_vocab_size=mode.draft_vocab_size if mode.is_trimmed else None,
        ttt_steps=TTT_STEPS,
        fc_norm=False,
        norm_output=False,
        loss="kl",
    )
    head = eagle3.Head(config, target, tensors["kept_ids"] if mode.is_trimmed else None)
    missing = head.load_state_dict(head_weights(tensors), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"d2t", "t2d"}, missing
    return head.train()


def build_batch(mode: Mode, tensors: dict[str, Tensor]) -> Batch:
    """The documents as one packed row."""
    lengths = torch.tensor(DOCUMENT_LENGTHS)
    return Batch(
        input_ids_BT=tensors["input_ids_T"][None],
        loss_mask_BT=torch.cat([loss_mask_of(length) for length in DOCUMENT_LENGTHS])[None],
        document_ids_BT=torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None],
        position_ids_BT=torch.cat([torch.arange(length) for length in DOCUMENT_LENGTHS])[None],
        aux_BTF=tensors["aux_TF"][None].to(mode.dtype),
        last_BTH=tensors["last_TH"][None].to(mode.dtype),
    )


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    mode, tensors = MODES[arguments.mode], read_workload(arguments.workload)
    head, batch = build_head(mode, tensors), build_batch(mode, tensors)
    del tensors

    def forward() -> tuple[Tensor, list[Tensor]]:
        counts = head.counts(batch)
        terms, _ = head(batch)
        means = [terms[name].sum / counts[name] for name in counts]
        weights = [terms[name].weight for name in counts]
        return sum(weight * mean for weight, mean in zip(weights, means, strict=True)), [
            mean.detach() for mean in means
        ]

    def supervised_rows() -> list[int]:
        return [int(count) for count in head.counts(batch).values()]

    measure(head, forward, arguments, supervised_rows)


if __name__ == "__main__":
    main()
