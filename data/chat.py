"""Messages -> the exact prompt ids that the target's own chat template gives; answers' ids come from the engine.

Nothing is added to what the template renders: no system prompt, no second BOS (special tokens are the template's
business). Messages take the form in which a vLLM server hands them to the template (vllm/renderers/chat_utils.py of
0.32), so that the context of a row equals the context that the server would show the target.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

# These decide what a prompt is here; as template arguments they would be silently lost or break every prompt.
_RESERVED_ARGS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_dict",
        "return_assistant_tokens_mask",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


class TemplateRefusal(ValueError):
    """The template does not take these messages (a role it does not know, an order it does not allow)."""


def prompt_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Render messages up to where the target starts to answer.

    Raises TemplateRefusal when the template raises, and ValueError when the tokenizer has no template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the target's tokenizer has no chat template; give the target one (chat_template.jinja)")
    check_template_args(template_args or {})
    try:
        served = [_as_served(message) for message in messages]
        rendered = tokenizer.apply_chat_template(
            served,
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(template_args or {}),
        )
    except TemplateRefusal:
        raise
    except Exception as error:  # Jinja raises whatever the template raises; each means that it refuses the messages
        raise TemplateRefusal(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
    ids = rendered["input_ids"]
    if ids and isinstance(ids[0], list):
        ids = ids[0]
    return [int(token) for token in ids]


def check_template_args(template_args: Mapping[str, Any]) -> None:
    """Raise ValueError for a template argument that is not the template's to take."""
    for name in sorted(_RESERVED_ARGS & template_args.keys()):
        raise ValueError(
            f"responses.chat_template_args.{name} is {template_args[name]!r}; {name} is set by draftsmith. "
            "Give only variables of the template (such as enable_thinking)."
        )


def answer_text(tokenizer: Any, response_ids: Sequence[int]) -> str:
    """The answer as the next turn's template wants it: as a server returns it, without special tokens, unpolished."""
    # clean_up_tokenization_spaces would turn " ." into ".", and the next prompt would not begin with this answer.
    text = tokenizer.decode(list(response_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def _as_served(message: Message) -> dict[str, Any]:
    """One message as vLLM gives it to the template: text content, tool-call arguments as objects."""
    served = dict(message)
    content = message.get("content")
    if content is None:
        served["content"] = ""  # an assistant turn of tool calls only
    elif not isinstance(content, str):
        served["content"] = "\n".join(_part_text(part) for part in content)
    if not message.get("tool_calls"):
        served.pop("tool_calls", None)
    else:
        served["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return served


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise TemplateRefusal(f"a message holds a content part of type {kind!r}; only text can be rendered")
    return str(part["text"])


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates print them as JSON, a string would be quoted twice."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise TemplateRefusal("a tool call is not an object with a `function` object")
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise TemplateRefusal(f"a tool call's arguments are not JSON: {error}") from error
    return dict(call) | {"function": dict(call["function"]) | {"arguments": arguments}}
