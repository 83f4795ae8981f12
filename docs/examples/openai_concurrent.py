"""Many questions at once. The server batches them; a semaphore bounds how many are open."""

import asyncio
import os

from openai import AsyncOpenAI

QUESTIONS = [f"Write a word that begins with {letter}." for letter in "ABCDEFGH"]


async def main() -> None:
    url = os.environ.get("SGLA_URL", "http://127.0.0.1:30000")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client:
        model = (await client.models.list()).data[0].id
        gate = asyncio.Semaphore(64)

        async def ask(question: str) -> str:
            async with gate:
                answer = await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": question}], max_tokens=8
                )
                return answer.choices[0].message.content or ""

        for question, answer in zip(QUESTIONS, await asyncio.gather(*map(ask, QUESTIONS))):
            print(f"{question} {answer!r}")


asyncio.run(main())
