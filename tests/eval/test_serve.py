"""vLLM's counters are read right; the real server is in test_run.py."""

from draftsmith.eval.serve import DraftCounters, parse_counters

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 12.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="tiny"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="2"} 0.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 22.0
"""


def test_counters_are_parsed_and_subtracted() -> None:
    found = parse_counters(METRICS)
    assert found == DraftCounters(12, 36, 9, (6, 3, 0), 22)
    assert found - DraftCounters(2, 6, 1, (1, 0, 0), 4) == DraftCounters(10, 30, 8, (5, 3, 0), 18)
    assert found - DraftCounters(0, 0, 0, (), 0) == found, "positions appear with the first draft"


def test_engines_of_one_server_are_summed() -> None:
    assert parse_counters(METRICS + METRICS.replace('engine="0"', 'engine="1"')).per_position == (12, 6, 0)


def test_a_server_without_speculation_has_none() -> None:
    assert parse_counters('vllm:generation_tokens_total{engine="0",model_name="x"} 5.0\n') == DraftCounters(
        0, 0, 0, (), 5
    )


def test_unrelated_and_missing_counters_change_nothing() -> None:
    text = METRICS.replace(METRICS.splitlines()[6] + "\n", "") + 'vllm:prompt_tokens_total{engine="0"} NaN\n'
    assert parse_counters(text) == DraftCounters(12, 36, 9, (0, 3, 0), 22), "position 0 was never accepted"
