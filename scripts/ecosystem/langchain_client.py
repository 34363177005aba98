"""langchain-openai: a chat whole and streamed, structured output by schema and by tool, a bound tool."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    hue: Literal["red", "blue"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


for uses_responses in (False, True):
    model = ChatOpenAI(
        model=os.environ["MODEL"], temperature=0, max_tokens=60, use_responses_api=uses_responses, max_retries=0
    )
    whole = model.invoke("What is the capital of France?")
    assert whole.text and "".join(chunk.text for chunk in model.stream("What is the capital of France?")) == whole.text
    for method in ("json_schema", "function_calling"):
        colour = model.with_structured_output(Colour, method=method).invoke("Name a colour.")
        assert isinstance(colour, Colour), colour
    asked = HumanMessage("What is the weather in Rome?")
    called = model.bind_tools([weather], tool_choice="weather").invoke([asked])
    [call] = called.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([weather]).invoke([asked, called, result]).text
print("chats, structured output by schema and tool, a tool and its result; over chats and over responses")
