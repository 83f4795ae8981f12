#!/usr/bin/env bash
# Ways in which the blocks of a whole step of one row exchange words: the fastest of them, its tests, and what
# it brings, on one H200. Run it in the repository's root; results into $OUT.
#   bash bench/gpu/one_row.sh dense      50 s: Qwen3-0.6B
#   bash bench/gpu/one_row.sh mixture    60 s: Qwen3-30B-A3B
set -uo pipefail
python=${PYTHON:-python3} kind=${1:-dense} name=decode
flags=() model=qwen3-0.6b
[ "$kind" = mixture ] && flags=(--mixture) name=mixture model=qwen3-30b-a3b
timeout 38 $python bench/gpu_one_row.py ${flags[@]+"${flags[@]}"} > "$OUT/one-row-$kind.txt" 2> "$OUT/one-row-$kind.err"
$python - "$OUT/one-row-$kind.txt" sgla/kernels/cuda/${name}_step.py <<'END'
import json, re, sys
from pathlib import Path
lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.startswith("{")]
found = {x["variant"]: (sum(us for n, us, _ in x["us"] if n > 1), x["defines"]) for x in lines
         if "us" in x and all(float(wrong) < 0.01 for *_, wrong in x["us"])}
base = min(found[x][0] for x in ("base", "again") if x in found) if found else 0
best = min(found, key=lambda x: found[x][0], default="base")
defines = found[best][1] if found and found[best][0] < 0.985 * base else {}
path = Path(sys.argv[2])
text = re.sub(r"EXCHANGE: dict\[str, int\] = \{.*?\}", f"EXCHANGE: dict[str, int] = {defines}", path.read_text())
path.write_text(text)
print("taken:", best, defines, {name: round(us / 3, 1) for name, (us, _) in found.items()})
END
timeout 35 $python -m pytest -q -n 4 tests/gpu/test_gpu_${name}_step.py 2>&1 | tail -5
timeout 30 $python bench/offline.py --model bench/models/$model --workloads W2 --repeat 3 | tail -3
