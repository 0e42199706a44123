"""What runs inside vLLM, in every one of its processes: one self-contained file, put on vLLM's path by our launcher.

It imports torch and vLLM only, never draftsmith, as vLLM lives in an environment of its own. Written for vLLM 0.32.

    StatesConnector       hands out hidden states, but only of requests that ask for them (any device)
    CpuStatesConnector    the same without CUDA streams and pinned memory, which the stock connector needs
    register()            CPU only: corrects DFlash's context K-norm, and runs DSpark on the V1 model runner
"""

import fcntl
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

_STOCK = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it once in each process."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _correct_context_k_norm()
        _enable_dspark_on_v1()


def __getattr__(name: str) -> Any:
    """Connectors are made on first use: importing vLLM's connector while vLLM loads its plugins is a cycle."""
    if name in ("StatesConnector", "CpuStatesConnector"):
        return _connectors()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _connectors() -> dict[str, type]:
    import importlib

    stock = importlib.import_module(_STOCK)

    class StatesConnector(stock.ExampleHiddenStatesConnector):  # type: ignore[misc, name-defined]
        """The stock connector, for a server that also generates: it writes files only where a request wants them.

        A request says so with `kv_transfer_params: {"capture": true}` or `{"include_output_tokens": true}`. For the
        others the connector takes the way that it has for requests aborted before scheduling: no file, no lock.
        """

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            metadata = super().build_connector_meta(scheduler_output)
            for request in scheduler_output.scheduled_new_reqs:
                extra = (request.sampling_params and request.sampling_params.extra_args) or {}
                wishes = extra.get("kv_transfer_params") or {}
                if not (wishes.get("capture") or wishes.get("include_output_tokens")):
                    self._request_filenames.pop(request.req_id, None)
                    metadata.new_req_filenames.pop(request.req_id, None)
            return metadata

    class CpuStatesConnector(StatesConnector):
        """Copies the states in the worker's thread: on a CPU there is no stream to wait for and nothing to pin."""

        def _submit_async_write(self, pending: Any) -> None:
            if not self._is_tp_rank_zero:
                return
            assert self._kv_cache is not None and pending.req_id not in self._req_futures
            offsets = torch.arange(self._block_size)
            slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
            states_TLH = stock.extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
            tensors = {"hidden_states": states_TLH.contiguous().clone(), "token_ids": pending.token_ids.clone()}
            Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
            lock = self._lock_fds.pop(pending.req_id, None)
            if lock is None and self.use_lock:
                lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
                fcntl.flock(lock, fcntl.LOCK_EX)
            copied = _CopyDone()
            future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
            self._req_copy_events[pending.req_id] = copied
            self._req_futures[pending.req_id] = future
            future.add_done_callback(partial(self._on_write_done, pending.req_id))

    # Named after the module, as if they had been defined at its top.
    for connector in (StatesConnector, CpuStatesConnector):
        connector.__module__, connector.__qualname__ = __name__, connector.__name__
    return {"StatesConnector": StatesConnector, "CpuStatesConnector": CpuStatesConnector}


class _CopyDone:
    """Stands in for the CUDA event after which the copy of the states is complete."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _correct_context_k_norm() -> None:
    """DFlash norms the context keys of all draft layers in one call with a weight [layers, head_dim]; the CPU kernel
    reads row 0 for every layer (upstream vllm/model_executor/models/qwen3_dflash.py:639). Do it in torch."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_context_k(self: Any, keys_LTKD: torch.Tensor) -> torch.Tensor:
        wide = keys_LTKD.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        gain = self._k_norm_weights.float()[:, None, None, :]
        scaled: torch.Tensor = normed * gain
        return scaled.to(keys_LTKD.dtype).contiguous()

    DFlashQwen3Model._normalize_context_k = normalize_context_k


def _enable_dspark_on_v1() -> None:
    """DSpark exists upstream only for the V2 model runner, which needs Triton; Triton has no CPU backend."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    if getattr(CPUModelRunner, "_draftsmith_dspark", False):
        return  # vLLM may load plugins more than once in a process
    unsupported = VllmConfig._get_v1_model_runner_unsupported_features
    initialise = CPUModelRunner.__init__
    aux_layers = CPUModelRunner._get_eagle3_aux_layers_from_config

    def is_dspark(config: Any) -> bool:
        return config is not None and config.method == "dspark"

    def without_dspark(self: Any) -> list[str]:
        return [feature for feature in unsupported(self) if feature != "dspark speculative decoding"]

    def with_drafter(self: Any, vllm_config: Any, device: torch.device) -> None:
        initialise(self, vllm_config, device)
        if is_dspark(self.speculative_config):
            self.drafter = _dspark_proposer()(self.vllm_config, self.device, self)
            self.use_aux_hidden_state_outputs = True

    def with_dspark_layers(self: Any) -> Any:
        if is_dspark(self.speculative_config):
            return get_eagle3_aux_layers_from_config(self.speculative_config)
        return aux_layers(self)

    VllmConfig._get_v1_model_runner_unsupported_features = without_dspark
    CPUModelRunner.__init__ = with_drafter
    CPUModelRunner._get_eagle3_aux_layers_from_config = with_dspark_layers
    CPUModelRunner._draftsmith_dspark = True


@cache
def _dspark_proposer() -> type:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.dflash import DFlashProposer

    class DSparkProposer(DFlashProposer):  # type: ignore[misc]
        """DSpark's greedy drafting on DFlash's V1 proposer: one parallel pass, then the Markov head token by token.

        B sequences, T context tokens of this step, N draft tokens, Q queries per sequence

            queries   anchor  mask  mask  ..     the anchor is the bonus token
            drafts    d1      d2    d3    ..     from the anchor on, or (sample_from_anchor false) from the first mask
        """

        def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
            config = vllm_config.speculative_config
            config.method = "dflash"  # upstream's constructor asserts it
            try:
                super().__init__(vllm_config, device, runner)
            finally:
                config.method = "dspark"
            self.method = "dflash"  # propose() then hands over the auxiliary states
            draft_config = self.draft_model_config.hf_config
            self.samples_from_anchor = bool(getattr(draft_config, "sample_from_anchor", True))
            self.anchor_B = torch.empty(0, dtype=torch.int64)

        def set_inputs_first_pass(
            self,
            target_token_ids: torch.Tensor,
            next_token_ids: torch.Tensor,
            target_positions: torch.Tensor,
            target_hidden_states: torch.Tensor,
            token_indices_to_sample: torch.Tensor | None,
            cad: Any,
            num_rejected_tokens_gpu: torch.Tensor | None,
        ) -> tuple[int, torch.Tensor, Any]:
            num_sequences, num_context = cad.batch_size(), target_token_ids.shape[0]
            offset = 0 if self.samples_from_anchor else 1
            num_queries = self.num_speculative_tokens + offset
            self._dflash_num_context = num_context
            self._dflash_hidden_states = target_hidden_states
            self.anchor_B = next_token_ids[:num_sequences].long()
            starts = cad.query_start_loc[: num_sequences + 1].long()
            rejected_B = (
                torch.zeros(num_sequences, dtype=torch.int64)
                if num_rejected_tokens_gpu is None
                else num_rejected_tokens_gpu.long()
            )
            table = cad.block_table_tensor[:num_sequences].long()

            def slots_of(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
                block = (positions // self.block_size).clamp_max(table.shape[1] - 1)
                slots: torch.Tensor = table[rows, block] * self.block_size + positions % self.block_size
                return slots

            # Rows of rejected tokens are written too; the queries' own keys overwrite those slots afterwards.
            positions_T = target_positions[:num_context].long()
            sequence_T = torch.repeat_interleave(torch.arange(num_sequences), starts[1:] - starts[:-1])
            self._context_positions_buffer[:num_context] = positions_T
            self._context_slot_mapping_buffer[:num_context] = slots_of(sequence_T, positions_T)

            last_B = positions_T[starts[1:] - rejected_B - 1]
            positions_BQ = last_B[:, None] + 1 + torch.arange(num_queries)
            ids_BQ = torch.full_like(positions_BQ, self.parallel_drafting_token_id, dtype=self.input_ids.dtype)
            ids_BQ[:, 0] = self.anchor_B.to(ids_BQ.dtype)
            total = num_sequences * num_queries
            self.input_ids[:total] = ids_BQ.flatten()
            self.positions[:total] = positions_BQ.flatten().clamp_max(self.max_model_len - 1)
            rows_BQ = torch.arange(num_sequences)[:, None].expand(-1, num_queries)
            self._slot_mapping_buffer[:total] = slots_of(rows_BQ, positions_BQ).flatten()

            first_B = torch.arange(num_sequences) * num_queries + offset
            sampled = (first_B[:, None] + torch.arange(self.num_speculative_tokens)).flatten().to(torch.int32)
            query_starts = (torch.arange(num_sequences + 1) * num_queries).to(torch.int32)
            bound = cad.seq_lens_cpu_upper_bound
            metadata = CommonAttentionMetadata(
                query_start_loc=query_starts,
                query_start_loc_cpu=query_starts,
                seq_lens=cad.seq_lens[:num_sequences] - rejected_B.to(cad.seq_lens.dtype) + num_queries,
                seq_lens_cpu_upper_bound=None if bound is None else bound + num_queries,
                num_reqs=cad.num_reqs,
                num_actual_tokens=total,
                max_query_len=num_queries,
                max_seq_len=cad.max_seq_len + num_queries,
                block_table_tensor=cad.block_table_tensor,
                slot_mapping=self._slot_mapping_buffer[:total],
                causal=self.dflash_causal,
            )
            return total, sampled, metadata

        def _sample_draft_tokens(self, hidden_states: torch.Tensor, _sampling: Any) -> tuple[torch.Tensor, None]:
            model = self.model
            base_BNV = model.compute_draft_logits(hidden_states).view(
                self.anchor_B.shape[0], self.num_speculative_tokens, -1
            )
            previous_B, drafts = self.anchor_B, []
            for step in range(self.num_speculative_tokens):
                logits_BV = base_BNV[:, step] + model.markov_bias(model.markov_embed(previous_B))
                previous_B = model.map_draft_to_target(logits_BV.argmax(-1))
                drafts.append(previous_B)
            return torch.stack(drafts, dim=1).flatten(), None

    return DSparkProposer
