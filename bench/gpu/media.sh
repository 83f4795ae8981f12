#!/usr/bin/env bash
# Pictures, videos and blocks out of noise on one H200: tests that need no network, and how late others' tokens come
# while a client sends what is no picture (on the CPUs of the machine). Run it in the repository's root; results into
# $OUT (media.jsonl: a JSON line each; media.log: what was printed). At most 420 s.
#   PYTHON=python3 BENCH_COMMIT=abc1234 OUT=/tmp/out bash bench/gpu/media.sh
set -uo pipefail
out=${OUT:-/tmp/media}
python=${PYTHON:-python}
end=$((SECONDS + ${LIMIT:-415}))
mkdir -p "$out"
: >"$out/media.jsonl" >"$out/media.log"
export BENCH_COMMIT=${BENCH_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}

# part NAME SECONDS COMMAND...: its JSON lines, marked with its name; never longer than what is left.
part() {
    local name=$1 limit=$2 left=$((end - SECONDS)) begun=$SECONDS code
    shift 2
    ((left < limit)) && limit=$left
    if ((limit < 15)); then
        echo "-- $name: left out, no time" | tee -a "$out/media.log"
        return
    fi
    timeout --kill-after=5 "$limit" $python "$@" >"$out/part.log" 2>&1
    code=$?
    { echo "-- $name: $*"; cat "$out/part.log"; echo "-- $name: code $code after $((SECONDS - begun)) s"; } >>"$out/media.log"
    sed -n 's/^{/{"part": "'"$name"'", /p' "$out/part.log" >>"$out/media.jsonl"
    echo "-- $name: code $code, $((SECONDS - begun)) s: $(grep -E 'passed|failed|"requests"' "$out/part.log" | tail -1 | cut -c1-400)"
    ((code)) && grep -E '^(E  |FAILED|ERROR)' "$out/part.log" | head -20
    rm -f "$out/part.log"
}

part hostile 90 bench/hostile_media.py --rounds 10
part canvases 90 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_canvases.py
part vectors 60 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_pictured_vectors.py
part sounds 60 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_sounds.py
part pictures 240 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_pictures.py
