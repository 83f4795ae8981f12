#!/usr/bin/env bash
# What users send, over HTTP to Qwen3-8B on one H200: chats that arrive at three rates (W9), requests of many kinds with
# schemas (W10), agents (W7), with their limits: no network, random weights. Run it in the repository's root; results into
# $OUT (chat.jsonl: a JSON line each; chat.log: what was printed). At most 150 s.
#   PYTHON=python3 BENCH_COMMIT=abc1234 OUT=/tmp/out bash bench/gpu/chat.sh [W9 W10 W7]
# MODEL, RATES, SECONDS_EACH, AGENTS, GAP, SERVER: other ones.
set -uo pipefail
LIMIT=${LIMIT:-145}
. bench/gpu/parts.sh
mark=''
model=${MODEL:-bench/models/qwen3-8b}
words=$(mktemp -d)
trap 'rm -rf "$words"' EXIT
$python bench/words.py "$model" "$words" || exit 1
# Prompts of agents end at 40 to 100 % of what the model's context of 40,960 tokens has.
part chat "$LIMIT" bench/serve.py --only ${@:-W9 W10 W7} --model "$model" --dummy "$words" --repeat 1 --rates "${RATES:-32,64,96}" \
    --seconds "${SECONDS_EACH:-6}" --agents "${AGENTS:-16}" --agent-tokens 40000 --gap "${GAP:-0.5}" --log "$out/server.log" \
    --server-args "${SERVER:---device cuda --context-length 40960}"
