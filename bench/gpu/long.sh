#!/usr/bin/env bash
# Long prompts, many requests, a prompt that arrives beside streams, and --deterministic on one H200: no network, random weights. Run it in the
# repository's root; results into $OUT (long.jsonl: a JSON line each; long.log: what was printed). At most 290 s.
#   PYTHON=python3 BENCH_COMMIT=abc1234 OUT=/tmp/out bash bench/gpu/long.sh
set -uo pipefail
LIMIT=${LIMIT:-285}
. bench/gpu/parts.sh
words=$(mktemp -d)
trap 'rm -rf "$words"' EXIT
$python bench/words.py bench/models/llama-3.1-8b "$words" || exit 1
llama="{\"tokenizer\": \"$words\"}"

# One prompt of 32,768 and eight; decode behind them, batch 1 and 8. 1,024 requests of 128/128 at once.
part documents 75 bench/offline.py --model bench/models/qwen3-8b --max-model-len 33100 --workloads W8,W6,W1,W2 \
    --document-tokens 32768 --batches 1024 --lengths 128,128 --documents 1,1,8 --repeat 1
# A prompt of 100,000 beside 32 streams.
part arrival 60 bench/arrival.py --repeat 2 --alone 1 --extra "$llama"
# Prompts of 100 tokens while prompts of 16,000 are read.
part flood 40 bench/flood.py
# --deterministic beside the first part's W1 and W2.
part deterministic 60 bench/offline.py --model bench/models/qwen3-8b --workloads W2,W1 --repeat 1 --tag deterministic \
    --extra '{"deterministic": true}'
# The same decode with 8-bit KV.
part fp8-kv 50 bench/offline.py --model bench/models/qwen3-8b --max-model-len 33100 --workloads W8 \
    --document-tokens 32768 --repeat 1 --tag fp8-kv --extra '{"kv_cache_dtype": "fp8"}'
part small 30 bench/offline.py --model bench/models/qwen3-0.6b --workloads W2 --repeat 3
