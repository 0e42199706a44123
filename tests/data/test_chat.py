"""The prompt's ids are what the target's own template renders, as a server would give them to the target."""

from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.data.chat import TemplateRefusal, answer_text, prompt_ids

MakeTokenizer = Callable[..., Any]
USER = {"role": "user", "content": "cab"}
TOOLS_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}{% endfor %}"
)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **more: Any) -> str:
    return str(tokenizer.decode(prompt_ids(tokenizer, messages, **more), skip_special_tokens=False))


def test_the_render_is_the_templates_own_with_no_system_prompt_added(make_tokenizer: MakeTokenizer) -> None:
    text = rendered(make_tokenizer(), [USER])
    assert text == "<|im_start|>user\ncab<|im_end|>\n<|im_start|>assistant\n"


def test_there_is_exactly_one_bos_when_template_and_tokenizer_both_have_one(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert tokenizer("cab").input_ids[0] == tokenizer.bos_token_id  # the tokenizer would add a second one
    ids = prompt_ids(tokenizer, [USER])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_an_empty_think_block_of_the_generation_prompt_is_part_of_the_prompt(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    assert rendered(tokenizer, [USER]) == "cab>"
    assert rendered(tokenizer, [USER], template_args={"enable_thinking": False}) == "cab><think></think>"


def test_template_arguments_that_draftsmith_sets_are_refused_by_name(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match=r"responses\.chat_template_args\.tokenize is False"):
        prompt_ids(make_tokenizer(), [USER], template_args={"tokenize": False})


def test_unknown_roles_are_context_where_the_template_takes_them(make_tokenizer: MakeTokenizer) -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "observation", "content": "y"}, USER]
    text = rendered(make_tokenizer(), messages)
    assert text.startswith("<|im_start|>developer\nx<|im_end|>\n<|im_start|>observation\ny<|im_end|>\n")


def test_a_role_that_the_template_refuses_is_a_refusal_that_says_why(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
        "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(TemplateRefusal, match="unknown role function"):
        prompt_ids(tokenizer, [USER, {"role": "function", "content": "1"}])


def test_a_target_without_a_template_is_an_error_and_not_a_refused_row(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match=r"chat_template\.jinja") as error:
        prompt_ids(make_tokenizer(None), [USER])
    assert not isinstance(error.value, TemplateRefusal)


def test_tool_calls_without_content_render_with_no_text_and_their_arguments_as_objects(
    make_tokenizer: MakeTokenizer,
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    assert rendered(make_tokenizer(TOOLS_TEMPLATE), messages) == (
        '[user]cab[assistant]<call>add {"x": 1}</call>[tool]2'
    )


def test_an_empty_assistant_turn_renders_as_an_empty_turn(make_tokenizer: MakeTokenizer) -> None:
    for content in ("", None):
        text = rendered(make_tokenizer(), [USER, {"role": "assistant", "content": content}, USER])
        assert "<|im_start|>assistant\n<|im_end|>\n" in text


def test_text_parts_are_joined_and_other_parts_refused(make_tokenizer: MakeTokenizer) -> None:
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    assert "user\nc\nd<" in rendered(make_tokenizer(), [{"role": "user", "content": parts}])
    with pytest.raises(TemplateRefusal, match="image_url"):
        prompt_ids(make_tokenizer(), [{"role": "user", "content": [{"type": "image_url"}]}])


def test_the_answers_text_is_without_special_tokens_and_otherwise_untouched(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(" a , b . ", add_special_tokens=False).input_ids
    assert answer_text(tokenizer, [*ids, tokenizer.eos_token_id]) == " a , b . "
