#!/usr/bin/env bash
# The tower of Qwen2.5-VL-7B on one H200: parts of a layer by several kernels, the whole, and where its time goes. Run it
# in the repository's root; results into $OUT (tower.jsonl: a JSON line each; tower.log: what was printed). At most 95 s.
#   PYTHON=python3 BENCH_COMMIT=abc1234 OUT=/tmp/out bash bench/gpu/tower.sh
set -uo pipefail
LIMIT=${LIMIT:-90}
. bench/gpu/parts.sh

mark='\(JSON \)\?'
tell() {
    echo "$2: $(grep -oE '[0-9.]+ TFLOP / [^"]*|[0-9]+ passed.*|[0-9]+ failed.*' "$out/part.log" | tr '\n' ';')"
    sed -n 's/.*"name": "\(.*\)", "rows": \([0-9]*\), "us": \([0-9.]*\), "tflops": \([0-9.]*\).*/\2 rows, \1: \3 us, \4 TFLOP\/s/p' \
        "$out/part.log"
    grep -oE '"note": "[^"]+"' "$out/part.log" | head -1
    (($1)) && tail -5 "$out/part.log"
}

part parts 30 bench/gpu_kernels.py tower
part tower 60 bench/pictures.py --only tower --peak 795e12 --profile
