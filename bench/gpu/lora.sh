#!/usr/bin/env bash
# Adapters (LoRA) on one H200, in the repository's root with OUT set: no network, random weights. At most 150 s:
#   OUT=... bash bench/gpu/lora.sh [attention] [all] [crowd]; apart `... cold` (60 s) and `... tests` (110 s):
#   kernels against torch's body, rows of many adapters as each alone (tests/gpu/test_gpu_lora.py)
#   1. decode steps of Qwen3-8B, 64 rows: base, one adapter, four, 64 different ones, on q, k, v, o and on all linears;
#      kernels of a layer in order; steps that read prompts; other sizes of tiles (goals: 1 <= 5 %, 64 <= 12 %, all
#      linears <= 28 % above base)
#   2. 2,000 adapters in the host's memory, uniform and Zipf, by turns with 5 (goal: <= 10 % fewer requests a second),
#      outputs of one length and of several; 90 s
#   3. the first token of an adapter of 109 MB that is not on the device, and of one that is to be read (goal: <= 150 ms)
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
PY=${PYTHON:-python}; MODEL=${MODEL:-bench/models/qwen3-8b}; END=$((SECONDS + ${LIMIT:-148})); : >"$OUT/lora.jsonl"
part() { # NAME SECONDS COMMAND...
  local name=$1 most=$2 left=$((END - SECONDS)) at=$SECONDS code; shift 2
  ((left < most)) && most=$left
  if ((most < 10)); then echo "== $name: no time left"; return; fi
  timeout -k 5 "$most" "$@" >"$OUT/lora-$name.log" 2>&1; code=$?
  sed -n 's/^JSON //p' "$OUT/lora-$name.log" >>"$OUT/lora.jsonl"
  echo "== $name: exit $code after $((SECONDS - at)) s of $most"
  grep -E '^JSON|passed|failed|^sweep' "$OUT/lora-$name.log" | grep -v '"timeline"' | sed 's/, "machine".*//; s/, "command".*//' | cut -c1-300
  ((code)) && tail -12 "$OUT/lora-$name.log" | cut -c1-500
}
for each in ${*:-attention all crowd}; do
  case $each in
  attention) part attention 78 $PY bench/gpu_lora.py --model "$MODEL" --timeline --prompts --sweep "${SWEEP:-22}" ;;
  all) part all 35 $PY bench/gpu_lora.py --model "$MODEL" --modules all --timeline ;;
  crowd) part crowd 95 $PY bench/lora.py --model "$MODEL" --parts crowd,varied --loaded 2000 ;;
  cold) part cold 60 $PY bench/lora.py --model "$MODEL" --parts cold --modules all --rank 20 ;;
  tests) part tests 110 $PY -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_lora.py --durations=5 ;;
  esac
done
