#!/usr/bin/env bash
# Evidence for steps without a learning rate. Every part is one command; given again, it continues.
#
#     results/lrfree/run.sh tasks smollm2|gemma|qwen MODEL DATA OUT     all tasks, all methods, at equal wall clock
#     results/lrfree/run.sh icl   smollm2|gemma|qwen MODEL DATA OUT     demonstrations in the prompt, for the same table
#     results/lrfree/run.sh table OUT                                   tables and a figure of what is in OUT
#     results/lrfree/run.sh reference MODEL DATA OUT                    time to the accuracy of MeZO's published procedure
#     results/lrfree/run.sh order MODEL DATA OUT                        economical order of blocks beside random order
#     results/lrfree/run.sh goals MODEL DATA OUT                        what SmolLM2 reaches without lr, beside Adam
#     results/lrfree/run.sh demo OUT                                    zeroblock demo, three seeds
#
# MODEL: a folder, a GGUF file or a hub id; a Gemma's tokenizer must put BOS first. DATA: local copies of the tasks.
# In the environment: MINUTES of training per runner (0.25; goals 2.7, order 0.05), SEEDS (3; order 2), JOBS at a time (1),
# TASKS (all eleven), TOTAL minutes after which no runner begins (600). At the defaults a method takes a minute per task
# and model: four learning rates tried for a quarter of the time each, and three runners. Dev chooses learning rates and
# steps; test is measured once per runner, at the step that dev chose.
set -euo pipefail
minutes=${MINUTES:-0.25} seeds=${SEEDS:-3} jobs=${JOBS:-1} total=${TOTAL:-600}
tasks=${TASKS:-sst2,rte,boolq,copa,wic,cb,wsc,multirc,record,squad,drop}
status=0
here=$(cd "$(dirname "$0")" && pwd)

zeroblock() { # works from a checkout too: PYTHONPATH=src PYTHON=python3 results/lrfree/run.sh …
    "${PYTHON:-python}" -c 'from zeroblock.cli import main; main()' "$@"
}

some() { # of the tasks, those that generate (yes) or that choose among options (no)
    tr , '\n' <<<"$tasks" | grep $([ "$1" = yes ] && echo -x || echo -vx) -e squad -e drop | paste -sd, || true
}

race() { # FOLDER MODEL DATA TASKS OPTION...
    local folder=$1 model=$2 data=$3 list=$4
    shift 4
    [ -n "$list" ] || return 0
    case $list in *,*) ;; *) folder=$folder/$list ;; esac # a race of one task makes no folder for it
    zeroblock race --model "$model" --data "$data" --task "$list" --out "$folder" --max-minutes "$minutes" \
        --seeds "$seeds" --jobs "$jobs" --total-minutes "$total" "$@" || status=$? # the other races go on
}

case ${1:-} in
tasks)
    name=$2 model=$3 data=$4 out=$5
    case $name in # half a decade apart, around what works for a model; the papers' eps
    smollm2) rates=(mezo=3e-6,1e-5,3e-5,1e-4 lozo=1e-6,3e-6,1e-5,3e-5 mezo_bcd=auto,1e-4,3e-4,1e-3,3e-3) ;;
    gemma) rates=(mezo=1e-6,3e-6,1e-5,3e-5 lozo=3e-7,1e-6,3e-6,1e-5 mezo_bcd=auto,3e-5,1e-4,3e-4,1e-3) ;;
    qwen) rates=(mezo=1e-7,3e-7,1e-6,3e-6 lozo=1e-7,3e-7,1e-6,3e-6 mezo_bcd=auto,3e-6,1e-5,3e-5,1e-4) ;;
    *) echo "no learning rates are known for $name: smollm2, gemma or qwen" >&2 && exit 2 ;;
    esac
    options=(--methods zero-shot,mezo,lozo,mezo_bcd,ft)
    for one in "${rates[@]}"; do options+=(--lr "$one"); done
    race "$out/$name" "$model" "$data" "$(some no)" "${options[@]}" --dev 200 --test 500
    race "$out/$name" "$model" "$data" "$(some yes)" "${options[@]}" --dev 50 --test 200 --evals 4
    ;;
icl)
    zeroblock sweep "$here/../../sweeps/icl.toml" --set "model=\"$3\"" --data "$4" --out "$5/$2-icl" --jobs "$jobs"
    ;;
table)
    "${PYTHON:-python}" "$here/table.py" "$2"
    ;;
reference)
    "${PYTHON:-python}" "$here/reference.py" --model "$2" --data "$3" --task sst2 --task rte --share 1 --csv "$4/reference.csv"
    ;;
order)
    minutes=${MINUTES:-0.05} seeds=${SEEDS:-2}
    race "$4/order" "$2" "$3" "${TASKS:-sst2,rte}" --methods random=mezo_bcd,economical=mezo_bcd \
        --set economical.schedule=economical --evals 10 --dev 300 --test 100
    ;;
goals)
    minutes=${MINUTES:-2.7}
    tasks=${TASKS:-sst2,rte,wic,squad}
    race "$4/goals" "$2" "$3" "$(some no)" --methods mezo_bcd,fzoo_bcd,ft --lr auto --dev 300 --test 500
    race "$4/goals" "$2" "$3" "$(some yes)" --methods mezo_bcd,fzoo_bcd,ft --lr auto --dev 100 --test 300 \
        --set batch_size=4 # learns more per second than 16 on long texts
    ;;
demo)
    for seed in 0 1 2; do zeroblock demo --seed "$seed" --quiet --out "$2/demo-seed$seed"; done
    ;;
*)
    sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2
    exit 2
    ;;
esac
exit "$status"
