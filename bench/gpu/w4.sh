#!/usr/bin/env bash
# Weights of 4 bits on one H200. Run in the repository's root with OUT set; parts are chosen by name. At most $LIMIT
# seconds (170); results in w4.jsonl, w4.log.
#   OUT=/tmp/out bash bench/gpu/w4.sh [PART ...]
#   tests   products of up to 16 rows against torch in float32
#   layer   its products and attention in turn, w4a16, fp8 and bf16, by ways to fetch weights
#   steps   steps of 1, 8 and 16 rows as they are, with the copy engine, and where o fetches what gate and up read first
#   timeline cycles between eight places of the kernels, in a layer's four products in turn
#   cuts    each product by kernel and cut: us ("serving": by integer_gemm.cu); a layer's four in turn; what
#           a kernel needs that only reads. Those that are wrong are named
#   mixture a step of one row of Qwen3-30B-A3B
#   w4a16   W2 and steps of 4, 8 and 16 rows
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
with='import runpy, sys
from sgla.kernels.cuda import integer_gemm, skinny_gemm
exec(sys.argv[1])
sys.path[0], sys.argv = "bench", sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")'
given="bench/step.py --model $T/qwen3-8b-w4a16 --batches 1,8,16"
for each in ${*:-tests layer steps timeline}; do
    case $each in
    tests) part tests 60 -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_integers.py \
        -k "stationary or copy_engine or ahead or few and int4g128" ;;
    layer) part layer 50 bench/gpu_layer.py ;;
    steps)
        part steps 35 $given
        part steps-engine 35 -c "$with" "integer_gemm.ENGINE = ${ENGINE:-1}" $given
        part steps-ahead 35 -c "$with" "skinny_gemm.AHEAD = ${AHEAD:-12} << 20" $given
        ;;
    fp8) # one row with a scale for each channel, without and with the second
        fp8="bench/step.py --model bench/models/qwen3-8b --quantization fp8 --batches 1,2"
        part fp8 35 $fp8
        part fp8-ahead 35 -c "$with" "skinny_gemm.AHEAD = ${AHEAD:-12} << 20" $fp8
        ;;
    timeline) part timeline 30 bench/gpu_timeline.py ;;
    cuts) part cuts 60 bench/gpu_stationary.py --rows 1,16 --chains 1,16 --seconds 25 ;;
    mixture) part mixture 80 bench/step.py --model "$T/qwen3-30b-a3b-w4a16" --batches 1 ;;
    w4a16) part w4a16 35 bench/offline.py --repeat 1 --model "$T/qwen3-8b-w4a16" --workloads W2,W5 --batches 4,8,16 ;;
    esac
done
