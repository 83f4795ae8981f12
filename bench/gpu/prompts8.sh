#!/usr/bin/env bash
# Prompts behind others in a KV cache of e4m3, by the CUDA kernel of prompts, on one H200: no network, random weights. Run
# it in the repository's root; results into $OUT (prompts8.jsonl: a JSON line each; prompts8.log). At most 190 s.
#   tests   against torch with what the pages hold, and a whole server's
#   behind  prompts behind histories: bf16, fp8 by this kernel and by Triton
#   long    Qwen3-8B with --kv-cache-dtype fp8: 32,768 tokens and eight times that
LIMIT=${LIMIT:-185}
. "$(dirname "$0")/parts.sh"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
part tests 80 -m pytest -q --tb=short -p no:cacheprovider -o addopts= -n 4 tests/gpu/test_gpu_prompt_attention.py tests/gpu/test_gpu_fp8_kv.py
part behind 40 bench/gpu_kernels.py behind
part long 60 bench/offline.py --model bench/models/qwen3-8b --max-model-len 33100 --workloads W8 \
    --document-tokens 32768 --repeat 1 --tag fp8-kv --extra '{"kv_cache_dtype": "fp8"}'
