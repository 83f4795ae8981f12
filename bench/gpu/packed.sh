#!/usr/bin/env bash
# One row and few rows with weights of 4 bits and in fp8 on one H200: the step as one kernel (csrc/cuda/decode_step.cu,
# packed_row.cuh) and as today. Run in the repository's root with OUT set. About 6 minutes.
#   1. correctness against torch in float32 (also of bf16, which shares the file), and of the few-row kernels
#   2. cuts of the kernel: milliseconds of a step for each (rows side by side, pieces flying, merging)
#   3. steps of the runner: int4, fp8 and w4a16 (groups of 128), 1, 2, 4, 8 and 16 rows; W2
# The step as one kernel is off until `DenseShape.pays` takes packed weights: cuts4 and cuts8 say whether it is faster
# (w4a16 below 2.13 ms, fp8 below 2.31).
# Before: Qwen3-8B one row int4 1.93, w4a16 2.14, fp8 2.31 ms; 16 rows 3.47. Goals: 1.5 (w4a16), 2.2 (fp8), 16 rows 1.9.
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
T=$(mktemp -d)
part() { name=$1 most=$2; shift 2; at=$SECONDS; timeout -k 8 "$most" "$@" >"$OUT/$name.log" 2>&1; code=$?
  echo "== $name: exit $code after $((SECONDS - at)) s"; grep -E '^JSON|passed|failed|rror|ms_per|graph_ms|floor' "$OUT/$name.log" | sed 's/, "machine".*//; s/, "command".*//' | cut -c1-300
  [ $code = 0 ] || tail -15 "$OUT/$name.log" | cut -c1-400; }
part tests 240 python -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_decode_step.py
part cuts4 75 python bench/gpu_one_row.py --kind int4g128 --seconds 50
part cuts8 60 python bench/gpu_one_row.py --kind fp8 --seconds 35
part llama 40 python bench/gpu_one_row.py --model llama-3.1-8b --kind int4g128 --seconds 12
# w4a16: groups of 128, symmetric, as llm-compressor writes it
cp -r bench/models/qwen3-8b "$T/qwen3-8b-w4a16"
python - "$T/qwen3-8b-w4a16/config.json" <<'PY'
import json, sys
path = sys.argv[1]; model = json.load(open(path))
weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False, "actorder": None}
model["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}}, "ignore": ["lm_head"]}
json.dump(model, open(path, "w"))
PY
part w4a16 110 python bench/offline.py --repeat 2 --model "$T/qwen3-8b-w4a16" --workloads W2,W5 --batches 1,2,4,8,16
part fp8 90 python bench/offline.py --repeat 2 --model bench/models/qwen3-8b --workloads W2,W5 --batches 1,4,16 --extra '{"quantization": "fp8"}'
part integers 60 python -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_integers.py tests/gpu/test_gpu_moe.py
rm -rf "$T"
