#!/usr/bin/env bash
# Weights of 4 bits on one H200. Run in the repository's root with OUT set; parts are chosen by name. At most $LIMIT
# seconds (170); results in w4.jsonl, w4.log.
#   OUT=/tmp/out bash bench/gpu/w4.sh [PART ...]
#   tests   products of up to 16 rows against torch in float32
#   steps   steps of 1, 8 and 16 rows
#   timeline cycles between eight places of the kernels, in a layer's four products in turn
#   cuts    each product by kernel and cut: us ("serving": by integer_gemm.cu); a layer's four in turn; what
#           a kernel needs that only reads. Those that are wrong are named
#   mixture a step of one row of Qwen3-30B-A3B
#   w4a16   W2 and steps of 4, 8 and 16 rows
#   formats a layer's products of 1, 16 and 64 rows for each storage of weights
LIMIT=${LIMIT:-170}
. "$(dirname "$0")/parts.sh"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
# Groups of 128, symmetric, as llm-compressor writes it.
for model in qwen3-8b qwen3-30b-a3b; do
    cp -r "bench/models/$model" "$T/$model-w4a16"
    $python - "$T/$model-w4a16/config.json" <<'PY'
import json, sys
path = sys.argv[1]; model = json.load(open(path))
weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False, "actorder": None}
model["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}}, "ignore": ["lm_head", "re:.*mlp.gate$"]}
json.dump(model, open(path, "w"))
PY
done
for each in ${*:-cuts timeline w4a16 tests}; do
    case $each in
    tests) part tests 60 -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_integers.py \
        -k "stationary or few and int4g128" ;;
    steps) part steps 35 bench/step.py --model "$T/qwen3-8b-w4a16" --batches 1,8,16 ;;
    timeline) part timeline 30 bench/gpu_timeline.py ;;
    cuts) part cuts 60 bench/gpu_stationary.py --rows 1,16 --chains 1,16 --seconds 25 ;;
    mixture) part mixture 80 bench/step.py --model "$T/qwen3-30b-a3b-w4a16" --batches 1 ;;
    formats) part formats 75 bench/gpu_formats.py ;;
    w4a16) part w4a16 35 bench/offline.py --repeat 1 --model "$T/qwen3-8b-w4a16" --workloads W2,W5 --batches 4,8,16 ;;
    esac
done
