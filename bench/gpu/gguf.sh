#!/usr/bin/env bash
# GGUF and MXFP4 packed on one H200; run in the repository's root, OUT set; about 3 minutes.
#   1. kernels of the new storages against torch (int4m*, int8m*: few rows, any rows), and MXFP4 experts
#   2. steps of Qwen3-8B with --quantization mxfp4 beside int4: 1, 16, 64 rows
#   3. the demo's GGUF file on the GPU beside the CPU: the same greedy answer (needs the demo in ~/.cache/sgla or network; skipped else)
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
run() { name=$1 most=$2; shift 2; timeout -k 8 "$most" "$@" >"$OUT/$name.log" 2>&1; echo "== $name: exit $?"; grep -E '^JSON|passed|failed|rror|graph_ms' "$OUT/$name.log" | sed 's/, "machine".*//' | cut -c1-300; }
run tests 120 python -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_integers.py tests/gpu/test_gpu_moe.py
for kind in mxfp4 int4; do run "$kind" 70 python bench/step.py --model bench/models/qwen3-8b --quantization $kind --batches 1,16,64; done
run gguf 90 python -c '
from sgla import Engine
from sgla.engine import SamplingParams
for device in ("cuda", "cpu"):
    with Engine("demo", device=device, context_length=2048) as engine:
        print(device, engine.generate(["The capital of France is"], SamplingParams(max_tokens=16, temperature=0.0), progress=False)[0].text)'
cat "$OUT/gguf.log" | tail -4
