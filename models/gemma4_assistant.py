"""Gemma 4 assistant: a small separately packaged drafter that reads the target's own keys and values.

No paper; the definition is transformers' Gemma4AssistantForCausalLM and vLLM's Gemma4MTP. Its layers have queries only:
a layer attends to what the target's last layer of the same type (sliding or full) that has keys and values of its own
holds in its cache. Published drafters come with every Gemma 4; they are fine-tuned through `train.init_from`.

    B rows, T tokens in a packed row, N = B*T, R query rows, H target width, Hd draft width, V vocabulary
    E key/value features, S cache slots, h query heads, g key/value heads, D head width

        tokens      t0  t1  t2  t3      y_i = final norm of last_BTH[:, i], the target's state that has seen t0..ti
        step 0  row i reads the embedding of t[i+1] and y_i, predicts t[i+2]; its teacher is last[i+1]
        step k  row i reads the embedding of t[i+1+k] and post_projection(its output of step k-1), predicts t[i+2+k]
        every step of row i attends to the target's keys 0..i of its document and rotates its queries by one position:
                    i (position: vllm) or i+1 (position: transformers); the keys carry the target's own positions

The servers disagree about that position (vLLM keeps the state's, transformers takes the bonus token's), and the keys'
rotation makes it matter: train for the one that will serve. A full layer sees keys 0..i, a sliding one the last W of
them, as in vLLM; transformers' mask, right for one query at a time, would show all keys to each of many queries.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from draftsmith.models.batch import Batch
from draftsmith.models.head import Context, Draft, Layout, Needs, Term
from draftsmith.models.ops.distillation import Lens, distil, greedy_tokens
from draftsmith.models.ops.row_attention import row_attention
from draftsmith.models.ops.segments import Segment
from draftsmith.models.parts.document_rows import rows_of, supervised_segments, whole_segments, without_last
from draftsmith.models.parts.key_value_rows import KeyValueRows
from draftsmith.models.parts.layers import Angles, RMSNorm
from draftsmith.models.parts.losses import LossName
from draftsmith.models.parts.rope import Rope, rotate
from draftsmith.models.target import FrozenTarget, softcap

SERVED_AS = {"method": "mtp"}  # vLLM's word for every drafter that recycles the target's last state

LayerType = Literal["sliding_attention", "full_attention"]
Attend = Callable[[LayerType, Tensor], Tensor]  # queries [..., h, D] -> what they attend to, of the same shape

_HEAD_ROWS = 128  # rows whose dense logits exist at once where centroids choose among them
_ACTIVATION = "gelu_pytorch_tanh"
_FIELDS_OF_TARGET = (
    "rms_norm_eps",
    "max_position_embeddings",
    "sliding_window",
    "rope_parameters",
    "attention_k_eq_v",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class Config(BaseModel, extra="forbid", frozen=True):
    """Every knob of the assistant. A published drafter's sizes come with it (train.init_from)."""

    layer_types: tuple[LayerType, ...] = Field(
        ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention"),
        description="which of the target's keys each draft layer reads; both types, the last one full",
    )
    hidden_size: int | None = Field(None, ge=1, description="Hd; default a quarter of the target's width")
    intermediate_size: int | None = Field(None, ge=1, description="default 8 Hd")
    num_attention_heads: int | None = Field(None, ge=1, description="query heads; default the target's")
    num_centroids: int | None = Field(None, ge=1, description="clusters of the vocabulary that drafting chooses from")
    centroid_top_k: int = Field(32, ge=1, description="clusters that drafting looks into; needs num_centroids")
    softcap_logits: bool = Field(False, description="draft logits pass through the target's softcap")
    position: Literal["vllm", "transformers"] = Field("vllm", description="whose rotation of the queries")
    train_lm_head: bool = Field(True, description="the draft's own lm_head; false: it stays as it is")
    ttt_steps: int = Field(3, ge=1, le=16, description="steps of the training unroll")
    step_decay: float = Field(1.0, gt=0, le=1, description="weight of step k is step_decay**k")
    loss: LossName = "kl"

    def model_post_init(self, _: Any) -> None:
        if len(set(self.layer_types)) != 2 or self.layer_types[-1] != "full_attention":
            raise ValueError(
                f"model.layer_types is {self.layer_types}; servers want both types, and full_attention as the last"
            )
        if self.num_centroids is not None and self.centroid_top_k > self.num_centroids:
            raise ValueError(
                f"model.centroid_top_k is {self.centroid_top_k}, of {self.num_centroids} centroids; lower it"
            )


@dataclass(frozen=True)
class _Source:
    """A target layer whose keys and values are read."""

    layer: int
    layer_type: LayerType
    num_kv_heads: int
    head_dim: int
    window: int | None

    @property
    def width(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


def needs(config: Config, target_config: Any) -> Needs:
    """The last state, whose id is the number of layers, and the keys and values of one layer of each type.

    Raises ValueError for targets other than Gemma 4.
    """
    sources = _sources(target_config)
    return Needs(
        aux_layers=(int(target_config.num_hidden_layers),),
        kv_layers=tuple(source.layer for source in sources),
        kv_width=sum(source.width for source in sources),
    )


def _sources(target_config: Any) -> list[_Source]:
    """Per layer type the last layer with keys and values of its own, in ascending order."""
    if not str(target_config.model_type).startswith("gemma4"):
        raise ValueError(
            f"model.method reads the keys and values of a Gemma 4 target, and this one is {target_config.model_type}; "
            "choose another method"
        )
    types = list(target_config.layer_types)
    own = types[: len(types) - target_config.num_kv_shared_layers]
    sources = []
    for index in sorted(len(own) - 1 - own[::-1].index(layer_type) for layer_type in set(types)):
        sizes = target_config.per_layer_config[index]
        window = int(target_config.sliding_window) if own[index] == "sliding_attention" else None
        sources.append(_Source(index, own[index], int(sizes.num_key_value_heads), int(sizes.head_dim), window))
    return sources


class Head(nn.Module):
    """See the module docstring; the methods are those of `models.head.Head`."""

    def __init__(self, config: Config, target: FrozenTarget, kept_ids: Tensor | None = None) -> None:
        super().__init__()
        assert kept_ids is None, "the draft scores the whole vocabulary"
        self.config, self.target, self.needs = config, target, needs(config, target.config)
        self.sources = {source.layer_type: source for source in _sources(target.config)}
        width, eps = config.hidden_size or max(target.hidden_size // 4, 1), target.config.rms_norm_eps
        self.hidden_size, self.intermediate_size = width, config.intermediate_size or 8 * width
        self.num_heads = config.num_attention_heads or int(target.config.num_attention_heads)
        for source in self.sources.values():
            if self.num_heads % source.num_kv_heads:
                raise ValueError(
                    f"model.num_attention_heads is {self.num_heads}; it must be a multiple of the "
                    f"{source.num_kv_heads} key/value heads of the target's layer {source.layer}"
                )
        self.pre_projection = nn.Linear(2 * target.hidden_size, width, bias=False)
        self.layers = nn.ModuleList(
            _Layer(width, self.intermediate_size, self.num_heads, self.sources[each], eps)
            for each in config.layer_types
        )
        self.norm = RMSNorm(width, eps)
        self.post_projection = nn.Linear(width, target.hidden_size, bias=False)
        self.lm_head = nn.Linear(width, target.vocab_size, bias=False)
        if config.num_centroids is not None:
            self.masked_embedding = _Centroids(config.num_centroids, config.centroid_top_k, width, target.vocab_size)
        self.ropes = {
            name: Rope.of_target(
                SimpleNamespace(
                    rope_parameters=target.config.rope_parameters[name],
                    max_position_embeddings=target.config.max_position_embeddings,
                ),
                source.head_dim,
                target.embedding_VH.device,
            )
            for name, source in self.sources.items()
        }
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=0.02)  # Gemma4TextConfig's initializer_range
        self.lm_head.requires_grad_(config.train_lm_head)
        self.post_projection.requires_grad_(config.ttt_steps > 1)  # one step never uses it

    # ---------------------------------------------------------------- training

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Supervised rows of each step."""
        segments, device = supervised_segments(batch), batch.input_ids_BT.device
        rows = [sum(max(s.num_rows - k, 0) for s in segments) for k in range(self.config.ttt_steps)]
        return {f"step{k}": torch.tensor(float(count), device=device) for k, count in enumerate(rows)}

    def loss(self, batch: Batch) -> tuple[dict[str, Term], dict[str, tuple[Tensor, Tensor]]]:
        """The named loss of every step against the target's distribution, and top-1 agreement per step."""
        segments = supervised_segments(batch)
        rows_R = rows_of(segments, batch.input_ids_BT.device)
        tokens_N, num_rows = batch.input_ids_BT.reshape(-1), rows_R.shape[0]
        students, weights = [], []
        # A batch without supervised rows still runs every module, so that ranks that shard parameters stay in step.
        for k, (kept_R, output_RH) in enumerate(
            self._unroll(
                batch, segments, lambda k, rows, _: tokens_N[rows + 1 + k], self.config.ttt_steps, shrinks=True
            )
        ):
            # Row i of step k and row i+k of step 0 have one teacher: shift by k inside the segment.
            empty = torch.zeros(num_rows, output_RH.shape[1], dtype=output_RH.dtype, device=output_RH.device)
            students.append(empty.index_copy(0, kept_R + k, output_RH))
            weights.append(torch.zeros(num_rows, device=output_RH.device).index_fill(0, kept_R + k, 1.0))
        weight_KR = torch.stack(weights)
        teacher_RH = self.target.normalise(batch.last_BTH.flatten(0, 1)[rows_R + 1])
        result = distil(self.config.loss, students, weight_KR, teacher_RH, self._lens())
        count_K = weight_KR.sum(-1)
        terms = {f"step{k}": Term(result.loss_K[k], self.config.step_decay**k) for k in range(len(students))}
        metrics = {f"top1_step{k}": (result.top1_K[k], count_K[k]) for k in range(len(students))}
        return terms, metrics

    def forward(self, batch: Batch) -> tuple[dict[str, Term], dict[str, tuple[Tensor, Tensor]]]:
        """`loss`, through the module's call, so that DeepSpeed's and DDP's hooks see it."""
        return self.loss(batch)

    @torch.no_grad()
    def propose(self, batch: Batch, num_tokens: int) -> Tensor:
        """int64 [B, T, N]: what a greedy round would draft at every row; see the protocol."""
        segments = whole_segments(batch)
        rows_R, tokens_N = rows_of(segments, batch.input_ids_BT.device), batch.input_ids_BT.reshape(-1)
        drafted: list[Tensor] = []

        def next_token(step: int, rows: Tensor, output_RH: Tensor | None) -> Tensor:
            return tokens_N[rows + 1] if output_RH is None else drafted[-1]

        for _, output_RH in self._unroll(batch, segments, next_token, num_tokens, shrinks=False):
            drafted.append(self._greedy(output_RH))
        drafted_NK = tokens_N.new_zeros(tokens_N.shape[0], num_tokens)
        drafted_NK[rows_R] = torch.stack(drafted, dim=1)
        return drafted_NK.view(*batch.input_ids_BT.shape, num_tokens)

    def _unroll(
        self,
        batch: Batch,
        segments: list[Segment],
        token_at: Callable[[int, Tensor, Tensor | None], Tensor],
        num_steps: int,
        shrinks: bool,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (rows kept of step 0, final-norm outputs) of each step; `token_at(step, rows, last outputs)` feeds it.

        `shrinks`: step k keeps only rows whose k-th forced token is supervised; else every row lives through all steps.
        """
        assert batch.kv_BTE is not None, "the batch holds no keys and values"
        device, kv_NE = batch.input_ids_BT.device, batch.kv_BTE.flatten(0, 1)
        rows_R = rows_of(segments, device)
        kept_R = torch.arange(rows_R.shape[0], device=device)
        hidden_RH = self.target.normalise(batch.last_BTH.flatten(0, 1)[rows_R])
        output_RH: Tensor | None = None
        for k in range(num_steps):
            if output_RH is not None:
                if shrinks:
                    alive = without_last(segments, device)
                    segments = [Segment(s.start, s.first, max(s.last - 1, s.first)) for s in segments]
                    kept_R, rows_R, output_RH = kept_R[alive], rows_R[alive], output_RH[alive]
                hidden_RH = self.post_projection(output_RH)
            embedded = self.target.embed(token_at(k, rows_R, output_RH))
            angles = self._angles(batch.position_ids_BT.reshape(-1)[rows_R])

            def attend(name: LayerType, q_RhD: Tensor, segments: list[Segment] = segments) -> Tensor:
                return row_attention(q_RhD, *self._keys_values(name, kv_NE), segments, self.sources[name].window)

            output_RH = self._output(embedded, hidden_RH, angles, attend)
            yield kept_R, output_RH

    # ---------------------------------------------------------------- drafting

    def start(self, batch_size: int, device: torch.device) -> KeyValueRows:
        """No keys and values yet."""
        return KeyValueRows(batch_size, self.needs.kv_width, device)

    @torch.no_grad()
    def draft(
        self, state: Any, context: Context, num_tokens: int, temperature: float, generator: torch.Generator | None
    ) -> Draft:
        """Take in the committed rows' keys and values; then a chain of single rows, all at one position."""
        assert context.kv_BRE is not None, "the runtime gave no keys and values"
        last_B = context.num_rows_B - 1
        batch_B = torch.arange(last_B.shape[0], device=last_B.device)
        rows_R = torch.arange(context.next_ids_BR.shape[1], device=last_B.device)
        kv_BSE = state.write(context.kv_BRE, context.start_B[:, None] + rows_R)
        position_B = context.start_B + last_B
        distance_BS = position_B[:, None] - torch.arange(kv_BSE.shape[1], device=last_B.device)

        def attend(name: LayerType, q_BhD: Tensor) -> Tensor:
            keys, values = (x.transpose(1, 2).to(q_BhD.dtype) for x in self._keys_values(name, kv_BSE))
            window = self.sources[name].window
            is_visible_BS = (distance_BS >= 0) & (True if window is None else distance_BS < window)
            mask = is_visible_BS[:, None, None]
            out = F.scaled_dot_product_attention(q_BhD[:, :, None], keys, values, mask, scale=1.0, enable_gqa=True)
            return out[:, :, 0]

        angles = self._angles(position_B)
        token_B, hidden_BH = (
            context.next_ids_BR[batch_B, last_B],
            self.target.normalise(context.last_BRH[batch_B, last_B]),
        )
        tokens, probs = [], []
        for _ in range(num_tokens):
            output_BH = self._output(self.target.embed(token_B), hidden_BH, angles, attend)
            token_B, prob_BV = self._sample(output_BH, temperature, generator)
            hidden_BH = self.post_projection(output_BH)
            tokens.append(token_B)
            probs.append(prob_BV)
        probs_BNV = torch.stack([p for p in probs if p is not None], dim=1) if temperature > 0 else None
        return Draft(torch.stack(tokens, dim=1), probs_BNV)

    def _sample(
        self, output_BH: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        if temperature <= 0:
            return self._greedy(output_BH), None
        logits_BV = self._logits(output_BH)
        if self.config.softcap_logits:
            logits_BV = softcap(logits_BV, self.target.logit_softcap)
        probs_BV = torch.softmax(logits_BV / temperature, dim=-1)
        return torch.multinomial(probs_BV, 1, generator=generator)[:, 0], probs_BV

    # ---------------------------------------------------------------- shared

    def _output(
        self, embedded_RH: Tensor, hidden_RH: Tensor, angles: dict[LayerType, Angles], attend: Attend
    ) -> Tensor:
        """One step of rows [R, H] -> final-norm outputs [R, Hd]."""
        dtype = self.pre_projection.weight.dtype
        state = self.pre_projection(torch.cat([embedded_RH.to(dtype), hidden_RH.to(dtype)], dim=-1))
        for layer in cast(list[_Layer], list(self.layers)):
            state = layer(state, angles[layer.layer_type], attend)
        return self.norm(state)  # type: ignore[no-any-return]

    def _angles(self, positions_R: Tensor) -> dict[LayerType, Angles]:
        """Of rows whose states are at these positions."""
        positions_R = positions_R + (self.config.position == "transformers")
        return {name: rope.angles(positions_R) for name, rope in self.ropes.items()}

    def _keys_values(self, name: LayerType, kv_XE: Tensor) -> tuple[Tensor, Tensor]:
        """Features [..., E] -> the keys and the values [..., g, D] of the layer of this type."""
        source, first = self.sources[name], 0
        for other in self.sources.values():
            first += other.width if other.layer < source.layer else 0
        both = kv_XE[..., first : first + source.width]
        both = both.reshape(*both.shape[:-1], 2, source.num_kv_heads, source.head_dim)
        return both[..., 0, :, :], both[..., 1, :, :]

    def _logits(self, output_RH: Tensor) -> Tensor:
        """fp32 [R, V]; -inf outside the clusters that the centroids choose."""
        logits_RV = F.linear(output_RH.to(self.lm_head.weight.dtype), self.lm_head.weight).float()
        if self.config.num_centroids is None:
            return logits_RV
        return logits_RV.masked_fill(~self.masked_embedding.chosen(output_RH), float("-inf"))

    def _greedy(self, output_RH: Tensor) -> Tensor:
        if self.config.num_centroids is None:
            return greedy_tokens(output_RH, self.lm_head.weight)
        return torch.cat([self._logits(rows).argmax(-1) for rows in torch.split(output_RH, _HEAD_ROWS)])

    def _lens(self) -> Lens:
        weight, target_VH = self.lm_head.weight, self.target.head_VH
        autocasts = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocasts else weight.dtype
        return Lens(weight, target_VH, None, self.target.logit_softcap, dtype, self.config.softcap_logits)

    def export_map(self) -> dict[str, Layout]:
        """The packaged layout, which transformers' Gemma4AssistantForCausalLM and vLLM's Gemma4MTP read."""
        names = {self._packaged_name(name): name for name in self.state_dict()}
        cap = self.target.logit_softcap if self.config.softcap_logits else None
        fields = {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": self.target.hidden_size,
            "use_ordered_embeddings": self.config.num_centroids is not None,
            "num_centroids": self.config.num_centroids or 2048,  # unused without; transformers' default
            "centroid_intermediate_top_k": self.config.centroid_top_k,
            "tie_word_embeddings": True,
            "text_config": {**self._text_fields(), "final_logit_softcapping": cap},
            "draft_position": self.config.position,  # ours: servers do not ask
        }
        return {"plain": Layout(fields, names, {}, {})}

    @staticmethod
    def _packaged_name(name: str) -> str:
        if name == "lm_head.weight":
            return "model.embed_tokens.weight"  # tied in the package, which reads its embeddings from the target
        return f"model.{name}" if name.startswith(("layers.", "norm.")) else name

    def _text_fields(self) -> dict[str, Any]:
        """Of the draft's layers, in the words of transformers' Gemma4TextConfig."""
        sliding, full = self.sources["sliding_attention"], self.sources["full_attention"]
        full_sizes = {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
        types = list(self.config.layer_types)
        return {name: getattr(self.target.config, name) for name in _FIELDS_OF_TARGET} | {
            "model_type": "gemma4_text",
            "vocab_size": self.target.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "hidden_activation": _ACTIVATION,
            "num_hidden_layers": len(types),
            "num_kv_shared_layers": len(types),
            "layer_types": types,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": sliding.num_kv_heads,
            "head_dim": sliding.head_dim,
            "per_layer_config": {str(i): full_sizes for i, each in enumerate(types) if each == "full_attention"},
            "global_head_dim": full.head_dim,  # the same in the words of readers before per_layer_config
            "num_global_key_value_heads": full.num_kv_heads,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "tie_word_embeddings": True,
        }


def read_export(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], target: FrozenTarget) -> Config:
    """The Config of a packaged drafter. Raises ValueError for one that is not this target's, or is built otherwise."""
    from transformers import Gemma4TextConfig

    if "text_config" not in fields or "backbone_hidden_size" not in fields:
        raise ValueError("config.json: text_config and backbone_hidden_size are missing; is it a packaged drafter?")
    text = Gemma4TextConfig(**fields["text_config"])
    sources = {source.layer_type: source for source in _sources(target.config)}
    of_target = {name: getattr(target.config, name) for name in ("sliding_window", "rms_norm_eps", "rope_parameters")}
    expected = {**of_target, "hidden_activation": _ACTIVATION, "attention_bias": False, "vocab_size": target.vocab_size}
    differing = [f"{name} {getattr(text, name)!r}" for name, x in expected.items() if getattr(text, name) != x]
    if fields["backbone_hidden_size"] != target.hidden_size:
        differing.append(f"backbone_hidden_size {fields['backbone_hidden_size']!r}")
    for index, name in enumerate(text.layer_types):
        sizes, source = text.per_layer_config[index], sources[name]
        if (sizes.num_key_value_heads, sizes.head_dim) != (source.num_kv_heads, source.head_dim):
            differing.append(f"key/value heads of layer {index}: {sizes.num_key_value_heads} of {sizes.head_dim}")
    if text.final_logit_softcapping not in (None, target.logit_softcap):
        differing.append(f"final_logit_softcapping {text.final_logit_softcapping}")
    if differing:
        raise ValueError(f"config.json does not go with this target, or with these heads: {'; '.join(differing)}")
    given = {"position": fields["draft_position"]} if "draft_position" in fields else {}
    return Config(
        layer_types=tuple(text.layer_types),
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_centroids=fields["num_centroids"] if fields.get("use_ordered_embeddings") else None,
        centroid_top_k=fields.get("centroid_intermediate_top_k", 32),
        softcap_logits=text.final_logit_softcapping is not None,
        **given,
    )


class _Layer(nn.Module):
    """A Gemma 4 decoder layer with queries only; parameter names are the packaged ones."""

    def __init__(self, width: int, inner: int, num_heads: int, source: _Source, eps: float) -> None:
        super().__init__()
        self.layer_type, self.head_dim = source.layer_type, source.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(width, num_heads * source.head_dim, bias=False),
                "q_norm": RMSNorm(source.head_dim, eps),
                "o_proj": nn.Linear(num_heads * source.head_dim, width, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, inner, bias=False),
                "up_proj": nn.Linear(width, inner, bias=False),
                "down_proj": nn.Linear(inner, width, bias=False),
            }
        )
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, state: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """[..., Hd] -> [..., Hd]."""
        q = self.self_attn["q_proj"](self.input_layernorm(state))
        q = q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
        q = rotate(self.self_attn["q_norm"](q).to(q.dtype), angles)
        mixed = self.self_attn["o_proj"](attend(self.layer_type, q).flatten(-2))
        state = state + self.post_attention_layernorm(mixed)
        x = self.pre_feedforward_layernorm(state)
        x = F.gelu(self.mlp["gate_proj"](x), approximate="tanh") * self.mlp["up_proj"](x)
        state = state + self.post_feedforward_layernorm(self.mlp["down_proj"](x))
        return state * self.layer_scalar  # type: ignore[operator]


class _Centroids(nn.Module):
    """The packaged choice of clusters, kept as it is: a top-k has no gradient, and training uses the whole lm_head."""

    def __init__(self, num_centroids: int, top_k: int, width: int, vocab_size: int) -> None:
        super().__init__()
        if vocab_size % num_centroids:
            raise ValueError(f"model.num_centroids is {num_centroids}; it must divide the {vocab_size} tokens")
        self.top_k, self.cluster_size = top_k, vocab_size // num_centroids
        self.centroids = nn.Module()
        self.centroids.register_buffer("weight", torch.randn(num_centroids, width) * 0.02)
        self.register_buffer("token_ordering", torch.arange(vocab_size))  # cluster after cluster: its token ids

    def chosen(self, output_RH: Tensor) -> Tensor:
        """bool [R, V]: the tokens of the top_k clusters."""
        weight, ordering = cast(Tensor, self.centroids.weight), cast(Tensor, self.token_ordering)
        clusters_RC = F.linear(output_RH.to(weight.dtype), weight).topk(self.top_k, dim=-1).indices
        ids_RI = ordering.view(-1, self.cluster_size)[clusters_RC].flatten(1)
        return torch.zeros(*ids_RI.shape[:1], ordering.shape[0], dtype=torch.bool, device=ids_RI.device).scatter_(
            1, ids_RI, True
        )
