#!/usr/bin/env bash
# The races of docs/race.md. A race continues where it was stopped; the most telling runners come first.
#
#     MODEL=models/SmolLM2-135M DATA=data OUT=runs/race bash results/race/run.sh smollm2
#     GEMMA=models/Gemma-3-270M DATA=data OUT=runs/race bash results/race/run.sh gemma
#     GEMMA=models/Gemma-3-270M DATA=data OUT=runs/race bash results/race/run.sh gemma_cpu
#     QWEN=models/Qwen2.5-1.5B DATA=data OUT=runs/race bash results/race/run.sh qwen
#     DATA=data OUT=runs/race bash results/race/run.sh steps
#     bash results/race/run.sh plan         say what would be run, and how long it takes
#
# MODEL, GEMMA, QWEN  folders of the models, as from_pretrained reads them
# DATA             a folder of TASK/train.jsonl and TASK/validation.jsonl
# RUNNER_S, JOBS   seconds of training per runner, and runners at a time, on SmolLM2 and Gemma; QWEN_RUNNER_S, QWEN_JOBS on Qwen
# gemma_cpu        is for two cores: two runners at a time, CPU_RUNNER_S seconds each, and few rows to evaluate on; not into the OUT of gemma
# RACE_S           seconds after which a command begins no more runners
# STEPS_MODEL      the shape whose steps are timed
set -uo pipefail
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-models/SmolLM2-135M}
GEMMA=${GEMMA:-models/Gemma-3-270M}
QWEN=${QWEN:-models/Qwen2.5-1.5B}
DATA=${DATA:-data}
OUT=${OUT:-runs/race}
RUNNER_S=${RUNNER_S:-10}
QWEN_RUNNER_S=${QWEN_RUNNER_S:-20}
CPU_RUNNER_S=${CPU_RUNNER_S:-50}
JOBS=${JOBS:-12}
QWEN_JOBS=${QWEN_JOBS:-6}
RACE_S=${RACE_S:-400}
STEPS_MODEL=${STEPS_MODEL:-opt-13b}
DRY=""

export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
minutes() { awk "BEGIN { printf \"%.10f\", ($1) / 60 }"; }
OPTIONS="--dev 200 --test 600"
GENERATING="--dev 50 --test 100"

race() { # MODEL RUNNER_S JOBS OPTION...
    local model=$1 runner=$2 jobs=$3
    shift 3
    "$PYTHON" -m zeroblock race --model "$model" --data "$DATA" --max-minutes "$(minutes "$runner")" --jobs "$jobs" \
        --seeds 3 --evals 4 --total-minutes "$(minutes "$RACE_S")" "$@" $DRY
}

# Four learning rates per method, half a decade apart, around what works; auto beside them. docs/race.md says why these.
smollm2() {
    local out=$OUT/smollm2
    local blocks=(--lr mezo_bcd=auto,1e-4,3e-4,1e-3,3e-3 --lr fzoo_bcd=auto)
    local others=(--lr mezo=auto,3e-6,1e-5,3e-5,1e-4 --lr lozo=auto,1e-6,3e-6,1e-5,3e-5 --lr ft=1e-5,3e-5,1e-4,3e-4)
    local here=("$MODEL" "$RUNNER_S" "$JOBS")
    race "${here[@]}" $OPTIONS --task sst2,rte,boolq,wic,copa,cb,wsc,multirc,record \
        --methods mezo_bcd,zero-shot,fzoo_bcd "${blocks[@]}" --out "$out"
    race "${here[@]}" $GENERATING --task squad,drop --methods mezo_bcd,zero-shot,fzoo_bcd "${blocks[@]}" --out "$out"
    race "${here[@]}" $OPTIONS --task sst2,rte,boolq --methods mezo,lozo,ft,fzoo_bcd,economical=mezo_bcd \
        --set economical.schedule=economical "${others[@]}" --lr fzoo_bcd=1e-3,3e-3,1e-2,3e-2 --lr economical=auto \
        --out "$out"
    race "${here[@]}" $OPTIONS --task sst2 --lr auto --out "$out/sst2" --methods \
        mezo_bcd_adam,eggroll,subzero,zo_muon,hizoo,conmezo,adamezo,mezo_svrg,mezo_greedy,lezo,sparse_mezo,fzoo
    race "${here[@]}" $GENERATING --task squad --methods mezo,lozo,ft "${others[@]}" --out "$out/squad"
}

gemma() {
    local out=$OUT/gemma
    local rates=(--lr mezo_bcd=auto,3e-5,1e-4,3e-4,1e-3 --lr fzoo_bcd=auto)
    local here=("$GEMMA" "$RUNNER_S" "$JOBS")
    race "${here[@]}" $OPTIONS --task sst2,rte,boolq,copa,wic,cb,wsc,multirc,record \
        --methods mezo_bcd,zero-shot,fzoo_bcd "${rates[@]}" --out "$out"
    race "${here[@]}" $GENERATING --task squad,drop --methods mezo_bcd,zero-shot,fzoo_bcd "${rates[@]}" --out "$out"
}

gemma_cpu() {
    local entrants=(--device cpu --dtype bf16 --methods mezo_bcd,fzoo_bcd,zero-shot --lr auto --evals 3 --total-minutes 90)
    local here=("$GEMMA" "$CPU_RUNNER_S" 2 "${entrants[@]}" --out "$OUT/gemma")
    race "${here[@]}" --dev 64 --test 150 --task sst2,rte,copa,wic,cb,wsc
    race "${here[@]}" --dev 24 --test 64 --task boolq,multirc,record
    race "${here[@]}" --dev 16 --test 50 --task squad,drop
}

qwen() {
    local out=$OUT/qwen
    local rates=(--lr mezo_bcd=auto,3e-6,1e-5,3e-5,1e-4 --lr fzoo_bcd=auto)
    local here=("$QWEN" "$QWEN_RUNNER_S" "$QWEN_JOBS")
    race "${here[@]}" $OPTIONS --task sst2,rte --methods mezo_bcd,zero-shot,fzoo_bcd,mezo "${rates[@]}" \
        --lr mezo=auto,1e-7,3e-7,1e-6,3e-6 --out "$out"
    race "${here[@]}" $OPTIONS --task boolq,copa --methods mezo_bcd,zero-shot,fzoo_bcd "${rates[@]}" --out "$out"
    race "${here[@]}" $GENERATING --task squad --methods mezo_bcd,zero-shot,fzoo_bcd "${rates[@]}" --out "$out/squad"
}

steps() {
    mkdir -p "$OUT"
    "$PYTHON" -m zeroblock bench methods --model "$STEPS_MODEL" --task sst2 --data "$DATA" --tokenizer "$MODEL" \
        --seconds 0.6 --total-seconds "$RACE_S" --csv "$OUT/steps.csv"
}

case "${1:-}" in
    smollm2 | gemma | gemma_cpu | qwen | steps) "$1" ;;
    plan)
        DRY=--dry-run
        smollm2
        gemma
        qwen
        ;;
    *)
        sed -n '2,/^set/p' "$0" | sed '$d'
        exit 2
        ;;
esac
