"""instructor: a model class from text, by tool, by schema and by JSON, and as a list in a stream."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)
    city: Literal["Rome", "Oslo"]


ask = {"model": os.environ["MODEL"], "temperature": 0, "max_tokens": 200}
ask["messages"] = [{"role": "user", "content": "Ada is 36 years old and lives in Rome."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(), mode=mode)
    person = client.chat.completions.create(response_model=Person, max_retries=0, **ask)
    assert person.city in ("Rome", "Oslo") and 0 <= person.age <= 150, person
    *_, last = client.chat.completions.create_partial(response_model=Person, max_retries=0, **ask)
    assert last.city in ("Rome", "Oslo"), last
print("a model class by tool and by schema, whole and streamed")
