"""pydantic-ai: structured output by schema and by tool, and a function tool."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolDefinition
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    hue: Literal["red", "blue"]
    is_dark: bool


provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
settings = {"temperature": 0.0, "max_tokens": 100}
for output_type in (NativeOutput(Colour), Colour):
    answer = Agent(model, output_type=output_type, model_settings=settings).run_sync("Name a dark colour.")
    assert isinstance(answer.output, Colour), answer
parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
tool = ToolDefinition(name="weather", parameters_json_schema=parameters)
asked = [ModelRequest.user_text_prompt("What is the weather in Rome?")]
offer = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
[call] = model_request_sync(model, asked, model_settings=settings, model_request_parameters=offer).tool_calls
assert call.tool_name == "weather" and call.args_as_dict()["city"] in ("Rome", "Oslo"), call
print("output of a model class by schema and by tool, a required function tool")
