#!/usr/bin/env bash
# Models that fit one H200: W1 and W2 of six, and Qwen3.6-35B-A3B in fp8 (W2, and 128 requests of 8192 in and 1024 out) and in bfloat16 (these requests).
# No network, random weights. Run it in the repository's root; results into $OUT (families.jsonl: a JSON line each; families.log: what was
# printed). At most $LIMIT seconds (560); parts are chosen by name, and two calls with two OUTs may run at once on two GPUs.
#   CUDA_VISIBLE_DEVICES=0 OUT=/tmp/out0 bash bench/gpu/families.sh [PART ...]
#   parts: gemma-3-27b gemma-2-9b command-r7b olmo-2-13b phi-4 granite-4.0-h-small qwen3.6-35b-a3b-fp8 qwen3.6-35b-a3b-most (default: all)
set -uo pipefail
LIMIT=${LIMIT:-560}
. bench/gpu/parts.sh
words=$(mktemp -d)
trap 'rm -rf "$words"' EXIT

# family NAME SECONDS MODEL EXTRA ARGUMENTS...: of bench/offline.py; EXTRA begins with ", " or is empty.
family() {
    local name=$1 limit=$2 model=bench/models/$3 extra=$4
    shift 4
    $python bench/words.py "$model" "$words/$name" || return
    part "$name" "$limit" bench/offline.py --model "$model" --repeat "${REPEAT:-1}" "$@" \
        --extra "{\"tokenizer\": \"$words/$name\"$extra}"
}

for each in ${*:-gemma-3-27b gemma-2-9b command-r7b olmo-2-13b phi-4 granite-4.0-h-small qwen3.6-35b-a3b-fp8 qwen3.6-35b-a3b-most}; do
    case $each in
    gemma-3-27b) family "$each" 110 "$each" "" --workloads W2,W1 ;;
    gemma-2-9b | command-r7b | phi-4) family "$each" 60 "$each" "" --workloads W2,W1 ;;
    olmo-2-13b) family "$each" 60 "$each" "" --workloads W2,W1 --max-model-len 4096 ;;
    granite-4.0-h-small) family "$each" 75 "$each" "" --workloads W2,W1 ;;
    qwen3.6-35b-a3b-fp8) family "$each" 150 qwen3.6-35b-a3b ', "quantization": "fp8"' --tag fp8 \
        --workloads W2,W6 --batches 128 --lengths 8192,1024 --max-model-len 9217 ;;
    qwen3.6-35b-a3b-most) family "$each" 110 qwen3.6-35b-a3b "" --workloads W6 --batches 128 --lengths 8192,1024 --max-model-len 9217 ;;
    *) echo "-- $each: no such part" ;;
    esac
done
