"""Without a server: vLLM's class, for scripts that work through a list."""

import os

from sgla import LLM, SamplingParams

with LLM(os.environ.get("SGLA_MODEL", "demo"), max_model_len=1024) as llm:
    sampling = SamplingParams(temperature=0, max_tokens=8)
    for result in llm.generate(["A river is", "A lake is", "The sea is"], sampling):
        print(result.prompt + result.outputs[0].text)

    [result] = llm.chat([{"role": "user", "content": "Name a river."}], sampling)
    print(result.outputs[0].text)
