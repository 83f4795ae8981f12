#!/usr/bin/env bash
# Pictures, videos and blocks out of noise on one H200: tests that need no network, and how late others' tokens come
# while a client sends what is no picture (on the CPUs of the machine). Run it in the repository's root; results into
# $OUT (media.jsonl: a JSON line each; media.log: what was printed). At most 450 s.
#   PYTHON=python3 BENCH_COMMIT=abc1234 OUT=/tmp/out bash bench/gpu/media.sh
set -uo pipefail
LIMIT=${LIMIT:-445}
. bench/gpu/parts.sh

mark=
tell() {
    echo "$2: $(grep -E 'passed|failed|"requests"' "$out/part.log" | tail -1 | cut -c1-400)"
    (($1)) && grep -E '^(E  |FAILED|ERROR)' "$out/part.log" | head -20
}

part hostile 90 bench/hostile_media.py --rounds 10
part canvases 90 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_canvases.py
part vectors 60 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_pictured_vectors.py
part sounds 90 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_sounds.py
part pictures 240 -m pytest -q -p no:cacheprovider -n 0 tests/gpu/test_gpu_pictures.py
