#!/usr/bin/env bash
# --deterministic on one H200: no network, random weights. Run it in the repository's root; results into $OUT
# (deterministic.jsonl: a JSON line each; deterministic.log: what was printed). At most 400 s.
#   tests    products and attention: the same bits with any number of rows, in any tile; then whole runners
#   kernels  what each costs beside what serves else, with the fastest cuts
#   fast     W1, W2, W5 and where a step goes with these kernels; "usual" without --deterministic
LIMIT=${LIMIT:-395}
. "$(dirname "$0")/parts.sh"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
what=${WHAT:-tests kernels fast usual}
has() { [[ " $what " == *" $1 "* ]]; }
det='{"deterministic": true}'
has tests && part chunked 70 -m pytest -q --tb=short -p no:cacheprovider -o addopts= -n 4 tests/gpu/test_gpu_chunked.py
has tests && part runners 70 -m pytest -q --tb=short -p no:cacheprovider -o addopts= -n 0 tests/gpu/test_gpu_invariant.py \
    tests/gpu/test_gpu_prompt_attention.py
has kernels && part kernels 110 bench/gpu_invariant.py --seconds 95
has fast && part fast 80 bench/offline.py --model bench/models/qwen3-8b --workloads W2,W1,W5 --batches 16,64,256 --repeat 1 \
    --tag deterministic --extra "$det"
has fast && part steps 50 bench/step.py --model bench/models/qwen3-8b --batches 1,64,256 --steps 30 --profile --extra "$det"
has usual && part usual 60 bench/offline.py --model bench/models/qwen3-8b --workloads W2,W1,W5 --batches 16,64,256 --repeat 1 \
    --tag usual
