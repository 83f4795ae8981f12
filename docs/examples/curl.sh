#!/bin/sh
# The APIs from a shell. With a key, add: -H "Authorization: Bearer $SGLA_API_KEY"
set -eu
url=${SGLA_URL:-http://127.0.0.1:30000}
ask() { curl --silent --show-error --fail-with-body "$url$1" -H 'Content-Type: application/json' -d "$2"; echo; }

curl --silent --show-error --fail-with-body "$url/v1/models"; echo
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}'
ask /v1/completions '{"prompt": "A river is", "max_tokens": 8, "stream": true}'
ask /v1/messages '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}'
ask /generate '{"text": "A lake is", "sampling_params": {"max_new_tokens": 8}}'
ask /tokenize '{"prompt": "How many tokens are these?"}'
curl --silent --show-error --fail-with-body "$url/metrics" | grep '^sgla:num_running_reqs'
