#!/bin/bash
# Prefill and decode servers on two H200 of one host, in the repository's root: bash bench/gpu/disaggregation.sh.
# About 170 s in all (limit 200). JSON lines go to $OUT/pd.jsonl, logs of servers to $OUT.
# PARTS: link (15 s: the copy alone, GB/s), servers (70 s: W6, long prompts, and where the decode server's steps take their time: "part": "steps"), W6 (45 s: of these W6 and the steps alone), equal (40 s), transports (45 s each pair).
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
PY=${PY:-python}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi topo -m > "$OUT/topo.txt" 2>&1
timeout 200 $PY bench/disaggregation.py --parts "${PARTS:-link,servers,equal,transports}" --backends "${BACKENDS:-auto}" \
  --limit "${LIMIT:-190}" --logs "$OUT" 2> "$OUT/pd.err" | sed -n 's/^JSON //p' | tee "$OUT/pd.jsonl" | cut -c1-700
tail -5 "$OUT/pd.err"
for log in "$OUT"/prefill-*.log "$OUT"/decode-*.log; do echo "== $log"; grep -iE "warn|error|cannot|lost|gone|refused" "$log" | head -5; done 2>/dev/null
