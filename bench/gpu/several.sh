#!/bin/bash
# Two H200 of one host: what tests/gpu/test_tp.py and bench/ say of --tp, --ep, --dp, --pp, --dp-attention and --cp.
#   OUT=... bash bench/gpu/several.sh [PART ...]     in the repository's root; parts: sums tune alone own8b steps8b steps30b halves8b row8b row30b tests ways tp8b tp30b ep30b data30b pp30b dcp cp8b dp pp (default: all)
# At most $LIMIT seconds in all (420); each part has a limit of its own, and goes on behind one that failed.
# JSON lines, logs and exit codes: $OUT/several.tar.xz, packed anew behind each part.
OUT=${OUT:?}; LIMIT=${LIMIT:-420}
mkdir -p "$OUT"; T=$(mktemp -d); BEGUN=$SECONDS
export BENCH_COMMIT=${BENCH_COMMIT:-next} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
pack() { tar -C "$T" -cJf "$OUT/several.tar.xz.new" . && mv "$OUT/several.tar.xz.new" "$OUT/several.tar.xz"; }
part() { # NAME SECONDS COMMAND...
  name=$1 most=$2; shift 2
  left=$((LIMIT - (SECONDS - BEGUN) - 6)); [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 15 ]; then echo "$name: no time left" | tee -a "$T/codes.txt"; return; fi
  at=$SECONDS
  timeout -k 8 "$most" "$@" >"$T/$name.log" 2>&1; code=$?
  grep -h '^JSON ' "$T/$name.log" | sed 's/^JSON //' >>"$T/several.jsonl"
  echo "$name: exit $code after $((SECONDS - at)) s of $most" | tee -a "$T/codes.txt"
  grep -hE '"w": "(W1|W2|W3)"' "$T/$name.log" | cut -c1-420
  [ "$code" = 0 ] || tail -15 "$T/$name.log" | cut -c1-600
  nvidia-smi --query-gpu=memory.used --format=csv,noheader >>"$T/codes.txt" 2>&1
  pack
}
offline() { # NAME SECONDS MODEL WORKLOADS EXTRA [MORE...]
  name=$1 most=$2 model=$3 w=$4 extra=$5; shift 5
  part "$name" "$most" python bench/offline.py --model "bench/models/$model" --workloads "$w" --repeat "${REPEAT:-1}" \
    --tag "$name" --extra "$extra" "$@"
}
python - >"$T/machine.txt" 2>&1 <<'PY'
import importlib, torch
print(torch.__version__, torch.version.cuda, torch.cuda.device_count(), [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
for name in ("msgspec", "uvloop", "aiohttp", "tokenizers", "safetensors", "triton", "flashinfer", "pytest"):
    try: print(name, getattr(importlib.import_module(name), "__version__", "there"))
    except Exception as error: print(name, "MISSING", error)
PY
nvidia-smi topo -m >>"$T/machine.txt" 2>&1; cat "$T/machine.txt" | head -12; pack
for each in ${*:-sums steps8b tp8b tp30b ways ep30b data30b pp30b dcp cp8b pp dp tests}; do
  case $each in
  sums) part sums 60 python bench/allreduce.py --ranks 2 --rows 1,64,256,8448 --layers 8 ;;
  tune) both() { # half of the numbers of rows on each GPU
          one() { CUDA_VISIBLE_DEVICES=$1 timeout -k 8 $((${TUNE:-100} + 24)) python bench/tune.py --out "$T/tune$1" --tp 2 \
                  --seconds "${TUNE:-100}" --most 5 --without logits --rows "$2" --models bench/models/qwen3-8b; }
          one 0 256,64 & one 1 224,192; wait
        }
        export -f both; export T; part tune $((${TUNE:-100} + 40)) bash -c both
        # What follows is measured with what was found. Products that the table has stay as they are.
        python - "$T"/tune?/H200.jsonl <<'PY'
import json, sys
from pathlib import Path
table = Path("sgla/kernels/gpu/tuned/H200.jsonl")
lines, product = table.read_text().splitlines(), lambda line: [json.loads(line)[key] for key in ("n", "k", "gated", "storage")]
there = [product(line) for line in lines]
new = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines() if product(line) not in there]
table.write_text("\n".join(lines + new) + "\n")
(Path(sys.argv[1]).parent.parent / "H200.jsonl").write_text(table.read_text())
print(len(new), "lines are new")
PY
        ;;
  alone) part alone 90 python -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_tp.py -k alone --durations=4 ;;
  row8b) part row8b 45 python bench/step.py --model bench/models/qwen3-8b --tp 2 --batches 1 --profile ;;
  row30b) part row30b 60 python bench/step.py --model bench/models/qwen3-30b-a3b --tp 2 --batches 1 --profile ;;
  own8b) part own8b 45 python bench/step.py --model bench/models/qwen3-8b --tp 2 --own-peer --batches 1,4,16,64,128,192,256 ;; # one GPU
  steps8b) part steps8b 90 python bench/step.py --model bench/models/qwen3-8b --tp 2 --batches 1,16,128,256 --profile \
        --prompts 0+4096 ;;
  steps30b) part steps30b 100 python bench/step.py --model bench/models/qwen3-30b-a3b --tp 2 --batches 1,64,256 --profile \
        --prompts 0+4096 ;;
  halves8b) # two batches by turns, or one (--two-batch-overlap): off, on, off, on; with OWN=1 on one GPU
    for q in "" fp8; do for turn in 1 2; do for on in false true; do
      part "halves8b${q:+-$q}-$on-$turn" 45 python bench/step.py --model bench/models/qwen3-8b --tp 2 ${OWN:+--own-peer} --context 8000 --batches 1 \
        ${q:+--quantization $q} --extra "{\"two_batch_overlap\": $on, \"kv_cache_bytes\": 4294967296}" --profile --prompts 0+4096,0+8448
    done; done; done
    [ "$OWN" ] || for turn in 1 2; do for on in false true; do # requests: prompts of 4,096 tokens
      offline "halves8b-W3-$on-$turn" 60 qwen3-8b W3 "{\"tp\": 2, \"two_batch_overlap\": $on}"
    done; done ;;
  tests) part tests 120 python -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_tp.py --durations=8 \
        -k "not other_ways and not counted" ;;
  ways) part ways 240 python -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_tp.py --durations=10 \
        -k "other_ways or counted" ;;
  tp8b) offline tp8b 60 qwen3-8b W1,W2 '{"tp": 2}' ;;
  tp30b) offline tp30b 75 qwen3-30b-a3b W1,W2 '{"tp": 2}' ;;
  ep30b) offline ep30b 75 qwen3-30b-a3b W1,W2 '{"tp": 2, "ep": 2}' ;;
  data30b) offline data30b 90 qwen3-30b-a3b W1 '{"tp": 2, "ep": 2, "dp_attention": true}' ;;
  pp30b) offline pp30b 75 qwen3-30b-a3b W1 '{"pp": 2}' ;;
  dcp) offline tplite 60 deepseek-v2-lite W1,W2 '{"tp": 2, "page_size": 32, "tokenizer": "bench/models/qwen3-8b"}'
       offline dcplite 60 deepseek-v2-lite W1,W2 '{"tp": 2, "dcp": 2, "page_size": 32, "tokenizer": "bench/models/qwen3-8b"}' ;;
  cp8b) offline cp8b 75 qwen3-8b W3 '{"cp": 2}' ;;
  dp) part dp 110 python bench/replicas.py --model bench/models/qwen3-8b --counts 1,2 \
        --server-args "--device cuda --context-length 8192 --log-level warning --no-log-requests" --log "$T/dp-server.log" ;;
  pp) offline pp 150 llama-3.1-70b W2,W1 '{"pp": 2, "tokenizer": "bench/models/qwen3-8b"}' --name llama-3.3-70b ;;
  esac
done
cat "$T/codes.txt"; ls -la "$OUT"
