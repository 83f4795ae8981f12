#!/usr/bin/env bash
# KV caches in few bits on one H200; run in the repository's root with OUT set. At most 240 s.
#   1. the decode kernel and the runner with pages in fp8, int8 and int4 against the torch bodies
#   2. attention at 16 x 8,192 tokens and others, Qwen3-8B's heads, by kind of cache and by cut of the kernel
# Before: 16 x 8,192 bf16 127 us, fp8 87, int8 139. Goals: fp8 below 79, int8 and int4 below 127.
# Look at lines with "chosen" first; a better line with other numbers says how to change `default_cut`.
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
part() { name=$1 most=$2; shift 2; at=$SECONDS; timeout -k 8 "$most" "$@" >"$OUT/$name.log" 2>&1; code=$?
  echo "== $name: exit $code after $((SECONDS - at)) s"
  grep -E '^JSON|passed|failed|logprobs differ' "$OUT/$name.log" | sed 's/, "command".*//; s/, "machine".*//' | cut -c1-300
  [ $code = 0 ] || tail -25 "$OUT/$name.log" | cut -c1-300; }
part kv-speed 120 python bench/kv.py --seconds 95
part kv-tests 120 python -m pytest -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_integer_kv.py tests/gpu/test_gpu_fp8_kv.py
