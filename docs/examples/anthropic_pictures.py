"""A picture to a model that takes them, with the anthropic client: whole, and word by word."""

import base64
import io
import os

from anthropic import Anthropic
from PIL import Image, ImageDraw

client = Anthropic(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000"), api_key="none")
model = client.models.list().data[0].id

image = Image.new("RGB", (224, 168), "white")
ImageDraw.Draw(image).rectangle((62, 34, 162, 134), fill="green")
file = io.BytesIO()
image.save(file, "PNG")
data = base64.b64encode(file.getvalue()).decode()
shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
messages = [{"role": "user", "content": [shown, {"type": "text", "text": "What is this?"}]}]

print(client.messages.count_tokens(model=model, messages=messages).input_tokens, "tokens with the picture")

answer = client.messages.create(model=model, messages=messages, max_tokens=32)
print(answer.content[0].text)

with client.messages.stream(model=model, messages=messages, max_tokens=32) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
