#!/usr/bin/env bash
# What users send, in parts of 25 to 60 s each on one H200: no network, random weights. Run it in the repository's root;
# results into $OUT (users.jsonl: a JSON line each; users.log: what was printed).
#   OUT=/tmp/out bash bench/gpu/users.sh [PART ...]
#   orders     attention of long prompts with their heads in several orders (15 s)
#   documents  Qwen3-8B: prompts of 32,768 tokens (W8) and of 4,096 (W3) (40 s)
#   whole      Llama-3.1-8B: one prompt of 130,816 tokens, the longest that leaves room for an answer (40 s)
#   flood      prompts of 100 tokens while prompts of 16,000 are read (40 s)
#   arrival    Llama-3.1-8B: a prompt of 100,000 tokens beside 32 streams; when their longest gaps end (40 s)
#   schemas    a batch of 64 in which one request has a new schema (35 s)
#   partition  decode rows and prompts on multiprocessors of their own (40 s)
#   chats      W9 and W10 over HTTP (60 s)
#   agents     W7 over HTTP: Llama-3.1-8B, 16 agents, 30 turns, prompts of up to 60,000 tokens (100 s)
# SMALL=1: a tiny model on a CPU, to see that the parts run, but for orders and partition, which are of GPUs.
set -uo pipefail
LIMIT=${LIMIT:-500}
. "$(dirname "$0")/parts.sh"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
eight=bench/models/qwen3-8b llama=bench/models/llama-3.1-8b device=cuda
document=32768 longest=131072 beside=100000 short=33100 flood=16000 outputs=128 rates=32,64,96 agents=60000 turns=30 context=8192
words=$(mktemp -d)
trap 'rm -rf "$words"' EXIT
parts="orders documents whole flood arrival schemas partition chats agents"
if [ "${SMALL:-}" ]; then
    parts="documents whole flood arrival schemas chats agents"
    eight=$words/small llama=$words/small device=cpu
    document=512 longest=2048 beside=20000 short=4200 flood=800 outputs=16 rates=2,4 agents=3500 turns=3 context=4096
    mkdir -p "$words/small"
    $python - "$words/small/config.json" <<'P'
import json, sys
made = json.load(open("bench/models/qwen3-0.6b/config.json"))
made |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 40960, "max_window_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
json.dump(made, open(sys.argv[1], "w"))
P
fi
for model in "$eight" "$llama"; do
    $python bench/words.py "$model" "$words/$(basename "$model")" || exit 1
done
vocab=$($python -c 'import json, sys; print(min(100000, json.load(open(sys.argv[1]))["vocab_size"]))' "$eight/config.json")
with() { printf '{"device": "%s"%s}' "$device" "${1:-}"; }
text_of() { printf ', "tokenizer": "%s/%s"' "$words" "$(basename "$1")"; }

for each in ${*:-$parts}; do
    case $each in
    orders) part orders 40 bench/gpu_kernels.py orders ;;
    documents)
        part documents 60 bench/offline.py --model "$eight" --max-model-len $short --workloads W8,W3 --document-tokens $document \
            --documents 1,8 --repeat 1 --vocab "$vocab" --extra "$(with)"
        ;;
    whole)
        part whole 60 bench/offline.py --model "$llama" --max-model-len $longest --workloads W8 --document-tokens $longest \
            --documents 1 --repeat 1 --vocab "$vocab" --extra "$(with "$(text_of "$llama")")"
        ;;
    flood) part flood 60 bench/flood.py --model "$eight" --long $flood --vocab "$vocab" --extra "$(with)" ;;
    arrival)
        part arrival 60 bench/arrival.py --model "$llama" --tokens $beside --repeat 1 --alone 1 --vocab "$vocab" \
            --extra "$(with "$(text_of "$llama")")"
        ;;
    schemas)
        part schemas 60 bench/grammar.py --model "$eight" --batch 64 --tokens $outputs --repeat 5 --others \
            --extra "$(with "$(text_of "$eight"), \"load_format\": \"dummy\", \"context_length\": 8192")"
        ;;
    partition) part partition 60 bench/partition.py --model "$eight" ;;
    chats | agents)
        model=$eight only="W9 W10"
        [ $each = agents ] && model=$llama only=W7
        [ $each = agents ] && context=$((agents + 1000))
        mark=
        part "$each" 110 bench/serve.py --only $only --model "$model" --dummy "$words/$(basename "$model")" --repeat 1 \
            --rates "$rates" --seconds 6 --agents 16 --agent-tokens $agents --agent-turns $turns --gap 0.5 --log "$out/$each.server" \
            --server-args "--device $device --context-length $context"
        mark='JSON '
        ;;
    *) echo "there is no part $each" && exit 1 ;;
    esac
done
