"""The Responses API: the server keeps the conversation."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id

first = client.responses.create(model=model, input="Name a river in France.", max_output_tokens=24)
print(first.output_text)

second = client.responses.create(
    model=model, input="And one in Germany?", previous_response_id=first.id, max_output_tokens=24
)
print(second.output_text)

for event in client.responses.create(model=model, input="Count to three.", max_output_tokens=24, stream=True):
    if event.type == "response.output_text.delta":
        print(event.delta, end="", flush=True)
print()
