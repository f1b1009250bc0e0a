#!/usr/bin/env bash
# The races of docs/race.md. Every race continues where it was stopped; the most telling runners come first.
#
#     MODEL=models/SmolLM2-135M DATA=data OUT=runs/race bash results/race/run.sh smollm2
#     QWEN=models/Qwen2.5-1.5B DATA=data OUT=runs/race bash results/race/run.sh qwen
#     TOKENIZER=models/SmolLM2-135M DATA=data OUT=runs/race bash results/race/run.sh steps
#     bash results/race/run.sh plan         say what would be run, and how long it takes
#
# MODEL, QWEN  folders of the models, as from_pretrained reads them
# DATA         a folder of TASK/train.jsonl and TASK/validation.jsonl
# RUNNER_S, QWEN_RUNNER_S   seconds of training per runner
# TOTAL_S, QWEN_TOTAL_S     seconds after which no runner begins; STEPS_TOTAL_S the same for the step times
# JOBS, QWEN_JOBS           runners at a time
set -uo pipefail
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-models/SmolLM2-135M}
QWEN=${QWEN:-models/Qwen2.5-1.5B}
DATA=${DATA:-data}
OUT=${OUT:-runs/race}
RUNNER_S=${RUNNER_S:-4}
QWEN_RUNNER_S=${QWEN_RUNNER_S:-5}
TOTAL_S=${TOTAL_S:-270}
QWEN_TOTAL_S=${QWEN_TOTAL_S:-150}
STEPS_TOTAL_S=${STEPS_TOTAL_S:-90}
STEPS_SECONDS=${STEPS_SECONDS:-1.2}
STEPS_MODEL=${STEPS_MODEL:-opt-13b}
TOKENIZER=${TOKENIZER:-$MODEL}
JOBS=${JOBS:-4}
QWEN_JOBS=${QWEN_JOBS:-3}
SEEDS=${SEEDS:-3}
START_S=${START_S:-20} # a race with less time left does not begin
COMMON=${COMMON:---dev 100 --test 300}
GENERATING=${GENERATING:---dev 100 --test 64}
DRY=""

export TOKENIZERS_PARALLELISM=false
minutes() { awk "BEGIN { printf \"%.9f\", ($1) / 60 }"; }

# race OUT TOTAL_S RUNNER_S JOBS MODEL TASKS METHODS OPTIONS...
race() {
    local out=$1 total=$2 runner=$3 jobs=$4 model=$5 tasks=$6 methods=$7
    shift 7
    if [ -z "$DRY" ] && [ "$total" -le "$((${runner%.*} + START_S))" ]; then
        echo "no time left for $tasks: $methods"
        return
    fi
    "$PYTHON" -m zeroblock race --model "$model" --task "$tasks" --data "$DATA" --methods "$methods" "$@" \
        --max-minutes "$(minutes "$runner")" --seeds "$SEEDS" --evals 4 --try-share 0.5 --jobs "$jobs" --out "$out" \
        --total-minutes "$(minutes "$total")" $DRY
}

# Two learning rates per method, and auto beside them. Where they come from: docs/race.md.
MEZO=(--lr mezo=1e-5,3e-5)
BCD=(--lr mezo_bcd=3e-4,1e-3)
LOZO=(--lr lozo=1e-5,3e-5)

smollm2() {
    SECONDS=0
    local out=$OUT/smollm2
    race "$out" "$TOTAL_S" "$RUNNER_S" "$JOBS" "$MODEL" sst2,rte \
        zero-shot,mezo,mezo_bcd,lozo,fzoo_bcd,hizoo,ft --lr auto "${MEZO[@]}" "${BCD[@]}" "${LOZO[@]}" \
        --lr fzoo_bcd=3e-3,1e-2 --lr hizoo=1e-5,3e-5 --lr ft=3e-5,1e-4 $COMMON
    race "$out/squad" "$((TOTAL_S - SECONDS))" "$RUNNER_S" "$JOBS" "$MODEL" squad \
        zero-shot,mezo,mezo_bcd --lr auto "${MEZO[@]}" "${BCD[@]}" $GENERATING
    race "$out/sst2" "$((TOTAL_S - SECONDS))" "$RUNNER_S" "$JOBS" "$MODEL" sst2 \
        conmezo,subzero,mezo_bcd_adam,zo_muon,lezo --lr auto --lr conmezo=1e-5,3e-5 --lr subzero=1e-5,3e-5 \
        --lr mezo_bcd_adam=3e-4,1e-3 --lr zo_muon=1e-2,3e-2 --lr lezo=3e-5,1e-4 $COMMON
    race "$out/boolq" "$((TOTAL_S - SECONDS))" "$RUNNER_S" "$JOBS" "$MODEL" boolq \
        zero-shot,mezo,mezo_bcd,lozo --lr auto "${MEZO[@]}" "${BCD[@]}" "${LOZO[@]}" $COMMON
    race "$out/sst2" "$((TOTAL_S - SECONDS))" "$RUNNER_S" "$JOBS" "$MODEL" sst2 \
        fzoo,eggroll,mezo_greedy,adamezo,mezo_svrg --lr auto --lr fzoo=1e-3,3e-3 --lr eggroll=1e-3,3e-3 \
        --lr mezo_greedy=1e-5,3e-5 --lr adamezo=1e-4,3e-4 --lr mezo_svrg=1e-5,3e-5 $COMMON
}

qwen() {
    race "$OUT/qwen" "$QWEN_TOTAL_S" "$QWEN_RUNNER_S" "$QWEN_JOBS" "$QWEN" sst2,rte \
        zero-shot,mezo,mezo_bcd,fzoo_bcd,lozo --lr auto --lr mezo=3e-7,6e-7 --lr mezo_bcd=1e-5,2e-5 \
        --lr fzoo_bcd=3e-4,1e-3 --lr lozo=3e-7,6e-7 $COMMON
}

steps() {
    mkdir -p "$OUT"
    "$PYTHON" -m zeroblock bench methods --model "$STEPS_MODEL" --task sst2 --data "$DATA" --tokenizer "$TOKENIZER" \
        --seconds "$STEPS_SECONDS" --total-seconds "$STEPS_TOTAL_S" --csv "$OUT/steps.csv"
}

case "${1:-}" in
    smollm2 | qwen | steps) "$1" ;;
    plan)
        DRY=--dry-run
        smollm2
        qwen
        ;;
    *)
        sed -n '2,/^set/p' "$0" | sed '$d'
        exit 2
        ;;
esac
