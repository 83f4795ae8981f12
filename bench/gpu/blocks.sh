#!/usr/bin/env bash
# fp8 in blocks of 128 x 128 and NVFP4 on one H200. Run in the repository's root with OUT set. At most 170 s.
#   tests    their kernels against torch in float32
#   rows     W1, W2 and steps of 16 rows of Qwen3-8B with a scale for each channel (as until now)
#   blocks   the same in blocks: no more than 5 % slower is wanted
#   nvfp4    W2 and steps of 16 rows
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 BENCH_COMMIT=${BENCH_COMMIT:-next}
T=$(mktemp -d)
part() { name=$1 most=$2; shift 2; at=$SECONDS; timeout -k 8 "$most" "$@" >"$OUT/$name.log" 2>&1; code=$?
  echo "== $name: exit $code after $((SECONDS - at)) s"; grep -E '^JSON|passed|failed|rror|ms_per|tok_s' "$OUT/$name.log" | sed 's/, "machine".*//; s/, "command".*//' | cut -c1-420
  [ $code = 0 ] || tail -15 "$OUT/$name.log" | cut -c1-400; }
model() { cp -r bench/models/qwen3-8b "$T/$1"; python - "$T/$1/config.json" "$2" <<'PY'
import json, sys
path = sys.argv[1]; model = json.load(open(path)); model["quantization_config"] = json.loads(sys.argv[2]); json.dump(model, open(path, "w"))
PY
}
model blocks '{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}'
model nvfp4 '{"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}'
part tests 50 python -m pytest -x -q -p no:cacheprovider -n 0 -m gpu tests/gpu/test_gpu_fp8.py -k "scales_of_groups or few_rows or cut"
part rows 45 python bench/offline.py --repeat 1 --model bench/models/qwen3-8b --workloads W1,W2,W5 --batches 16 --extra '{"quantization": "fp8"}'
part blocks 45 python bench/offline.py --repeat 1 --model "$T/blocks" --workloads W1,W2,W5 --batches 16
part nvfp4 30 python bench/offline.py --repeat 1 --model "$T/nvfp4" --workloads W2,W5 --batches 16
rm -rf "$T"
