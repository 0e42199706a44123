"""TrainConfig: the `train` section of a recipe. It imports no torch, so that a recipe is checked in an instant."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator


class TrainConfig(BaseModel, extra="forbid", frozen=True):
    """How a head is trained, and how long: the first reached of `epochs`, `max_steps` and `max_minutes` ends it."""

    epochs: int | None = Field(default=None, ge=1, description="Passes over the rows.")
    max_steps: int | None = Field(default=None, ge=1, description="Optimizer steps.")
    max_minutes: float | None = Field(
        default=None,
        gt=0,
        description="Wall-clock budget over all resumes; the last probe and save come on top. The schedule follows "
        "whichever of steps and time is further, so the learning rate decays to its end also when time runs out. "
        "A budget makes a run depend on the machine's speed: it is not reproducible bit for bit.",
    )

    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="Exported head, folder or Hugging Face id, whose weights training starts from; settings of the "
        "section `model` that are left at their default are those of that head.",
    )

    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: matrices by Muon (match_rms_adamw), embeddings, lm_head and vectors by AdamW.",
    )
    learning_rate: float = Field(gt=0, description="Peak learning rate, of AdamW and of Muon alike.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's; 0.95 as in the EAGLE-3 paper.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled; on matrices only, never on norms and biases."
    )
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon's (Nesterov); 0.95 as in its reference.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="The decay after warm-up, to 0."
    )
    warmup_ratio: float = Field(default=0.02, ge=0, lt=1, description="Share of the run with a linearly rising rate.")
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm; null: no clipping.")

    tokens_per_batch: int = Field(ge=8, description="Length of a packed row: one row per process and micro step.")
    gradient_accumulation: int = Field(default=1, ge=1, description="Micro steps per optimizer step.")
    precision: Literal["bf16", "fp32"] = Field(
        default="bf16", description="bf16: bf16 compute over fp32 master weights."
    )
    seed: int = Field(default=0, ge=0, description="Order of the rows, and random draws inside a head.")

    checkpoint_every_steps: int | None = Field(default=None, ge=1, description="null: by minutes only.")
    checkpoint_every_minutes: float | None = Field(default=10.0, gt=0, description="null: by steps only.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Older ones are deleted.")
    probe_every_steps: int | None = Field(default=None, ge=1, description="Held-out acceptance; null: only at the end.")

    max_nonfinite_steps: int = Field(
        default=10, ge=0, description="Skipped steps (NaN, Inf) after which the run stops."
    )
    stall_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="Time without a step after which a multi-process run stops, naming the stalled rank.",
    )
    prefetch_windows: int = Field(default=2, ge=1, description="Optimizer steps whose batches are read ahead.")

    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(default=(), description="Besides log.jsonl.")
    wandb_mode: Literal["offline", "online"] = Field(
        default="offline", description="`wandb sync` uploads an offline run."
    )
    log_every_s: float = Field(default=5.0, ge=0, description="Shortest time between two progress lines.")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.epochs is None and self.max_steps is None and self.max_minutes is None:
            raise ValueError(
                "train.epochs, train.max_steps and train.max_minutes are all unset; give at least one of them"
            )
        return self
