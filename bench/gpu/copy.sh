#!/usr/bin/env bash
# Guesses of n-grams on one H200, and rows of which none may guess: no network, random weights but for the demo's. Run it in the
# repository's root; results into $OUT (copy.jsonl: a JSON line each; copy.log: what was printed). At most 75 s, or LIMIT:
#   OUT=... bash bench/gpu/copy.sh [small] [copy]     OUT=... LIMIT=150 bash bench/gpu/copy.sh blocks (or: crowd, beside, ...)
#   small: Qwen3-0.6B, one stream, four fifths of the guesses right (goal: 0.20 ms a token with five), and none right (<= 3 %)
#   copy: the demo model, if its file has come along in ~/.cache/sgla (goal: >= 2 times), repeats code and tells a story
#   blocks: Qwen3-8B, one stream, a head of the shape of DFlash's published ones and one of EAGLE-3's; four fifths right, and none
#   beside: Qwen3-0.6B and Qwen3-8B, one stream, without a head and with one of EAGLE-3's shape; none right (<= 3 %), and four fifths
#   mixture: the same of Qwen3-30B-A3B, whose steps of one row are one kernel, none right
#   medusa: Qwen3-8B, one stream, five heads of Medusa's shape; four fifths right, and none
#   crowd: 64 streams of Qwen3-8B without guesses, with n-grams and with a head of EAGLE-3 (goal: not slower)
#   small-crowd: 64 streams of Qwen3-0.6B without guesses and with a head of EAGLE-3, by turns (goal: not slower)
#   hundreds: 256 streams, without guesses and with a head of EAGLE-3, by turns
set -uo pipefail
LIMIT=${LIMIT:-75}
. bench/gpu/parts.sh

common="bench/drafts.py --device cuda --alone"
small="$common --dummy --model bench/models/qwen3-0.6b --texts free --tokens 512 --repeat 3 --kv 2"
large="$common --dummy --model bench/models/qwen3-8b --texts free --tokens 512 --repeat 3 --kv 4"
crowd="$common --dummy --model bench/models/qwen3-8b --texts free --rows 64 --tokens 512 --repeat 3 --kv 14"
for each in ${*:-small copy}; do
    case $each in
    small)
        part small 45 ${small/ --alone/} --algorithm ngram --accept 0.8,0 --always --guesses 15,8,5
        ;;
    copy) part copy 30 bench/drafts.py --device cuda --tokens 400 --repeat 3 --kv 2 --algorithm ngram ;;
    blocks)
        blocks="--algorithm dflash --draft bench/heads/qwen3-8b-dflash"
        part blocks 65 ${large/ --alone/} $blocks --accept 0 --guesses 15
        part blocks 45 $large $blocks --accept 0.8 --guesses 15,8,5
        part heads 35 $large --algorithm eagle3 --draft bench/heads/qwen3-8b --accept 0.8 --guesses 5
        ;;
    beside)
        head="--algorithm eagle3 --guesses 5 --draft bench/heads"
        part small 50 ${small/ --alone/} $head/qwen3-0.6b --accept 0,0.8
        part large 60 ${large/ --alone/} $head/qwen3-8b --accept 0
        ;;
    mixture)
        mixture="${small/ --alone/} --algorithm eagle3 --guesses 5"
        part mixture 95 ${mixture//qwen3-0.6b/qwen3-30b-a3b} --draft bench/heads/qwen3-30b-a3b --accept 0
        ;;
    medusa)
        medusa="--algorithm medusa --guesses 5 --draft bench/heads/qwen3-8b-medusa"
        part medusa 65 ${large/ --alone/} $medusa --accept 0
        part medusa 45 $large $medusa --accept 0.8
        ;;
    crowd)
        part none 40 $crowd --algorithm off
        part ngram 40 $crowd --algorithm ngram
        part head 45 $crowd --algorithm eagle3 --draft bench/heads/qwen3-8b --accept 0.8 --guesses 5
        ;;
    small-crowd)
        many="${small/--kv 2/--kv 10} --rows 64"
        part small-crowd 75 ${many/ --alone/} --algorithm eagle3 --draft bench/heads/qwen3-0.6b --accept 0.8,0 --guesses 5
        ;;
    hundreds)
        many=${large/--tokens 512 --repeat 3 --kv 4/--tokens 256 --repeat 2 --kv 31}
        part hundreds 70 ${many/ --alone/} --rows 256 --algorithm eagle3 --draft bench/heads/qwen3-8b --accept 0.8 --guesses 5
        ;;
    esac
done
