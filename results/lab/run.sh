#!/usr/bin/env bash
# Alignment per block along real runs, beside what the adaptive schedule chooses: SmolLM2-135M and one larger model.
#
#     results/lab/run.sh SMOLLM2 LARGER DATA OUT
#
# SMOLLM2, LARGER: folders or GGUF files, as `zeroblock lab blocks --model` takes them; LARGER may be "" for none.
# DATA: a folder with sst2/train.jsonl and sst2/validation.jsonl.  OUT: where figures and tables go.
# Needs a GPU with 40 GiB for a model of 1.5B weights in fp32 (8 for SmolLM2), and matplotlib, pandas and scipy.
set -euo pipefail
small=$1 larger=$2 data=$3 out=$4
device=${DEVICE:-cuda}

zeroblock() { # works from a checkout too: PYTHONPATH=src PYTHON=python3 results/lab/run.sh …
    "${PYTHON:-python}" -c 'from zeroblock.cli import main; main()' "$@"
}

blocks() { # NAME MODEL OPTION...
    local folder=$out/$1 model=$2
    shift 2
    zeroblock lab blocks --model "$model" --task sst2 --data "$data" --out "$folder" --device "$device" \
        --batch 16 --batches 2 --max-tokens 48 "$@"
    # the diagnosis needs the warm-up and temperature of the run, which a JSONL does not hold
    zeroblock lab adaptive "$folder/blocks_records.jsonl" --out "$folder" --warmup 96 \
        --temperature "${temperature:-1}"
}

# At temperature 1, the paper's, the run of README.md stayed on the embedding, whose |c| is ten times that of the others;
# at 30 the choice was all but uniform (0.030 to 0.038 per block after 420 steps of SmolLM2 on a CPU).
for temperature in 1 10; do
    blocks "smollm2-t$temperature" "$small" --steps 4000 --points 4 --lr 1e-4 --warmup 96 --temperature "$temperature" \
        --probes 16 --iterations 6
done
if [ -n "$larger" ]; then
    temperature=10
    blocks larger "$larger" --steps 2000 --points 2 --lr 1e-5 --warmup 96 --temperature "$temperature" --probes 8 --iterations 5
fi
