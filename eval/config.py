"""EvalConfig: the `eval` section of a recipe. It imports no torch, so that a recipe is checked in an instant."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from draftsmith.eval.ngram import NgramConfig
from draftsmith.eval.suffix import SuffixConfig
from draftsmith.hidden_states.vllm_server import ServerConfig

EngineName = Literal["runtime", "replay", "vllm"]
BaselineName = Literal["ngram", "suffix"]


class EvalConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """What is measured: every proposal length on every workload, at every temperature and batch size."""

    workloads: dict[str, Path] = Field(
        default_factory=dict, description="name -> JSONL of prompts; empty = the held-out prompts, by their source"
    )
    limit: int | None = Field(20, ge=1, description="first so many prompts of every workload; null = all")
    num_speculative_tokens: tuple[int, ...] = Field((1, 2, 3, 5), min_length=1, description="proposal lengths N")
    max_new_tokens: int = Field(160, ge=1, description="of every answer")
    temperatures: tuple[float, ...] = Field((0.0,), min_length=1, description="0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="of the target, at temperature > 0")
    top_k: int = Field(0, ge=0, description="of the target, at temperature > 0; 0 = all")
    draft_sampling: Literal["probabilistic", "greedy"] = Field(
        "probabilistic", description="at temperature > 0: draw drafts from the head's distribution, or its best token"
    )
    min_confidence: float | None = Field(
        None, gt=0, lt=1, description="a draft ends before its first token below this; for heads that give confidences"
    )
    schedule: Literal["fixed", "throughput"] = Field(
        "fixed",
        description="of drafts in the runtime. fixed: a pass verifies whole drafts; throughput: by calibrated "
        "confidences and this machine's measured speed, as many tokens as are expected to pay",
    )
    batch_sizes: tuple[int, ...] = Field((1,), min_length=1, description="sequences decoded at once")
    engines: tuple[EngineName, ...] = Field(
        ("runtime", "replay"), min_length=1, description="replay: held-out rows from stored states, greedy only"
    )
    baselines: tuple[BaselineName, ...] = Field(
        ("ngram", "suffix"),
        description="drafters without training that the runtime measures beside the head, at the longest N only: their "
        "drafts cost nothing and end where the match ends. Each adds one run to the 1 + len(num_speculative_tokens)",
    )
    ngram: NgramConfig = NgramConfig()
    suffix: SuffixConfig = SuffixConfig()
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of target and head; float32 makes greedy output exactly the target's own"
    )
    device: str = Field("auto", description="of the runtime and of replay; auto = GPU if there is one")
    seed: int = Field(0, ge=0, lt=2**32, description="of sampling and of the bootstrap")
    bootstrap_samples: int = Field(2000, ge=100, description="resamples of prompts behind every 95 % interval")
    server: ServerConfig = Field(ServerConfig(), description="engine vllm: the servers that are launched")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("num_speculative_tokens", "batch_sizes"):
            values = getattr(self, name)
            if min(values) < 1 or list(values) != sorted(set(values)):
                raise ValueError(f"eval.{name} is {list(values)}; give ascending, different numbers of at least 1")
        if min(self.temperatures) < 0 or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(
                f"eval.temperatures is {list(self.temperatures)}; give different numbers of at least 0 (0 = greedy)"
            )
        for field in ("engines", "baselines"):
            names = getattr(self, field)
            if len(set(names)) != len(names):
                raise ValueError(f"eval.{field} is {list(names)}; name each once")
        if self.schedule == "throughput" and self.min_confidence is not None:
            raise ValueError("eval.schedule: throughput decides itself where drafts end; remove eval.min_confidence")
        if self.schedule == "throughput" and "runtime" not in self.engines:
            raise ValueError(f"eval.schedule is for the runtime, eval.engines is {list(self.engines)}; add it there")
        if self.engines != ("replay",) and max(self.num_speculative_tokens) > 31:
            # data/generate.py attends with one kernel up to 32 queries: the bonus and 31 drafts.
            raise ValueError(f"eval.num_speculative_tokens is {list(self.num_speculative_tokens)}; give at most 31")
        if max(self.temperatures) == 0 and (self.top_p != 1.0 or self.top_k != 0):
            raise ValueError("eval.top_p and eval.top_k do nothing at temperature 0; remove them or add a temperature")
        return self

    @property
    def longest(self) -> int:
        """The largest proposal length."""
        return self.num_speculative_tokens[-1]
