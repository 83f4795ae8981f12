"""A sound to a model that hears, with the openai client. Recordings are sent in the same way, as WAV, MP3,
FLAC and others; models that transcribe take them at ``client.audio.transcriptions``, too."""

import base64
import io
import math
import os
import struct
import wave

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id

# A second of a tone that rises.
samples = [
    round(12_000 * math.sin(2 * math.pi * (300 + 200 * i / 16_000) * i / 16_000)) for i in range(16_000)
]
file = io.BytesIO()
with wave.open(file, "wb") as out:
    out.setnchannels(1)
    out.setsampwidth(2)
    out.setframerate(16_000)
    out.writeframes(struct.pack(f"<{len(samples)}h", *samples))

heard = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
parts = [{"type": "input_audio", "input_audio": heard}, {"type": "text", "text": "What do you hear?"}]
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": parts}], max_tokens=32, temperature=0
)
print(answer.choices[0].message.content)
print(answer.usage.prompt_tokens, "tokens with the sound")
