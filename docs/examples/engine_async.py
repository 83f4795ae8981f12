"""Without a server, in an asyncio program: streams side by side on one engine."""

import asyncio
import os

from sgla import Engine, SamplingParams


async def tell(engine: Engine, question: str) -> str:
    parts = []
    messages = [{"role": "user", "content": question}]
    async for event in engine.astream(messages=messages, sampling=SamplingParams(max_tokens=12)):
        parts.append(event.text)
    return "".join(parts)


async def main(engine: Engine) -> None:
    questions = ["Name a river.", "Name a lake.", "Name a sea."]
    for question, answer in zip(questions, await asyncio.gather(*(tell(engine, one) for one in questions))):
        print(f"{question} {answer!r}")


with Engine(os.environ.get("SGLA_MODEL", "demo"), context_length=1024) as engine:
    asyncio.run(main(engine))
