"""Anthropic's client against the same server."""

import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000"), api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Name three rivers."}]

print(client.messages.count_tokens(model=model, messages=messages).input_tokens, "tokens")

answer = client.messages.create(model=model, system="You are brief.", messages=messages, max_tokens=32)
print(answer.content[0].text)

with client.messages.stream(model=model, messages=messages, max_tokens=32) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
