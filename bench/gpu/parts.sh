# For scripts of parts beside this one, which set LIMIT and source it: results go into $OUT (SCRIPT.jsonl: a JSON line
# each; SCRIPT.log: what was printed).
script=$(basename "$0" .sh)
out=${OUT:-/tmp/$script}
python=${PYTHON:-python}
end=$((SECONDS + LIMIT))
mark='JSON ' # what a line of results begins with
mkdir -p "$out"
: >"$out/$script.jsonl" >"$out/$script.log"
export BENCH_COMMIT=${BENCH_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}

# part NAME SECONDS COMMAND...: its JSON lines, marked with its name; never longer than what is left.
part() {
    local name=$1 limit=$2 left=$((end - SECONDS)) begun=$SECONDS code
    shift 2
    ((left < limit)) && limit=$left
    if ((limit < 15)); then
        echo "-- $name: left out, no time" | tee -a "$out/$script.log"
        return
    fi
    timeout --kill-after=5 "$limit" $python "$@" >"$out/part.log" 2>&1
    code=$?
    { echo "-- $name: $*"; cat "$out/part.log"; echo "-- $name: code $code after $((SECONDS - begun)) s"; } >>"$out/$script.log"
    sed -n "s/^$mark{/{\"part\": \"$name\", /p" "$out/part.log" >>"$out/$script.jsonl"
    tell "$code" "-- $name: code $code, $((SECONDS - begun)) s"
    rm -f "$out/part.log"
}

# tell CODE WORDS: of the part that has ended.
tell() {
    echo "$2"
    sed -n "s/^$mark//p" "$out/part.log" | sed 's/, "command".*//' | cut -c1-400
    (($1)) && tail -5 "$out/part.log"
}
