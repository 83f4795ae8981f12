#!/usr/bin/env bash
# Models that fit one H200: W1 and W2 of any folder of bench/models by its name, with -fp8 behind it in fp8, with -int4 as
# llm-compressor writes 4 bits in groups of 128, with -generic through transformers' module; some have settings of their own:
#   gpt2                   a step of one row and of 64 in place of both, since its context is shorter than W1 asks for
#   qwen3.6-35b-a3b-fp8    W2, and 128 requests of 8192 in and 1024 out
#   qwen3.6-35b-a3b-most   these requests in bfloat16
#   qwen3.6-35b-a3b-first  the first token of one prompt of 8192, and steps of 1 and 16 rows behind as many tokens in bfloat16 and fp8
# No network, random weights. Run it in the repository's root; results into $OUT (families.jsonl: a JSON line each; families.log: what was
# printed). At most $LIMIT seconds (560); with WORKLOADS=W2 one request alone; two calls with two OUTs may run at once on two GPUs.
#   CUDA_VISIBLE_DEVICES=0 OUT=/tmp/out0 bash bench/gpu/families.sh PART ...
set -uo pipefail
LIMIT=${LIMIT:-560}
. bench/gpu/parts.sh
words=$(mktemp -d)
trap 'rm -rf "$words"' EXIT

# family NAME SECONDS MODEL EXTRA ARGUMENTS...: of bench/offline.py; MODEL is a folder of bench/models or a path, EXTRA begins with ", "
# or is empty.
family() {
    local name=$1 limit=$2 model=$3 extra=$4
    [[ $model = */* ]] || model=bench/models/$model
    shift 4
    $python bench/words.py "$model" "$words/$name" || return
    part "$name" "$limit" bench/offline.py --model "$model" --repeat "${REPEAT:-1}" "$@" \
        --extra "{\"tokenizer\": \"$words/$name\"$extra}"
}

# int4 MODEL: a folder whose config.json says so, beside its tokenizer. Routers stay as they are.
int4() {
    local model=$words/$1-w4a16
    cp -r "bench/models/$1" "$model"
    $python - "$model/config.json" <<'PY' || return
import json, sys
path = sys.argv[1]; model = json.load(open(path))
weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False, "actorder": None}
model["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}}, "ignore": ["lm_head", "re:.*gate$"]}
json.dump(model, open(path, "w"))
PY
    family "$1-int4" 230 "$model" "" --tag int4 --workloads "${WORKLOADS:-W2,W1}" --max-model-len 4096
}

for each in "$@"; do
    case $each in
    gpt2) part "$each" 60 bench/step.py --model bench/models/gpt2 --batches 1,64 --context 400 ;;
    qwen3.6-35b-a3b-fp8) family "$each" 150 qwen3.6-35b-a3b ', "quantization": "fp8"' --tag fp8 \
        --workloads W2,W6 --batches 128 --lengths 8192,1024 --max-model-len 9217 ;;
    qwen3.6-35b-a3b-most) family "$each" 110 qwen3.6-35b-a3b "" --workloads W6 --batches 128 --lengths 8192,1024 --max-model-len 9217 ;;
    qwen3.6-35b-a3b-first)
        REPEAT=3 family "$each" 60 qwen3.6-35b-a3b "" --workloads W6 --batches 1 --lengths 8192,1 --max-model-len 9217
        part "$each" 60 bench/step.py --model bench/models/qwen3.6-35b-a3b --batches 1,16 --context 8192
        part "$each" 60 bench/step.py --model bench/models/qwen3.6-35b-a3b --batches 1,16 --context 8192 --quantization fp8 ;;
    *-fp8) family "$each" 150 "${each%-fp8}" ', "quantization": "fp8"' --tag fp8 --workloads "${WORKLOADS:-W2,W1}" --max-model-len 4096 ;;
    *-int4) int4 "${each%-int4}" ;;
    *-generic) family "$each" 150 "${each%-generic}" ', "model_impl": "transformers"' --tag generic --workloads "${WORKLOADS:-W2,W1}" --max-model-len 4096 ;;
    *) family "$each" 130 "$each" "" --workloads "${WORKLOADS:-W2,W1}" --max-model-len 4096 ;;
    esac
done
