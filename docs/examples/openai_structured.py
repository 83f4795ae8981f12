"""An answer that fits a schema, read into a pydantic model."""

import os
from typing import Annotated

from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id


class City(BaseModel):
    name: Annotated[str, Field(max_length=30)]
    country: Annotated[str, Field(max_length=30)]
    inhabitants: int


answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Tell me about the capital of Norway."}],
    response_format=City,
    max_tokens=96,
    temperature=0,
)
print(answer.choices[0].message.parsed)

# Not only JSON: one of some words, a regular expression, a grammar.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is this review good or bad? 'I liked every minute.'"}],
    extra_body={"structured_outputs": {"choice": ["good", "bad"]}},
    max_tokens=8,
)
print(answer.choices[0].message.content)
