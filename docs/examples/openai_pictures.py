"""Pictures to a model that takes them, with the openai client: one alone, then two between texts."""

import base64
import io
import os

from openai import OpenAI
from PIL import Image, ImageDraw

client = OpenAI(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id


def picture(color):
    """Of a disc, as a part of a message; the URL of one on the web, or of a file, does as well."""
    image = Image.new("RGB", (224, 168), "white")
    ImageDraw.Draw(image).ellipse((62, 34, 162, 134), fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def ask(*parts):
    messages = [{"role": "user", "content": list(parts)}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0)
    print(answer.choices[0].message.content)
    print(answer.usage.prompt_tokens, "tokens with the pictures")


ask(picture("red"), text("What is this?"))
ask(text("Here is one:"), picture("red"), text("and another:"), picture("blue"), text("How do they differ?"))
