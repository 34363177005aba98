"""An agent of openai-agents with a function tool, whole and streamed: it calls the tool, then answers."""

import asyncio
import os
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

called: list[str] = []


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    called.append(city)
    return f"It is sunny in {city}."


async def main() -> None:
    set_tracing_disabled(True)
    settings = ModelSettings(tool_choice="required", temperature=0, max_tokens=100)
    model = os.environ["MODEL"]
    agent = Agent("guide", instructions="Be brief.", tools=[weather], model=model, model_settings=settings)
    whole = await Runner.run(agent, "What is the weather in Rome?", max_turns=4)
    streamed = Runner.run_streamed(agent, "What is the weather in Oslo?", max_turns=4)
    events = [event async for event in streamed.stream_events()]
    assert len(called) >= 2 and set(called) <= {"Rome", "Oslo"}, called
    assert whole.final_output and streamed.final_output and len(events) > 10
    kinds = [item.type for item in whole.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item", kinds
    print("an agent with a function tool over /v1/responses, whole and streamed")


asyncio.run(main())
