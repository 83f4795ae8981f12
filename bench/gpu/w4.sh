#!/usr/bin/env bash
# Weights of 4 bits, few rows, on one H200: cuts whose memory never waits between two kernels ("late": the next kernel
# begins when this one has asked for its last weights), of integer_gemm.cu and of fixed_gemm.cu, whose products are of
# integers. Run in the repository's root with OUT set. At most 150 s.
#   one, few   equality with the dense product in float32; us and GB/s of Qwen3-8B's products at 1 and 16 rows ("us" is
#              what serves, the last two fields before the time say fixed and late); then a layer's four in turn
#   before     W2 with what serves
#   w4a16      W2 and steps of 16 rows with the cuts found (they become this checkout's table of the card)
# On 2026-11-29 with fixed_gemm.cu alone: W2 1.78 ms, 16 rows 3.33; goals 1.5 and 1.9.
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
T=$(mktemp -d); TABLE=sgla/kernels/gpu/tuned/H200.jsonl; cp "$TABLE" "$T/table"
part() { name=$1 most=$2; shift 2; at=$SECONDS; timeout -k 8 "$most" "$@" >"$OUT/$name.log" 2>&1; code=$?
  echo "== $name: exit $code after $((SECONDS - at)) s"; grep -E '^JSON|passed|failed|rror|ms_per|"us"|wrong' "$OUT/$name.log" | sed 's/, "machine".*//; s/, "command".*//' | cut -c1-420
  [ $code = 0 ] || tail -15 "$OUT/$name.log" | cut -c1-400; }
part one 45 python bench/gpu_integers.py --kernels late,fixed --rows 1 --seconds 30 --out "$OUT/w4.jsonl"
part few 32 python bench/gpu_integers.py --kernels late --rows 16 --seconds 18 --out "$OUT/w4.jsonl"
TAKEN=$OUT/w4.jsonl
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
part before 40 python bench/offline.py --repeat 1 --model "$T/qwen3-8b-w4a16" --workloads W2
[ -s "$TAKEN" ] && cat "$TAKEN" >>"$TABLE"
part w4a16 45 python bench/offline.py --repeat 1 --model "$T/qwen3-8b-w4a16" --workloads W2,W5 --batches 16
cp "$T/table" "$TABLE"; rm -rf "$T"
