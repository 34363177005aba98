"""litellm: chats, whole and streamed, a completion, a forced tool and a response."""

import os

import litellm

to = {"model": f"openai/{os.environ['MODEL']}", "api_base": os.environ["OPENAI_BASE_URL"], "api_key": "none"}
chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 60, "temperature": 0}
whole = litellm.completion(**to, **chat)
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**to, **chat, stream=True)]
assert "".join(parts) == whole.choices[0].message.content != ""
assert whole.usage.completion_tokens > 0
text = litellm.text_completion(**(to | {"model": f"text-completion-{to['model']}"}), prompt="def f(", max_tokens=5)
assert text.choices[0].text
parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
parameters["additionalProperties"] = False
tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
[call] = litellm.completion(**to, **chat, tools=[tool], tool_choice="required").choices[0].message.tool_calls
assert call.function.name == "weather", call
response = litellm.responses(**to, input="Say hello.", max_output_tokens=20)
assert response.output[0].content[0].text
print("a chat whole and streamed, a completion, a required tool, a response")
