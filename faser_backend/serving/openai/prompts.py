"""What a request asks the model to continue: prompts and conversations -> token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from faser_backend.serving.openai.bodies import parse
from faser_backend.serving.openai.errors import ApiError
from faser_backend.serving.openai.fields import ChatBody, CompletionBody, Message, ResponsesBody, TextPart
from faser_backend.serving.openai.tools import shows_tools, written_out
from faser_backend.serving.tensor_values import check_length
from faser_backend.serving.tokenizer import TextTokenizer

MAX_PROMPTS = 256  # of one request


def completion_prompts(
    body: CompletionBody, tokenizer: TextTokenizer, vocab_size: int, max_bytes: int
) -> Iterator[list[int]]:
    """The ids of every prompt of the body, tokenised as they are asked for. max_bytes: of one text. Raises ApiError."""
    given = body.prompt
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if len(prompts) * body.num_choices > MAX_PROMPTS:
        limit = f"at most {MAX_PROMPTS} answers to a request (prompts times n)"
        raise ApiError(f"prompt: {len(prompts)} prompts with n = {body.num_choices}: {limit}", param="prompt")
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text("prompt", prompt, max_bytes)
    return (_ids_of(prompt, tokenizer, vocab_size) for prompt in prompts)


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Raises RequestError for a text that is too long to be tokenised."""
    check_length(name, text, max_bytes)


def _ids_of(prompt: Any, tokenizer: TextTokenizer, vocab_size: int) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    bad = next((one for one in (min(prompt, default=0), max(prompt, default=0)) if not 0 <= one < vocab_size), None)
    if bad is not None:
        raise ApiError(f"prompt = {bad}: token ids must lie in [0, {vocab_size - 1}]", param="prompt")
    return prompt


def chat_prompt(body: ChatBody, tokenizer: TextTokenizer, max_bytes: int) -> list[int]:
    """The conversation as the chat template writes it, with its tools. Raises ApiError."""
    return _encode(body, body.messages, tokenizer, max_bytes)


def responses_prompt(body: ResponsesBody, tokenizer: TextTokenizer, max_bytes: int) -> list[int]:
    """Raises ApiError."""
    given = [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if body.instructions:
        given = [Message(role="system", content=body.instructions), *given]
    return _encode(body, given, tokenizer, max_bytes)


def _encode(
    body: ChatBody | ResponsesBody, given: list[Message], tokenizer: TextTokenizer, max_bytes: int
) -> list[int]:
    messages = _for_template(given, max_bytes)
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered_tools] or None
    if not shows_tools(tokenizer.chat_template):
        messages, tools = written_out(messages, tools), None
    return tokenizer.encode_conversation("messages", messages, tools, max_bytes=max_bytes)[1]


def _for_template(messages: list[Message], max_bytes: int) -> list[dict[str, Any]]:
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    texts = [message.text for message in messages] + [call.arguments for call in calls]
    check_text("messages", "".join(texts), max_bytes)
    return [_one_for_template(index, message) for index, message in enumerate(messages)]


def _one_for_template(index: int, message: Message) -> dict[str, Any]:
    """Content is text, as templates expect, and the arguments of calls are objects."""
    name = f"messages[{index}]"
    if message.content is None and not message.tool_calls:
        raise ApiError(f"{name}.content: is required", param=f"{name}.content")
    if isinstance(message.content, list) and any(not isinstance(part, TextPart) for part in message.content):
        raise ApiError(f"{name}.content: must be text", param=f"{name}.content")
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(name, call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for key in ("name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            shown[key] = value
    return shown


def _arguments(name: str, text: str) -> Any:
    try:
        return parse(text.encode() or b"{}")
    except ApiError:
        field = f"{name}.tool_calls.function.arguments"
        raise ApiError(f"{field} = {text[:60]!r}: must be JSON", param=field) from None
