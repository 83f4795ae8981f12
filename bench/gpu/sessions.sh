#!/bin/bash
# One H200; run in the repository's root. Parts, each a call of its own or several in one:
#   turns: tiered and plain, about 220 s; tiered (80 s), plain (150 s): multi-turn sessions of five times a pool of 16 GiB,
#     with tiers and without; whichever comes last compares the two (goals: TTFT 4x, throughput 1.8x, hits 0.9)
#   half (about 105 s): the same pair at half the size, pool, sessions and talks at a time
#   beside (50 s): decode steps beside copies (at most 2 % longer); agents (150 s): the agent trace; prefix (60 s): a 32k prefix from the host (>= 90 % of a plain copy, >= 6x; host_more_s below host_s + cached_more_s); disk (>= 3x)
# JSON lines go to $OUT/sessions.jsonl; keep $OUT between calls. No part takes more than 240 s. Turns are shaped as SGLang's
# benchmark/hicache/bench_multiturn (10 rounds of 2,048 new tokens, random order, a barrier between rounds), with answers of
# 32 tokens and 8 talks at a time.
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; PY=${PY:-python}; PORT=${PORT:-31000}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
tok() { $PY -c "import sys; from pathlib import Path; sys.path.insert(0, 'bench'); from words import write_tokenizer; write_tokenizer(Path('${MODELS:-bench/models}/$1'), Path('$OUT/tok-$1'))"; }
serve() { # model, flags
  local model=$1; shift
  $PY -m sgla serve --model ${MODELS:-bench/models}/$model --served-model-name m --load-format dummy --tokenizer "$OUT/tok-$model" \
    --chat-template bench/tools.jinja --device ${DEVICE:-cuda} --port $PORT "$@" > "$OUT/server.log" 2>&1 &
  PID=$!
  for i in $(seq 400); do
    $PY - <<P 2>/dev/null && return 0
import urllib.request; urllib.request.urlopen("http://127.0.0.1:$PORT/health/ready", timeout=5)
P
    kill -0 $PID 2>/dev/null || { tail -20 "$OUT/server.log"; return 1; }
    sleep 0.3
  done
}
stop() { kill $PID; wait $PID 2>/dev/null; }
tell() { $PY - <<P
import urllib.request
t = urllib.request.urlopen("http://127.0.0.1:$PORT/metrics").read().decode()
print("\n".join(l for l in t.splitlines() if l[:1] != "#" and any(k in l for k in ("tier_", "prefix_", "retracted"))))
P
}
steps() { # of the last rounds, for bench/step_times.py and sgla replay
  $PY - "$OUT/steps-$1.sgla" <<P
import sys, urllib.request
asked = urllib.request.Request("http://127.0.0.1:$PORT/step_log", headers={"Authorization": "Bearer of-a-bench"})
open(sys.argv[1], "wb").write(urllib.request.urlopen(asked).read())
P
  $PY bench/step_times.py "$OUT/steps-$1.sgla" | sed -n 's/^JSON //p' | cut -c1-300
}
run() { timeout -k 5 ${LIMIT:-200} $PY bench/sessions.py "$@" 2>> "$OUT/err.txt" | sed -n 's/^JSON //p' | tee -a "$OUT/sessions.jsonl" | cut -c1-900; }
sessions() { # NAME, flags
  local name=$1 note="--kv-cache-bytes ${POOL_BYTES:-16G} $2"
  tok qwen3-8b
  serve qwen3-8b --context-length 32768 --kv-cache-bytes ${POOL_BYTES:-16G} --admin-api-key of-a-bench --step-log 4000 \
    $2 ${MORE:-} || exit 1
  run turns http://127.0.0.1:$PORT --model m --pool 5000 --times 1 --turns 1 --question 300 --answer 16 --seed 99 > /dev/null
  run turns http://127.0.0.1:$PORT --model m --pool ${POOL:-116500} --times ${TIMES:-4.4} --turns ${TURNS:-10} --system 0 \
    --question ${QUESTION:-2048} --answer ${ANSWER:-32} --concurrency ${CONCURRENCY:-8} --note "${note% }"
  tell > "$OUT/metrics-$name.txt"; steps $name; cp "$OUT/server.log" "$OUT/server-$name.log"; stop
}
compare() { $PY - "$OUT/sessions.jsonl" <<'P'
import json, sys
last = {len(d["note"].split()) > 2: d for d in map(json.loads, open(sys.argv[1])) if d["kind"] == "turns" and d["requests"] > 30}
if len(last) == 2:
    a, b = last[True], last[False]
    print({"ttft_mean_x": round(b["ttft_mean_ms"] / a["ttft_mean_ms"], 2), "later_ttft_x": round(b["later_ttft_mean_ms"] / a["later_ttft_mean_ms"], 2),
           "throughput_x": round(a["out_tok_s"] / b["out_tok_s"], 2), "hit_of_unlimited": round(a["hit_rate"] / a["attainable"], 3), "errors": a["errors"] + b["errors"]})
P
}
parts=(); for part in ${@:-turns}; do [ $part = turns ] && parts+=(tiered plain) || parts+=($part); done
for part in ${parts[@]}; do case $part in
tiered) sessions tiered "${TIERS:---kv-host-bytes 84G}"; compare ;;
plain) sessions plain ""; compare ;;
half)
  POOL_BYTES=${POOL_BYTES:-8G} POOL=${POOL:-58250} CONCURRENCY=${CONCURRENCY:-4}
  sessions tiered "${TIERS:---kv-host-bytes 42G}"; sessions plain ""; compare ;;
agents)
  tok llama-3.1-8b
  serve llama-3.1-8b --context-length 65536 --kv-cache-bytes ${POOL_BYTES:-15G} --kv-host-bytes ${HOST:-84G} ${MORE:-} || exit 1
  run agents http://127.0.0.1:$PORT --model m --agents 16 --turns 30 --most 60000 --system 2000 --answer 64 --gap 1 \
    --note "--kv-cache-bytes ${POOL_BYTES:-15G} --kv-host-bytes ${HOST:-84G}"
  tell > "$OUT/metrics-agents.txt"; cp "$OUT/server.log" "$OUT/server-agents.log"; stop ;;
prefix)
  timeout 110 $PY bench/tiers.py --model bench/models/qwen3-8b --parts prefix --repeat ${REPEAT:-5} 2>> "$OUT/err.txt" | sed -n 's/^JSON //p' | tee -a "$OUT/tiers.jsonl" | cut -c1-500
  ;;
beside)
  timeout 120 $PY bench/beside.py --model bench/models/qwen3-8b --log "$OUT/beside.log" 2>> "$OUT/err.txt" | sed -n 's/^JSON //p' | tee -a "$OUT/beside.jsonl" | sed 's/, "machine".*//' ;;
disk)
  timeout 90 $PY bench/tiers.py --model bench/models/qwen3-8b --parts prefix --disk "$OUT/../kv-disk" --repeat ${REPEAT:-3} 2>> "$OUT/err.txt" | sed -n 's/^JSON //p' | tee -a "$OUT/tiers.jsonl" | cut -c1-500
  rm -rf "$OUT/../kv-disk" ;;
esac; done
tail -3 "$OUT/err.txt" 2>/dev/null
