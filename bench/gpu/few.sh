#!/usr/bin/env bash
# One and two rows of mixtures and of models with latent attention on one H200: tests of what is new for them, layers in a chain with each
# way to cut and to start, and steps without what starts early (EARLY of moe.py) and with Triton's kernels for experts of few tokens; a
# step of Qwen3-0.6B that verifies guesses. No network, random weights. Run it in the repository's root; results into $OUT (few.jsonl: a JSON line each; few.log: what
# was printed). At most $LIMIT seconds (500); parts are chosen by name, and steps are timed also WITH "before triton", of so many LAYERS; ONLY=1: not as they are.
#   OUT=/tmp/out bash bench/gpu/few.sh [PART ...]
#   parts: tests early sums layers states guesses last qwen3.6-35b-a3b glm-4.7-flash deepseek-v2-lite (default: all but sums and last)
set -uo pipefail
LIMIT=${LIMIT:-500}
. bench/gpu/parts.sh
# with VALUES SCRIPT ARGUMENTS...: a script with other values of constants.
with='import runpy, sys
from sgla.kernels.cuda import token_experts
from sgla.kernels.triton import moe
exec(sys.argv[1])
sys.path[0], sys.argv = "bench", sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")'
before='moe.EARLY, moe.few_cuts = 0, lambda *_: moe.Few()'
triton='token_experts.refuses = lambda *_: "no"'

for each in ${*:-tests early layers states guesses qwen3.6-35b-a3b glm-4.7-flash deepseek-v2-lite}; do
    case $each in
    tests) part tests 150 -m pytest -q -p no:cacheprovider -o addopts= -n 6 -m "gpu and not slow" --tb=short \
        tests/gpu/test_gpu_moe.py tests/gpu/test_gpu_states.py tests/gpu/test_gpu_kernels.py -k "moe or states or latents" ;;
    early) part early 80 -m pytest -q -p no:cacheprovider -o addopts= -n 6 -m gpu --tb=short tests/gpu/test_gpu_moe.py \
        tests/gpu/test_gpu_states.py tests/gpu/test_gpu_kernels.py -k "start_early or convolution_in_the or chain_of_layers or sum_otherwise" ;;
    sums) part sums 45 -m pytest -q -p no:cacheprovider -o addopts= -n 6 -m gpu --tb=short tests/gpu/test_gpu_moe.py -rA \
        -k "sum_otherwise or (chain_of_layers and bf16) or shared_expert or mixture_equals" ;;
    states) part states 40 bench/gpu_states.py --rows 1,4 --tokens 64 ;;
    layers)
        part layers-qwen 60 bench/gpu_moe.py layers --model bench/models/qwen3.6-35b-a3b
        part layers-qwen-fp8 60 bench/gpu_moe.py layers --model bench/models/qwen3.6-35b-a3b --fp8
        part layers-glm 60 bench/gpu_moe.py layers --model bench/models/glm-4.7-flash
        part layers-deepseek 60 bench/gpu_moe.py layers --model bench/models/deepseek-v2-lite
        ;;
    guesses)
        part guesses 40 bench/step.py --model bench/models/qwen3-0.6b --batches 1 --guesses 8,7,5
        for depth in 2 3; do
            part "guesses, depth $depth" 30 bench/drafts.py --device cuda --alone --dummy --model bench/models/qwen3-0.6b --texts free \
                --tokens 512 --repeat 3 --kv 2 --algorithm ngram --accept 0.8 --always --guesses 8,7,5 --extra "{\"depth\": $depth}"
        done
        ;;
    last)  # 45 s
        part depth 18 bench/drafts.py --device cuda --alone --dummy --model bench/models/qwen3-0.6b --texts free --tokens 512 --repeat 3 \
            --kv 2 --algorithm ngram --accept 0.8 --always --guesses 7,5 --extra '{"depth": 3}'
        $python -c 'import json; print(json.dumps([*range(0, 248320, 8)] + [*range(1, 1729)]))' >"$out/map.json"
        part mtp 40 bench/drafts.py --dummy --device cuda --model bench/models/qwen3.6-35b-a3b --alone --kv 8 --texts loop --algorithm mtp \
            --accept 0.8 --all --guesses 3 --rows 1 --tokens 256 --repeat 2 --extra '{"speculative_token_map": "'"$out/map.json"'"}'
        ;;
    *)
        model=bench/models/$each
        if [ "${LAYERS:-}" ]; then  # so many alone, which are loaded sooner
            model=$out/$each && mkdir -p "$model"
            $python -c 'import json, sys
whole = json.load(open(sys.argv[1]))
decoder = whole.get("text_config", whole)
decoder["num_hidden_layers"] = layers = int(sys.argv[2])
for kinds in {"layer_types", "mlp_layer_types"} & decoder.keys():
    decoder[kinds] = decoder[kinds][:layers]
json.dump(whole, open(sys.argv[3], "w"))' "bench/models/$each/config.json" "$LAYERS" "$model/config.json"
        fi
        given="bench/step.py --model $model --batches 1,2 --profile --prompts 0+64"
        [ "${ONLY:-}" ] || part "$each" 60 $given
        for more in ${WITH:-before triton}; do
            part "$each-$more" 60 -c "$with" "${!more}" $given
        done
        ;;
    esac
done
