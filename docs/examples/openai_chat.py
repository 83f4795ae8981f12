"""One question to a running server, with the openai client."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    max_tokens=32,
    temperature=0,
)
print(answer.choices[0].message.content)
print(answer.usage)
