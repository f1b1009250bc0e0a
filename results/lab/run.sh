#!/usr/bin/env bash
# Alignment per block along real runs, beside what the adaptive and the cost-aware schedule choose.
#
#     results/lab/run.sh SMOLLM2 LARGER DATA OUT       measure, on a GPU; nothing but torch and transformers is needed
#     results/lab/draw.sh OUT                          figures and table, anywhere with zeroblock[lab]
#
# SMOLLM2, LARGER: folders or GGUF files, as `zeroblock lab blocks --model` takes them; LARGER may be "" for none.
# DATA: a folder with sst2/train.jsonl and sst2/validation.jsonl.  OUT: gets NAME/blocks.csv (a row per block, as soon
# as it is measured), NAME/blocks.zbj (the run's journal, step by step) and log.  A run that is cut leaves what it has.
# The three runs share one GPU at the same time: 80 GiB for 1.5B weights in fp32, 8 for each SmolLM2.
# A trial on a CPU: DEVICE=cpu STEPS=12 LARGER_STEPS=0 WARMUP=6 POINTS=1 PARTITION=layers:10 BATCH=2 PROBES=2 ITERATIONS=1
set -uo pipefail
small=$1 larger=$2 data=$3 out=$4
mkdir -p "$out"
export PYTHONUNBUFFERED=1

blocks() { # NAME MODEL OPTION...
    local name=$1 model=$2
    shift 2
    # works from a checkout too: PYTHONPATH=src PYTHON=python3 results/lab/run.sh …
    "${PYTHON:-python}" -c 'from zeroblock.cli import main; main()' lab blocks --model "$model" --task sst2 \
        --data "$data" --out "$out/$name" --device "${DEVICE:-cuda}" --partition "${PARTITION:-layers}" \
        --points "${POINTS:-2}" --warmup "${WARMUP:-96}" --batch "${BATCH:-16}" --batches 2 \
        --max-tokens "${MAX_TOKENS:-48}" --iterations "${ITERATIONS:-4}" --rows-only "$@" 2>&1 |
        sed -u "s/^/$name: /" >>"$out/log" || echo "$name failed: see $out/log" | tee -a "$out/log" >&2
    echo "$name: ended after $SECONDS s" >>"$out/log"
}

# At temperature 1, the paper's, the choice collapses onto the embedding, whose |c| is ten times that of the others;
# at 30 it was all but uniform (0.030 to 0.038 per block after 420 steps of SmolLM2 on a CPU).  The learning rate moves
# an embedding that takes all 4,000 steps by some ten percent of its weights' rms.
for temperature in 1 10; do
    blocks "smollm2-t$temperature" "$small" --steps "${STEPS:-4000}" --lr "${LR:-1e-5}" --temperature "$temperature" \
        --probes "${PROBES:-16}" &
done
if [ -n "$larger" ]; then # TF32: a step of 1.5B weights takes a third of the time, and |c| is noisier than that anyway
    NVIDIA_TF32_OVERRIDE=1 blocks larger-t10 "$larger" --steps "${LARGER_STEPS:-2000}" --lr "${LARGER_LR:-3e-6}" \
        --temperature 10 --probes "${PROBES:-8}" &
fi
wait
ls -l "$out"/*/
