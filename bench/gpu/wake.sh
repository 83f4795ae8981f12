#!/usr/bin/env bash
# What it takes to wake from sleep on one H200; run in the repository's root with OUT set. At most 310 s.
#   tests (100 s): what the tiers' code of GPUs does; 8b, 0.6b (55 s each): seconds of each level and of the wakes behind them
#   (goals: the first wake from level 1 0.6 and 0.3); regions (70 s): the driver's calls of a wake, without a server, with
#   the KV in pieces of several sizes, with and without a thread that has the next piece meanwhile
# JSON lines go to $OUT/wake.jsonl.
OUT=${OUT:?}; mkdir -p "$OUT"; PY=${PY:-python}; export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
part() { # NAME SECONDS COMMAND...
  name=$1 most=$2; shift 2; at=$SECONDS
  timeout -k 8 "$most" "$@" >"$OUT/$name.log" 2>&1; code=$?
  sed -n 's/^JSON //p' "$OUT/$name.log" >>"$OUT/wake.jsonl"
  echo "== $name: exit $code after $((SECONDS - at)) s"
  grep -E '^JSON|passed|failed' "$OUT/$name.log" | sed 's/^JSON //; s/, "machine".*//' | cut -c1-420
  [ $code = 0 ] || tail -8 "$OUT/$name.log" | cut -c1-400
}
for each in ${*:-8b 0.6b regions tests}; do case $each in
  8b) part 8b 60 $PY bench/tiers.py --model bench/models/qwen3-8b --parts sleep --repeat 2 ;;
  0.6b) part 0.6b 45 $PY bench/tiers.py --model bench/models/qwen3-0.6b --parts sleep --repeat 2 ;;
  regions) part regions 80 $PY bench/tiers.py --parts regions ;;
  tests) part tests 150 $PY -m pytest -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_early_layers.py tests/gpu/test_gpu_sleep.py tests/gpu/test_gpu_lent.py \
    tests/gpu/test_gpu_runner.py ;;
esac; done
