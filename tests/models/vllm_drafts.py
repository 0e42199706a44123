"""Runs in vLLM's own environment: loads exported heads, records every proposal of greedy speculative decoding.

usage: python vllm_drafts.py JOBS.json RESULTS.json

One process, one engine after another: an engine starts in seconds here, a process takes half a minute.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main(jobs_path: str, results_path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    proposals: list[dict[str, Any]] = []
    original = SpecDecodeBaseProposer.propose

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, *args, **kwargs)
        proposals.append({"bonus": kwargs["next_token_ids"].tolist(), "drafts": drafts.tolist()})
        return drafts

    SpecDecodeBaseProposer.propose = recording
    jobs = json.loads(Path(jobs_path).read_text())
    results = {}
    for job in jobs:
        llm = LLM(
            **job["engine"],
            dtype="float32",
            max_model_len=256,
            max_num_seqs=2,
            max_num_batched_tokens=256,
            enforce_eager=True,
            enable_prefix_caching=False,
            seed=0,
        )
        sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
        found = []
        for ids in job["prompts"]:
            proposals.clear()
            outputs = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
            rounds = [{"bonus": each["bonus"][0], "drafts": each["drafts"][0]} for each in proposals]
            found.append({"generated": list(outputs[0].outputs[0].token_ids), "rounds": rounds})
        results[job["name"]] = found
        Path(results_path).write_text(json.dumps(results))
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
