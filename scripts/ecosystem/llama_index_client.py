"""llama-index's OpenAILike: a chat, whole and streamed, structured output and a required tool."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    hue: Literal["red", "blue"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


kinds = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
to = {"model": os.environ["MODEL"], "api_base": os.environ["OPENAI_BASE_URL"], "api_key": "none"}
model = OpenAILike(**to, **kinds, context_window=2048, temperature=0, max_tokens=60, max_retries=0)
messages = [ChatMessage(role="user", content="What is the capital of France?")]
whole = model.chat(messages).message.content
assert whole and "".join(chunk.delta or "" for chunk in model.stream_chat(messages)) == whole
assert isinstance(model.as_structured_llm(Colour).chat(messages).raw, Colour)
tool = FunctionTool.from_defaults(weather)
[call] = model.get_tool_calls_from_response(model.chat_with_tools([tool], messages[0], tool_required=True))
assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Rome", "Oslo"), call
plain = OpenAILike(**to, is_chat_model=False, context_window=2048, max_tokens=10, max_retries=0)
assert plain.complete("def f(").text
print("a chat whole and streamed, structured output, a required tool, a completion")
