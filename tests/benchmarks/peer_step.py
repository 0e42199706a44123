"""One EAGLE-3 training step of speculators 0.9.0 on the shared workload. Runs in the peer's environment, prints JSON.

Its model class with its eager losses, its collator and its `shift_batch`, called as its trainer calls them. On a CPU
its fused losses (Triton) do not run, and its default attention (FlexAttention) has no backward; two others are left.
"""

import torch
from measurement import measure, parse_arguments
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from torch import Tensor
from transformers import LlamaConfig
from workload import (
    AUX_LAYERS,
    DOCUMENT_LENGTHS,
    HEAD_DIM,
    MLP_WIDTH,
    MODES,
    NORM_EPS,
    NUM_HEADS,
    NUM_KV_HEADS,
    ROPE_THETA,
    TTT_STEPS,
    VOCAB_SIZE,
    WIDTH,
    Mode,
    head_weights,
    loss_mask_of,
    read_workload,
)


def build_model(mode: Mode, tensors: dict[str, Tensor], attention: str) -> Eagle3DraftModel:
    """The peer's model with the workload's weights; plain EAGLE-3, none of the optional norms."""
    layer = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position_embeddings=8192,
    )
    layer._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=mode.draft_vocab_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(AUX_LAYERS),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=TTT_STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    head, kept_ids = tensors["embedding_VH"], tensors["kept_ids"]
    if mode.is_trimmed:
        t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, kept_ids, True)
        model.load_vocab_mappings(t2d, kept_ids - torch.arange(kept_ids.shape[0]))
        head = head[kept_ids]
    frozen = {
        "embed_tokens.weight": tensors["embedding_VH"],
        "lm_head.weight": head,
        "verifier_lm_head.weight": head,
        "verifier_norm.weight": torch.ones(WIDTH),
    }
    missing = model.load_state_dict(frozen | head_weights(tensors), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"d2t", "t2d"}, missing
    return model.train()


def build_batch(mode: Mode, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The documents through the peer's own shift and collation."""
    samples, start = [], 0
    for length in DOCUMENT_LENGTHS:
        rows = slice(start, start + length)
        samples.append(
            {
                "hidden_states": tensors["aux_TF"][rows],
                "input_ids": tensors["input_ids_T"][rows],
                "verifier_last_hidden_states": tensors["last_TH"][rows],
                "loss_mask": loss_mask_of(length),
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
        start += length
    collate = CollateFn(start, WIDTH, len(AUX_LAYERS), dtype=mode.dtype, preprocess=shift_batch)
    return {name: value for name, value in collate(samples).items() if isinstance(value, Tensor)}


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(("--attention", ("eager", "sdpa")))
    mode, tensors = MODES[arguments.mode], read_workload(arguments.workload)
    model, batch = build_model(mode, tensors, arguments.attention), build_batch(mode, tensors)
    del tensors
    losses = resolve_loss_config("kl_div", "eager")
    last_metrics: dict[str, Tensor] = {}

    def forward() -> tuple[Tensor, list[Tensor]]:
        _, loss, metrics = model(**batch, ttt_steps=TTT_STEPS, ttt_step_loss_decay=1.0, loss_config=losses)
        last_metrics.update(metrics)
        return loss, [metrics[f"loss_{k}_sum"] for k in range(TTT_STEPS)]

    def supervised_rows() -> list[int]:
        return [int(last_metrics[f"full_acc_{k}_total"]) for k in range(TTT_STEPS)]

    measure(model, forward, arguments, supervised_rows, attention=arguments.attention)


if __name__ == "__main__":
    main()
