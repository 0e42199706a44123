"""TransformersSource: the states are the residual stream at the asked layers, whatever the model and the batch."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget
from draftsmith.hidden_states.record import CaptureSpec
from draftsmith.hidden_states.transformers_source import TransformersSource, capture_states, text_decoder

LAYERS = (0, 2, 4)
LAST = 5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_states_are_what_enters_the_layers_and_what_leaves_the_last_one_before_the_norm(
    kind: str, make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    target = make_target(kind)
    source = TransformersSource(target, LAYERS, "float32")
    model = source.model
    for row, record in zip(rows, source.capture(rows), strict=True):
        with torch.no_grad():
            output = model(input_ids=torch.tensor([row.input_ids]), output_hidden_states=True)
        for index, layer in enumerate(LAYERS):
            torch.testing.assert_close(record.states_TLH[:, index], output.hidden_states[layer][0])
        normed = model.model.norm(record.states_TLH[:, -1])
        torch.testing.assert_close(normed, output.hidden_states[LAST][0])
        assert record.token_ids_T.tolist() == list(row.input_ids)


def test_layers_are_ascending_without_repeats_and_end_with_the_last_state(target: ResolvedTarget) -> None:
    source = TransformersSource(target, (3, 1, 3), "bfloat16")
    assert source.spec.layers == (1, 3, LAST)
    assert (source.spec.hidden_size, source.spec.dtype, source.spec.target_dtype) == (128, "bfloat16", "float32")


def test_a_layer_that_does_not_exist_is_refused_by_number(target: ResolvedTarget) -> None:
    with pytest.raises(ValueError, match="layer 6 does not exist: input-of ids of this target are 0 to 5"):
        TransformersSource(target, (6,), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_rows", [1, 4])
def test_a_record_is_the_same_bit_for_bit_whatever_rows_are_captured_with_it(
    dtype: str, batch_rows: int, make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    source = TransformersSource(make_target("llama", dtype), LAYERS, "float32", batch_rows=batch_rows)
    together = {record.row_id: record for record in source.capture(rows)}
    for row in rows:
        (alone,) = source.capture([row])
        assert torch.equal(alone.states_TLH, together[row.row_id].states_TLH)
    for record in source.capture(reversed(rows)):
        assert torch.equal(record.states_TLH, together[record.row_id].states_TLH)


def test_batches_of_rows_of_mixed_length_come_back_in_order_and_equal_rows_run_alone(
    target: ResolvedTarget, make_rows: Callable[..., list[Row]]
) -> None:
    rows = make_rows([5, 200, 130, 7, 300, 128, 129, 1, 64] * 8)  # more than one look-ahead window
    alone = TransformersSource(target, LAYERS, "float32")
    batched = TransformersSource(target, LAYERS, "float32", batch_rows=3)
    for row, one, other in zip(rows, alone.capture(rows), batched.capture(rows), strict=True):
        assert one.row_id == other.row_id == row.row_id
        torch.testing.assert_close(one.states_TLH, other.states_TLH, rtol=1e-4, atol=1e-4)


def test_the_lm_head_is_not_run_and_no_hook_is_left(target: ResolvedTarget, rows: list[Row]) -> None:
    source = TransformersSource(target, LAYERS, "float32")
    source.model.lm_head.register_forward_hook(lambda *_: pytest.fail("the lm_head ran"))
    list(source.capture(rows))
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in source.decoder.layers)


def test_records_can_be_trained_on_and_do_not_hold_their_batch(target: ResolvedTarget, rows: list[Row]) -> None:
    record = next(TransformersSource(target, LAYERS, "float32", batch_rows=4).capture(rows))
    weight = torch.nn.Linear(128, 1)
    weight(record.states_TLH).sum().backward()  # an inference-mode tensor would be refused here
    assert weight.weight.grad is not None
    assert record.states_TLH.untyped_storage().nbytes() == record.num_bytes()


def test_gpt_oss_like_decoders_with_experts_and_sliding_windows_are_captured_too(
    make_target: Callable[..., ResolvedTarget], rows: list[Row]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_target("gpt_oss").path).eval()
    decoder, config = text_decoder(model)
    spec = CaptureSpec((0, 2, LAST), "float32", config.hidden_size, "w", "t", "c", "float32")
    ids_BT = torch.tensor([rows[1].input_ids])
    states_BTLH, _ = capture_states(decoder, ids_BT, spec)
    with torch.no_grad():
        output = model(input_ids=ids_BT, output_hidden_states=True)
    torch.testing.assert_close(states_BTLH[:, :, 1], output.hidden_states[2])
    torch.testing.assert_close(model.model.norm(states_BTLH[:, :, 2]), output.hidden_states[LAST])
