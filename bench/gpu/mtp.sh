#!/usr/bin/env bash
# Qwen3.6-35B-A3B with its own layer that guesses, of whose guesses four fifths are taken as right, and without it, on one H200: no network,
# random weights. Run it in the repository's root; results into $OUT (mtp.jsonl: a JSON line each; mtp.log: what was printed). At most 150 s.
#   PYTHON=python3 BENCH_COMMIT=abc1234 OUT=/tmp/out bash bench/gpu/mtp.sh [rounded | wrong]
set -uo pipefail
LIMIT=${LIMIT:-148}
. bench/gpu/parts.sh

common="bench/drafts.py --dummy --device cuda --model bench/models/qwen3.6-35b-a3b --alone --kv 8 --texts loop"
if [[ ${1:-} == rounded ]]; then # an output layer of 4 bits makes the guesses
    for kind in int4 none; do
        extra=(); [[ $kind == none ]] || extra=(--extra '{"speculative_head_quantization": "'$kind'"}')
        part "$kind" 70 $common --algorithm mtp --accept 0.8 --all --guesses 4,3 --rows 1,16 --tokens 256 --repeat 2 "${extra[@]}"
    done
    exit
fi
if [[ ${1:-} == wrong ]]; then # no guess is right (goal: 3 % longer than without)
    wrong="${common/loop/free} --rows 1,16 --tokens 512 --repeat 2"
    part wrong 60 $wrong --algorithm mtp --accept 0 --guesses 3
    part none 60 $wrong --algorithm off
    exit
fi
# Goals: 1.6 ms a token of one stream, 8.1 ms of sixteen. One engine, with up to 4, 3, 2 and 1 guesses.
part guesses 90 $common --algorithm mtp --accept 0.8 --all --guesses 4,3,2,1 --rows 1,16 --tokens 256 --repeat 2
# The same with some 32,500 tokens that it may guess; which ones these are costs nothing here.
$python -c 'import json; print(json.dumps([*range(0, 248320, 8)] + [*range(1, 1729)]))' >"$out/map.json"
part narrowed 60 $common --algorithm mtp --accept 0.8 --all --guesses 4,3,2 --rows 1 --tokens 256 --repeat 2 \
    --extra '{"speculative_token_map": "'"$out/map.json"'"}'
# As many guesses as pay by the clock.
part adaptive 45 $common --algorithm mtp --accept 0.8 --guesses 4 --rows 1,16 --tokens 256 --repeat 2 \
    --extra '{"speculative_token_map": "'"$out/map.json"'"}'
part none 60 $common --algorithm off --rows 1,16 --tokens 256 --repeat 2
