"""An agent with a tool: pip install 'pydantic-ai-slim[openai]'."""

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

provider = OpenAIProvider(
    base_url=os.environ.get("SGLA_URL", "http://127.0.0.1:30000") + "/v1", api_key="none"
)
model = OpenAIChatModel(os.environ.get("SGLA_MODEL", "demo"), provider=provider)
agent = Agent(
    model, system_prompt="You are brief.", model_settings=ModelSettings(max_tokens=48, temperature=0)
)


@agent.tool_plain
def inhabitants(city: str) -> int:
    """How many people live in a city."""
    return {"oslo": 720_000, "bergen": 290_000}.get(city.lower(), 0)


print(agent.run_sync("How many people live in Oslo?").output)
