#!/usr/bin/env bash
# Mixtures with one and two rows on one H200: tests of their kernels and of states, layers in a chain with each way to cut and to start, and
# steps with both ways that are off (moe.py: TWO_TILES, EARLY) and without. No network, random weights. Run it in the repository's root;
# results into $OUT (few.jsonl: a JSON line each; few.log: what was printed). At most $LIMIT seconds (400); parts are chosen by name.
#   OUT=/tmp/out bash bench/gpu/few.sh [PART ...]
#   parts: tests layers qwen3.6-35b-a3b glm-4.7-flash deepseek-v2-lite (default: all)
set -uo pipefail
LIMIT=${LIMIT:-400}
. bench/gpu/parts.sh
both='import runpy, sys; from sgla.kernels.triton import moe; moe.TWO_TILES, moe.EARLY = True, 2
sys.path.insert(0, "bench"); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name="__main__")'

for each in ${*:-tests layers qwen3.6-35b-a3b glm-4.7-flash deepseek-v2-lite}; do
    case $each in
    tests) part tests 150 -m pytest -q -p no:cacheprovider -o addopts= -n 4 -m "gpu and not slow" --tb=short \
        tests/gpu/test_gpu_moe.py tests/gpu/test_gpu_states.py ;;
    layers)
        part layers-qwen 60 bench/gpu_moe.py layers --model bench/models/qwen3.6-35b-a3b
        part layers-qwen-fp8 60 bench/gpu_moe.py layers --model bench/models/qwen3.6-35b-a3b --fp8
        part layers-glm 60 bench/gpu_moe.py layers --model bench/models/glm-4.7-flash
        part layers-deepseek 60 bench/gpu_moe.py layers --model bench/models/deepseek-v2-lite
        ;;
    *)
        given="bench/step.py --model bench/models/$each --batches 1,2 --profile --prompts 0+64"
        part "$each" 60 $given
        part "$each, both" 60 -c "$both" $given
        ;;
    esac
done
