#!/usr/bin/env bash
# The tower of Qwen2.5-VL-7B on one H200, as it is and with what is tried: attention over whole pictures by cuDNN and by
# our kernel, other numbers of pictures at a time, and where the time goes. Run it in the repository's root; results into $OUT
# (tower.jsonl: a JSON line each; tower.log: what was printed). At most 200 s.
#   PYTHON=python3 BENCH_COMMIT=abc1234 OUT=/tmp/out bash bench/gpu/tower.sh
set -uo pipefail
LIMIT=${LIMIT:-195}
. bench/gpu/parts.sh

mark=
tell() {
    echo "$2: $(grep -oE '[0-9.]+ TFLOP / [^"]*|[0-9]+ passed.*|[0-9]+ failed.*' "$out/part.log" | tr '\n' ';')"
    grep -oE '"note": "[^"]+"' "$out/part.log" | head -1
    (($1)) && tail -5 "$out/part.log"
}

tower="bench/pictures.py --only tower --peak 795e12"
part torch 40 $tower
part cudnn 40 $tower --long-by cudnn
part own 40 $tower --long-by own --profile
part three 40 $tower --long-by own --abreast $((80 << 20))
part four 40 $tower --long-by own --abreast $((104 << 20))
