"""The model calls a function, gets its result, and answers with it."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id


def weather(city: str) -> str:
    return f"It is sunny in {city}, 21 degrees."


tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the weather like in Oslo?"}]

# tool_choice="auto" leaves it to the model; "required" makes it call one.
asked = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=64, temperature=0
)
message = asked.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or []:
    arguments = json.loads(call.function.arguments)
    result = weather(**arguments)
    print(f"{call.function.name}({arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=32, temperature=0
)
print(answer.choices[0].message.content)
