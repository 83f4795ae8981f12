#!/usr/bin/env bash
# The tests of tests/gpu on one H200 beside each other, without those that fill its memory: about 220 s on 16 cores.
# Run in the repository's root with OUT set. A run that is cut short has the names of what failed so far, too.
#   OUT=/tmp/out bash bench/gpu/tests.sh [FILE ...]
OUT=${OUT:?}; mkdir -p "$OUT"; export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
timeout -k 8 "${LIMIT:-300}" python -m pytest -v -p no:cacheprovider -o addopts= -n "${JOBS:-10}" --dist worksteal -m "gpu and not slow" \
  --tb=short --ignore tests/gpu/test_gpu_sleep.py "${@:-tests/gpu}" >"$OUT/tests.log" 2>&1
echo "exit $?"
# These look at what is free of the GPU's memory.
(($#)) || timeout -k 8 60 python -m pytest -v -p no:cacheprovider -o addopts= -n 0 -m "gpu and not slow" tests/gpu/test_gpu_sleep.py \
  >>"$OUT/tests.log" 2>&1
grep -E ' (FAILED|ERROR) ' "$OUT/tests.log" | sed 's/^.*\(FAILED\|ERROR\) /\1 /' | sort -u | head -60
grep -E -A3 '^WHY ' "$OUT/tests.log" | cut -c1-250 | head -120
tail -1 "$OUT/tests.log"
