"""SGLang's own route, with nothing but the standard library:
texts in, texts and what is known of them out."""

import json
import os
import urllib.request

url = os.environ.get("SGLA_URL", "http://127.0.0.1:30000")
body = {
    "text": ["The capital of France is", "The capital of Italy is"],
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "stop": ["\n"]},
    "return_logprob": True,
    "top_logprobs_num": 2,
}
request = urllib.request.Request(
    f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request) as response:
    for result in json.load(response):
        logprob, token, _ = result["meta_info"]["output_token_logprobs"][0]
        print(f"{result['text']!r}; its first token is {token}, with log-probability {logprob:.2f}")
