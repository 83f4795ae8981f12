#!/usr/bin/env bash
# Weights of 4 bits, few rows, on one H200: the kernel whose products are of integers (csrc/cuda/fixed_gemm.cu) beside
# the one that serves (integer_gemm.cu). Run in the repository's root with OUT set. At most 150 s.
#   cuts   equality with the dense product in float32, us and GB/s of Qwen3-8B's four products at 1 and 16 rows: "us" is
#          what serves today, "best" are the fastest cuts, the last field of each cut says whether it is the new kernel
#   w4a16  W2 and steps of 16 rows with the cuts found (they become this checkout's table of the card)
#   tests  the kernel against torch for more shapes and rows
# Before: W2 2.13 ms, 16 rows 3.36; goals 1.5 and 1.9. Keep cuts.log, w4a16.log and w4.jsonl (the table's lines).
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
T=$(mktemp -d); TABLE=sgla/kernels/gpu/tuned/H200.jsonl; cp "$TABLE" "$T/table"
part() { name=$1 most=$2; shift 2; at=$SECONDS; timeout -k 8 "$most" "$@" >"$OUT/$name.log" 2>&1; code=$?
  echo "== $name: exit $code after $((SECONDS - at)) s"; grep -E '^JSON|passed|failed|rror|ms_per|"us"|wrong' "$OUT/$name.log" | sed 's/, "machine".*//; s/, "command".*//' | cut -c1-420
  [ $code = 0 ] || tail -15 "$OUT/$name.log" | cut -c1-400; }
part cuts 70 python bench/gpu_integers.py --kernels fixed --rows 1,16 --seconds 50 --out "$OUT/w4.jsonl"
[ -s "$OUT/w4.jsonl" ] && cat "$OUT/w4.jsonl" >>"$TABLE"
# Groups of 128, symmetric, as llm-compressor writes it.
cp -r bench/models/qwen3-8b "$T/qwen3-8b-w4a16"
python - "$T/qwen3-8b-w4a16/config.json" <<'PY'
import json, sys
path = sys.argv[1]; model = json.load(open(path))
weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False, "actorder": None}
model["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}}, "ignore": ["lm_head"]}
json.dump(model, open(path, "w"))
PY
part w4a16 55 python bench/offline.py --model "$T/qwen3-8b-w4a16" --workloads W2,W5 --batches 16
part tests 22 python -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_integers.py -k "few_rows and int4g128 and True"
cp "$T/table" "$TABLE"; rm -rf "$T"
